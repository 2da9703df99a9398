//! The memory as a Rust library: fills a table, draws a batch of 2-step returns, updates its priorities.
//! `cargo run --package replay_core --example fill_draw_update`

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{SampleRequest, Wait};
use replay_core::schema::{Codec, Column, Dtype};
use replay_core::view::{DecodeOptions, Decoder, NStep, Padding, ViewSpec};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};
use replay_core::{Replay, Result, TableConfig};

#[expect(clippy::print_stdout, reason = "an example shows what it did")]
fn main() -> Result<()> {
    let column = |name: &str, dtype| Column {
        name: name.into(),
        dtype,
        shape: vec![],
        codec: Codec::None,
    };
    let columns = vec![
        column("observation", Dtype::Int32),
        column("reward", Dtype::Float32),
    ];
    let table = TableConfig::new("steps", columns, 1000);
    let (memory, wait) = (Memory::new(MemoryLimits::default()), Wait::forever());
    Replay::create_table(&*memory, &table, &wait)?;

    let view = ViewSpec::NStep(NStep {
        observation: "observation".into(),
        stack: 1,
        n: 2,
        gamma: 0.99,
        padding: Padding::Zero,
    });
    let mut writer = Writer::open(&*memory, "steps", 1, &view, WriterOptions::default(), &wait)?;
    for step in 0..100_i32 {
        let (observation, reward) = (step.to_le_bytes(), (step as f32).to_le_bytes());
        let values = |dtype, bytes| Values {
            dtype,
            shape: &[1],
            bytes,
        };
        let columns = [
            ("observation", values(Dtype::Int32, &observation)),
            ("reward", values(Dtype::Float32, &reward)),
        ];
        writer.append(
            &StepBatch {
                columns: &columns,
                ..StepBatch::default()
            },
            &wait,
        )?;
    }
    writer.close(&wait)?;

    let (before, after) = (view.before(), view.after());
    let request = SampleRequest {
        table: "steps".into(),
        count: 32,
        before,
        after,
        allow_short: false,
        min_probability: false,
    };
    let drawn = memory.sample(&request, &wait)?;
    let batch = Decoder::new(&table, &view, DecodeOptions::default())?.decode(&drawn, 0.4)?;
    let keys: Vec<u64> = drawn.items.iter().map(|item| item.key).collect();
    let updated = memory.update_priorities("steps", &keys, &[0.5; 32], &wait)?;
    let arrays: Vec<_> = batch
        .arrays
        .iter()
        .map(|array| array.name.as_str())
        .collect();
    println!(
        "{} items of {}: {arrays:?}; {} priorities updated",
        batch.len, drawn.live_items, updated.applied
    );
    Ok(())
}

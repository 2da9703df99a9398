//! The memory as a Rust library: fills a table, samples single steps, updates their priorities.
//! `cargo run --package replay_core --example fill_sample_update`

use base::wait::Wait;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::schema::{Column, Dtype};
use replay_core::view::{ViewSpec, Window};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};
use replay_core::{Replay, Result, TableConfig, replay::SampleRequest};

pub(crate) fn main() -> Result<()> {
    let columns = vec![Column::new("observation", Dtype::Int32, vec![])];
    let memory = Memory::new(MemoryLimits::default());
    let (memory, wait): (&dyn Replay, _) = (&*memory, Wait::forever());
    memory.create_table(&TableConfig::new("steps", columns, 1000), &wait)?;
    let view = ViewSpec::Window(Window::default());
    let mut writer = Writer::open(memory, "steps", 1, &view, WriterOptions::default(), &wait)?;
    for step in 0..100_i32 {
        let bytes = step.to_le_bytes();
        let columns = [("observation", Values::new(Dtype::Int32, &[1], &bytes))];
        writer.append(&StepBatch::new(&columns), &wait)?;
    }
    writer.close(&wait)?;
    let sampled = memory.sample("steps", &SampleRequest::new(32, &view), &wait)?;
    let ids: Vec<u64> = sampled.items.iter().map(|item| item.id).collect();
    let updated = memory.update_priorities("steps", &ids, &[0.5; 32], &wait)?;
    let (items, updated) = (sampled.live_items, updated.applied);
    eprintln!("sampled 32 of {items} items, updated {updated}");
    Ok(())
}

//! Small rows in process: `cargo bench --package replay_core --bench rows` samples 256 of 10^6 by priority, makes their arrays, and sets their
//! priorities.

use std::sync::{Arc, LazyLock};

use base::wait::Wait;
use divan::{Bencher, black_box};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, SampleRequest, Sampled};
use replay_core::schema::{Column, Dtype, TableConfig};
use replay_core::view::{DecodeOptions, Decoder, NStep, ViewSpec};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};

const BATCH: u32 = 256;
/// Fewer for `cargo test`, which calls each benchmark once.
const ROWS: u32 = if cfg!(debug_assertions) { 4_096 } else { 1_000_000 };
const OBSERVATION: usize = 17;
const ACTION: usize = 6;
const FOREVER: Wait<'static> = Wait { deadline: None, interrupted: &|| false, notice: None };

static VIEW: LazyLock<ViewSpec> = LazyLock::new(|| ViewSpec::NStep(NStep::default()));

static CONFIG: LazyLock<TableConfig> = LazyLock::new(|| {
    let column = |name, numbers: &[usize]| {
        Column::new(name, Dtype::Float32, numbers.iter().map(|&n| n as u32).collect::<Vec<_>>())
    };
    let columns = vec![column("observation", &[OBSERVATION]), column("action", &[ACTION]), column("reward", &[])];
    TableConfig { priority_exponent: 0.6, ..TableConfig::new("rows", columns, ROWS.into()) }
});

/// A full memory.
static MEMORY: LazyLock<Arc<Memory>> = LazyLock::new(|| {
    let memory = Memory::new(MemoryLimits::default());
    memory.create_table(&CONFIG).expect("a valid table");
    let mut writer: Writer =
        Writer::open(&*memory, "rows", 1, &VIEW, WriterOptions::default(), &FOREVER).expect("a writer");
    let action = [0; 4 * ACTION];
    for row in 0..ROWS {
        let observation = [row as f32; OBSERVATION].map(f32::to_le_bytes).concat();
        let columns = [
            ("observation", Values::new(Dtype::Float32, &[1, OBSERVATION], &observation)),
            ("action", Values::new(Dtype::Float32, &[1, ACTION], &action)),
            ("reward", Values::new(Dtype::Float32, &[1], &[0; 4])),
        ];
        writer.append(&StepBatch::new(&columns), &FOREVER).expect("a step that fits");
    }
    writer.flush(&FOREVER).expect("a memory that takes them");
    memory
});

fn main() {
    divan::main();
}

fn sampled() -> Sampled {
    let memory: &dyn Replay = &**MEMORY;
    memory.sample("rows", &SampleRequest::new(BATCH, &VIEW), &FOREVER).expect("a sample")
}

#[divan::bench]
fn sample(bencher: Bencher) {
    LazyLock::force(&MEMORY);
    bencher.bench_local(sampled);
}

/// Each call decodes a new sample, whose rows are still in the caches.
#[divan::bench]
fn decode(bencher: Bencher) {
    let decoder = Decoder::new(&CONFIG, &VIEW, DecodeOptions::default()).expect("a view that fits");
    bencher.with_inputs(sampled).bench_local_refs(|sampled| decoder.decode(sampled, 0.4).expect("a batch"));
}

#[divan::bench]
fn update_priorities(bencher: Bencher) {
    let memory: &dyn Replay = &**MEMORY;
    let priorities: Vec<_> = (1..=BATCH).map(f64::from).collect();
    let ids = || sampled().items.iter().map(|item| item.id).collect::<Vec<_>>();
    bencher.with_inputs(ids).bench_local_refs(|ids| {
        let receipt = memory.update_priorities("rows", ids, &priorities, &FOREVER);
        black_box(receipt.expect("ids of the table"))
    });
}

//! A table as a learner and an actor use it: `cargo bench --bench table`.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use divan::{Bencher, black_box};
use replay_core::TableConfig;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody, SampleRequest, Sampled};
use replay_core::schema::{Codec, Column, Dtype};
use replay_core::table::{Attempt, Table, Turn};

const ITEMS: u64 = 1 << 20;
const BATCH: u32 = 512;
/// Steps of one chunk, and so of one push.
const CHUNK: u32 = 50;
/// Of the order of a Breakout frame, packed.
const BLOB_BYTES: u32 = 200;

fn main() {
    divan::main();
}

fn config() -> TableConfig {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.into(),
        codec,
        finite: true,
        max_length: 0,
    };
    TableConfig::new(
        "t",
        vec![
            column("frame", Dtype::Uint8, &[84, 84], Codec::Lz4),
            column("action", Dtype::Int64, &[], Codec::None),
            column("reward", Dtype::Float32, &[], Codec::None),
        ],
        ITEMS,
    )
}

/// A push of one chunk whose steps are all items with a window of 3 rows before.
fn push(sequence: u64, payload: &Bytes) -> Push {
    let first_step = (sequence - 1) * u64::from(CHUNK);
    let items = (first_step..first_step + u64::from(CHUNK)).map(|anchor| NewItem {
        anchor,
        stream: 0,
        before: anchor.min(3) as u16,
        after: 0,
        priority: Some((anchor % 1000) as f32),
    });
    Push {
        writer: 1,
        epoch: 1,
        sequence,
        body: PushBody {
            items: items.collect(),
            payload: Bytes::copy_from_slice(payload),
            chunks: vec![ChunkHead { stream: 0, rows: CHUNK, first_step, bytes: payload.len() as u32, version: 0 }],
        },
    }
}

/// The payload of a chunk; blobs are never unpacked here.
fn payload() -> Bytes {
    let mut row = vec![0u8; config().row_bytes()];
    let lengths_at = row.len() - 4;
    row[lengths_at..].copy_from_slice(&BLOB_BYTES.to_le_bytes());
    let mut bytes = row.repeat(CHUNK as usize);
    bytes.resize(bytes.len() + (BLOB_BYTES * CHUNK) as usize, 7);
    bytes.into()
}

fn filled() -> Arc<Table> {
    let memory = Memory::new(MemoryLimits::default());
    let table = memory.create_table(&config()).expect("a valid table");
    let open =
        OpenWriter { writer: 1, name: "bench".into(), server: None, streams: 1, window_before: 3, window_after: 3 };
    table.open_writer(&open).expect("a valid writer");
    let payload = payload();
    for sequence in 1..=ITEMS / u64::from(CHUNK) {
        table.try_push(&push(sequence, &payload), &mut Turn::default()).expect("a valid push");
    }
    table
}

static TABLE: LazyLock<Arc<Table>> = LazyLock::new(filled);

fn sample(before: u16) -> Sampled {
    let request = SampleRequest { count: BATCH, before, ..SampleRequest::default() };
    match TABLE.try_sample(&request, false, &mut Turn::default()).expect("items to sample") {
        Attempt::Ready(sampled) => sampled,
        Attempt::Blocked(waits) => unreachable!("nothing limits the sample: {waits}"),
    }
}

/// 512 of 2^20 windows of `before` + 1 steps.
#[divan::bench(args = [0, 3])]
fn sample_512(bencher: Bencher, before: u16) {
    LazyLock::force(&TABLE);
    bencher.bench_local(|| black_box(sample(before)));
}

#[divan::bench]
fn update_512(bencher: Bencher) {
    let ids: Vec<u64> = sample(0).items.iter().map(|item| item.id).collect();
    let priorities: Vec<f64> = (0..BATCH).map(f64::from).collect();
    bencher.bench_local(|| TABLE.update_priorities(&ids, &priorities));
}

/// 50 steps and items, with the eviction of as many.
#[divan::bench]
fn push_50(bencher: Bencher) {
    LazyLock::force(&TABLE);
    let payload = payload();
    let mut sequence = ITEMS / u64::from(CHUNK);
    bencher
        .with_inputs(|| {
            sequence += 1;
            push(sequence, &payload)
        })
        .bench_local_values(|push| TABLE.try_push(&push, &mut Turn::default()));
}

//! Packing and unpacking of Breakout frames: `cargo bench --package replay_core --bench views`. With the recording of
//! `python -m benchmarks` in `target/benchmarks` they are frames of a trained agent's games, otherwise sampled ones.

mod breakout;

use std::sync::{Arc, LazyLock};

use base::wait::Wait;
use divan::Bencher;
use divan::counter::ItemsCount;
use replay_core::codec::Codec;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, SampleRequest, Sampled};
use replay_core::schema::{Column, Dtype, TableConfig};
use replay_core::view::{DecodeOptions, Decoder, NStep, ViewSpec};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};

use breakout::{append, frames, table_of, view};

const STREAMS: usize = 16;
const BATCH: usize = 512;
const CAPACITY: u64 = 1 << 20;
/// Steps of every stream in the memory that is sampled from.
const STEPS: usize = 1000;
const FRAME: usize = 84 * 84;
const CODECS: [Codec; 2] = [Codec::Lz4, Codec::Zstd];
const FOREVER: Wait<'static> = Wait { deadline: None, interrupted: &|| false, notice: None };

/// Frames of every stream, step by step.
static FRAMES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/benchmarks/frame.npy");
    match std::fs::read(recording) {
        // The header of NumPy's format, whose size is a number of two bytes, comes before the array.
        Ok(file) => file[10 + usize::from(file[8]) + 256 * usize::from(file[9])..]
            .chunks_exact(STREAMS * FRAME)
            .take(STEPS)
            .map(<[u8]>::to_vec)
            .collect(),
        Err(_) => (0..STEPS).map(|step| frames(step, STREAMS)).collect(),
    }
});

/// 512 frames, spread over the streams and the steps.
fn single_frames() -> impl Iterator<Item = &'static [u8]> {
    let frames = FRAMES.iter().flat_map(|frames| frames.chunks_exact(FRAME));
    frames.step_by(STEPS * STREAMS / BATCH).take(BATCH)
}

#[expect(clippy::print_stdout, reason = "bytes are a result, beside the times")]
fn main() {
    for codec in CODECS {
        let mut out = vec![0; FRAME];
        let lengths = single_frames().map(|frame| codec.pack(frame, &mut out).unwrap_or(FRAME));
        let alone = lengths.sum::<usize>() / BATCH;
        let stats = filled(codec).stats();
        let stored = stats["tables"]["breakout"]["bytes"].as_u64().unwrap_or(0);
        let stored = stored as usize / (STREAMS * STEPS);
        println!("{codec:?}: {alone} bytes a frame by itself; {stored} bytes a step, with differences");
    }
    divan::main();
}

fn writer(memory: &Memory) -> Writer {
    let options = WriterOptions::default();
    Writer::open(memory, "breakout", STREAMS as u32, &view(), options, &FOREVER).expect("a writer")
}

fn memory(codec: Codec, capacity: u64) -> Arc<Memory> {
    // A seed, so that every run samples the same.
    let limits = MemoryLimits { seed: Some(1), ..MemoryLimits::default() };
    let memory = Memory::new(limits);
    let config = table_of(codec, capacity);
    memory.create_table(&config).expect("a valid table");
    memory
}

/// A memory of [`STEPS`] steps of every stream.
fn filled(codec: Codec) -> Arc<Memory> {
    let memory = memory(codec, CAPACITY);
    let mut writer = writer(&memory);
    for frames in FRAMES.iter() {
        append(&mut writer, frames, STREAMS);
    }
    writer.close(&FOREVER).expect("a close");
    memory
}

/// 512 frames, each by itself.
#[divan::bench(args = CODECS)]
fn pack_512(bencher: Bencher, codec: Codec) {
    let mut out = vec![0; FRAME];
    bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
        let lengths = single_frames().map(|frame| codec.pack(frame, &mut out));
        lengths.flatten().sum::<usize>()
    });
}

/// 512 frames, each by itself.
#[divan::bench(args = CODECS)]
fn unpack_512(bencher: Bencher, codec: Codec) {
    let mut out = vec![0; FRAME];
    let packed = |frame| {
        let length = codec.pack(frame, &mut out).expect("a frame that compresses");
        out[..length].to_vec()
    };
    let blobs: Vec<_> = single_frames().map(packed).collect();
    bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
        let unpacked = blobs.iter().map(|blob| codec.unpack(blob, &mut out));
        unpacked.collect::<Result<(), _>>().expect("a blob")
    });
}

/// 64 steps of 16 environments, as differences where they are small.
#[divan::bench(args = CODECS)]
fn append_1024(bencher: Bencher, codec: Codec) {
    let memory = memory(codec, 1 << 14);
    let mut writer = writer(&memory);
    let steps = &FRAMES[..64];
    bencher
        .counter(ItemsCount::new(STREAMS * steps.len()))
        .bench_local(|| steps.iter().for_each(|frames| append(&mut writer, frames, STREAMS)));
}

/// A step of one environment that observes so many float32, others in every step, with and without their check for NaN and
/// infinity.
#[divan::bench(args = [4, 84 * 84].iter().flat_map(|&floats| [true, false].map(|checked| (floats, checked))))]
fn append_floats(bencher: Bencher, (floats, checked): (u32, bool)) {
    let mut observation = Column::new("observation", Dtype::Float32, vec![floats]);
    observation.finite = checked;
    let columns = vec![observation, Column::new("reward", Dtype::Float32, vec![])];
    let config = TableConfig::new("floats", columns, 1 << 12);
    let memory = Memory::new(MemoryLimits::default());
    memory.create_table(&config).expect("a valid table");
    let (view, options) = (ViewSpec::NStep(NStep::default()), WriterOptions::default());
    let mut writer: Writer = Writer::open(&*memory, "floats", 1, &view, options, &FOREVER).expect("a writer");
    let observe = |step: u32| -> Vec<u8> {
        let numbers = (0..floats).map(|i| ((i + floats * step) as f32).sin());
        numbers.flat_map(f32::to_le_bytes).collect()
    };
    let observations: Vec<_> = (0..16).map(observe).collect();
    let mut observations = observations.iter().cycle();
    let shape = [1, floats as usize];
    bencher.bench_local(|| {
        let observation = observations.next().expect("a cycle");
        let columns = [
            ("observation", Values::new(Dtype::Float32, &shape, observation)),
            ("reward", Values::new(Dtype::Float32, &[1], &[0; 4])),
        ];
        writer.append(&StepBatch::new(&columns), &FOREVER).expect("a step that fits");
    });
}

fn sample(codec: Codec) -> Sampled {
    let request = SampleRequest::new(BATCH as u32, &view());
    let memory = filled(codec);
    let memory: &dyn Replay = &*memory;
    let sampled = memory.sample("breakout", &request, &FOREVER);
    sampled.expect("a sample")
}

/// A sample of 512 windows of 7 frames into arrays.
#[divan::bench(args = CODECS.iter().flat_map(|&codec| [1, 2].map(|threads| (codec, threads))))]
fn decode_512(bencher: Bencher, (codec, threads): (Codec, usize)) {
    let options = DecodeOptions { threads, ..DecodeOptions::default() };
    let config = table_of(codec, CAPACITY);
    let decoder = Decoder::new(&config, &view(), options).expect("a view that fits");
    let sampled = sample(codec);
    bencher.counter(ItemsCount::new(BATCH)).bench(|| decoder.decode(&sampled, 0.4).expect("a sample that decodes"));
}

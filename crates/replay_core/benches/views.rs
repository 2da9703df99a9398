//! Packing and unpacking of Breakout-like frames: `cargo bench --bench views`.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use divan::Bencher;
use divan::counter::ItemsCount;
use replay_core::error::Result;
use replay_core::replay::{
    BlobSegment, NewItem, PushBody, PushChannel, Sampled, SampledItem, Wait,
};
use replay_core::schema::{Codec, Column, Dtype, TableConfig};
use replay_core::view::{DecodeOptions, Decoder, NStep, Padding, ViewSpec};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};

const SIDE: usize = 84;
const STREAMS: usize = 16;
const BATCH: usize = 512;

fn main() {
    divan::main();
}

fn table() -> TableConfig {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        codec,
    };
    TableConfig::new(
        "breakout",
        vec![
            column("frame", Dtype::Uint8, &[SIDE as u32; 2], Codec::Lz4),
            column("action", Dtype::Int64, &[], Codec::None),
            column("reward", Dtype::Float32, &[], Codec::None),
        ],
        1 << 20,
    )
}

fn view() -> ViewSpec {
    ViewSpec::NStep(NStep {
        observation: "frame".into(),
        stack: 4,
        n: 3,
        gamma: 0.99,
        padding: Padding::Zero,
    })
}

/// Walls, a score, rows of bricks with holes, a paddle and a ball.
fn frame(step: usize) -> Vec<u8> {
    let mut pixels = vec![0; SIDE * SIDE];
    let mut fill = |top: usize, left: usize, height: usize, width: usize, value: u8| {
        for row in top..(top + height).min(SIDE) {
            pixels[row * SIDE..][left..(left + width).min(SIDE)].fill(value);
        }
    };
    fill(6, 0, 8, SIDE, 142);
    fill(6, 0, 72, 4, 142);
    fill(6, 80, 72, 4, 142);
    for digit in 0..3 {
        fill(1, 20 + 8 * digit, 4, 3 + (step / 40 + digit) % 3, 142);
    }
    for row in 0..6 {
        fill(23 + 3 * row, 4, 3, 76, [110, 130, 120, 140, 100, 90][row]);
        for hole in 0..(step / 100 + row) % 5 {
            fill(23 + 3 * row, 4 + (17 * hole + 13 * row) % 72, 3, 5, 0);
        }
    }
    fill(76, 4 + step * 3 % 66, 2, 8, 147);
    fill(30 + step * 2 % 46, 5 + step % 74, 2, 1, 147);
    pixels
}

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<PushBody>>>);

impl PushChannel for Kept {
    fn push(&mut self, body: PushBody, _: &Wait<'_>) -> Result<()> {
        self.0.lock().expect("one thread").push(body);
        Ok(())
    }
    fn flush(&mut self, _: &Wait<'_>) -> Result<()> {
        Ok(())
    }
    fn close(&mut self, _: &Wait<'_>) -> Result<()> {
        Ok(())
    }
}

fn writer(kept: Kept) -> Writer {
    let open = |_| -> Result<Box<dyn PushChannel>> { Ok(Box::new(kept)) };
    let options = WriterOptions::default();
    Writer::over_channel(table().into(), STREAMS as u32, &view(), options, open).expect("a writer")
}

fn append(writer: &mut Writer, frames: &[u8]) {
    let values = |dtype, shape, bytes| Values {
        dtype,
        shape,
        bytes,
    };
    let (actions, rewards) = ([0; 8 * STREAMS], [0; 4 * STREAMS]);
    writer
        .append(
            &StepBatch {
                columns: &[
                    (
                        "frame",
                        values(Dtype::Uint8, &[STREAMS, SIDE, SIDE], frames),
                    ),
                    ("action", values(Dtype::Int64, &[STREAMS], &actions)),
                    ("reward", values(Dtype::Float32, &[STREAMS], &rewards)),
                ],
                ..StepBatch::default()
            },
            &Wait::forever(),
        )
        .expect("a step that fits");
}

/// Frames of every stream at a step.
fn frames(step: usize) -> Vec<u8> {
    (0..STREAMS)
        .flat_map(|stream| frame(step + 57 * stream))
        .collect()
}

/// One step of 16 environments.
#[divan::bench]
fn append_16_frames(bencher: Bencher) {
    let kept = Kept::default();
    let mut writer = writer(kept.clone());
    let steps: Vec<_> = (0..64).map(frames).collect();
    let mut step = 0;
    bencher.counter(ItemsCount::new(STREAMS)).bench_local(|| {
        append(&mut writer, &steps[step % steps.len()]);
        step += 1;
    });
}

/// 512 windows of 7 frames, spread over every chunk.
fn draw() -> Sampled {
    let kept = Kept::default();
    let mut writer = writer(kept.clone());
    for step in 0..200 {
        append(&mut writer, &frames(step));
    }
    writer.close(&Wait::forever()).expect("a close");
    let row_bytes = table().row_bytes();
    let mut streams = vec![Vec::new(); STREAMS];
    let mut items: Vec<NewItem> = Vec::new();
    for push in kept.0.lock().expect("one thread").iter() {
        let mut at = 0;
        for head in &push.chunks {
            let rows = push.payload.slice(at..at + head.rows as usize * row_bytes);
            let mut blob = at + rows.len();
            for row in 0..head.rows as usize {
                let row = rows.slice(row * row_bytes..(row + 1) * row_bytes);
                let length = row.last_chunk().copied().map_or(0, u32::from_le_bytes) as usize;
                let bytes = push.payload.slice(blob..blob + length);
                streams[head.stream as usize].push((row, bytes));
                blob += length;
            }
            at += head.bytes as usize;
        }
        items.extend(push.items.iter().filter(|item| item.before == 3));
    }
    let chosen: Vec<_> = (0..BATCH).map(|i| items[i * 7919 % items.len()]).collect();
    let (mut rows, mut blobs) = (Vec::new(), Vec::new());
    for item in &chosen {
        let anchor = item.anchor as usize;
        for (row, blob) in &streams[item.stream as usize][anchor - 3..=anchor + 3] {
            rows.extend_from_slice(row);
            blobs.push(BlobSegment::Received(blob.clone()));
        }
    }
    Sampled {
        items: chosen
            .iter()
            .map(|item| SampledItem {
                key: item.anchor,
                probability: 0.5,
                age: 0,
                times_sampled: 1,
                before: 3,
                after: 3,
            })
            .collect(),
        live_items: BATCH as u64,
        min_probability: None,
        rows: Bytes::from(rows),
        blobs,
        credit: None,
    }
}

/// A draw of 512 into arrays.
#[divan::bench(args = [1, 2, 4])]
fn decode_512(bencher: Bencher, threads: usize) {
    let options = DecodeOptions {
        threads,
        ..DecodeOptions::default()
    };
    let decoder = Decoder::new(&table(), &view(), options).expect("a view that fits");
    let sampled = draw();
    bencher
        .counter(ItemsCount::new(BATCH))
        .bench(|| decoder.decode(&sampled, 0.4).expect("a draw that decodes"));
}

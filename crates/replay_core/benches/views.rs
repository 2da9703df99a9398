//! Packing and unpacking of Breakout-like frames: `cargo bench --bench views`.

mod breakout;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use divan::Bencher;
use divan::counter::ItemsCount;
use replay_core::error::Result;
use replay_core::replay::{NewItem, PushBody, PushChannel, Sampled, SampledItem, Wait};
use replay_core::view::{DecodeOptions, Decoder};
use replay_core::writer::{Writer, WriterOptions};

use breakout::{append, frames, table, view};

const STREAMS: usize = 16;
const BATCH: usize = 512;
const CAPACITY: u64 = 1 << 20;

fn main() {
    divan::main();
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
    Writer::over_channel(
        table(CAPACITY).into(),
        STREAMS as u32,
        &view(),
        options,
        open,
    )
    .expect("a writer")
}

/// One step of 16 environments.
#[divan::bench]
fn append_16_frames(bencher: Bencher) {
    let kept = Kept::default();
    let mut writer = writer(kept.clone());
    let steps: Vec<_> = (0..64).map(|step| frames(step, STREAMS)).collect();
    let mut step = 0;
    bencher.counter(ItemsCount::new(STREAMS)).bench_local(|| {
        append(&mut writer, &steps[step % steps.len()], STREAMS);
        step += 1;
    });
}

/// 512 windows of 7 frames, spread over every chunk.
fn draw() -> Sampled {
    let kept = Kept::default();
    let mut writer = writer(kept.clone());
    for step in 0..200 {
        append(&mut writer, &frames(step, STREAMS), STREAMS);
    }
    writer.close(&Wait::forever()).expect("a close");
    let row_bytes = table(CAPACITY).row_bytes();
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
            blobs.push(blob.clone());
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
    let decoder = Decoder::new(&table(CAPACITY), &view(), options).expect("a view that fits");
    let sampled = draw();
    bencher
        .counter(ItemsCount::new(BATCH))
        .bench(|| decoder.decode(&sampled, 0.4).expect("a draw that decodes"));
}

//! A small table, a writer that fills it with steps whose content follows from stream and number, and a reader
//! that checks that content.

use std::sync::Arc;

use bytes::Bytes;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody, SampleRequest, Sampled, SampledItem};
use replay_core::schema::{Codec, Column, Dtype, flags};
use replay_core::snapshot;
use replay_core::table::{Attempt, Table, Turn};
use replay_core::{Error, Result, TableConfig};

/// Flags, stream, step and one blob length.
pub const ROW_BYTES: usize = 1 + 4 + 8 + 4;
const FRAME_BYTES: u64 = 16;

/// A snapshot of the memory.
pub fn saved(memory: &Memory) -> Vec<u8> {
    let mut bytes = Vec::new();
    snapshot::save(memory, &mut bytes).unwrap();
    bytes
}

pub fn restore(memory: &Memory, bytes: &[u8]) -> Result<()> {
    snapshot::restore(memory, bytes, bytes.len() as u64)
}

/// A prioritized table with exponent 1, where priorities are their own masses.
pub fn config(capacity: u64) -> TableConfig {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.into(),
        codec,
        finite: true,
        max_length: 0,
    };
    TableConfig {
        priority_exponent: 1.0,
        ..TableConfig::new(
            "t",
            vec![
                column("stream", Dtype::Uint32, &[], Codec::None),
                column("frame", Dtype::Uint8, &[FRAME_BYTES as u32], Codec::Lz4),
                column("step", Dtype::Uint64, &[], Codec::None),
            ],
            capacity,
        )
    }
}

pub fn table(config: &TableConfig) -> Arc<Table> {
    memory().create_table(config).unwrap()
}

/// Samples the same numbers in every run.
pub fn memory() -> Arc<Memory> {
    Memory::new(MemoryLimits { seed: Some(7), ..MemoryLimits::default() })
}

fn blob(stream: u32, step: u64) -> Vec<u8> {
    let length = 1 + step % FRAME_BYTES;
    (0..length).map(|i| (u64::from(stream) * 31 + step * 7 + i) as u8).collect()
}

/// The payload of a chunk.
pub fn steps(stream: u32, first_step: u64, rows: u32) -> Vec<u8> {
    let (mut bytes, mut blobs) = (Vec::new(), Vec::new());
    for step in first_step..first_step + u64::from(rows) {
        let blob = blob(stream, step);
        bytes.push(if step == 0 { flags::FIRST } else { 0 });
        bytes.extend(stream.to_le_bytes());
        bytes.extend(step.to_le_bytes());
        bytes.extend((blob.len() as u32).to_le_bytes());
        blobs.extend(blob);
    }
    bytes.extend(blobs);
    bytes
}

/// Bytes that such a chunk counts for.
pub fn steps_bytes(first_step: u64, rows: u32) -> u64 {
    steps(0, first_step, rows).len() as u64 + TableConfig::CHUNK_BYTES
}

/// A push in the making.
#[derive(Clone, Default)]
pub struct Body {
    pub chunks: Vec<ChunkHead>,
    pub items: Vec<NewItem>,
    pub payload: Vec<u8>,
}

impl Body {
    pub fn chunk(mut self, stream: u32, first_step: u64, rows: u32) -> Self {
        let bytes = steps(stream, first_step, rows);
        self.chunks.push(ChunkHead { stream, rows, first_step, bytes: bytes.len() as u32, version: 0 });
        self.payload.extend(bytes);
        self
    }

    /// The newest chunk comes from parameters of this version.
    pub fn version(mut self, version: u64) -> Self {
        self.chunks.last_mut().expect("a chunk").version = version;
        self
    }

    /// An item with `before` and `after` rows around `anchor`.
    pub fn window(mut self, stream: u32, anchor: u64, (before, after): (u16, u16), priority: Option<f32>) -> Self {
        self.items.push(NewItem { anchor, stream, before, after, priority });
        self
    }

    /// An item of its anchor alone.
    pub fn item(self, stream: u32, anchor: u64, priority: f32) -> Self {
        self.window(stream, anchor, (0, 0), Some(priority))
    }

    pub fn build(self) -> PushBody {
        PushBody { chunks: self.chunks, items: self.items, payload: Bytes::from(self.payload) }
    }
}

/// A writer with four streams and windows of up to 3 rows before and 3 after.
pub struct Actor {
    pub table: Arc<Table>,
    pub writer: u64,
    pub epoch: u32,
    pub sequence: u64,
    pub next_step: u64,
}

impl Actor {
    pub fn open(table: &Arc<Table>, writer: u64) -> Self {
        Self::open_as(table, &open(writer))
    }

    pub fn open_as(table: &Arc<Table>, open: &OpenWriter) -> Self {
        let (opened, writer) = (table.open_writer(open).unwrap(), open.writer);
        Actor { table: table.clone(), writer, epoch: opened.epoch, sequence: opened.last_sequence, next_step: 0 }
    }

    pub fn try_push(&mut self, body: Body) -> Result<Attempt<u64>> {
        self.try_push_in_turn(body, &mut Turn::default())
    }

    pub fn try_push_in_turn(&mut self, body: Body, turn: &mut Turn) -> Result<Attempt<u64>> {
        let push = Push { writer: self.writer, epoch: self.epoch, sequence: self.sequence + 1, body: body.build() };
        let attempt = self.table.try_push(&push, turn)?;
        if let Attempt::Ready(_) = attempt {
            self.sequence += 1;
        }
        Ok(attempt)
    }

    /// Pushes what has to fit.
    pub fn push(&mut self, body: Body) -> u64 {
        match self.try_push(body).unwrap() {
            Attempt::Ready(steps) => steps,
            Attempt::Blocked(waits) => panic!("blocked: {waits}"),
        }
    }

    /// The next `rows` steps of stream 0, each an item of priority 1.
    pub fn next(&self, rows: u32) -> Body {
        let first = self.next_step;
        let body = Body::default().chunk(0, first, rows);
        (first..first + u64::from(rows)).fold(body, |body, step| body.item(0, step, 1.0))
    }

    pub fn push_next(&mut self, rows: u32) {
        self.push(self.next(rows));
        self.next_step += u64::from(rows);
    }
}

pub fn open(writer: u64) -> OpenWriter {
    OpenWriter { writer, name: format!("actor {writer}"), server: None, streams: 4, window_before: 3, window_after: 3 }
}

pub fn request(count: u32) -> SampleRequest {
    SampleRequest { count, ..SampleRequest::default() }
}

/// A batch, delivered where samples end items.
pub fn sample_as(table: &Arc<Table>, request: &SampleRequest) -> Sampled {
    match table.try_sample(request, false, &mut Turn::default()).unwrap() {
        Attempt::Ready(mut sampled) => {
            if table.config().max_times_sampled > 0 {
                deliver(&mut sampled);
            }
            sampled
        }
        Attempt::Blocked(waits) => panic!("blocked: {waits}"),
    }
}

/// The batch has reached its reader: its samples count.
pub fn deliver(sampled: &mut Sampled) {
    if let Some(credit) = sampled.credit.take() {
        credit.delivered();
    }
}

pub fn sample(table: &Arc<Table>, count: u32) -> Sampled {
    sample_as(table, &request(count))
}

pub fn blocked<T>(attempt: Result<Attempt<T>>) -> String {
    match attempt {
        Ok(Attempt::Blocked(waits)) => waits.to_string(),
        Ok(Attempt::Ready(_)) => panic!("expected to be blocked"),
        Err(error) => panic!("expected to be blocked, got {error}"),
    }
}

pub fn refusal<T>(attempt: Result<T>) -> Error {
    match attempt {
        Err(error) => error,
        Ok(_) => panic!("expected an error"),
    }
}

/// Checks every byte of a batch and returns the (stream, step) of each row, item by item.
pub fn windows(sampled: &Sampled) -> Vec<Vec<(u32, u64)>> {
    let mut rows = sampled.rows.chunks_exact(ROW_BYTES);
    let mut segments = sampled.blobs.iter().map(AsRef::as_ref);
    let mut segment: &[u8] = &[];
    let windows = sampled
        .items
        .iter()
        .map(|item| {
            let length = usize::from(item.before) + 1 + usize::from(item.after);
            let window: Vec<_> = (0..length)
                .map(|_| {
                    let row = rows.next().expect("a row for each step of the window");
                    let stream = u32::from_le_bytes(row[1..5].try_into().unwrap());
                    let step = u64::from_le_bytes(row[5..13].try_into().unwrap());
                    let length = u32::from_le_bytes(row[13..17].try_into().unwrap()) as usize;
                    if segment.is_empty() {
                        segment = segments.next().expect("blobs for each row");
                    }
                    let (frame, rest) = segment.split_at(length);
                    assert_eq!(frame, blob(stream, step), "frame of step {step}");
                    segment = rest;
                    (stream, step)
                })
                .collect();
            let anchor = window[usize::from(item.before)];
            let around = (0..length as u64).map(|i| (anchor.0, anchor.1 - u64::from(item.before) + i));
            assert!(window.iter().copied().eq(around), "{window:?} is one window");
            window
        })
        .collect();
    assert!(rows.next().is_none() && segment.is_empty() && segments.next().is_none());
    windows
}

/// The anchor's step number of each item.
pub fn anchors(sampled: &Sampled) -> Vec<u64> {
    windows(sampled).iter().zip(&sampled.items).map(|(window, item)| window[usize::from(item.before)].1).collect()
}

pub fn ids(sampled: &Sampled) -> Vec<u64> {
    sampled.items.iter().map(|item| item.id).collect()
}

/// The sampled item of that step; all items are anchors alone.
pub fn item_of(sampled: &Sampled, step: u64) -> SampledItem {
    let index = anchors(sampled).iter().position(|&s| s == step);
    sampled.items[index.expect("the step is in the batch")]
}

pub fn stat(table: &Table, name: &str) -> u64 {
    table.stats()[name].as_u64().unwrap_or_else(|| panic!("a count {name}"))
}

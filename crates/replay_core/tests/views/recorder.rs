//! A push channel that keeps what it gets, and samples from it in the plainest way.

use std::sync::{Arc, Mutex};

use base::wait::Wait;
use bytes::Bytes;
use rand::RngExt;
use rand::rngs::StdRng;
use replay_core::chunk::{BlobLength, RowLayout};
use replay_core::error::{Error, Result};
use replay_core::replay::{NewItem, PushBody, PushChannel, Sampled, SampledItem};
use replay_core::schema::{TableConfig, flags};

#[derive(Default)]
pub struct Recorded {
    pub pushes: Vec<PushBody>,
    /// Pushes to refuse with a deadline before the next one is taken.
    pub refuse: usize,
    pub closed: bool,
}

#[derive(Clone, Default)]
pub struct Recorder(pub Arc<Mutex<Recorded>>);

impl PushChannel for Recorder {
    fn push(&mut self, body: PushBody, _: &Wait<'_>) -> Result<()> {
        let mut recorded = self.0.lock().unwrap();
        if recorded.refuse > 0 {
            recorded.refuse -= 1;
            return Err(Error::deadline("the test"));
        }
        recorded.pushes.push(body);
        Ok(())
    }

    fn flush(&mut self, _: &Wait<'_>) -> Result<()> {
        Ok(())
    }

    fn end_steps(&mut self, _: &Wait<'_>) -> Result<()> {
        Ok(())
    }

    fn close(&mut self, _: &Wait<'_>) -> Result<()> {
        self.0.lock().unwrap().closed = true;
        Ok(())
    }
}

/// One packed row.
#[derive(Clone)]
struct PackedRow {
    fields: Vec<u8>,
    blobs: Vec<u8>,
    /// Where the row is that its blobs are differences to.
    key: Option<usize>,
}

/// Every row and item of some pushes.
pub struct Stored {
    rows: Vec<Vec<PackedRow>>,
    pub items: Vec<NewItem>,
}

impl Stored {
    /// Takes pushes apart, and checks that they are what `PushBody` promises.
    pub fn new(config: &TableConfig, streams: usize, pushes: &[PushBody]) -> Self {
        let layout = RowLayout::of(config);
        let row_bytes = layout.row_bytes;
        let mut stored = Stored { rows: vec![Vec::new(); streams], items: Vec::new() };
        for push in pushes {
            let mut payload = &push.payload[..];
            for (index, head) in push.chunks.iter().enumerate() {
                assert!(push.chunks[..index].iter().all(|c| c.stream != head.stream));
                let rows = &mut stored.rows[head.stream as usize];
                assert_eq!(head.first_step, rows.len() as u64);
                let (chunk, rest) = payload.split_at(head.bytes as usize);
                payload = rest;
                let mut key = None;
                let (fields, mut chunk_blobs) = chunk.split_at(head.rows as usize * row_bytes);
                for fields in fields.chunks_exact(row_bytes) {
                    let length = layout.blob_lengths(fields).map(BlobLength::bytes).sum();
                    let (own, rest) = chunk_blobs.split_at(length);
                    chunk_blobs = rest;
                    let is_difference = fields[0] & flags::DIFFERENCE != 0;
                    if !is_difference {
                        key = Some(rows.len());
                    }
                    assert!(key.is_some(), "a chunk begins with a key row");
                    rows.push(PackedRow {
                        fields: fields.to_vec(),
                        blobs: own.to_vec(),
                        key: key.filter(|_| is_difference),
                    });
                }
                assert!(chunk_blobs.is_empty());
            }
            assert!(payload.is_empty());
            for item in &push.items {
                let rows = stored.rows[item.stream as usize].len() as u64;
                assert!(item.anchor >= u64::from(item.before));
                assert!(
                    item.anchor + u64::from(item.after) < rows,
                    "an item comes with the push that completes its window"
                );
            }
            stored.items.extend(&push.items);
        }
        stored
    }

    /// Rows after an item's anchor in a sample: with the observation after a termination, where it came.
    pub fn after(&self, item: &NewItem, most: u16) -> u16 {
        let (stream, last) = (&self.rows[item.stream as usize], (item.anchor + u64::from(item.after)) as usize);
        let follows = stream.get(last + 1).is_some_and(|next| next.fields[0] & flags::FIRST == 0);
        let terminated = stream[last].fields[0] & flags::TERMINATED != 0;
        most.min(item.after + u16::from(terminated && follows))
    }

    /// Samples these items, at most `before` and `after` rows around each, with the blobs in random segments. The
    /// id of the i-th is i, its probability random.
    pub fn sample(&self, items: &[NewItem], before: u16, after: u16, rng: &mut StdRng) -> Sampled {
        let (mut rows, mut segments, mut segment) = (Vec::new(), Vec::new(), Vec::new());
        let mut sampled = Vec::new();
        for (id, item) in items.iter().enumerate() {
            let (before, after) = (before.min(item.before), self.after(item, after));
            let first = item.anchor as usize - before as usize;
            let last = item.anchor as usize + after as usize;
            let stream = &self.rows[item.stream as usize];
            let mut known = None;
            for index in first..=last {
                let row = &stream[index];
                let missing = row.key.filter(|&key| known != Some(key));
                for (index, flag) in missing.map(|key| (key, flags::REFERENCE)).into_iter().chain([(index, 0)]) {
                    rows.push(stream[index].fields[0] | flag);
                    rows.extend_from_slice(&stream[index].fields[1..]);
                    segment.extend_from_slice(&stream[index].blobs);
                    if rng.random_bool(0.3) {
                        segments.push(Bytes::from(std::mem::take(&mut segment)));
                    }
                }
                known = row.key.or(Some(index));
            }
            sampled.push(SampledItem {
                id: id as u64,
                probability: rng.random_range(0.001..1.0),
                age: id as u32 + 7,
                times_sampled: 1,
                before,
                after,
                version: 0,
            });
        }
        segments.push(Bytes::from(segment));
        Sampled {
            items: sampled,
            live_items: self.items.len() as u64,
            min_probability: None,
            state: None,
            rows: Bytes::from(rows),
            blobs: segments,
            shares: Vec::new(),
            lease: 0,
            credit: None,
        }
    }
}

//! What a push has to be before anything is stored: checked against columns, streams and windows, and built.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::replay::{NewItem, Push};
use crate::slab::Handle;

use super::Table;
use super::residents::Resident;
use super::stored::{Charge, StoredChunk};
use super::streams::{Link, Place};
use super::writers::Writer;

/// Where a chunk is before it has been placed.
pub const NOWHERE: Handle = Handle::from_bits(u64::MAX);

/// The place of a checked chunk among the residents.
pub struct ReadyChunk {
    pub resident: Box<Resident>,
    pub first_step: u64,
    /// The chunk of the stream that it continues.
    pub continues: Option<u64>,
}

/// A checked item.
pub struct ReadyItem {
    pub first_chunk: FirstChunk,
    pub first_row: u32,
    pub item: NewItem,
}

/// The chunk of an item's first row.
pub enum FirstChunk {
    Held(u64),
    /// By its index in the push.
    Pushed(usize),
}

/// A push that fits the table. Everything that placing it takes is allocated here, before the insert lock.
pub struct Prepared {
    #[expect(
        clippy::vec_box,
        reason = "the slab takes boxes; they are made before the lock"
    )]
    pub stored: Vec<Box<StoredChunk>>,
    pub chunks: Vec<ReadyChunk>,
    pub items: Vec<ReadyItem>,
    pub charge: Arc<Charge>,
    pub rows: u64,
    pub bytes: u64,
    /// Items skipped because their first row has been evicted.
    pub late: u64,
    /// Filled by placing it: the chunks in the slab, and their links for the streams.
    pub handles: Vec<Handle>,
    pub links: Vec<Link>,
}

impl Table {
    fn refuse(&self, reason: String) -> Error {
        Error::Schema {
            table: self.config.name.clone(),
            reason,
        }
    }

    /// Checks everything about a push that does not depend on other writers, and builds what it stores.
    pub(super) fn prepare(&self, writer: &mut Writer, push: &Push) -> Result<Prepared> {
        let body = &push.body;
        let rows = body.chunks.iter().map(|c| u64::from(c.rows)).sum();
        let bytes = body.payload.len() as u64;
        for (what, size, limit) in [
            ("a push, in steps,", rows, self.config.capacity),
            ("a push, in bytes,", bytes, self.capacity_bytes),
            (
                "a push, in items,",
                body.items.len() as u64,
                self.items.capacity() as u64,
            ),
        ] {
            if size > limit {
                return Err(Error::TooLarge { what, size, limit });
            }
        }
        let packed = self.check_chunks(writer, push)?;
        let (items, late) = self.check_items(writer, push)?;

        let charge = Charge::new(self.held.clone(), bytes);
        let last = packed.len().wrapping_sub(1);
        let identity = &writer.identity;
        let reach = usize::from(identity.window_before) + usize::from(identity.window_after);
        let chunks = body.chunks.iter().enumerate().map(|(index, head)| {
            // An item for each row, and a few more at an episode's start: no growth under the lock.
            let room = if body.items.is_empty() {
                0
            } else {
                head.rows as usize + reach.min(64)
            };
            ReadyChunk {
                resident: Box::new(Resident {
                    handle: NOWHERE,
                    rows: head.rows,
                    freed_bytes: if index == last { bytes } else { 0 },
                    items: Vec::with_capacity(room),
                }),
                first_step: head.first_step,
                continues: writer.streams[head.stream as usize].continues(head.first_step),
            }
        });
        let stored = body.chunks.iter().zip(packed).map(|(head, packed)| {
            let writer = identity.clone();
            StoredChunk::new(packed, writer, head.stream, head.first_step, charge.clone())
        });
        Ok(Prepared {
            chunks: chunks.collect(),
            // Placed from the back.
            stored: stored.rev().collect(),
            items,
            charge: charge.clone(),
            rows,
            bytes,
            late,
            handles: Vec::with_capacity(body.chunks.len()),
            links: Vec::with_capacity(body.chunks.len()),
        })
    }

    fn check_chunks(&self, writer: &mut Writer, push: &Push) -> Result<Vec<PackedRows>> {
        let body = &push.body;
        let streams = writer.streams.len();
        let mut named: Vec<u32> = body.chunks.iter().map(|c| c.stream).collect();
        named.sort_unstable();
        if let Some(pair) = named.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.refuse(format!(
                "stream {} has two chunks in one push; it may have one",
                pair[0]
            )));
        }
        if let Some(&stream) = named.last()
            && stream as usize >= streams
        {
            return Err(self.refuse(format!(
                "stream {stream} of writer {:?}, which was opened with {streams}",
                writer.identity.name
            )));
        }
        let first_arrival = self.first_arrival.load(Ordering::Relaxed);
        let mut rest: Bytes = body.payload.clone();
        let mut packed = Vec::with_capacity(body.chunks.len());
        for head in &body.chunks {
            if head.bytes as usize > rest.len() {
                return Err(self.refuse(format!(
                    "the chunks take more than the payload's {} bytes",
                    body.payload.len()
                )));
            }
            packed.push(
                self.layout
                    .check(head.rows, rest.split_to(head.bytes as usize))?,
            );
            let stream = &mut writer.streams[head.stream as usize];
            stream.forget_before(first_arrival);
            if head.first_step < stream.next_step()
                || head.first_step.checked_add(u64::from(head.rows)).is_none()
            {
                return Err(self.refuse(format!(
                    "step {} of stream {} after step {}: step numbers do not go back",
                    head.first_step,
                    head.stream,
                    stream.next_step()
                )));
            }
        }
        if !rest.is_empty() {
            return Err(self.refuse(format!(
                "the payload has {} bytes more than its chunks",
                rest.len()
            )));
        }
        Ok(packed)
    }

    fn check_items(&self, writer: &Writer, push: &Push) -> Result<(Vec<ReadyItem>, u64)> {
        let body = &push.body;
        let mut chunk_of = vec![
            None;
            if body.items.is_empty() {
                0
            } else {
                writer.streams.len()
            }
        ];
        if !body.items.is_empty() {
            for (index, head) in body.chunks.iter().enumerate() {
                chunk_of[head.stream as usize] = Some(index);
            }
        }
        let mut items = Vec::with_capacity(body.items.len());
        let mut late = 0;
        for item in &body.items {
            let missing = |reason: String| {
                self.refuse(format!(
                    "the item at step {} of stream {} needs {reason}",
                    item.anchor, item.stream
                ))
            };
            let Some(stream) = writer.streams.get(item.stream as usize) else {
                return Err(missing(format!(
                    "a stream that the writer was opened with: 0 to {}",
                    writer.streams.len() - 1
                )));
            };
            if let Some(priority) = item.priority
                && !(priority.is_finite() && priority >= 0.0)
            {
                return Err(Error::Priority {
                    value: f64::from(priority),
                });
            }
            let identity = &writer.identity;
            if item.before > identity.window_before || item.after > identity.window_after {
                return Err(missing(format!(
                    "{} steps before and {} after; the writer was opened with {} and {}",
                    item.before, item.after, identity.window_before, identity.window_after
                )));
            }
            let first = item.anchor.checked_sub(u64::from(item.before));
            let last = item.anchor.checked_add(u64::from(item.after));
            let (Some(first), Some(last)) = (first, last) else {
                return Err(missing("steps that no stream has".into()));
            };
            let pushed = chunk_of[item.stream as usize];
            let range = pushed.map(|i: usize| (body.chunks[i].first_step, body.chunks[i].rows));
            let (first_chunk, first_row) =
                match (stream.locate(first, last, range).map_err(missing)?, pushed) {
                    (Place::Held { arrival, row }, _) => (FirstChunk::Held(arrival), row),
                    (Place::Pushed { row }, Some(index)) => (FirstChunk::Pushed(index), row),
                    (Place::Evicted | Place::Pushed { .. }, _) => {
                        late += 1;
                        continue;
                    }
                };
            items.push(ReadyItem {
                first_chunk,
                first_row,
                item: *item,
            });
        }
        Ok((items, late))
    }
}

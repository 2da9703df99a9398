//! What a push has to be before anything is stored: checked against columns, streams and windows, and built.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::replay::{NewItem, Push};
use crate::schema::TableConfig;
use crate::slab::Handle;

use super::Table;
use super::residents::Resident;
use super::stored::{Charge, StoredChunk};
use super::streams::{Link, Place};
use super::writers::Writer;

/// Items of one chunk, at most, beyond one for each row: those whose observation stack is cut at an episode's start.
/// A longer stack makes the insert lock's holder allocate where such an episode begins with its chunk.
pub const EXTRA_ITEMS: usize = 16;

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
        let bytes = body.payload.len() as u64 + TableConfig::CHUNK_BYTES * body.chunks.len() as u64;
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
                return Err(Error::TooLarge {
                    what,
                    size,
                    limit,
                    advice: "give the writer fewer streams or a smaller chunk_steps, or the table a larger capacity",
                });
            }
        }
        let packed = self.check_chunks(writer, push)?;
        let (items, late) = self.check_items(writer, push)?;

        let charge = Charge::new(self.held.clone(), bytes);
        let last = packed.len().wrapping_sub(1);
        let identity = &writer.identity;
        let extra = EXTRA_ITEMS.min(identity.window_before.into());
        let chunks = body.chunks.iter().enumerate().map(|(index, head)| {
            // For the items of later pushes too, which may begin in this chunk: no growth under the lock.
            let room = head.rows as usize + extra;
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
            let chunk = rest.split_to(head.bytes as usize);
            packed.push(PackedRows::check(&self.layout, head.rows, chunk)?);
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

#[cfg(test)]
mod tests {
    use crate::memory::{Memory, MemoryLimits};
    use crate::replay::{ChunkHead, OpenWriter, PushBody};
    use crate::schema::{Codec, Column, Dtype};
    use crate::table::Attempt;
    use crate::table::writers::lock;

    use super::*;

    #[test]
    fn items_of_later_pushes_have_their_room_from_the_start() {
        const ROWS: u64 = 8;
        let column = Column {
            name: "value".into(),
            dtype: Dtype::Uint8,
            shape: vec![],
            codec: Codec::None,
        };
        let table = Memory::new(MemoryLimits::default())
            .create_table(&TableConfig::new("t", vec![column], 100))
            .unwrap();
        let open = OpenWriter {
            table: "t".into(),
            writer: 1,
            name: String::new(),
            streams: 1,
            window_before: 3,
            window_after: 12,
        };
        table.open_writer(&open).unwrap();
        let push = |sequence: u64, items| {
            let head = ChunkHead {
                stream: 0,
                rows: ROWS as u32,
                first_step: (sequence - 1) * ROWS,
                bytes: 2 * ROWS as u32,
            };
            let push = Push {
                table: "t".into(),
                writer: 1,
                epoch: 1,
                sequence,
                body: PushBody {
                    chunks: vec![head],
                    items,
                    payload: vec![0; 2 * ROWS as usize].into(),
                },
            };
            assert!(matches!(table.try_push(&push), Ok(Attempt::Ready(_))));
        };
        let room = || {
            let mut residents = lock(&table.residents);
            let first = residents.get_mut(0).expect("it is live");
            (first.items.len(), first.items.capacity())
        };
        // Windows that span three chunks: the first two pushes complete none.
        push(1, vec![]);
        push(2, vec![]);
        let (_, before) = room();
        // All items whose stack begins in the first chunk, as many as there can be.
        let items = (0..ROWS + 3).map(|anchor| NewItem {
            anchor,
            stream: 0,
            before: anchor.min(3) as u16,
            after: 12,
            priority: None,
        });
        push(3, items.collect());
        assert_eq!(room(), (ROWS as usize + 3, before));
    }
}

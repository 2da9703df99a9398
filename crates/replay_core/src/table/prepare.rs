//! Preparation of a push before anything is stored: checks against columns, streams and windows, and all allocations for
//! its placement.

use std::sync::Arc;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::replay::{ChunkHead, NewItem, PushBody};
use crate::schema::TableConfig;
use crate::slab::Handle;
use base::allocation::check_size;

use super::Table;
use super::items::ItemRows;
use super::stored::{Charge, Chunks, StoredChunk};
use super::streams::{ChunkSpan, FirstChunk};
use super::writers::TableWriter;

/// A push that fits the table, with all allocations for its placement, made before the insert lock is taken.
pub struct Prepared {
    pub chunks: Vec<PreparedChunk>,
    pub items: Vec<PreparedItem>,
    pub charge: Arc<Charge>,
    pub rows: u64,
    pub bytes: u64,
    /// Items skipped because their first row has been evicted.
    pub late: u64,
}

pub struct PreparedChunk {
    /// `None` once the slab has it.
    pub stored: Option<Box<StoredChunk>>,
    pub handle: Option<Handle>,
    pub stream: u32,
    /// Its steps; the arrival is filled in when it is in place.
    pub span: ChunkSpan,
    /// Arrival of the stream's chunk that it continues.
    pub continues: Option<u64>,
}

impl PreparedItem {
    /// Number of its first chunk, which is in place, in the order of arrival.
    pub fn arrival(&self, pushed: &[PreparedChunk]) -> u64 {
        match self.first_chunk {
            FirstChunk::Stored(arrival) => arrival,
            FirstChunk::Pushed(index) => pushed[index].span.arrival,
        }
    }
}

impl PreparedChunk {
    /// Inserts the chunk into the slab; false when no slot is free.
    pub fn enter(&mut self, slab: &Chunks) -> bool {
        match self.stored.take().map(|stored| slab.insert(stored)) {
            Some(Ok(handle)) => self.handle = Some(handle),
            // Dropped without the lock.
            Some(Err(stored)) => self.stored = Some(stored),
            None => {}
        }
        self.handle.is_some()
    }
}

pub struct PreparedItem {
    pub stream: u32,
    pub first_chunk: FirstChunk,
    pub rows: ItemRows,
    /// Before the exponent.
    pub priority: f64,
    /// The part of it that counts for the largest priority.
    pub raises: f64,
    pub units: u64,
}

/// What happened to an item before it is put in place.
#[derive(Clone, Copy)]
pub struct History {
    /// Steps that the table had taken when it was inserted.
    pub born: u64,
    /// Samples of it before it was restored.
    pub times_sampled: u32,
}

impl Table {
    fn refuse(&self, reason: String) -> Error {
        Error::schema(&self.config.name, reason)
    }

    /// Checks everything about a push that does not depend on other writers, and builds its chunks and items.
    pub(super) fn prepare(&self, writer: &mut TableWriter, body: &PushBody) -> Result<Prepared> {
        let rows = body.chunks.iter().map(|c| u64::from(c.rows)).sum();
        let bytes = body.payload.len() as u64 + TableConfig::CHUNK_BYTES * body.chunks.len() as u64;
        let advice = "give the writer fewer streams or a smaller chunk_steps, or the table a larger capacity";
        let check = |what, size, limit| check_size(what, size, limit, advice);
        check("a push, in steps,", rows, self.config.capacity)?;
        check("a push, in bytes,", bytes, self.held.limit)?;
        let slots = self.items.capacity() as u64;
        check("a push, in items,", body.items.len() as u64, slots)?;
        body.check_priorities()?;
        let charge = Charge::new(&self.held);
        let packed = self.check_chunks(writer, body, charge.payload(body.payload.clone()))?;
        let items = self.check_items(writer, body)?;
        let late = (body.items.len() - items.len()) as u64;

        let last = packed.len().wrapping_sub(1);
        let chunks = body.chunks.iter().zip(packed).enumerate();
        let chunks = chunks.map(|(index, (head, packed))| {
            let freed_bytes = if index == last { bytes } else { 0 };
            let ChunkHead { stream, rows, first_step, version, .. } = *head;
            let (writer, steps) = (writer.identity.clone(), &writer.streams[stream as usize]);
            PreparedChunk {
                stored: Some(StoredChunk::new(packed, writer, stream, first_step, version, freed_bytes)),
                handle: None,
                stream,
                span: steps.arriving(first_step, rows),
                continues: steps.continues(first_step),
            }
        });
        Ok(Prepared { chunks: chunks.collect(), items, charge, rows, bytes, late })
    }

    fn check_chunks(&self, writer: &mut TableWriter, body: &PushBody, mut rest: Bytes) -> Result<Vec<PackedRows>> {
        let streams = writer.streams.len();
        let mut named: Vec<u32> = body.chunks.iter().map(|c| c.stream).collect();
        named.sort_unstable();
        if let Some(pair) = named.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.refuse(format!("stream {} has two chunks in one push; it may have one", pair[0])));
        }
        if let Some(&stream) = named.last()
            && stream as usize >= streams
        {
            return Err(self.refuse(format!(
                "stream {stream} of writer {:?}, which was opened with {streams}",
                writer.identity.name
            )));
        }
        let first_arrival = self.lock_inserts()?.first;
        let mut packed = Vec::with_capacity(body.chunks.len());
        for head in &body.chunks {
            if head.bytes as usize > rest.len() {
                return Err(
                    self.refuse(format!("the chunks take more than the payload's {} bytes", body.payload.len()))
                );
            }
            let chunk = rest.split_to(head.bytes as usize);
            packed.push(PackedRows::check(&self.format.layout, head.rows, chunk)?);
            let stream = &mut writer.streams[head.stream as usize];
            stream.forget_before(first_arrival);
            stream.reserve();
            if head.first_step < stream.next_step || head.first_step.checked_add(u64::from(head.rows)).is_none() {
                return Err(self.refuse(format!(
                    "step {} of stream {} after step {}: step numbers do not go back",
                    head.first_step, head.stream, stream.next_step
                )));
            }
        }
        if !rest.is_empty() {
            return Err(self.refuse(format!("the payload has {} bytes more than its chunks", rest.len())));
        }
        Ok(packed)
    }

    /// Checks all items, and gives them their priorities and masses; those whose first row has been evicted are left out.
    /// An item without a priority takes the largest one so far, 1 while there is none above zero (Schaul
    /// et al., 2016, algorithm 1).
    fn check_items(&self, writer: &TableWriter, body: &PushBody) -> Result<Vec<PreparedItem>> {
        let mut chunk_of = vec![None; writer.streams.len()];
        for (index, head) in body.chunks.iter().enumerate() {
            chunk_of[head.stream as usize] = Some((index, head.first_step, head.rows));
        }
        let mut items = Vec::with_capacity(body.items.len());
        let mut priorities = Vec::with_capacity(body.items.len());
        let mut largest = self.max_priority.get(&self.items).unwrap_or(0.0);
        for item in &body.items {
            let Some((first_chunk, first_row)) = self.check_item(writer, item, &chunk_of)? else {
                continue;
            };
            let maximum = if largest > 0.0 { largest } else { 1.0 };
            let priority = item.priority.map_or(maximum, f64::from);
            largest = largest.max(priority);
            priorities.push(priority);
            items.push(PreparedItem {
                stream: item.stream,
                first_chunk,
                rows: ItemRows { first_row, before: item.before, after: item.after },
                priority,
                // A maximum from before the table was emptied does not count again.
                raises: item.priority.map_or(priority.min(1.0), f64::from),
                units: 0,
            });
        }
        for (item, units) in items.iter_mut().zip(self.sampler.units(&self.items, priorities)) {
            item.units = units;
        }
        Ok(items)
    }

    /// Checks an item and finds its first row; `None` when that has been evicted.
    fn check_item(
        &self,
        writer: &TableWriter,
        item: &NewItem,
        pushed: &[Option<(usize, u64, u32)>],
    ) -> Result<Option<(FirstChunk, u32)>> {
        let missing = |reason: String| {
            self.refuse(format!("the item at step {} of stream {} needs {reason}", item.anchor, item.stream))
        };
        let Some(stream) = writer.streams.get(item.stream as usize) else {
            return Err(missing(format!(
                "a stream that the writer was opened with: 0 to {}",
                writer.streams.len() - 1
            )));
        };
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
        let pushed = pushed[item.stream as usize].map(|(index, first_step, rows)| {
            let span = stream.arriving(first_step, rows);
            (FirstChunk::Pushed(index), span)
        });
        stream.locate(first, last, pushed).map_err(missing)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::memory::{Memory, MemoryLimits};
    use crate::replay::{ChunkHead, OpenWriter, Push};
    use crate::schema::{Codec, Column, Dtype};
    use crate::sync::lock;
    use crate::table::streams::LOOKS;
    use crate::table::{Attempt, Turn};

    use super::*;

    /// A table, and a writer of one stream with windows of `before` and `after` steps.
    fn table(capacity: u64, before: u16, after: u16) -> Arc<Table> {
        let column = Column {
            name: "value".into(),
            dtype: Dtype::Uint8,
            shape: vec![],
            codec: Codec::None,
            finite: true,
            max_length: 0,
        };
        let table =
            Memory::new(MemoryLimits::default()).create_table(&TableConfig::new("t", vec![column], capacity)).unwrap();
        let open = OpenWriter {
            writer: 1,
            name: String::new(),
            server: None,
            streams: 1,
            window_before: before,
            window_after: after,
        };
        table.open_writer(&open).unwrap();
        table
    }

    /// Pushes the next chunk, of `rows` rows as the ones before it.
    fn push(table: &Table, rows: u64, sequence: u64, items: Vec<NewItem>) {
        let head = ChunkHead {
            stream: 0,
            rows: rows as u32,
            first_step: (sequence - 1) * rows,
            bytes: 2 * rows as u32,
            version: 0,
        };
        let push = Push {
            writer: 1,
            epoch: 1,
            sequence,
            body: PushBody { chunks: vec![head], items, payload: vec![0; 2 * rows as usize].into() },
        };
        assert!(matches!(table.try_push(&push, &mut Turn::default()), Ok(Attempt::Ready(_))));
    }

    #[test]
    fn items_of_later_pushes_have_their_room_from_the_start() {
        const ROWS: u64 = 8;
        let table = table(100, 3, 12);
        let room = || {
            let first = lock(&table.arrivals).get(0).expect("it is live");
            let chunk = table.chunks.pin(first).expect("it is live");
            let items = lock(&chunk.items);
            (items.len(), items.capacity())
        };
        // Windows that span three chunks: the first two pushes complete none.
        push(&table, ROWS, 1, vec![]);
        push(&table, ROWS, 2, vec![]);
        let (_, before) = room();
        // All items whose stack begins in the first chunk, as many as there can be.
        let items = (0..ROWS + 3).map(|anchor| NewItem {
            anchor,
            stream: 0,
            before: anchor.min(3) as u16,
            after: 12,
            priority: None,
        });
        push(&table, ROWS, 3, items.collect());
        assert_eq!(room(), (ROWS as usize + 3, before));
    }

    /// A push of as many items as a hostile client likes, each a window over thousands of chunks, looks at a few chunks for
    /// each item: the ends of the window by bisection, and none between.
    #[test]
    #[cfg_attr(miri, ignore = "takes hours: 2^14 pushes")]
    fn a_push_of_long_windows_over_short_chunks_looks_at_their_ends_alone() {
        const CHUNKS: u64 = 1 << 14;
        const ITEMS: u64 = 10_000;
        let table = table(1 << 15, (CHUNKS / 2 - 1) as u16, (CHUNKS / 2) as u16);
        for sequence in 1..CHUNKS {
            push(&table, 1, sequence, vec![]);
        }
        let items = (0..ITEMS).map(|_| NewItem {
            anchor: CHUNKS / 2 - 1,
            stream: 0,
            before: (CHUNKS / 2 - 1) as u16,
            after: (CHUNKS / 2) as u16,
            priority: None,
        });
        let looks = LOOKS.get();
        push(&table, 1, CHUNKS, items.collect());
        let looks = LOOKS.get() - looks;
        assert_eq!(table.items.live(), ITEMS);
        // Two ends, each by a bisection of 2^14.
        assert!(looks > 0 && looks <= ITEMS * 2 * 15, "{looks} looks");
    }
}

//! A table that is read while it is in use: to the records of a snapshot, or its stored steps in their order of arrival, a few chunks at a time.
//! [`Table::save_point`] notes the instant, between two pushes, that
//! the records describe. Writing them holds the insert lock for a few chunks' names at a time, never over I/O; each chunk is
//! pinned while it is written, so a full table can still evict the others.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::sync::Arc;

use super::Table;
use super::ids::ItemId;
use super::stored::{AfterSavePoint, Arrivals};
use super::writers::WriterIdentity;
use crate::error::{Error, Result};
use crate::replay::{ReadSteps, StepsRead, StoredSteps};
use crate::slab::Handle;
use crate::snapshot_records::{
    ChunkRecord, ItemRecord, RecordKind, RecordWriter, ServedTable, TableState, WriterRecord,
};
use crate::sync::Ordering;

const ITEMS_AT_ONCE: usize = 4096;

#[derive(Default)]
struct Saved {
    /// Number of each chunk's record.
    chunks: HashMap<Handle, u32>,
    /// The table's own number of each chunk, ascending.
    arrivals: Vec<u64>,
    /// Number of each writer's record, by its serial.
    writers: HashMap<u64, u32>,
}

/// A table between two pushes. Until it is dropped, the table keeps the ids of items that are inserted without new steps.
pub(crate) struct SavePoint {
    table: Arc<Table>,
    /// Number of the chunk that arrives next.
    end: u64,
    state: TableState,
    /// In the snapshot of a server: its writers.
    writers: Option<Vec<WriterRecord>>,
}

impl Drop for SavePoint {
    fn drop(&mut self) {
        // An error is a table that has failed.
        if let Ok(mut arrivals) = self.table.lock_inserts() {
            arrivals.after_save_point = None;
        }
    }
}

impl Table {
    /// Records the steps and items of the table, `with_writers` also the progress of the writers, consistent with the steps. One save point of
    /// a table at a time.
    pub(crate) fn save_point(self: Arc<Self>, with_writers: bool) -> Result<SavePoint> {
        let (end, state, writers) = self.writers.between_pushes(|open| {
            let (end, state) = self.note(&mut *self.lock_inserts()?);
            let records = || open.iter().map(|(number, writer)| writer.record(*number)).collect();
            Ok::<_, Error>((end, state, with_writers.then(records)))
        })?;
        Ok(SavePoint { table: self, end, state, writers })
    }

    fn note(&self, arrivals: &mut Arrivals) -> (u64, TableState) {
        let state = self.state();
        arrivals.after_save_point =
            Some(AfterSavePoint { taken: state.counters.inserted_steps, items: HashSet::new() });
        (arrivals.end(), state)
    }

    /// Writes the table's records: the chunks and items of the save point, without those evicted since. Each item has the priority
    /// of the instant in which it is written.
    pub(crate) fn save<W: Write>(point: &SavePoint, out: &mut RecordWriter<W>) -> Result<()> {
        let table = &point.table;
        out.json(RecordKind::Table, &*table.config)?;
        let mut saved = Saved::default();
        for writer in point.writers.iter().flatten() {
            saved.write_writer(writer, out)?;
        }
        table.save_chunks(point.end, &mut saved, out)?;
        table.save_items(point, &saved, out)?;
        let arrivals = table.lock_inserts()?;
        let (first, number) = (arrivals.first, arrivals.number);
        drop(arrivals);
        let evicted_chunks = saved.arrivals.partition_point(|&arrival| arrival < first);
        let served = point.writers.is_some().then_some(ServedTable { number, end: point.end });
        out.json(RecordKind::State, &TableState { served, ..point.state_after(evicted_chunks) })
    }

    /// Writes the live chunks of the numbers up to `end`, exclusive.
    fn save_chunks<W: Write>(&self, end: u64, saved: &mut Saved, out: &mut RecordWriter<W>) -> Result<()> {
        let mut next = 0;
        loop {
            let named = self.name_chunks(&mut next, end)?;
            if named.is_empty() {
                return Ok(());
            }
            for (arrival, handle) in named {
                if base::planted!(ShortSnapshot) && saved.arrivals.len() == 2 {
                    return Ok(());
                }
                // None: it was evicted since.
                let Some(chunk) = self.chunks.pin(handle) else {
                    continue;
                };
                let writer = match saved.writers.get(&chunk.writer.serial) {
                    Some(&writer) => writer,
                    None => {
                        let identity = WriterIdentity::clone(&chunk.writer);
                        saved.write_writer(&WriterRecord { identity, open: None }, out)?
                    }
                };
                let (stream, rows) = (chunk.stream, chunk.packed.rows());
                let version = if base::planted!(LostVersions) { 0 } else { chunk.version };
                let head = ChunkRecord { writer, stream, rows, first_step: chunk.first_step, version };
                out.record(RecordKind::Chunk, &[&head.to_bytes(), chunk.packed.as_bytes()])?;
                saved.chunks.insert(handle, saved.arrivals.len() as u32);
                saved.arrivals.push(arrival);
            }
        }
    }

    /// Writes the live items of the save point: all rows of their windows were there.
    fn save_items<W: Write>(&self, point: &SavePoint, saved: &Saved, out: &mut RecordWriter<W>) -> Result<()> {
        let mut body = Vec::with_capacity(ITEMS_AT_ONCE * ItemRecord::BYTES);
        for (id, priority) in self.sampler.saved(&self.items) {
            let Some(item) = self.saved_item(id, priority, saved) else {
                continue;
            };
            if !self.is_before(point, id, item.born)? {
                continue;
            }
            item.write(&mut body);
            if body.len() == body.capacity() {
                out.record(RecordKind::Items, &[&body])?;
                body.clear();
            }
        }
        match body.is_empty() {
            true => Ok(()),
            false => out.record(RecordKind::Items, &[&body]),
        }
    }

    /// Whether an item existed at the save point, by the steps that the table had taken when it was inserted.
    fn is_before(&self, point: &SavePoint, id: ItemId, born: u64) -> Result<bool> {
        let taken = point.state.counters.inserted_steps;
        if born != taken {
            return Ok(born < taken);
        }
        let arrivals = self.lock_inserts()?;
        let after = arrivals.after_save_point.as_ref();
        Ok(after.is_none_or(|after| !after.items.contains(&id)))
    }

    /// An item as it is now; `None` when it has died, has no sample left, or its chunk was not written. Its priority was read before:
    /// the last sample takes the mass away. A live item of a queue whose last sample is taken was not delivered yet, or not acknowledged.
    fn saved_item(&self, id: ItemId, priority: f64, saved: &Saved) -> Option<ItemRecord> {
        let metadata = self.items.metadata(id.slot);
        let mut times_sampled = self.items.times_sampled(id.slot);
        if self.is_queue() {
            times_sampled = times_sampled.min(self.config.max_times_sampled - 1);
        }
        // If the item is still there, all that was loaded is of it.
        if !self.items.confirm(id) || self.items.is_used_up(times_sampled) {
            return None;
        }
        Some(ItemRecord {
            chunk: *saved.chunks.get(&metadata.oldest)?,
            first_row: metadata.rows.first_row,
            before: metadata.rows.before,
            after: metadata.rows.after,
            times_sampled,
            born: metadata.born,
            priority,
            id: self.items.id_bits(id),
        })
    }

    fn state(&self) -> TableState {
        let (limiter_sampled, limiter_inserted) = self.limiter.counts();
        TableState {
            evicted_chunks: 0,
            limiter_inserted,
            limiter_sampled,
            max_priority: self.max_priority.ever(),
            samples: self.draws.next.load(Ordering::Relaxed),
            counters: self.counters.saved(),
            sample_lag: self.counters.sample_lag.saved(),
            served: None,
        }
    }
}

impl SavePoint {
    /// Name of the parameters whose versions its chunks have.
    pub(crate) fn parameters(&self) -> Option<&str> {
        self.table.config.parameters.as_deref()
    }

    /// State of the save point, with later evictions, which the snapshot leaves out, and the current largest priority, which no item of the
    /// snapshot exceeds.
    fn state_after(&self, evicted_chunks: usize) -> TableState {
        let now = self.table.state();
        let mut counters = self.state.counters;
        // Chunks that arrived since may have been evicted, too.
        counters.evicted_steps = now.counters.evicted_steps.min(counters.inserted_steps);
        counters.evicted_items = now.counters.evicted_items.min(counters.inserted_items);
        counters.expired_items = now.counters.expired_items.min(counters.inserted_items);
        let (evicted_chunks, max_priority) = (evicted_chunks as u64, now.max_priority);
        TableState { evicted_chunks, max_priority, counters, ..self.state.clone() }
    }
}

impl Saved {
    /// Writes the record of a writer, and returns its number.
    fn write_writer<W: Write>(&mut self, writer: &WriterRecord, out: &mut RecordWriter<W>) -> Result<u32> {
        out.json(RecordKind::Writer, writer)?;
        let number = self.writers.len() as u32;
        self.writers.insert(writer.identity.serial, number);
        Ok(number)
    }
}

/// Chunks named under one hold of the insert lock.
const NAMED_AT_ONCE: usize = 64;
/// Bytes of a chunk's head in a message, with room.
const HEAD_BYTES: usize = 64;

impl Table {
    /// The next chunks of a reading, which ends with the steps that the table has at its first request. A request for 0 bytes gets a position
    /// alone, from which the reading ends with the steps of now. An error when the table was dropped, even if a new one has its name.
    pub fn read_steps(&self, request: &ReadSteps) -> Result<StepsRead> {
        self.check_open()?;
        let mut at = request.from;
        let arrivals = self.lock_inserts()?;
        if at.end == 0 {
            // Of a table that has had no steps, as later ones would be read otherwise.
            (at.number, at.end) = (arrivals.number, arrivals.end().max(1));
        }
        if at.number != arrivals.number {
            return Err(Self::was_dropped(&self.config.name));
        }
        drop(arrivals);
        if request.bytes == 0 {
            return Ok(StepsRead { chunks: Vec::new(), next: Some(at) });
        }
        let mut read = StepsRead::default();
        let mut bytes = 0;
        loop {
            let named = self.name_chunks(&mut at.next, at.end)?;
            if named.is_empty() {
                return Ok(read);
            }
            for (arrival, handle) in named {
                // None: it was evicted since.
                let Some(chunk) = self.chunks.pin(handle) else {
                    continue;
                };
                let packed = chunk.packed.as_bytes();
                // Its head is a part of the answer, too.
                bytes += packed.len() + HEAD_BYTES;
                if bytes > request.bytes as usize && !read.chunks.is_empty() {
                    at.next = arrival;
                    read.next = Some(at);
                    return Ok(read);
                }
                read.chunks.push(StoredSteps {
                    writer: chunk.writer.serial,
                    stream: chunk.stream,
                    rows: chunk.packed.rows(),
                    first_step: chunk.first_step,
                    version: chunk.version,
                    packed: packed.clone(),
                });
            }
        }
    }

    /// Numbers and handles of a few chunks, from the number `next` up to `end`, exclusive. `next` becomes the number after them.
    pub(super) fn name_chunks(&self, next: &mut u64, end: u64) -> Result<Vec<(u64, Handle)>> {
        let mut named = Vec::with_capacity(NAMED_AT_ONCE);
        let arrivals = self.lock_inserts()?;
        *next = arrivals.first.max(*next);
        while *next < end && named.len() < NAMED_AT_ONCE {
            named.extend(arrivals.get(*next).map(|handle| (*next, handle)));
            *next += 1;
        }
        Ok(named)
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use crate::memory::{Memory, MemoryLimits};
    use crate::replay::{Push, PushBody};
    use crate::schema::{Column, Dtype, TableConfig};
    use crate::snapshot_records::{RecordReader, from_json};
    use crate::table::tests::{open, push};
    use crate::table::{Attempt, Turn};

    fn apply(table: &Table, push: &Push) {
        let pushed = table.try_push(push, &mut Turn::default());
        assert!(matches!(pushed, Ok(Attempt::Ready(_))));
    }

    #[test]
    fn pushes_after_the_moment_are_left_out_with_and_without_steps() {
        let config = TableConfig::new("t", vec![Column::new("value", Dtype::Uint8, vec![])], 100);
        let memory = Memory::new(MemoryLimits::default());
        let table = memory.create_table(&config).unwrap();
        table.open_writer(&open(1, 1)).unwrap();
        apply(&table, &push(1, None));
        let point = table.clone().save_point(true).unwrap();
        // Another item of the first step.
        let item = Push {
            sequence: 2,
            body: PushBody { items: push(1, None).body.items, ..PushBody::default() },
            ..push(2, None)
        };
        apply(&table, &item);
        apply(&table, &push(3, None));

        let mut bytes = Vec::new();
        let mut out = RecordWriter::new(&mut bytes).unwrap();
        Table::save(&point, &mut out).unwrap();
        drop(point);
        let mut records = RecordReader::new(&bytes[..], bytes.len() as u64).unwrap();
        let (mut chunks, mut items) = (0, 0);
        loop {
            match records.next().unwrap() {
                (RecordKind::Chunk, _) => chunks += 1,
                (RecordKind::Items, body) => items += body.len() / ItemRecord::BYTES,
                (RecordKind::Writer, body) => {
                    let writer: WriterRecord = from_json(&body).unwrap();
                    let open = writer.open.unwrap();
                    assert_eq!((open.last_sequence, open.steps), (1, 1));
                }
                (RecordKind::State, body) => {
                    let state: TableState = from_json(&body).unwrap();
                    assert_eq!((state.counters.inserted_steps, state.limiter_inserted), (1, 1));
                    break;
                }
                _ => {}
            }
        }
        assert_eq!((chunks, items), (1, 1));
        assert!(table.lock_inserts().unwrap().after_save_point.is_none());
    }
}

//! A table to the records of a snapshot, while it is in use. The insert lock is held for a few chunks' names at a
//! time, never over I/O; each chunk is pinned while it is written, so a full table can still evict the others.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::slab::Handle;
use crate::snapshot_records::content::{ChunkRecord, ItemRecord, StreamRecord, TableState};
use crate::snapshot_records::{RecordKind, RecordWriter};

use super::Table;
use super::ids::ItemId;
use super::stored::StoredChunk;
use super::writers::WriterIdentity;

/// Chunks named under one hold of the insert lock.
const NAMED_AT_ONCE: usize = 64;

const ITEMS_AT_ONCE: usize = 4096;

/// Records written so far.
#[derive(Default)]
struct Saved {
    /// Number of each chunk's record.
    chunks: HashMap<Handle, u32>,
    /// The table's own number of each chunk, ascending.
    arrivals: Vec<u64>,
    /// Number of each stream's record, by writer and the writer's number of it.
    streams: HashMap<(*const WriterIdentity, u32), u32>,
    /// The writers of `streams`, kept so that no other writer gets the address of one.
    writers: Vec<Arc<WriterIdentity>>,
}

impl Table {
    /// Writes the table's records: chunks and items that it holds now, without those evicted meanwhile. Each item has
    /// the priority of the moment in which it is written.
    pub(crate) fn save<W: Write>(&self, out: &mut RecordWriter<W>) -> Result<()> {
        let definition = serde_json::to_vec(&*self.config)
            .map_err(|error| Error::Internal(error.to_string()))?;
        out.record(RecordKind::Table, &[&definition])?;
        let (end, taken) = {
            let residents = self.lock_residents()?;
            let taken = self.counters.inserted_steps.load(Ordering::Relaxed);
            (residents.end(), taken)
        };
        let mut saved = Saved::default();
        self.save_chunks(end, &mut saved, out)?;
        self.save_items(taken, &saved, out)?;
        let first = self.lock_residents()?.first;
        let evicted = saved.arrivals.partition_point(|&arrival| arrival < first);
        let state = self.state(evicted as u64);
        out.record(RecordKind::State, &[&state.to_bytes()])
    }

    /// Writes the live chunks of the numbers up to `end`, exclusive.
    fn save_chunks<W: Write>(
        &self,
        end: u64,
        saved: &mut Saved,
        out: &mut RecordWriter<W>,
    ) -> Result<()> {
        let mut named = Vec::with_capacity(NAMED_AT_ONCE);
        let mut next = 0;
        loop {
            {
                let mut residents = self.lock_residents()?;
                next = residents.first.max(next);
                while next < end && named.len() < NAMED_AT_ONCE {
                    named.extend(residents.get_mut(next).map(|chunk| (next, chunk.handle)));
                    next += 1;
                }
            }
            if named.is_empty() {
                return Ok(());
            }
            for (arrival, handle) in named.drain(..) {
                // None: it was evicted since.
                let Some(chunk) = self.chunks.pin(handle) else {
                    continue;
                };
                let stream = saved.stream_of(&chunk, out)?;
                let head = ChunkRecord {
                    stream,
                    rows: chunk.packed.rows(),
                    first_step: chunk.first_step,
                };
                out.record(
                    RecordKind::Chunk,
                    &[&head.to_bytes(), chunk.packed.as_bytes()],
                )?;
                saved.chunks.insert(handle, saved.arrivals.len() as u32);
                saved.arrivals.push(arrival);
            }
        }
    }

    /// Writes the live items that were there when the table had taken `taken` steps: all rows of such a window were.
    fn save_items<W: Write>(
        &self,
        taken: u64,
        saved: &Saved,
        out: &mut RecordWriter<W>,
    ) -> Result<()> {
        let mut body = Vec::with_capacity(ITEMS_AT_ONCE * ItemRecord::BYTES);
        for id in self.sampler.ids(&self.items) {
            let Some(item) = self.saved_item(id, saved).filter(|i| i.born <= taken) else {
                continue;
            };
            item.write(&mut body);
            if body.len() == body.capacity() {
                out.record(RecordKind::Items, &[&body])?;
                body.clear();
            }
        }
        if body.is_empty() {
            return Ok(());
        }
        out.record(RecordKind::Items, &[&body])
    }

    /// An item as it is now; `None` when it has died, has no sample left, or its chunk was not written.
    fn saved_item(&self, id: ItemId, saved: &Saved) -> Option<ItemRecord> {
        let metadata = self.items.metadata(id.slot);
        // Before the samples: the last one takes the mass away.
        let units = self.sampler.saved_units(&self.items, id)?;
        let times_sampled = self.items.times_sampled(id.slot);
        // All that was loaded is this item's, if it is still there.
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
            units,
        })
    }

    fn state(&self, evicted_chunks: u64) -> TableState {
        let (limiter_sampled, limiter_inserted) = self.limiter.counts();
        TableState {
            evicted_chunks,
            limiter_inserted,
            limiter_sampled,
            max_priority: self.max_priority.ever_bits(),
            samples: self.samples.load(Ordering::Relaxed),
            counters: self
                .counters
                .all()
                .map(|(_, counter)| counter.load(Ordering::Relaxed)),
        }
    }
}

impl Saved {
    /// The number of the chunk's stream, whose record is written before its first chunk.
    fn stream_of<W: Write>(
        &mut self,
        chunk: &StoredChunk,
        out: &mut RecordWriter<W>,
    ) -> Result<u32> {
        let name = (Arc::as_ptr(&chunk.writer), chunk.stream);
        if let Some(&number) = self.streams.get(&name) {
            return Ok(number);
        }
        let stream = StreamRecord {
            window_before: chunk.writer.window_before,
            window_after: chunk.writer.window_after,
            number: chunk.stream,
            writer: chunk.writer.name.clone(),
        };
        out.record(RecordKind::Stream, &[&stream.to_bytes()])?;
        let number = self.streams.len() as u32;
        self.streams.insert(name, number);
        self.writers.push(chunk.writer.clone());
        Ok(number)
    }
}

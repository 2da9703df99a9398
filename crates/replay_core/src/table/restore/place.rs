//! Puts the checked records of a snapshot into their empty table.

use std::sync::Arc;

use super::{Staged, StagedChunk};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::schema::TableConfig;
use crate::snapshot_records::content::{TableState, WriterRecord, WriterStream};
use crate::sync::Ordering;
use crate::table::Table;
use crate::table::ids::{ItemId, RestoredIds};
use crate::table::items::ItemRows;
use crate::table::residents::Residents;
use crate::table::stored::{Charge, NewChunk, StoredChunk};
use crate::table::streams::Stream;
use crate::table::writers::WriterIdentity;

/// A table of a snapshot in place.
pub(crate) struct Placed {
    pub table: Arc<Table>,
    /// Ids of its items, if the snapshot has them.
    pub ids: Vec<(u64, ItemId)>,
    /// Steps of the snapshot that the table is too small for.
    pub left_out: u64,
}

/// A chunk of a snapshot with everything that placing it takes.
struct ReadyChunk {
    new: NewChunk,
    charge: Arc<Charge>,
    bytes: u64,
    /// Index of the chunk whose first row follows this one's last.
    continued_by: Option<usize>,
}

fn not_empty(table: &Table, residents: &Residents) -> Error {
    Error::NotEmpty { table: table.config.name.clone(), steps: residents.steps, bytes: table.held.bytes() }
}

impl Staged {
    /// Whether [`Self::place`] would find the table empty, asked of all tables before the first one is placed.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn check_unused(&self) -> Result<()> {
        let residents = self.table.lock_residents()?;
        self.table.check_open()?;
        match self.table.is_unused(&residents) {
            true => Ok(()),
            false => Err(not_empty(&self.table, &residents)),
        }
    }

    /// Puts everything into the table, which has to be empty, and returns it. Everything is allocated before the insert
    /// lock, which is held for the whole of it: an empty table has no samples to delay.
    ///
    /// # Errors
    /// Nothing is stored with [`Error::NotEmpty`], or [`Error::UnknownTable`] (it was dropped).
    pub fn place(mut self) -> Result<Placed> {
        let state = self.state.unwrap_or_default();
        let table = self.table.clone();
        self.keep_writer_numbers();
        let identities = self.share_identities();
        let streams: Vec<_> = self.chunks.iter().map(|chunk| (chunk.stream, chunk.span())).collect();
        let mut ids = Vec::with_capacity(self.ids.len());
        let priorities = self.items.iter().map(|item| item.priority).collect();
        let units = table.sampler.units(&table.items, priorities);
        let mut chunks = self.build();

        let mut residents = table.lock_residents()?;
        table.check_open()?;
        let mut news = chunks.iter_mut().map(|chunk| &mut chunk.new);
        if !(table.is_unused(&residents) && news.all(|new| new.enter(&table.chunks))) {
            let refused = not_empty(&table, &residents);
            drop(residents);
            for handle in chunks.iter().filter_map(|chunk| chunk.new.handle()) {
                table.chunks.retire(handle);
            }
            return Err(refused);
        }
        if let Some(reading) = &self.reading {
            residents.number = reading.number;
            residents.first = residents.first.max(reading.end - chunks.len() as u64);
            // Relaxed, as in evictions: the insert lock is held.
            table.first_arrival.store(residents.first, Ordering::Relaxed);
        }
        let first_arrival = residents.end();
        for index in 0..chunks.len() {
            let next = chunks[index].continued_by;
            let next = next.and_then(|next| chunks[next].new.handle());
            let chunk = &mut chunks[index];
            let Some(resident) = chunk.new.take_resident() else {
                continue;
            };
            chunk.charge.count(chunk.bytes);
            if let Some(next) = next
                && let Some(stored) = table.chunks.pin(resident.handle)
            {
                stored.set_next(next);
            }
            residents.push(resident);
        }
        for (index, (item, units)) in self.items.iter().zip(units).enumerate() {
            let arrival = first_arrival + u64::from(item.chunk) - self.first;
            let Some(resident) = residents.get_mut(arrival) else {
                continue;
            };
            let rows = ItemRows { first_row: item.first_row, before: item.before, after: item.after };
            // Without mass until its samples are counted, so that no sample finds it before.
            let id = table
                .items
                .insert(resident.handle, rows, item.born, 0)
                .expect("the table is empty, and there are no more items than it has slots");
            table.items.count_earlier_samples(id, item.times_sampled);
            table.items.tree.set(id.slot, id.generation, units);
            table.sampler.insert(id, item.priority);
            // Rounding of the mass may have raised it.
            let largest = f64::from_bits(state.max_priority);
            table.max_priority.insert(id, item.priority.min(largest));
            resident.items.push(id);
            ids.extend(self.ids.get(index).map(|&bits| (bits, id)));
        }
        self.place_writers(identities, &streams, first_arrival);
        table.go_on_from(&state, &self.saved);
        drop(residents);
        table.held.wake();
        Ok(Placed { table, ids, left_out: self.left_out })
    }

    /// Lets the writers keep the numbers by which readers know them.
    fn keep_writer_numbers(&mut self) {
        let Some(reading) = &self.reading else {
            return;
        };
        for (stream, &serial) in self.streams.iter_mut().zip(&reading.writers) {
            stream.writer = stream.writer.with_serial(serial);
        }
    }

    /// Shares each writer's identity with its restored chunks, as with those that it pushes later.
    fn share_identities(&mut self) -> Vec<Arc<WriterIdentity>> {
        let streams = &mut self.streams;
        let identity = |record: &WriterRecord| {
            let mut identity = None;
            for stream in &record.streams {
                if let Some(staged) = streams.get_mut(stream.record as usize) {
                    staged.writer = identity.get_or_insert_with(|| staged.writer.clone()).clone();
                }
            }
            let (before, after) = (record.window_before, record.window_after);
            identity.unwrap_or_else(|| WriterIdentity::new(record.name.clone(), before, after))
        };
        self.writers.iter().map(identity).collect()
    }

    /// Opens the writers of the snapshot; `chunks` has the stream and the steps of each chunk.
    fn place_writers(&self, identities: Vec<Arc<WriterIdentity>>, chunks: &[(usize, (u64, u32))], first_arrival: u64) {
        let mut of_record: Vec<_> = self.streams.iter().map(|_| None).collect();
        for (writer, record) in self.writers.iter().enumerate() {
            for (number, stream) in record.streams.iter().enumerate() {
                if let Some(slot) = of_record.get_mut(stream.record as usize) {
                    *slot = Some((writer, number));
                }
            }
        }
        let restored = |stream: &WriterStream| Stream::restored(stream.next_step);
        let mut streams: Vec<Vec<Stream>> =
            (self.writers.iter()).map(|record| record.streams.iter().map(restored).collect()).collect();
        for (arrival, &(record, (first_step, rows))) in (first_arrival..).zip(chunks) {
            if let Some((writer, number)) = of_record[record] {
                streams[writer][number].push_restored(arrival, first_step, rows);
            }
        }
        for ((record, identity), streams) in self.writers.iter().zip(identities).zip(streams) {
            self.table.writers.restore(record, identity, streams);
        }
    }

    fn build(&mut self) -> Vec<ReadyChunk> {
        let first = self.first;
        let build = |chunk: StagedChunk| {
            let stream = &self.streams[chunk.stream];
            let bytes = chunk.bytes();
            let writer = stream.writer.clone();
            let stored = StoredChunk::new(chunk.packed, writer, stream.number, chunk.first_step);
            ReadyChunk {
                new: NewChunk::new(stored, bytes, chunk.items),
                charge: chunk.charge,
                bytes,
                continued_by: chunk.continued_by.map(|number| (number - first) as usize),
            }
        };
        std::mem::take(&mut self.chunks).into_iter().map(build).collect()
    }
}

impl Placed {
    /// Lets the items keep their ids, as far as the memory's limit allows.
    pub fn keep_ids(self, memory: &Memory) {
        if self.ids.is_empty() {
            return;
        }
        let table = &self.table.config.name;
        match memory.reserve(RestoredIds::bytes(&self.ids)) {
            Some(reservation) => {
                let ids = RestoredIds::new(self.ids, reservation);
                self.table.items.keep_ids(ids);
            }
            None => tracing::warn!(
                table,
                "max_bytes has no memory left for the ids of the restored items: updates by ids from before are stale"
            ),
        }
    }
}

impl Table {
    /// Whether the table has no step, and no reader holds bytes or items of it.
    fn is_unused(&self, residents: &Residents) -> bool {
        let free = self.items.free() == self.items.capacity();
        residents.steps == 0 && self.held.bytes() == 0 && free
    }

    /// Takes over the counts of a table of the definition `saved`. Under the insert lock, after the items: until then
    /// the rate limiter holds samples back.
    fn go_on_from(&self, state: &TableState, saved: &TableConfig) {
        for ((_, counter), value) in self.counters.all().into_iter().zip(state.counters) {
            counter.store(value, Ordering::Relaxed);
        }
        let largest = f64::from_bits(state.max_priority);
        self.max_priority.go_on_from(largest);
        self.samples.store(state.samples, Ordering::Relaxed);
        self.limiter.go_on_from(
            state.limiter_inserted,
            state.limiter_sampled,
            (saved.samples_per_insert, saved.effective_slack(), saved.min_size),
        );
    }
}

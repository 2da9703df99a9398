//! Stores the checked records of a snapshot in their empty table.

use std::sync::Arc;

use super::{Staged, StagedChunk};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::schema::TableConfig;
use crate::snapshot_records::{ItemRecord, OpenRecord, TableState};
use crate::sync::Ordering;
use crate::table::Table;
use crate::table::ids::{ItemId, RestoredIds};
use crate::table::items::ItemRows;
use crate::table::prepare::{History, PreparedChunk, PreparedItem};
use crate::table::stored::{Arrivals, PASSED};
use crate::table::streams::{FirstChunk, Stream};

/// A table with what a snapshot had.
pub(crate) struct StoredTable {
    pub table: Arc<Table>,
    /// Ids of its items, if the snapshot has them.
    pub ids: Vec<(u64, ItemId)>,
    /// Steps of the snapshot that the table is too small for.
    pub left_out: u64,
}

fn not_empty(table: &Table, arrivals: &Arrivals) -> Error {
    Error::NotEmpty { table: table.config.name.clone(), steps: arrivals.steps, bytes: table.held.bytes() }
}

impl Staged {
    /// Whether [`Self::store`] would find the table empty, asked of all tables before the first one is filled.
    pub fn check_unused(&self) -> Result<()> {
        let arrivals = self.table.lock_inserts()?;
        self.table.check_open()?;
        match self.table.is_unused(&arrivals) {
            true => Ok(()),
            false => Err(not_empty(&self.table, &arrivals)),
        }
    }

    /// Puts everything into the table, which has to be empty, and returns it. The insert lock is held for the whole of it: an
    /// empty table has no samples to delay.
    ///
    /// # Errors
    /// Nothing is stored with [`Error::NotEmpty`], or [`Error::UnknownTable`] (it was dropped).
    pub fn store(self) -> Result<StoredTable> {
        let Staged { table, saved, writers, chunks, first, items: records, left_out, state, .. } = self;
        let state = state.unwrap_or_default();
        let priorities = records.iter().map(|item| item.priority).collect();
        let units = table.sampler.units(&table.items, priorities);

        let mut arrivals = table.lock_inserts()?;
        table.check_open()?;
        if !table.is_unused(&arrivals) {
            return Err(not_empty(&table, &arrivals));
        }
        if let Some(served) = state.served {
            arrivals.number = served.number;
            arrivals.first = arrivals.first.max(served.end - chunks.len() as u64);
        }
        let first_arrival = arrivals.end();
        let arrival = |number: u64| Some(first_arrival + number.checked_sub(first)?);
        let streams = |open: &OpenRecord| open.next_steps.iter().copied().map(Stream::restored).collect();
        let mut open: Vec<Vec<Stream>> =
            writers.iter().map(|writer| writer.open.as_ref().map(streams).unwrap_or_default()).collect();
        for StagedChunk { writer, mut push } in chunks {
            for chunk in &mut push.chunks {
                chunk.continues = chunk.continues.and_then(arrival);
            }
            table.store_chunks(&mut arrivals, &mut push).expect("an unused table has a slot for each step, and more");
            for PreparedChunk { stream, span, handle, .. } in push.chunks {
                if let Some(stream) = open[writer].get_mut(stream as usize) {
                    stream.push_restored(span.arrival, span.first_step, span.rows);
                } else if let Some(chunk) = handle.and_then(|handle| table.chunks.pin(handle)) {
                    chunk.note(PASSED);
                }
            }
        }
        let item = |(record, units): (&ItemRecord, u64)| PreparedItem {
            stream: 0,
            // Items of chunks before the first were left out.
            first_chunk: FirstChunk::Stored(first_arrival + u64::from(record.chunk) - first),
            rows: ItemRows { first_row: record.first_row, before: record.before, after: record.after },
            priority: record.priority,
            raises: 0.0,
            units,
        };
        let items: Vec<_> = records.iter().zip(units).map(item).collect();
        let mut ids = Vec::with_capacity(if state.served.is_some() { records.len() } else { 0 });
        let history = |index: usize| History { born: records[index].born, times_sampled: records[index].times_sampled };
        table.store_items(&mut arrivals, &items, &[], history, |index, id| {
            if state.served.is_some() {
                ids.push((records[index].id, id));
            }
        });
        for (writer, streams) in writers.into_iter().zip(open) {
            if let Some(record) = &writer.open {
                table.writers.restore(record, writer.identity, streams);
            }
        }
        table.go_on_from(&state, &saved);
        drop(arrivals);
        table.held.wake();
        Ok(StoredTable { table, ids, left_out })
    }
}

impl StoredTable {
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
    fn is_unused(&self, arrivals: &Arrivals) -> bool {
        let free = self.items.free() == self.items.capacity();
        arrivals.steps == 0 && self.held.bytes() == 0 && free
    }

    /// Takes over the counts of a table of the definition `saved`. Under the insert lock, after the items: until then
    /// the rate limiter holds samples back.
    fn go_on_from(&self, state: &TableState, saved: &TableConfig) {
        self.counters.go_on_from(&state.counters);
        self.counters.sample_lag.go_on_from(&state.sample_lag);
        self.max_priority.go_on_from(state.max_priority);
        self.draws.next.store(state.samples, Ordering::Relaxed);
        self.limiter.go_on_from(
            state.limiter_inserted,
            state.limiter_sampled,
            (saved.samples_per_insert, saved.effective_slack(), saved.min_size),
        );
    }
}

//! Eviction of the oldest chunks, by steps, bytes and items. Under the insert lock chunks leave the order of
//! arrival and their items die; the chunks themselves are dropped after it is released.

use crate::error::Result;
use crate::limiter::Outcome;
use crate::slab::Handle;
use crate::sync::{Ordering, lock};

use super::Table;
use super::ids::ItemId;
use super::prepare::Prepared;
use super::stored::Arrivals;
use super::stored::StoredChunk;

/// Chunks taken out under the lock, to be dropped after it.
pub type Evicted = Vec<Handle>;

/// Pushes wait, instead of evicting more, once sampled batches hold evicted chunks of more than a fourth of the table's bytes: a slow
/// learner makes the table smaller by a fourth, and does not empty one of few large chunks.
const HELD_BY_READERS: u64 = 4;

/// Most chunks evicted under one hold of the insert lock: bounds the hold, and the size of their preallocated list.
pub const EVICTED_AT_ONCE: usize = 64;

impl Table {
    /// Evicts the oldest chunks until the push fits, at most [`EVICTED_AT_ONCE`] of them. `false`: the caller drops `evicted`
    /// and tries again. `Err` is the reason of the wait.
    pub(super) fn make_room(&self, arrivals: &mut Arrivals, push: &Prepared, evicted: &mut Evicted) -> Outcome<bool> {
        // Evicted chunks whose blobs sampled batches hold, or that another push is about to drop.
        let pinned = self.held.bytes().saturating_sub(arrivals.bytes);
        let waits = pinned > self.held.limit / HELD_BY_READERS;
        let used = if waits { push.bytes } else { pinned + push.bytes };
        let limit = self.held.limit;
        let wait = |bytes: u64| {
            let missing = bytes - limit;
            format!(
                "has {pinned} of its {limit} bytes in evicted chunks that sampled batches still hold; waiting until {missing} of them are free"
            )
        };
        if pinned + push.bytes > limit {
            return Err(wait(pinned + push.bytes));
        }
        let items = push.items.len();
        while arrivals.steps + push.rows > self.config.capacity
            || arrivals.bytes + used > self.held.limit
            || self.items.free() < items
        {
            if evicted.len() == evicted.capacity() {
                return Ok(false);
            }
            let Some((handle, oldest)) = arrivals.pop(&self.chunks) else {
                return Err("waits for samples that are taking its last items".to_owned());
            };
            self.end_items(&oldest);
            evicted.push(handle);
        }
        let bytes = arrivals.bytes + pinned + push.bytes;
        if waits && bytes > limit {
            return Err(wait(bytes));
        }
        // Evicted chunks count until they are dropped, after the lock is released.
        Ok(self.held.bytes() + push.bytes <= self.held.limit)
    }

    /// Removes all live chunks with their items, and resets the limiter and the largest priority; no window begins before this.
    pub(crate) fn empty(&self) -> Result<()> {
        self.catch_panic(|| {
            let end = self.begin_to_empty()?;
            let mut removed = Vec::with_capacity(EVICTED_AT_ONCE);
            while self.remove_some(end, &mut removed)? {}
            Ok(())
        })?;
        if !base::planted!(SilentEmpty) {
            self.held.wake();
        }
        Ok(())
    }

    /// Resets the limiter and the largest priority, and returns the number of the next chunk to arrive.
    fn begin_to_empty(&self) -> Result<u64> {
        let arrivals = self.lock_inserts()?;
        self.limiter.reset();
        self.max_priority.reset(self.counters.inserted_steps.load(Ordering::Relaxed));
        Ok(arrivals.end())
    }

    /// Removes at most [`EVICTED_AT_ONCE`] of the oldest chunks before `end`, and returns whether there were any. `removed` is a buffer.
    fn remove_some(&self, end: u64, removed: &mut Evicted) -> Result<bool> {
        let mut arrivals = self.lock_inserts()?;
        while removed.len() < EVICTED_AT_ONCE && arrivals.first < end {
            let Some((handle, oldest)) = arrivals.pop(&self.chunks) else { break };
            for &id in lock(&oldest.items).iter() {
                self.end(id);
            }
            removed.push(handle);
        }
        drop(arrivals);
        let some = !removed.is_empty();
        self.retire(removed);
        Ok(some)
    }

    /// Ends the items of a chunk that was evicted, and counts them. Under the insert lock.
    fn end_items(&self, chunk: &StoredChunk) {
        let (mut ended, mut unread) = (0, 0);
        for left in lock(&chunk.items).iter().filter_map(|&id| self.end(id)) {
            ended += 1;
            unread += u64::from(left > 0);
        }
        let counters = &self.counters;
        counters.evicted_items.fetch_add(ended, Ordering::Relaxed);
        counters.evicted_unread_items.fetch_add(unread, Ordering::Relaxed);
        counters.evicted_steps.fetch_add(u64::from(chunk.packed.rows()), Ordering::Relaxed);
    }

    /// Logs, once, that items are evicted before their last sample. Without the locks of table and writer.
    pub(super) fn warn_of_unread_items(&self) {
        let unread = self.counters.evicted_unread_items.load(Ordering::Relaxed);
        // Relaxed: the flag publishes nothing. Read first, as every push comes here.
        let logged = &self.counters.unread_logged;
        let logged = || logged.load(Ordering::Relaxed) || logged.swap(true, Ordering::Relaxed);
        if unread > 0 && !logged() {
            tracing::warn!(
                "table {:?} is full, and has evicted {unread} items before their last sample (max_times_sampled {}): its learners \
                 are slower than its writers; give it a larger capacity, or samples_per_insert, for which writers wait. The \
                 statistic evicted_unread_items counts further ones",
                self.config.name,
                self.config.max_times_sampled,
            );
        }
    }

    /// Ends an item, and returns its samples left, 0 without a limit, to exactly one caller.
    pub(super) fn end(&self, id: ItemId) -> Option<u64> {
        let left = self.items.end(id);
        if left.is_some() {
            self.sampler.remove(id);
        }
        left
    }

    /// Drops evicted chunks, now or with their last pin. Without the insert lock.
    pub(super) fn retire(&self, evicted: &mut Evicted) {
        for handle in evicted.drain(..) {
            self.chunks.retire(handle);
        }
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::sync::Arc;

    use crate::memory::{Memory, MemoryLimits};
    use crate::schema::{Column, Dtype, TableConfig};
    use crate::table::ids::ItemId;
    use crate::table::{Attempt, Turn, tests};

    use super::*;

    /// Pushes a chunk of one step with an item, and returns the item.
    fn push(table: &Table, sequence: u64, priority: f32) -> ItemId {
        let push = tests::push(sequence, Some(priority));
        let pushed = table.try_push(&push, &mut Turn::default());
        assert!(matches!(pushed, Ok(Attempt::Ready(_))));
        let arrivals = table.lock_inserts().unwrap();
        let newest = arrivals.get(arrivals.end() - 1).unwrap();
        lock(&table.chunks.pin(newest).unwrap().items)[0]
    }

    /// A table of more chunks than one hold of the lock removes, and its newest item.
    fn table() -> (Arc<Table>, ItemId) {
        let config = TableConfig::new("t", vec![Column::scalar("value", Dtype::Uint8)], 2 * CHUNKS);
        let table = Memory::new(MemoryLimits::default()).create_table(&config).unwrap();
        table.open_writer(&tests::open(1, 1)).unwrap();
        let items: Vec<_> = (1..=CHUNKS).map(|n| push(&table, n, 1.0)).collect();
        (table, items[items.len() - 1])
    }

    const CHUNKS: u64 = EVICTED_AT_ONCE as u64 + 10;
    const TOO_LARGE: f64 = 1e300;

    fn update(table: &Table, item: ItemId, priority: f64) {
        let id = table.items.id_bits(item);
        let receipt = table.update_priorities(&[id], &[priority]).unwrap();
        assert_eq!(receipt.applied, 1);
    }

    fn largest(table: &Table) -> Option<f64> {
        table.max_priority.get(&table.items)
    }

    #[test]
    fn an_update_of_an_item_that_is_about_to_die_does_not_count() {
        let (table, old) = table();
        update(&table, old, TOO_LARGE);
        let end = table.begin_to_empty().unwrap();
        assert_eq!(largest(&table), None);
        assert!(table.remove_some(end, &mut Vec::new()).unwrap());
        update(&table, old, TOO_LARGE);
        assert_eq!(largest(&table), None);
        // A priority of a new item does.
        let new = push(&table, CHUNKS + 1, 3.0);
        assert_eq!(largest(&table), Some(3.0));
        update(&table, new, 5.0);
        while table.remove_some(end, &mut Vec::new()).unwrap() {}
        assert_eq!(largest(&table), Some(5.0));
        assert!(table.items.confirm(new) && !table.items.confirm(old));
    }

    #[test]
    fn an_update_that_began_before_the_table_was_emptied_does_not_count() {
        let (table, old) = table();
        assert!(table.items.confirm(old));
        table.empty().unwrap();
        table.max_priority.update(&table.items, &[old], &[TOO_LARGE]);
        assert_eq!(largest(&table), None);
    }
}

//! Chunks as the table keeps them, the bytes they hold, their order of arrival, and the eviction of the oldest, by steps, bytes and items.
//! Under the insert lock evicted chunks leave the order and their items die; the chunks themselves are dropped after it is released.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use super::Table;
use super::ids::ItemId;
use super::streams::ChunkSpan;
use super::waiting::WaitingLine;
use super::writers::WriterIdentity;
use crate::budget::{Counted, Reservation};
use crate::chunk::{PackedRows, RowBlobs};
use crate::error::Result;
use crate::limiter::Outcome;
use crate::schema::TableConfig;
use crate::slab::{Handle, Pinned, Slab};
use crate::sync::{AtomicU32, AtomicU64, Mutex, Ordering, lock};

/// Names no chunk.
const NO_CHUNK: u64 = u64::MAX;

/// Reserved capacity of a chunk for items beyond one per row: those whose observation stack is cut at an episode's start.
/// With longer stacks the list may grow under the insert lock where an episode begins with its chunk.
const EXTRA_ITEMS: usize = 12;

/// The chunks of a table. Boxed, so that a free slot takes no more than a pointer.
pub type Chunks = Slab<Box<StoredChunk>>;

/// A chunk that stays while it is read.
pub type PinnedChunk<'a> = Pinned<'a, Box<StoredChunk>>;

/// Steps of one stream, immutable but for the link to the chunk that continues them, and the items that die with them.
pub struct StoredChunk {
    pub packed: PackedRows,
    pub writer: Arc<WriterIdentity>,
    pub stream: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
    /// [`ChunkHead::version`](crate::replay::ChunkHead::version).
    pub version: u64,
    /// Bytes of its push if it is the last chunk of it, else 0: only evicting the last one can free the shared buffer.
    pub freed_bytes: u64,
    /// Items whose first row is in it; some may have died already. Only under the insert lock.
    pub items: Mutex<Vec<ItemId>>,
    next: AtomicU64,
    /// Of a queue: [`HEAD`], [`PASSED`], [`FREED`]. Relaxed, as it is used under the insert lock alone.
    progress: AtomicU32,
}

/// The chunk before it in its stream is gone.
pub const HEAD: u32 = 1;
/// No later item begins in it.
pub const PASSED: u32 = 2;
/// It was freed, perhaps before older ones.
pub const FREED: u32 = 4;

impl StoredChunk {
    /// A chunk that nothing continues yet, whose eviction frees `freed_bytes`.
    pub fn new(
        packed: PackedRows,
        writer: Arc<WriterIdentity>,
        stream: u32,
        first_step: u64,
        version: u64,
        freed_bytes: u64,
    ) -> Box<Self> {
        // With room for later pushes' items that begin in this chunk: the list does not grow under the lock.
        let items = packed.rows() as usize + EXTRA_ITEMS.min(writer.window_before.into());
        let (items, next) = (Mutex::new(Vec::with_capacity(items)), AtomicU64::new(NO_CHUNK));
        let progress = AtomicU32::new(0);
        Box::new(StoredChunk { packed, writer, stream, first_step, version, freed_bytes, items, next, progress })
    }

    pub fn progress(&self) -> u32 {
        self.progress.load(Ordering::Relaxed)
    }

    pub fn note(&self, progress: u32) {
        self.progress.fetch_or(progress, Ordering::Relaxed);
    }

    /// Links the chunk that continues this one. Under the insert lock, before any item that spans both goes live.
    pub fn set_next(&self, next: Handle) {
        // Release: pairs with the Acquire in `next`.
        self.next.store(next.to_bits(), Ordering::Release);
    }

    /// The chunk that continues this one.
    pub fn next(&self) -> Option<Handle> {
        match self.next.load(Ordering::Acquire) {
            NO_CHUNK => None,
            bits => Some(Handle::from_bits(bits)),
        }
    }
}

/// Bytes that a table holds: live chunks, and the payloads of evicted ones while a sampled batch refers to them.
pub struct Held {
    bytes: AtomicU64,
    /// Most bytes: [`TableConfig::effective_capacity_bytes`].
    pub limit: u64,
    pub pushes: Arc<WaitingLine>,
    pub samples: Arc<WaitingLine>,
    /// The table's share of the memory's byte limit, until no batch holds a blob of the dropped table.
    _reservation: Reservation,
}

impl Held {
    /// No bytes held yet, with the table's reservation.
    pub fn new(reservation: Reservation, limit: u64) -> Arc<Self> {
        Arc::new(Held {
            bytes: AtomicU64::new(0),
            limit,
            pushes: Arc::default(),
            samples: Arc::default(),
            _reservation: reservation,
        })
    }

    /// Wakes the first waiting push and sample after a change that may unblock them.
    pub fn wake(&self) {
        WaitingLine::wake_first(&[&self.pushes, &self.samples]);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

// The allocations of a chunk, without its payload, are within the bytes that it counts for. The atomics of model checkers are larger.
const _: () = {
    let chunk = size_of::<StoredChunk>();
    // The list of a stream's chunks may be half empty. `Table::index_bytes` has the part of each row.
    let lists = 2 * size_of::<ChunkSpan>() + EXTRA_ITEMS * size_of::<ItemId>() + size_of::<RowBlobs>();
    // With the counters of an `Arc` and of a `Bytes` with an owner, and the three words that slices of a `Vec` share.
    let push = size_of::<Charge>() + size_of::<Counted<Arc<Charge>>>() + (2 + 1 + 3) * size_of::<usize>();
    let kept_by_the_allocator = 6 * 16;
    let bytes = chunk + lists + push + kept_by_the_allocator;
    assert!(cfg!(feature = "model") || bytes <= TableConfig::CHUNK_BYTES as usize);
};

/// Bytes of a push, counted until the buffer that its chunks share is freed.
pub struct Charge {
    held: Arc<Held>,
    /// 0 until it counts.
    bytes: AtomicU64,
}

impl Charge {
    pub fn new(held: &Arc<Held>) -> Arc<Self> {
        Arc::new(Charge { held: held.clone(), bytes: AtomicU64::new(0) })
    }

    /// The push's payload, which keeps the charge for as long as there is a slice of it.
    pub fn payload(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        Counted::bytes(bytes, self.clone())
    }

    /// Counts `bytes`. Under the insert lock, so that the sum stays within the table's limit.
    pub fn count(&self, bytes: u64) {
        self.held.bytes.fetch_add(bytes, Ordering::Relaxed);
        // Relaxed, as the access in `drop`: dropping the last `Arc` is ordered after all uses of the others.
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        if bytes > 0 {
            self.held.bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.held.wake();
        }
    }
}

/// Live chunks, oldest first, numbered by arrival.
pub struct Arrivals {
    chunks: VecDeque<Handle>,
    /// Number of the table in the positions of readers; a restart of the server keeps it.
    pub number: u16,
    /// Number of the oldest live chunk.
    pub first: u64,
    pub steps: u64,
    pub bytes: u64,
    /// Set while a snapshot is written.
    pub after_save_point: Option<AfterSavePoint>,
}

/// Items inserted after a save point and before the next step. The count of steps, which is otherwise the bound of a snapshot, is the same.
pub struct AfterSavePoint {
    /// Steps the table had taken at the save point.
    pub taken: u64,
    pub items: HashSet<ItemId>,
}

impl Arrivals {
    /// Allocates a list for `chunks` chunks of the table `number`, so that nothing is allocated under the lock.
    pub fn new(number: u16, chunks: usize) -> Self {
        let chunks = VecDeque::with_capacity(chunks);
        Arrivals { chunks, number, first: 0, steps: 0, bytes: 0, after_save_point: None }
    }

    /// Bytes of the list for `chunks` chunks.
    pub fn bytes_of(chunks: u32) -> u64 {
        u64::from(chunks) * size_of::<Handle>() as u64
    }

    /// Number that the next chunk will have.
    pub fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    /// The chunk of a number, if it is live.
    pub fn get(&self, arrival: u64) -> Option<Handle> {
        let index = arrival.checked_sub(self.first)?;
        self.chunks.get(index as usize).copied()
    }

    /// Adds a chunk as the newest and returns its number.
    pub fn push(&mut self, handle: Handle, chunk: &StoredChunk) -> u64 {
        self.steps += u64::from(chunk.packed.rows());
        self.bytes += chunk.freed_bytes;
        self.chunks.push_back(handle);
        self.end() - 1
    }

    /// The chunk of a number, if it is there and was not freed.
    pub fn live<'a>(&self, chunks: &'a Chunks, arrival: u64) -> Option<(Handle, PinnedChunk<'a>)> {
        let handle = self.get(arrival)?;
        let chunk = chunks.pin(handle)?;
        (chunk.progress() & FREED == 0).then_some((handle, chunk))
    }

    /// Takes the oldest chunk out. The caller retires it.
    pub fn pop<'a>(&mut self, chunks: &'a Chunks) -> Option<(Handle, PinnedChunk<'a>)> {
        let handle = self.chunks.pop_front()?;
        let chunk = chunks.pin(handle).expect("a live chunk is in the slab");
        self.first += 1;
        self.uncount(&chunk);
        Some((handle, chunk))
    }

    /// Counts a chunk no longer, which leaves the order or was freed in it.
    pub fn uncount(&mut self, chunk: &StoredChunk) {
        self.steps -= u64::from(chunk.packed.rows());
        self.bytes -= chunk.freed_bytes;
    }

    /// Goes on to the oldest chunk that was not freed: it is the first one whenever the insert lock is released.
    pub fn pass_freed(&mut self, chunks: &Chunks) {
        while self.first < self.end() && self.live(chunks, self.first).is_none() {
            self.chunks.pop_front();
            self.first += 1;
        }
    }

    /// Whether the list would grow with another chunk.
    pub fn is_full(&self) -> bool {
        self.chunks.len() == self.chunks.capacity()
    }
}

/// What a push takes of its table.
pub struct PushSize {
    pub rows: u64,
    pub bytes: u64,
    pub items: usize,
}

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
    pub(super) fn make_room(&self, arrivals: &mut Arrivals, push: &PushSize, evicted: &mut Evicted) -> Outcome<bool> {
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
        while arrivals.steps + push.rows > self.config.capacity
            || arrivals.bytes + used > self.held.limit
            || self.items.free() < push.items
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
            if let Some(next) = oldest.next().and_then(|next| self.chunks.pin(next)) {
                next.note(HEAD);
            }
            arrivals.pass_freed(&self.chunks);
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

    use super::*;
    use crate::memory::{Memory, MemoryLimits};
    use crate::schema::{Column, Dtype, TableConfig};
    use crate::table::ids::ItemId;
    use crate::table::{Attempt, Turn, tests};

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
        let config = TableConfig::new("t", vec![Column::new("value", Dtype::Uint8, vec![])], 2 * CHUNKS);
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

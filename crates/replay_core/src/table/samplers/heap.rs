//! Binary heap of items that knows each slot's index, for the samplers that always choose the first item.

use std::marker::PhantomData;

use crate::error::Result;
use crate::schema::TableConfig;
use crate::sync::{Mutex, lock};
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::{ItemSampler, Order, TableSampler, Taken};

/// Sort key of a heap.
pub trait RankBy: Send + Sync + 'static {
    /// Whether the key depends on the priority.
    const BY_PRIORITY: bool = true;

    /// The key, least first, from the bits of a priority that is not negative, which are ordered as the priorities, and the
    /// number of earlier changes.
    fn first(priority: u64, change: u64) -> u64;

    /// The priority in a key of [`Self::first`]; 0 if the key ignores it.
    fn priority(first: u64) -> u64;
}

/// Items in the order of a sampler. Among equal priorities the one that was inserted or updated the longest ago comes
/// first, as in Reverb's heap selectors. Removed items stay until they come first, or until another one has their
/// slot.
pub struct Heap<R> {
    rank_by: PhantomData<R>,
    /// By slot; a slot that never had an item is of generation 0, which no live item has.
    entries: Box<[HeapEntry]>,
    /// Slots of the items that can be sampled, a binary heap: index i has its parent, which ranks before it, at
    /// (i - 1) / 2.
    slots: Vec<u32>,
    /// Insertions and updates so far.
    changes: u64,
}

#[derive(Debug, Clone, Copy)]
struct HeapEntry {
    /// The least comes first.
    rank: Rank,
    generation: u32,
    /// Index in `Heap::slots`, or `NOWHERE`.
    index: u32,
}

/// By priority, then by insertion or update.
type Rank = (u64, u64);

/// Updates under one hold of a heap's lock: bounds the wait of an insertion, which holds the insert lock.
const UPDATED_AT_ONCE: usize = 64;

/// Index of an item whose last sample is taken, but may still be given back.
const NOWHERE: u32 = u32::MAX;

impl<R: RankBy> Heap<R> {
    /// A heap for an item in each of `capacity` slots.
    pub fn new(capacity: u32) -> Self {
        let never_used = HeapEntry { rank: (0, 0), generation: 0, index: NOWHERE };
        Heap {
            rank_by: PhantomData,
            entries: (0..capacity).map(|_| never_used).collect(),
            slots: Vec::with_capacity(capacity as usize),
            changes: 0,
        }
    }

    /// Bytes that it allocates.
    pub fn bytes(capacity: u32) -> u64 {
        u64::from(capacity) * (size_of::<HeapEntry>() + size_of::<u32>()) as u64
    }

    /// Adds an item, replacing an earlier one in its slot.
    pub fn insert(&mut self, id: ItemId, priority: f64) {
        let rank = self.next_rank(priority);
        let entry = &mut self.entries[id.slot as usize];
        entry.rank = rank;
        entry.generation = id.generation;
        self.put(id.slot);
    }

    /// Ranks an item anew, unless another one has its slot.
    pub fn update(&mut self, id: ItemId, priority: f64) {
        if !R::BY_PRIORITY || !self.has(id) {
            return;
        }
        let rank = self.next_rank(priority);
        let entry = &mut self.entries[id.slot as usize];
        entry.rank = rank;
        if entry.index != NOWHERE {
            self.put(id.slot);
        }
    }

    /// [`Self::update`] of several items of a shared heap.
    pub fn update_all(heap: &Mutex<Self>, ids: &[ItemId], priorities: &[f64]) {
        let batches = ids.chunks(UPDATED_AT_ONCE);
        for (ids, priorities) in batches.zip(priorities.chunks(UPDATED_AT_ONCE)) {
            let mut heap = lock(heap);
            for (&id, &priority) in ids.iter().zip(priorities) {
                heap.update(id, priority);
            }
        }
    }

    /// The first item, which may have been removed.
    pub fn first(&self) -> Option<ItemId> {
        let &slot = self.slots.first()?;
        Some(ItemId { slot, generation: self.entries[slot as usize].generation })
    }

    pub fn pop(&mut self) {
        let Some(last) = self.slots.pop() else {
            return;
        };
        let first = self.slots.first().copied().unwrap_or(last);
        self.entries[first as usize].index = NOWHERE;
        if first != last {
            self.sift_down(0, last);
        }
    }

    /// Returns a removed item to the heap, unless another item has its slot.
    pub fn put_back(&mut self, id: ItemId) {
        if self.has(id) {
            self.put(id.slot);
        }
    }

    /// The priority of an item, 0 where items are ranked without; `None` when another one has its slot.
    pub fn priority(&self, id: ItemId) -> Option<f64> {
        let (first, _) = self.entries[id.slot as usize].rank;
        self.has(id).then(|| f64::from_bits(R::priority(first)))
    }

    /// Number of the last change and id of every item, in no order; some may have been removed.
    pub fn changes(&self) -> Vec<(u64, ItemId)> {
        let entries = (0..).zip(&self.entries);
        let changes = entries.map(|(slot, entry)| {
            let generation = entry.generation;
            (entry.rank.1, ItemId { slot, generation })
        });
        changes.collect()
    }

    /// The rank of an item that is inserted or updated now.
    fn next_rank(&mut self, priority: f64) -> Rank {
        self.changes += 1;
        // Positive floats are ordered as their bits; the bits of -0.0 would be the largest of all.
        let first = R::first(priority.abs().to_bits(), self.changes);
        (first, self.changes)
    }

    fn has(&self, id: ItemId) -> bool {
        self.entries[id.slot as usize].generation == id.generation
    }

    fn rank(&self, slot: u32) -> Rank {
        self.entries[slot as usize].rank
    }

    /// Moves a slot up or down to the position of its rank.
    fn put(&mut self, slot: u32) {
        let mut index = self.entries[slot as usize].index as usize;
        if index == NOWHERE as usize {
            index = self.slots.len();
            self.slots.push(slot);
        }
        while index > 0 {
            let above = self.slots[(index - 1) / 2];
            if self.rank(above) < self.rank(slot) {
                break;
            }
            self.set(index, above);
            index = (index - 1) / 2;
        }
        self.sift_down(index, slot);
    }

    /// Puts a slot at the position of its rank, at `index` or below.
    fn sift_down(&mut self, mut index: usize, slot: u32) {
        loop {
            let left = 2 * index + 1;
            let below = self.slots.get(left..).unwrap_or_default();
            let first = below.iter().take(2).copied().enumerate();
            let Some((side, child)) = first.min_by_key(|&(_, child)| self.rank(child)) else {
                break;
            };
            if self.rank(slot) < self.rank(child) {
                break;
            }
            self.set(index, child);
            index = left + side;
        }
        self.set(index, slot);
    }

    fn set(&mut self, index: usize, slot: u32) {
        self.slots[index] = slot;
        self.entries[slot as usize].index = index as u32;
    }
}

/// Samples the first item of a heap, until it has reached `max_times_sampled`. The lock is held for one item by samples and
/// insertions, for a few by updates, and for one copy of all ranks by a snapshot; an insertion, which holds the insert lock,
/// may wait that long.
pub struct HeapSampler<R>(Mutex<Heap<R>>);

impl<R: RankBy> ItemSampler for HeapSampler<R> {
    fn make(config: &TableConfig) -> TableSampler {
        let heap = Heap::<R>::new(config.capacity as u32);
        TableSampler::Other(Box::new(HeapSampler(Mutex::new(heap))))
    }

    fn bytes(config: &TableConfig) -> u64 {
        Heap::<R>::bytes(config.capacity as u32)
    }

    fn insert(&self, id: ItemId, priority: f64) {
        lock(&self.0).insert(id, priority);
    }

    fn update(&self, _: &Items, ids: &[ItemId], priorities: Vec<f64>) -> usize {
        Heap::update_all(&self.0, ids, &priorities);
        ids.len()
    }

    fn put_back(&self, _: &Items, id: ItemId) {
        lock(&self.0).put_back(id);
    }

    fn order(&self) -> Option<&dyn Order> {
        Some(self)
    }

    fn ids<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = ItemId> + 'a> {
        // Sorted after releasing the lock, for which samples and pushes may wait.
        let mut changes = lock(&self.0).changes();
        changes.sort_unstable_by_key(|&(change, _)| change);
        let ids = changes.into_iter().map(|(_, id)| id);
        Box::new(ids.filter(|&id| items.confirm(id)))
    }

    /// Bits of the item's priority.
    fn saved_units(&self, _: &Items, id: ItemId) -> Option<u64> {
        lock(&self.0).priority(id).map(f64::to_bits)
    }

    fn most_saved_units(&self) -> u64 {
        f64::MAX.to_bits()
    }

    fn saved_priority(&self, _: &Items, saved: u64) -> f64 {
        f64::from_bits(saved)
    }
}

impl<R: RankBy> Order for HeapSampler<R> {
    fn offer(&self, _: &Items, mut count: u32, take: &mut dyn FnMut(ItemId) -> Result<Taken>) -> Result<()> {
        while count > 0 {
            let mut heap = lock(&self.0);
            let Some(id) = heap.first() else { break };
            let taken = take(id)?;
            count -= u32::from(taken != Taken::Refused);
            if taken != Taken::Again {
                heap.pop();
            }
        }
        Ok(())
    }
}

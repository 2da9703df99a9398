//! Items in the order of a sampler: a binary heap in an array that knows the index of each slot. A map would allocate under the
//! insert lock. `fifo`, `lifo`, `max_heap` and `min_heap` sample the first item until it has been sampled `max_times_sampled` times. Its
//! probability is 1. The first two ignore priorities, and do not keep them.

use crate::error::Result;
use crate::schema::TableConfig;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::ItemSampler;

/// Which item ranks first; among equal priorities the one inserted or updated longest ago, as in Reverb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankBy {
    /// By insertion, whatever the priorities are.
    Oldest,
    Newest,
    Highest,
    Lowest,
}

/// The least comes first: by [`RankBy`], then by insertion or update.
type Rank = (u64, u64);

/// Items that can be sampled, by rank, and the others behind them.
pub struct Ranking {
    by: RankBy,
    /// Rank and slot of each item. The first `len` are a heap: index i has its parent, which ranks before it, at (i - 1) / 2. Then
    /// come items that died or whose last sample is taken; that may still be given back.
    ranked: Box<[(Rank, u32)]>,
    len: usize,
    /// Generation and index in `ranked` by slot. A slot that never had an item is of generation 0, which no live item has.
    slots: Box<[(u32, u32)]>,
    /// Insertions and updates so far.
    changes: u64,
    /// Changes of the heap since it was last sorted.
    unsorted: usize,
}

impl Ranking {
    /// Adds an item, in place of an earlier one of its slot.
    fn insert(&mut self, id: ItemId, priority: f64) {
        self.slots[id.slot as usize].0 = id.generation;
        self.rank_anew(id, priority);
        self.enter(id);
    }

    /// Ranks an item anew, unless another one has its slot.
    fn update(&mut self, id: ItemId, priority: f64) {
        let Some(index) = self.index(id) else { return };
        if matches!(self.by, RankBy::Highest | RankBy::Lowest) {
            self.rank_anew(id, priority);
            if index < self.len {
                self.enter(id);
            }
        }
    }

    /// Takes an item out of the heap, unless another one has its slot.
    pub fn remove(&mut self, id: ItemId) {
        let Some(index) = self.index(id).filter(|&index| index < self.len) else { return };
        self.len -= 1;
        self.unsorted += 1;
        self.swap(index, self.len);
        self.sift(index);
    }

    /// Puts an item where its rank belongs in the heap, unless another one has its slot.
    fn enter(&mut self, id: ItemId) {
        let Some(mut index) = self.index(id) else { return };
        if index >= self.len {
            self.swap(index, self.len);
            index = self.len;
            self.len += 1;
        }
        self.unsorted += 1;
        self.sift(index);
    }

    /// Items that can be sampled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The item at an index below [`Self::len`]: the first one at 0.
    pub fn at(&self, index: usize) -> Option<ItemId> {
        let &(_, slot) = self.ranked[..self.len].get(index)?;
        Some(ItemId { slot, generation: self.slots[slot as usize].0 })
    }

    /// The priority of an item, 1 where it does not matter; `None` when another one has its slot.
    pub fn priority(&self, id: ItemId) -> Option<f64> {
        let ((first, _), _) = self.ranked[self.index(id)?];
        Some(match self.by {
            RankBy::Oldest | RankBy::Newest => 1.0,
            RankBy::Highest => f64::from_bits(!first),
            RankBy::Lowest => f64::from_bits(first),
        })
    }

    /// Number of the last change and id of every item, in no order; some may have died.
    fn changes(&self) -> Vec<(u64, ItemId)> {
        let change = |&((_, change), slot)| (change, ItemId { slot, generation: self.slots[slot as usize].0 });
        self.ranked.iter().map(change).collect()
    }

    /// Sorts the heap if more than one in `interval` of its items were changed since: a sorted array is a heap, too.
    pub fn sort_at(&mut self, interval: usize) {
        if self.unsorted.saturating_mul(interval) > self.len {
            self.unsorted = 0;
            self.ranked[..self.len].sort_unstable();
            for (index, &(_, slot)) in (0..).zip(&self.ranked[..self.len]) {
                self.slots[slot as usize].1 = index;
            }
        }
    }

    /// The index of an item, unless another one has its slot.
    fn index(&self, id: ItemId) -> Option<usize> {
        let (generation, index) = self.slots[id.slot as usize];
        (generation == id.generation).then_some(index as usize)
    }

    /// Gives an item the rank of one that is inserted or updated now, at the index that it has.
    fn rank_anew(&mut self, id: ItemId, priority: f64) {
        self.changes += 1;
        // Positive floats are ordered as their bits; the bits of -0.0 would be the largest of all.
        let priority = priority.abs().to_bits();
        let first = match self.by {
            RankBy::Oldest => self.changes,
            RankBy::Newest => !self.changes,
            RankBy::Highest => !priority,
            RankBy::Lowest => priority,
        };
        let (_, index) = self.slots[id.slot as usize];
        self.ranked[index as usize].0 = (first, self.changes);
    }

    /// Moves the item at `index` up or down to where its rank belongs in the heap.
    fn sift(&mut self, mut index: usize) {
        while index > 0 && index < self.len && self.ranked[index] < self.ranked[(index - 1) / 2] {
            self.swap(index, (index - 1) / 2);
            index = (index - 1) / 2;
        }
        loop {
            let children = 2 * index + 1..self.len.min(2 * index + 3);
            let first = children.min_by_key(|&child| self.ranked[child].0);
            let Some(child) = first.filter(|&child| self.ranked[child] < self.ranked[index]) else { break };
            self.swap(index, child);
            index = child;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.ranked.swap(a, b);
        for index in [a, b] {
            let (_, slot) = self.ranked[index];
            self.slots[slot as usize].1 = index as u32;
        }
    }
}

/// Outcome of offering an item to a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Sampled; it has samples left.
    Again,
    /// Sampled for the last time.
    Last,
    /// Not sampled: it is gone, or has no sample left.
    Refused,
    /// Not sampled, and removed: its parameters are too old.
    Expired,
}

/// Updates under one hold of the lock: bounds the wait of an insertion, which holds the insert lock.
const UPDATED_AT_ONCE: usize = 64;

impl ItemSampler for LockedRanking {
    fn ranking(&self) -> Option<&LockedRanking> {
        Some(self)
    }
}

/// A ranking under its lock, which a snapshot holds for one copy of all changes, others for a few items.
pub struct LockedRanking(Mutex<Ranking>);

impl LockedRanking {
    /// A ranking with room for an item in each slot of a table.
    pub fn new(config: &TableConfig, by: RankBy) -> Self {
        let slots = 0..config.capacity as u32;
        LockedRanking(Mutex::new(Ranking {
            by,
            ranked: slots.clone().map(|slot| ((0, 0), slot)).collect(),
            len: 0,
            slots: slots.map(|index| (0, index)).collect(),
            changes: 0,
            unsorted: 0,
        }))
    }

    pub fn bytes(config: &TableConfig) -> u64 {
        config.capacity * (size_of::<(Rank, u32)>() + size_of::<(u32, u32)>()) as u64
    }

    pub fn lock(&self) -> MutexGuard<'_, Ranking> {
        lock(&self.0)
    }

    /// Offers items from the first on to `take`, until it has sampled `count` times or has refused the last one.
    pub fn offer(&self, mut count: u32, mut take: impl FnMut(ItemId) -> Result<Taken>) -> Result<()> {
        while count > 0 {
            // Locked until the item is taken: no other sample may remove it after it was put back.
            let mut ranking = self.lock();
            let Some(id) = ranking.at(0) else { break };
            let taken = take(id)?;
            count -= u32::from(matches!(taken, Taken::Again | Taken::Last));
            if taken != Taken::Again {
                ranking.remove(id);
            }
        }
        Ok(())
    }

    /// Adds an item that was just inserted; another one may have had its slot.
    pub fn insert(&self, id: ItemId, priority: f64) {
        self.lock().insert(id, priority);
    }

    /// Ranks items anew, if they still have their slots.
    pub fn update(&self, ids: &[ItemId], priorities: &[f64]) {
        let batches = ids.chunks(UPDATED_AT_ONCE);
        for (ids, priorities) in batches.zip(priorities.chunks(UPDATED_AT_ONCE)) {
            let mut ranking = self.lock();
            for (&id, &priority) in ids.iter().zip(priorities) {
                ranking.update(id, priority);
            }
        }
    }

    /// Returns a removed item, if it is alive and has samples left: another sample may have taken the last one.
    pub fn put_back(&self, items: &Items, id: ItemId) {
        let mut ranking = self.lock();
        // An item that dies after this check is removed after the lock.
        if items.confirm(id) && !items.is_used_up(items.times_sampled(id.slot)) {
            ranking.enter(id);
        }
    }

    /// The live items by insertion or update, each with its priority.
    pub fn saved<'a>(&'a self, items: &'a Items) -> impl Iterator<Item = (ItemId, f64)> + 'a {
        let mut changes = self.lock().changes();
        // Sorted after releasing the lock, for which samples and pushes may wait.
        changes.sort_unstable_by_key(|&(change, _)| change);
        let ids = changes.into_iter().map(|(_, id)| id).filter(|&id| items.confirm(id));
        ids.filter_map(|id| Some((id, self.lock().priority(id)?)))
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_order_is_that_of_a_sorted_list(
            by in prop::sample::select(vec![RankBy::Oldest, RankBy::Newest, RankBy::Highest, RankBy::Lowest]),
            changes in vec((0..5u8, 0..80u32, 0..6u8), 0..600),
        ) {
            const CAPACITY: u32 = 80;
            let locked = LockedRanking::new(&TableConfig::new("t", vec![], CAPACITY.into()), by);
            let mut ranking = locked.lock();
            // Priority, change and whether it can be sampled, by slot.
            let mut list = vec![None; CAPACITY as usize];
            let mut change = 0i64;
            for (kind, slot, priority) in changes {
                let id = ItemId { slot, generation: 1 };
                let item = &mut list[slot as usize];
                match (kind, &mut *item) {
                    (0, _) => {
                        ranking.insert(id, priority.into());
                        change += 1;
                        *item = Some((priority, change, true));
                    }
                    (1, Some((old, changed, _))) => {
                        ranking.update(id, priority.into());
                        if by == RankBy::Highest || by == RankBy::Lowest {
                            change += 1;
                            (*old, *changed) = (priority, change);
                        }
                    }
                    (2, Some((_, _, there))) => {
                        ranking.remove(id);
                        *there = false;
                    }
                    (3, Some((_, _, there))) => {
                        ranking.enter(id);
                        *there = true;
                    }
                    (4, _) => ranking.sort_at(4),
                    _ => {}
                }
                let later = ItemId { slot, generation: 3 };
                ranking.update(later, 9.0);
                ranking.remove(later);
                ranking.enter(later);
                for index in 1..ranking.len {
                    prop_assert!(ranking.ranked[(index - 1) / 2] < ranking.ranked[index], "it is a heap");
                }
                for (index, &(_, slot)) in ranking.ranked.iter().enumerate() {
                    prop_assert_eq!(ranking.slots[slot as usize].1 as usize, index);
                }
            }
            let mut expected: Vec<_> = (0..).zip(&list)
                .filter_map(|(slot, &item)| Some((slot, item?)))
                .filter(|&(_, (.., there))| there)
                .map(|(slot, (priority, change, _))| match by {
                    RankBy::Oldest => (0, change, slot),
                    RankBy::Newest => (0, -change, slot),
                    RankBy::Highest => (-i64::from(priority), change, slot),
                    RankBy::Lowest => (i64::from(priority), change, slot),
                })
                .collect();
            expected.sort_unstable();
            let expected: Vec<u32> = expected.into_iter().map(|(.., slot)| slot).collect();
            prop_assert_eq!(ranking.at(0).map(|id| id.slot), expected.first().copied());
            ranking.sort_at(usize::MAX);
            let sorted: Vec<_> = (0..).map_while(|index| ranking.at(index)).map(|id| id.slot).collect();
            prop_assert_eq!(sorted, expected);
        }
    }
}

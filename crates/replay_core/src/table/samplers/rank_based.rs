//! `rank_based`: at random, in proportion to 1 / rank^`priority_exponent` (Schaul et al., 2016, section 3.3, the rank-based
//! variant).
//!
//! Items that can be sampled are ranked from 1 on: by priority, the highest first, and among equal priorities by the last insertion or
//! update, the oldest first. Items of priority 0 are ranked like any other. The paper ranks by a heap that is sorted occasionally; here
//! a batch is chosen by the ranks of one instant. With n items, the probability of rank r is u(r) / (u(1) + .. + u(n)), where u(r) is
//! 1 / r^`priority_exponent` in units of 1 / [`FIRST`], rounded to at least one. Batches report this probability, and importance
//! weights use it. As in the paper, a batch of k items has one of each of k ranges of ranks with equal probability.
//!
//! The masses in the sum tree only mark the items that can be sampled. Each of several servers ranks its own items; the probability is
//! then u(r) over the sum of u of all servers.

use crate::power;
use crate::schema::TableConfig;
use crate::sum_tree::{SampledLeaf, SumTree};
use crate::sync::{Mutex, lock};
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::{ItemSampler, TableSampler};

/// Units of the first rank. All ranks together have fewer than 2^63, as all leaves of a sum tree have.
const FIRST: u64 = SumTree::<16>::MAX_UNITS;

/// Updates under one hold of the lock: bounds the wait of an insertion, which holds the insert lock.
const UPDATED_AT_ONCE: usize = 64;

/// Most slots of a block: few enough for fast insertion, many enough that a batch walks over few blocks.
const BLOCK: usize = 1024;

pub struct RankBased {
    /// Held for one item by insertions and removals, for a few by updates, for a batch by samples, and for one copy of all ranks by a
    /// snapshot.
    ranks: Mutex<Ranks>,
    /// Cumulative units of the ranks; the first rank at index 0.
    sums: Box<[u64]>,
}

impl ItemSampler for RankBased {
    fn make(config: &TableConfig) -> TableSampler {
        let capacity = config.capacity as u32;
        TableSampler::Other(Box::new(RankBased {
            ranks: Mutex::new(Ranks::new(capacity, BLOCK)),
            sums: sums(capacity, config.priority_exponent),
        }))
    }

    fn bytes(config: &TableConfig) -> u64 {
        Ranks::bytes(config.capacity as u32, BLOCK) + config.capacity * size_of::<u64>() as u64
    }

    fn insert(&self, id: ItemId, priority: f64) {
        lock(&self.ranks).insert(id, priority);
    }

    fn update(&self, _: &Items, ids: &[ItemId], priorities: Vec<f64>) -> usize {
        let batches = ids.chunks(UPDATED_AT_ONCE);
        for (ids, priorities) in batches.zip(priorities.chunks(UPDATED_AT_ONCE)) {
            let mut ranks = lock(&self.ranks);
            for (&id, &priority) in ids.iter().zip(priorities) {
                ranks.update(id, priority);
            }
        }
        ids.len()
    }

    fn remove(&self, id: ItemId) {
        lock(&self.ranks).remove(id);
    }

    fn put_back(&self, items: &Items, id: ItemId) {
        let mut ranks = lock(&self.ranks);
        // An item that dies after this check is removed after the lock.
        if items.confirm(id) {
            ranks.put_back(id);
        }
    }

    fn choose(&self, _: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> u64 {
        chosen.clear();
        let ranks = lock(&self.ranks);
        let sums = &self.sums[..ranks.ranked];
        let Some(&total) = sums.last() else {
            return 0;
        };
        let (mut block, mut before) = (0, 0);
        for target in targets {
            let position = ((target * total as f64) as u64).min(total - 1);
            let index = sums.partition_point(|&sum| sum <= position);
            while index - before >= ranks.blocks[block].len() {
                before += ranks.blocks[block].len();
                block += 1;
            }
            let slot = ranks.blocks[block][index - before];
            chosen.push(SampledLeaf {
                slot,
                generation: ranks.entries[slot as usize].generation,
                units: units(sums, index),
            });
        }
        total
    }

    fn total(&self, _: &Items) -> u64 {
        let ranked = lock(&self.ranks).ranked;
        self.sums[..ranked].last().copied().unwrap_or(0)
    }

    fn fewest_units(&self, _: &Items) -> Option<u64> {
        let last = lock(&self.ranks).ranked.checked_sub(1)?;
        Some(units(&self.sums, last))
    }

    fn total_priority(&self, _: &Items, units: u64) -> Option<f64> {
        Some(units as f64 / FIRST as f64)
    }

    fn ids<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = ItemId> + 'a> {
        // Sorted after releasing the lock, for which samples and pushes may wait.
        let mut changes = lock(&self.ranks).changes();
        changes.sort_unstable_by_key(|&(change, _)| change);
        let ids = changes.into_iter().map(|(_, id)| id);
        Box::new(ids.filter(|&id| items.confirm(id)))
    }

    /// Bits of the item's priority.
    fn saved_units(&self, _: &Items, id: ItemId) -> Option<u64> {
        let ranks = lock(&self.ranks);
        ranks.has(id).then(|| !ranks.rank(id.slot).0)
    }

    fn most_saved_units(&self) -> u64 {
        f64::MAX.to_bits()
    }

    fn saved_priority(&self, _: &Items, saved: u64) -> f64 {
        f64::from_bits(saved)
    }
}

/// Sums of the units of the first ranks, one for each of `capacity` ranks.
fn sums(capacity: u32, exponent: f64) -> Box<[u64]> {
    let mut shares: Vec<_> = (1..=capacity).map(|rank| f64::from(rank).recip()).collect();
    power::raise(&mut shares, exponent);
    let mut sum = 0;
    let units = shares.into_iter().map(|share| {
        sum += ((share * FIRST as f64).round() as u64).max(1);
        sum
    });
    units.collect()
}

fn units(sums: &[u64], index: usize) -> u64 {
    sums[index] - index.checked_sub(1).map_or(0, |before| sums[before])
}

/// Order of the items that can be sampled: their slots in blocks, of which small neighbours are merged. All of it is allocated at the
/// start, for as many items as there are slots.
struct Ranks {
    /// By slot; a slot that never had an item is of generation 0, which no live item has.
    entries: Box<[Entry]>,
    /// Slots by rank. No block is empty, unless it is the only one, and two neighbours are always more than half a block.
    blocks: Vec<Vec<u32>>,
    spare: Vec<Vec<u32>>,
    /// Slots in all blocks.
    ranked: usize,
    /// Most slots of a block.
    block: usize,
    /// Insertions and updates so far.
    changes: u64,
}

struct Entry {
    /// The least comes first: the inverted bits of the priority, then the number of the last change.
    rank: (u64, u64),
    generation: u32,
    /// Whether the slot is in a block.
    ranked: bool,
}

impl Ranks {
    fn new(capacity: u32, block: usize) -> Self {
        let never_used = |_| Entry { rank: (0, 0), generation: 0, ranked: false };
        let most = Self::most_blocks(capacity, block);
        let mut blocks = Vec::with_capacity(most);
        blocks.push(Vec::with_capacity(block));
        let mut spare = Vec::with_capacity(most);
        spare.extend((1..most).map(|_| Vec::with_capacity(block)));
        Ranks { entries: (0..capacity).map(never_used).collect(), blocks, spare, ranked: 0, block, changes: 0 }
    }

    /// Bytes that it allocates.
    fn bytes(capacity: u32, block: usize) -> u64 {
        let blocks = Self::most_blocks(capacity, block);
        let each = block * size_of::<u32>() + 2 * size_of::<Vec<u32>>();
        u64::from(capacity) * size_of::<Entry>() as u64 + (blocks * each) as u64
    }

    /// Any two neighbours together fill more than half a block.
    fn most_blocks(capacity: u32, block: usize) -> usize {
        2 * (capacity as usize / (block / 2 + 1)) + 1
    }

    /// Ranks an item, replacing an earlier one in its slot.
    fn insert(&mut self, id: ItemId, priority: f64) {
        self.leave(id.slot);
        let rank = self.next_rank(priority);
        let entry = &mut self.entries[id.slot as usize];
        entry.rank = rank;
        entry.generation = id.generation;
        self.enter(id.slot);
    }

    /// Ranks an item anew, unless another one has its slot.
    fn update(&mut self, id: ItemId, priority: f64) {
        if !self.has(id) {
            return;
        }
        let ranked = self.leave(id.slot);
        self.entries[id.slot as usize].rank = self.next_rank(priority);
        if ranked {
            self.enter(id.slot);
        }
    }

    /// Takes an item out of the order, unless another one has its slot.
    fn remove(&mut self, id: ItemId) {
        if self.has(id) {
            self.leave(id.slot);
        }
    }

    /// Returns a removed item to the order, unless another one has its slot.
    fn put_back(&mut self, id: ItemId) {
        if self.has(id) && !self.entries[id.slot as usize].ranked {
            self.enter(id.slot);
        }
    }

    /// Number of the last change and id of every item, in no order; some may have died.
    fn changes(&self) -> Vec<(u64, ItemId)> {
        let entries = (0..).zip(&self.entries);
        let changes = entries.map(|(slot, entry)| {
            let generation = entry.generation;
            (entry.rank.1, ItemId { slot, generation })
        });
        changes.collect()
    }

    fn has(&self, id: ItemId) -> bool {
        self.entries[id.slot as usize].generation == id.generation
    }

    fn rank(&self, slot: u32) -> (u64, u64) {
        self.entries[slot as usize].rank
    }

    /// The rank of an item that is inserted or updated now.
    fn next_rank(&mut self, priority: f64) -> (u64, u64) {
        self.changes += 1;
        // Positive floats are ordered as their bits; the bits of -0.0 would be the largest of all.
        (!priority.abs().to_bits(), self.changes)
    }

    /// Puts a slot, which is in no block, where its rank belongs.
    fn enter(&mut self, slot: u32) {
        let rank = self.rank(slot);
        let mut at = self.block_of(rank).min(self.blocks.len() - 1);
        if self.blocks[at].len() == self.block {
            let mut upper = self.spare.pop().expect("most_blocks are enough");
            upper.extend(self.blocks[at].drain(self.block / 2..));
            let is_upper = self.rank(upper[0]) < rank;
            self.blocks.insert(at + 1, upper);
            at += usize::from(is_upper);
        }
        let index = self.index_in(at, rank);
        self.blocks[at].insert(index, slot);
        self.entries[slot as usize].ranked = true;
        self.ranked += 1;
    }

    /// Takes a slot out of its block; false when it was in none.
    fn leave(&mut self, slot: u32) -> bool {
        if !std::mem::take(&mut self.entries[slot as usize].ranked) {
            return false;
        }
        let rank = self.rank(slot);
        let at = self.block_of(rank);
        let index = self.index_in(at, rank);
        self.blocks[at].remove(index);
        self.ranked -= 1;
        for lower in [Some(at), at.checked_sub(1)].into_iter().flatten() {
            self.unite(lower);
        }
        true
    }

    /// Makes one block of two neighbours that are at most half a block, or of which one is empty.
    fn unite(&mut self, lower: usize) {
        let Some(upper) = self.blocks.get(lower + 1) else {
            return;
        };
        let (a, b) = (self.blocks[lower].len(), upper.len());
        if a == 0 || b == 0 || a + b <= self.block / 2 {
            let mut upper = self.blocks.remove(lower + 1);
            self.blocks[lower].append(&mut upper);
            self.spare.push(upper);
        }
    }

    /// The first block with a slot of this rank or a later one.
    fn block_of(&self, rank: (u64, u64)) -> usize {
        let is_before = |block: &Vec<u32>| block.last().is_some_and(|&slot| self.rank(slot) < rank);
        self.blocks.partition_point(is_before)
    }

    /// Index of a rank in a block, or its insertion point.
    fn index_in(&self, block: usize, rank: (u64, u64)) -> usize {
        self.blocks[block].partition_point(|&slot| self.rank(slot) < rank)
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Small blocks, so that they are cut and united.
        #[test]
        fn the_order_is_that_of_a_sorted_list(
            changes in vec((0..4u8, 0..80u32, 0..6u8), 0..600),
        ) {
            const CAPACITY: u32 = 80;
            let mut ranks = Ranks::new(CAPACITY, 8);
            // Priority, change and whether it is ranked, by slot.
            let mut list = vec![None; CAPACITY as usize];
            let mut change = 0;
            for (kind, slot, priority) in changes {
                let id = ItemId { slot, generation: 1 };
                let (priority, item) = (f64::from(priority), &mut list[slot as usize]);
                match (kind, &mut *item) {
                    (0, _) => {
                        ranks.insert(id, priority);
                        change += 1;
                        *item = Some((priority, change, true));
                    }
                    (1, Some((old, changed, _))) => {
                        ranks.update(id, priority);
                        change += 1;
                        (*old, *changed) = (priority, change);
                    }
                    (2, Some((_, _, ranked))) => {
                        ranks.remove(id);
                        *ranked = false;
                    }
                    (3, Some((_, _, ranked))) => {
                        ranks.put_back(id);
                        *ranked = true;
                    }
                    _ => {}
                }
                let later = ItemId { slot, generation: 3 };
                ranks.update(later, 9.0);
                ranks.remove(later);
                ranks.put_back(later);
            }
            let mut expected: Vec<_> = (0..).zip(&list)
                .filter_map(|(slot, item)| item.map(|item| (slot, item)))
                .filter(|(_, (_, _, ranked))| *ranked)
                .map(|(slot, (priority, change, _))| (-priority as i64, change, slot))
                .collect();
            expected.sort_unstable();
            let expected: Vec<u32> = expected.into_iter().map(|(_, _, slot)| slot).collect();
            prop_assert_eq!(&ranks.blocks.concat(), &expected);
            prop_assert_eq!(ranks.ranked, expected.len());
            for pair in ranks.blocks.windows(2) {
                prop_assert!(!pair[0].is_empty() && !pair[1].is_empty());
                prop_assert!(pair[0].len() + pair[1].len() > 4);
            }
            let blocks = ranks.blocks.len() + ranks.spare.len();
            prop_assert_eq!(blocks, Ranks::most_blocks(CAPACITY, 8));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes hours: 2^20 ranks")]
    fn units_fall_as_a_power_of_the_rank_and_never_to_nothing() {
        for exponent in [0.0, 0.7, 1.0, 4.0] {
            let sums = sums(1 << 20, exponent);
            for rank in [1, 2, 10, 1 << 10, 1 << 20] {
                let exact = FIRST as f64 * f64::from(rank).powf(-exponent);
                let units = units(&sums, rank as usize - 1);
                assert!(units >= 1 && (units as f64 - exact).abs() <= 1.0, "{exponent} {rank}");
            }
        }
    }
}

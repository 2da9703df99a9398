//! Samplers; [`ItemSampler`] is their interface to a table. To add one, add a file here, a variant of [`Sampler`], and its line in
//! [`make`] and [`bytes`].
//!
//! | file | subject |
//! | --- | --- |
//! | `prioritized` | `prioritized`, `uniform`: at random, by the masses of the sum tree, without a lock |
//! | `first_of_ranking` | the first item of a ranking: `fifo`, `lifo`, `max_heap`, `min_heap` |
//! | `rank_based` | at random, by the rank of the priority |
//! | `ranking` | the ranking of both, under one lock |

mod first_of_ranking;
mod prioritized;
mod rank_based;

pub mod ranking;

use crate::schema::{Sampler, TableConfig};
use crate::sum_tree::SampledLeaf;

use super::ids::ItemId;
use super::items::Items;
use prioritized::{Prioritized, Uniform};
use rank_based::RankBased;
use ranking::{LockedRanking, RankBy};

pub use first_of_ranking::{FirstOfRanking, Taken};

/// The sampler of a table of this valid definition, without items.
pub fn make(config: &TableConfig) -> Box<dyn ItemSampler> {
    match config.sampler {
        Sampler::Prioritized => Prioritized::make(config),
        Sampler::Uniform => Box::new(Uniform),
        Sampler::Fifo => FirstOfRanking::make(config, RankBy::Oldest),
        Sampler::Lifo => FirstOfRanking::make(config, RankBy::Newest),
        Sampler::MaxHeap => FirstOfRanking::make(config, RankBy::Highest),
        Sampler::MinHeap => FirstOfRanking::make(config, RankBy::Lowest),
        Sampler::RankBased => Box::new(RankBased::new(config)),
    }
}

pub fn bytes(config: &TableConfig) -> u64 {
    match config.sampler {
        Sampler::Prioritized | Sampler::Uniform => 0,
        Sampler::Fifo | Sampler::Lifo | Sampler::MaxHeap | Sampler::MinHeap => LockedRanking::bytes(config),
        Sampler::RankBased => RankBased::bytes(config),
    }
}

/// Mass of an item, in units, under a sampler that keeps no masses in the sum tree.
pub const EQUAL_MASS: u64 = 1;

/// What [`ItemSampler::choose`] chooses from.
#[derive(Debug, Clone, Copy, Default)]
pub struct Total {
    /// Units of all items: the probability of one is its units over these.
    pub units: u64,
    /// The sum of their priorities, after the exponent: 1 for each item where masses are equal.
    pub priority: f64,
}

/// Interface of a sampler to its table. Items of every sampler have mass in the sum tree; an item without mass is never sampled.
///
/// The default methods are for a sampler that samples uniformly, and for what a sampler with a ranking keeps of its items. Priorities have been
/// checked: they are finite and not negative.
pub trait ItemSampler: Send + Sync {
    /// The masses, in units, of items with these priorities.
    fn units(&self, _: &Items, priorities: Vec<f64>) -> Vec<u64> {
        priorities.into_iter().map(|_| EQUAL_MASS).collect()
    }

    /// The ranking of its items, if it keeps one.
    fn ranking(&self) -> Option<&LockedRanking> {
        None
    }

    /// Adds an item that was just inserted; another one may have had its slot. Only under the insert lock.
    fn insert(&self, id: ItemId, priority: f64) {
        if let Some(ranking) = self.ranking() {
            ranking.insert(id, priority);
        }
    }

    /// Sets the priorities of items and returns the number of applied updates. Some items may have been evicted.
    fn update(&self, _: &Items, ids: &[ItemId], priorities: Vec<f64>) -> usize {
        if let Some(ranking) = self.ranking() {
            ranking.update(ids, &priorities);
        }
        ids.len()
    }

    /// Called when an item has died or its last sample was taken. Its slot may have a new item already.
    fn remove(&self, id: ItemId) {
        if let Some(ranking) = self.ranking() {
            ranking.lock().remove(id);
        }
    }

    /// Called when the last sample of an item was taken back. The item may have died.
    fn put_back(&self, items: &Items, id: ItemId) {
        if let Some(ranking) = self.ranking() {
            ranking.put_back(items, id);
        }
    }

    /// The ranking whose first item it samples; `None` when it chooses at random.
    fn first_of_ranking(&self) -> Option<&FirstOfRanking> {
        None
    }

    /// Chooses an item at random for each of the ascending `targets` in [0, 1), into `chosen` (cleared first), and returns the
    /// total. As [`SumTree::sample_batch`].
    ///
    /// [`SumTree::sample_batch`]: crate::sum_tree::SumTree::sample_batch
    fn choose(&self, items: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> Total {
        let units = items.tree.sample_batch(targets, chosen);
        Total { units, priority: (units / EQUAL_MASS) as f64 }
    }

    /// The fewest units of an item that [`Self::choose`] can choose; `None` without one.
    fn fewest_units(&self, items: &Items) -> Option<u64> {
        items.tree.min_positive()
    }

    /// The live items, each with its priority, 1 where priorities are not kept. In the order in which another table has to
    /// insert them to sample as this one does: by insertion or update where that matters, else by slot, since samples find
    /// equal masses in equal order.
    fn saved<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = (ItemId, f64)> + 'a> {
        let slots = 0..items.capacity() as u32;
        match self.ranking() {
            Some(ranking) => Box::new(ranking.saved(items)),
            None => Box::new(slots.filter_map(|slot| Some((items.live_in(slot)?, 1.0)))),
        }
    }
}

impl dyn ItemSampler {
    /// The total that [`Self::choose`] would return.
    pub fn total(&self, items: &Items) -> Total {
        self.choose(items, &[], &mut Vec::new())
    }
}

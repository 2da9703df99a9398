//! Samplers; [`ItemSampler`] is their interface to a table. To add one, add a file here, a variant of [`Sampler`], and its line in
//! [`make`] and [`bytes`].
//!
//! | where | subject |
//! | --- | --- |
//! | here | `prioritized`, `uniform`: at random, by the masses of the sum tree, without a lock; the priority of new items |
//! | `rank_based` | at random, by the rank of the priority |
//! | `ranking` | the first item of a ranking: `fifo`, `lifo`, `max_heap`, `min_heap`; the ranking itself, under one lock |
//!
//! # Invariant
//!
//! Priorities on the wire and in snapshots are before the exponent; the sampler applies it, once.

mod rank_based;
mod ranking;

use crate::processor;
use crate::schema::{Sampler, TableConfig};
use crate::sum_tree::{SampledLeaf, Update};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

use super::ids::ItemId;
use super::items::Items;
use rank_based::RankBased;
use ranking::RankBy;

pub use ranking::{LockedRanking, Taken};

/// The sampler of a table of this valid definition, without items.
pub fn make(config: &TableConfig) -> Box<dyn ItemSampler> {
    let first = |by| Box::new(LockedRanking::new(config, by));
    match config.sampler {
        Sampler::Prioritized => Prioritized::make(config),
        Sampler::Uniform => Box::new(Uniform),
        Sampler::Fifo => first(RankBy::Oldest),
        Sampler::Lifo => first(RankBy::Newest),
        Sampler::MaxHeap => first(RankBy::Highest),
        Sampler::MinHeap => first(RankBy::Lowest),
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
    /// The sum of their masses: 1 for each item where masses are equal.
    pub mass: f64,
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

    /// Chooses an item at random for each of the ascending `targets` in [0, 1), into `chosen` (cleared first), and returns the
    /// total. As [`SumTree::sample_batch`].
    ///
    /// [`SumTree::sample_batch`]: crate::sum_tree::SumTree::sample_batch
    fn choose(&self, items: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> Total {
        let units = items.tree.sample_batch(targets, chosen);
        Total { units, mass: (units / EQUAL_MASS) as f64 }
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

/// `uniform`: at random, each live item with the same probability. Priorities are ignored and not kept.
struct Uniform;

impl ItemSampler for Uniform {}

/// `prioritized`: at random, in proportion to priority^`priority_exponent` (Schaul et al., 2016, section 3.3, proportional
/// variant). Priorities are masses of the sum tree. An item of priority 0 is never sampled.
struct Prioritized {
    /// Above 0.
    exponent: f64,
}

impl Prioritized {
    fn make(config: &TableConfig) -> Box<dyn ItemSampler> {
        match config.priority_exponent {
            // Every priority to the power of 0 is 1.
            0.0 => Box::new(Uniform),
            exponent => Box::new(Prioritized { exponent }),
        }
    }

    /// The priority of an item with this mass, up to the mass's rounding.
    fn priority(&self, mass: f64) -> f64 {
        if base::planted!(RaisedTwice) {
            return mass;
        }
        // The mass of the largest finite priority may have been rounded up.
        mass.powf(self.exponent.recip()).min(f64::MAX)
    }
}

impl ItemSampler for Prioritized {
    fn units(&self, items: &Items, mut priorities: Vec<f64>) -> Vec<u64> {
        processor::raise(&mut priorities, self.exponent);
        priorities.into_iter().map(|raised| items.tree.units_of(raised)).collect()
    }

    fn update(&self, items: &Items, ids: &[ItemId], priorities: Vec<f64>) -> usize {
        let mut updates = Vec::with_capacity(ids.len());
        for (id, units) in ids.iter().zip(self.units(items, priorities)) {
            // Mass of an item without a sample left would be in the total, and never be sampled.
            if items.limits_samples() && items.is_used_up(items.times_sampled(id.slot)) {
                continue;
            }
            updates.push(Update { slot: id.slot, generation: id.generation, units });
        }
        items.tree.set_batch(&updates)
    }

    fn choose(&self, items: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> Total {
        let units = items.tree.sample_batch(targets, chosen);
        Total { units, mass: items.tree.from_units(units) }
    }

    fn saved<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = (ItemId, f64)> + 'a> {
        let slots = 0..items.capacity() as u32;
        Box::new(slots.filter_map(|slot| {
            let id = items.live_in(slot)?;
            let units = items.tree.units(slot, id.generation)?;
            Some((id, self.priority(items.tree.from_units(units))))
        }))
    }
}

/// The priority of items that are pushed without one: the largest priority ever held, or in a table with `live_max_priority` the largest of the live items.
pub struct MaxPriority {
    /// Bits of the largest priority since the table was made or emptied, before the exponent; 0 while none was above zero.
    /// Positive floats are ordered as their bits.
    ever: AtomicU64,
    /// Steps that the table had taken when it was last emptied: earlier items no longer count, even before they are removed.
    /// Locked while an update raises `ever`, so that an update from before a reset cannot raise it afterwards.
    emptied_at: Mutex<u64>,
    /// Items by priority, with `live_max_priority`.
    live: Option<LockedRanking>,
}

impl MaxPriority {
    pub fn new(config: &TableConfig) -> Self {
        let live = config.live_max_priority.then(|| LockedRanking::new(config, RankBy::Highest));
        MaxPriority { ever: AtomicU64::new(0), emptied_at: Mutex::new(0), live }
    }

    pub fn bytes(config: &TableConfig) -> u64 {
        match config.live_max_priority {
            true => LockedRanking::bytes(config),
            false => 0,
        }
    }

    /// The largest priority; `None` where none is above zero.
    pub fn get(&self, items: &Items) -> Option<f64> {
        let bits = match &self.live {
            None => self.ever.load(Ordering::Relaxed),
            Some(live) => {
                let mut live = live.lock();
                // Items that have died leave the order here: one step for each that was inserted.
                while let Some(id) = live.at(0).filter(|&id| !items.confirm(id)) {
                    live.remove(id);
                }
                let first = live.at(0).and_then(|id| live.priority(id));
                // Rounding of a mass may have raised a restored one.
                first.map_or(0, |priority| bits(priority.min(self.ever())))
            }
        };
        (bits > 0).then(|| f64::from_bits(bits))
    }

    /// The largest priority since the table was made or emptied, for a snapshot; 0 while none was above zero.
    pub fn ever(&self) -> f64 {
        f64::from_bits(self.ever.load(Ordering::Relaxed))
    }

    /// Counts the priorities of items that were just inserted, of which `priority` is the largest. Only under the insert lock.
    pub fn raise(&self, priority: f64) {
        if self.is_larger(priority) {
            // Relaxed, as all accesses: only the value itself is published. Concurrent updates also raise it.
            self.ever.fetch_max(bits(priority), Ordering::Relaxed);
        }
    }

    fn is_larger(&self, priority: f64) -> bool {
        self.ever() < priority
    }

    /// Adds an item that was just inserted. Only under the insert lock.
    pub fn insert(&self, id: ItemId, priority: f64) {
        if let Some(live) = &self.live {
            live.insert(id, priority);
        }
    }

    /// Sets the priorities of live items. Ids of evicted items are ignored.
    pub fn update(&self, items: &Items, ids: &[ItemId], priorities: &[f64]) {
        if priorities.iter().any(|&priority| self.is_larger(priority)) {
            let emptied_at = lock(&self.emptied_at);
            for (&id, &priority) in ids.iter().zip(priorities) {
                if self.is_larger(priority) {
                    let born = items.metadata(id.slot).born;
                    if items.confirm(id) && born > *emptied_at {
                        self.ever.fetch_max(bits(priority), Ordering::Relaxed);
                    }
                }
            }
        }
        if let Some(live) = &self.live {
            live.update(ids, priorities);
        }
    }

    /// Forgets the priorities of all items when emptying the table begins, after `steps` steps. Only under the insert lock.
    pub fn reset(&self, steps: u64) {
        let mut emptied_at = lock(&self.emptied_at);
        *emptied_at = steps;
        self.ever.store(0, Ordering::Relaxed);
    }

    /// Takes over the largest priority of a snapshot, whose items are in place. Only under the insert lock.
    pub fn go_on_from(&self, largest: f64) {
        *lock(&self.emptied_at) = 0;
        self.raise(largest);
    }
}

/// Bits of the priority's magnitude, ordered as the priorities: -0.0 would rank above all positive numbers.
fn bits(priority: f64) -> u64 {
    priority.abs().to_bits()
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use crate::table::ids::IdSpace;

    #[test]
    fn a_restored_item_has_the_mass_that_it_had() {
        for unit_log2 in [-30, -19, 0] {
            let items = Items::new(IdSpace::of(1, 0), 1, unit_log2, 0);
            for exponent in [1e-9, 0.01, 0.3, 0.6, 0.7, 1.0, 4.0] {
                let sampler = Prioritized { exponent };
                let priorities = (-1022..1024).map(|log2| 1.37 * 2f64.powi(log2)).chain([0.0, f64::MAX]);
                let units = sampler.units(&items, priorities.collect());
                let saved = units.iter().map(|&units| sampler.priority(items.tree.from_units(units)));
                assert_eq!(sampler.units(&items, saved.collect()), units, "{exponent} {unit_log2}");
            }
        }
    }
}

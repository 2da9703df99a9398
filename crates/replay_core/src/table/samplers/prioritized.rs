//! `prioritized`: at random, in proportion to priority^`priority_exponent` (Schaul et al., 2016, section 3.3, proportional
//! variant). Priorities are masses of the sum tree, and nothing takes a lock. An item of priority 0 is never sampled.
//!
//! # Invariant
//!
//! Priorities on the wire and in snapshots are before the exponent; it is applied here, once.

use crate::processor;
use crate::schema::TableConfig;
use crate::sum_tree::{SampledLeaf, Update};
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::{ItemSampler, Total};

/// `uniform`: at random, each live item with the same probability. Priorities are ignored and not kept.
pub struct Uniform;

impl ItemSampler for Uniform {}

pub struct Prioritized {
    /// Above 0.
    exponent: f64,
}

impl Prioritized {
    pub fn make(config: &TableConfig) -> Box<dyn ItemSampler> {
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
        Total { units, priority: items.tree.from_units(units) }
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

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use crate::table::ids::IdSpace;

    use super::*;

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

//! `prioritized`: at random, in proportion to priority^`priority_exponent` (Schaul et al., 2016, section 3.3, proportional
//! variant). Priorities are masses of the sum tree, and nothing takes a lock. An item of priority 0 is never sampled.
//!
//! # Invariant
//!
//! Priorities on the wire are before the exponent; it is applied here, once.

use crate::power;
use crate::schema::TableConfig;
use crate::sum_tree::{SumTree, Update};
use crate::table::ids::ItemId;
use crate::table::items::Items;
use base::mistake::{Mistake, planted};

use super::uniform::Uniform;
use super::{ItemSampler, TableSampler};

pub struct Prioritized {
    /// Above 0.
    exponent: f64,
}

impl ItemSampler for Prioritized {
    fn make(config: &TableConfig) -> TableSampler {
        match config.priority_exponent {
            // Every priority to the power of 0 is 1.
            0.0 => Uniform::make(config),
            exponent => TableSampler::Prioritized(Prioritized { exponent }),
        }
    }

    fn raise(&self, priorities: &mut [f64]) {
        power::raise(priorities, self.exponent);
    }

    fn units(&self, items: &Items, raised: f64) -> u64 {
        items.tree.units_of(raised)
    }

    fn update(&self, items: &Items, ids: &[ItemId], mut priorities: Vec<f64>) -> usize {
        self.raise(&mut priorities);
        let mut updates = Vec::with_capacity(ids.len());
        for (id, &raised) in ids.iter().zip(&priorities) {
            // Mass of an item without a sample left would be in the total, and never be sampled.
            if items.limits_samples() && items.is_used_up(items.times_sampled(id.slot)) {
                continue;
            }
            updates.push(Update { slot: id.slot, generation: id.generation, units: self.units(items, raised) });
        }
        items.tree.set_batch(&updates)
    }

    fn total_priority(&self, items: &Items, units: u64) -> Option<f64> {
        Some(items.tree.from_units(units))
    }

    fn most_saved_units(&self) -> u64 {
        SumTree::<16>::MAX_UNITS
    }

    fn saved_priority(&self, items: &Items, saved: u64) -> f64 {
        items.tree.from_units(saved).powf(self.exponent.recip())
    }

    fn insert_saved(&self, items: &Items, id: ItemId, saved: u64) {
        let units = match planted(Mistake::RaisedTwice) {
            true => items.tree.units_of(items.tree.from_units(saved).powf(self.exponent)),
            false => saved,
        };
        items.tree.set(id.slot, id.generation, units);
    }
}

//! Samplers, one per file; [`ItemSampler`] is their interface to a table. To add one, add a file here, a variant of [`Sampler`],
//! and its line in [`Kind::of`].
//!
//! | file | subject |
//! | --- | --- |
//! | `prioritized`, `uniform` | at random, by the masses of the sum tree |
//! | `rank_based` | at random, by the rank of the priority |
//! | `fifo`, `lifo`, `max_heap`, `min_heap` | the first item of an order |
//! | `order`, `heap` | items by insertion, for FIFO; by rank, for LIFO and the heaps |

mod fifo;
pub mod heap;
mod lifo;
pub mod max_heap;
mod min_heap;
pub mod order;
mod prioritized;
mod rank_based;
mod uniform;

use std::ops::Deref;

use crate::error::Result;
use crate::schema::{Sampler, TableConfig};
use crate::sum_tree::SampledLeaf;

use super::ids::ItemId;
use super::items::Items;
use fifo::Fifo;
use lifo::Lifo;
use max_heap::MaxHeap;
use min_heap::MinHeap;
use prioritized::Prioritized;
use rank_based::RankBased;
use uniform::Uniform;

/// Mass of an item, in units, under a sampler that keeps no masses in the sum tree.
pub const EQUAL_MASS: u64 = 1;

/// Outcome of offering an item to a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Sampled; it has samples left.
    Again,
    /// Sampled for the last time.
    Last,
    /// Not sampled: it is gone, or has no sample left.
    Refused,
}

/// Interface of a sampler to its table. Items of every sampler have mass in the sum tree; an item without mass is never sampled.
///
/// The default methods are for a sampler without state that samples uniformly. Priorities have been checked: they are finite and
/// not negative.
pub trait ItemSampler: Send + Sync {
    /// The sampler of a table of this valid definition, without items.
    fn make(config: &TableConfig) -> TableSampler
    where
        Self: Sized;

    /// Checks the sampler's requirements on a definition. The error names the fault and the remedy.
    fn check(_: &TableConfig) -> std::result::Result<(), String>
    where
        Self: Sized,
    {
        Ok(())
    }

    /// Bytes that it allocates for a table of this valid definition.
    fn bytes(_: &TableConfig) -> u64
    where
        Self: Sized,
    {
        0
    }

    /// Converts priorities to the input of [`Self::units`].
    fn raise(&self, _priorities: &mut [f64]) {}

    /// The mass, in units, of an item whose priority was [raised](Self::raise).
    fn units(&self, _items: &Items, _raised: f64) -> u64 {
        EQUAL_MASS
    }

    /// Whether `count` items can be inserted. Only under the insert lock.
    fn has_room(&self, _items: &Items, _count: usize) -> bool {
        true
    }

    /// Adds an item that was just inserted, after [`Self::has_room`]; another one may have had its slot. Only under the insert
    /// lock.
    fn insert(&self, _id: ItemId, _priority: f64) {}

    /// Sets the priorities of items and returns the number of applied updates. Some items may have been evicted.
    fn update(&self, _items: &Items, ids: &[ItemId], _priorities: Vec<f64>) -> usize {
        ids.len()
    }

    /// Called when an item has died or its last sample was taken. Its slot may have a new item already.
    fn remove(&self, _id: ItemId) {}

    /// Called when the last sample of an item was taken back. The item may have died.
    fn put_back(&self, _items: &Items, _id: ItemId) {}

    /// The order whose first item it samples; `None` when it chooses at random.
    fn order(&self) -> Option<&dyn Order> {
        None
    }

    /// Chooses an item at random for each of the ascending `targets` in [0, 1), into `chosen` (cleared first), and returns the
    /// total: the probability of an item is its units over the total. As [`SumTree::sample_batch`].
    ///
    /// [`SumTree::sample_batch`]: crate::sum_tree::SumTree::sample_batch
    fn choose(&self, items: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> u64 {
        items.tree.sample_batch(targets, chosen)
    }

    /// The total that [`Self::choose`] would return.
    fn total(&self, items: &Items) -> u64 {
        items.tree.total()
    }

    /// The fewest units of an item that [`Self::choose`] can choose; `None` without one.
    fn fewest_units(&self, items: &Items) -> Option<u64> {
        items.tree.min_positive()
    }

    /// The sum of the priorities, after the exponent, of items with `units` in all: 1 for each item where masses are equal.
    /// `None` for an order of items, whose masses mean nothing.
    fn total_priority(&self, _items: &Items, units: u64) -> Option<f64> {
        (self.order().is_none()).then_some((units / EQUAL_MASS) as f64)
    }

    /// The live items, in the order in which another table has to insert them to sample as this one does: by insertion where
    /// that matters, else by slot, since samples find equal masses in equal order.
    fn ids<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = ItemId> + 'a> {
        let slots = 0..items.capacity() as u32;
        Box::new(slots.filter_map(|slot| items.live_in(slot)))
    }

    /// Form of an item's priority in a snapshot: here its mass. `None` when the item is gone.
    fn saved_units(&self, items: &Items, id: ItemId) -> Option<u64> {
        items.tree.units(id.slot, id.generation)
    }

    /// The largest number that [`Self::saved_units`] returns.
    fn most_saved_units(&self) -> u64 {
        EQUAL_MASS
    }

    /// The priority of an item of a snapshot, up to the rounding of its mass; 1 where priorities are not kept.
    fn saved_priority(&self, _items: &Items, _saved: u64) -> f64 {
        1.0
    }

    /// Adds an item of a snapshot that was just inserted without mass. Only under the insert lock.
    fn insert_saved(&self, items: &Items, id: ItemId, saved: u64) {
        // Not `saved`: a batch under way may have held its mass when it was saved.
        items.tree.set(id.slot, id.generation, EQUAL_MASS);
        self.insert(id, self.saved_priority(items, saved));
    }
}

/// The order of a sampler that samples the first item until it has reached `max_times_sampled`, then the next one. Its
/// probability is 1.
pub trait Order {
    /// Offers items from the first on to `take`, until it has sampled `count` times or has refused the last one.
    ///
    /// # Errors
    /// The first error of `take`.
    fn offer(&self, items: &Items, count: u32, take: &mut dyn FnMut(ItemId) -> Result<Taken>) -> Result<()>;
}

/// Constructor, check and size of the type behind a [`Sampler`].
struct Kind {
    make: fn(&TableConfig) -> TableSampler,
    check: fn(&TableConfig) -> std::result::Result<(), String>,
    bytes: fn(&TableConfig) -> u64,
}

impl Kind {
    fn of(sampler: Sampler) -> Self {
        match sampler {
            Sampler::Prioritized => Self::new::<Prioritized>(),
            Sampler::Uniform => Self::new::<Uniform>(),
            Sampler::Fifo => Self::new::<Fifo>(),
            Sampler::Lifo => Self::new::<Lifo>(),
            Sampler::MaxHeap => Self::new::<MaxHeap>(),
            Sampler::MinHeap => Self::new::<MinHeap>(),
            Sampler::RankBased => Self::new::<RankBased>(),
        }
    }

    fn new<S: ItemSampler>() -> Self {
        Kind { make: S::make, check: S::check, bytes: S::bytes }
    }
}

/// The sampler of one table.
pub enum TableSampler {
    /// A variant of its own, so that its pushes, samples and updates make no virtual call.
    Prioritized(Prioritized),
    Other(Box<dyn ItemSampler>),
}

impl TableSampler {
    /// As [`ItemSampler::make`].
    pub fn new(config: &TableConfig) -> Self {
        (Kind::of(config.sampler).make)(config)
    }

    /// As [`ItemSampler::check`].
    pub fn check(config: &TableConfig) -> std::result::Result<(), String> {
        (Kind::of(config.sampler).check)(config)
    }

    /// As [`ItemSampler::bytes`].
    pub fn bytes(config: &TableConfig) -> u64 {
        (Kind::of(config.sampler).bytes)(config)
    }
}

/// Rarely called methods, through a virtual call.
impl Deref for TableSampler {
    type Target = dyn ItemSampler;

    fn deref(&self) -> &Self::Target {
        match self {
            TableSampler::Prioritized(sampler) => sampler,
            TableSampler::Other(sampler) => &**sampler,
        }
    }
}

/// Methods that every push, sample or update calls.
macro_rules! direct {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)+) => {
        impl TableSampler {$(
            #[inline]
            pub fn $name(&self $(, $argument: $type)*) $(-> $result)? {
                match self {
                    TableSampler::Prioritized(sampler) => sampler.$name($($argument),*),
                    TableSampler::Other(sampler) => sampler.$name($($argument),*),
                }
            }
        )+}
    };
}

direct! {
    fn raise(&self, priorities: &mut [f64]);
    fn units(&self, items: &Items, raised: f64) -> u64;
    fn has_room(&self, items: &Items, count: usize) -> bool;
    fn insert(&self, id: ItemId, priority: f64);
    fn update(&self, items: &Items, ids: &[ItemId], priorities: Vec<f64>) -> usize;
    fn remove(&self, id: ItemId);
    fn put_back(&self, items: &Items, id: ItemId);
    fn order(&self) -> Option<&dyn Order>;
    fn choose(&self, items: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> u64;
    fn total_priority(&self, items: &Items, units: u64) -> Option<f64>;
}

//! The choice of items: one type behind the definition's [`Sampler`], with the order of items that some samplers keep.
//! A new sampler is a variant of [`Sampler`]: every match here is exhaustive, so the compiler lists the missing arms.

use std::sync::Mutex;

use crate::error::Result;
use crate::power;
use crate::schema::{Sampler, TableConfig};
use crate::sum_tree::{SumTree, Update};
use base::sync::lock;

use super::heap::{Heap, RankBy};
use super::ids::ItemId;
use super::items::Items;
use super::order::InsertionOrder;

/// Mass of an item, in units, under a sampler that ignores priorities.
pub const EQUAL_MASS: u64 = 1;

/// The sampler of one table. Items of every sampler have mass in the sum tree; an item without mass is never sampled.
pub enum ItemSampler {
    /// Draws at random, in proportion to mass.
    Random {
        /// Mass is the priority to this power; 0 gives every item the same.
        exponent: f64,
    },
    /// Samples the first item of a queue until it has reached `max_times_sampled`, then the next one.
    InOrder(Queue),
}

/// Items in the order in which they are sampled.
pub enum Queue {
    /// By insertion, the oldest first. Samples take no lock.
    Fifo(InsertionOrder),
    /// By rank. Samples and insertions take its lock for one item at a time, updates for a few, a snapshot for one copy of
    /// all ranks; so long an insertion, which holds the insert lock, may wait.
    Heap(Mutex<Heap>),
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
}

impl ItemSampler {
    /// The sampler of a valid table definition, without items.
    pub fn new(config: &TableConfig) -> Self {
        let capacity = config.capacity as u32;
        let heap =
            |rank_by| ItemSampler::InOrder(Queue::Heap(Mutex::new(Heap::new(rank_by, capacity))));
        match config.sampler {
            Sampler::Prioritized => ItemSampler::Random {
                exponent: config.priority_exponent,
            },
            Sampler::Uniform => ItemSampler::Random { exponent: 0.0 },
            Sampler::Fifo => ItemSampler::InOrder(Queue::Fifo(InsertionOrder::new(capacity))),
            Sampler::Lifo => heap(RankBy::Newest),
            Sampler::MaxHeap => heap(RankBy::Highest),
            Sampler::MinHeap => heap(RankBy::Lowest),
        }
    }

    /// Bytes that it allocates.
    pub fn bytes(config: &TableConfig) -> u64 {
        match config.sampler {
            Sampler::Prioritized | Sampler::Uniform => 0,
            Sampler::Fifo => InsertionOrder::bytes(config.capacity as u32),
            Sampler::Lifo | Sampler::MaxHeap | Sampler::MinHeap => {
                Heap::bytes(config.capacity as u32)
            }
        }
    }

    /// The power that makes masses of priorities; `None` where every mass is [`EQUAL_MASS`].
    fn exponent(&self) -> Option<f64> {
        match self {
            ItemSampler::Random { exponent } => Some(*exponent).filter(|&exponent| exponent != 0.0),
            ItemSampler::InOrder(_) => None,
        }
    }

    /// The sum of the priorities, after the exponent, of items whose masses add up to `units`: 1 for each item where the
    /// exponent is 0. `None` for an order of items, whose masses mean nothing.
    pub fn total_priority(&self, items: &Items, units: u64) -> Option<f64> {
        match self {
            ItemSampler::Random { .. } if self.exponent().is_some() => {
                Some(items.tree.from_units(units))
            }
            ItemSampler::Random { .. } => Some((units / EQUAL_MASS) as f64),
            ItemSampler::InOrder(_) => None,
        }
    }

    /// The masses, in units, of items with these checked priorities, which it overwrites.
    pub fn units(&self, items: &Items, priorities: &mut [f64]) -> impl Iterator<Item = u64> {
        let exponent = self.exponent();
        if let Some(exponent) = exponent {
            power::raise(priorities, exponent);
        }
        priorities.iter().map(move |&mass| match exponent {
            Some(_) => items.tree.units_of(mass),
            None => EQUAL_MASS,
        })
    }

    /// Whether `count` items can be inserted. Only under the insert lock.
    pub fn has_room(&self, items: &Items, count: usize) -> bool {
        match self {
            ItemSampler::Random { .. } | ItemSampler::InOrder(Queue::Heap(_)) => true,
            ItemSampler::InOrder(Queue::Fifo(order)) => {
                order.has_room(count, |id| items.confirm(id))
            }
        }
    }

    /// Adds an item that was just inserted, after [`Self::has_room`]. Only under the insert lock.
    pub fn insert(&self, id: ItemId, priority: f64) {
        match self {
            ItemSampler::Random { .. } => {}
            ItemSampler::InOrder(Queue::Fifo(order)) => order.append(id),
            ItemSampler::InOrder(Queue::Heap(heap)) => lock(heap).insert(id, priority),
        }
    }

    /// Sets the checked priorities of items that were live a moment ago, and returns how many are.
    pub fn update(&self, items: &Items, ids: &[ItemId], mut priorities: Vec<f64>) -> usize {
        if self.exponent().is_none() {
            if let ItemSampler::InOrder(queue) = self {
                queue.update(ids, &priorities);
            }
            return ids.len();
        }
        let mut updates = Vec::with_capacity(ids.len());
        for (id, units) in ids.iter().zip(self.units(items, &mut priorities)) {
            updates.push(Update {
                slot: id.slot,
                generation: id.generation,
                units,
            });
        }
        items.tree.set_batch(&updates)
    }

    /// The live items, in the order in which another table has to insert them to sample as this one does: as they were
    /// inserted where that counts, else by slot, since samples find equal masses in equal order.
    pub fn ids<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = ItemId> + 'a> {
        match self {
            ItemSampler::Random { .. } => {
                let slots = 0..items.capacity() as u32;
                Box::new(slots.filter_map(|slot| items.live_in(slot)))
            }
            ItemSampler::InOrder(Queue::Fifo(order)) => {
                let mut from = 0;
                Box::new(std::iter::from_fn(move || {
                    let (position, id) = order.first_live(from, |id| items.confirm(id))?;
                    from = position + 1;
                    Some(id)
                }))
            }
            ItemSampler::InOrder(Queue::Heap(heap)) => {
                // Sorted without the lock, for which samples and pushes may wait.
                let mut changes = lock(heap).changes();
                changes.sort_unstable_by_key(|&(change, _)| change);
                let ids = changes.into_iter().map(|(_, id)| id);
                Box::new(ids.filter(|&id| items.confirm(id)))
            }
        }
    }

    /// The number by which a snapshot keeps an item's priority: its mass, or in a heap the bits of the priority. `None`
    /// when the item is gone.
    pub fn saved_units(&self, items: &Items, id: ItemId) -> Option<u64> {
        match self {
            ItemSampler::Random { .. } | ItemSampler::InOrder(Queue::Fifo(_)) => {
                items.tree.units(id.slot, id.generation)
            }
            ItemSampler::InOrder(Queue::Heap(heap)) => lock(heap).priority(id).map(f64::to_bits),
        }
    }

    /// The largest number that [`Self::saved_units`] returns.
    pub fn most_saved_units(&self) -> u64 {
        match self {
            ItemSampler::Random { .. } if self.exponent().is_some() => SumTree::<16>::MAX_UNITS,
            ItemSampler::Random { .. } | ItemSampler::InOrder(Queue::Fifo(_)) => EQUAL_MASS,
            ItemSampler::InOrder(Queue::Heap(_)) => f64::MAX.to_bits(),
        }
    }

    /// The priority of an item of a snapshot, up to the rounding of its mass; 1 where masses are equal and priorities are
    /// not kept.
    pub fn saved_priority(&self, items: &Items, saved: u64) -> f64 {
        match (self, self.exponent()) {
            (ItemSampler::InOrder(Queue::Heap(_)), _) => f64::from_bits(saved),
            (_, Some(exponent)) => items.tree.from_units(saved).powf(exponent.recip()),
            (_, None) => 1.0,
        }
    }

    /// Adds an item of a snapshot that was just inserted without mass. Only under the insert lock.
    pub fn insert_saved(&self, items: &Items, id: ItemId, saved: u64) {
        let units = match self.exponent() {
            Some(_) => saved,
            // A batch under way may have held its mass when it was saved.
            None => EQUAL_MASS,
        };
        items.tree.set(id.slot, id.generation, units);
        // Only a heap looks at it.
        self.insert(id, f64::from_bits(saved));
    }
}

impl Queue {
    /// Offers items from the first on to `take`, until it has sampled `count` times or has refused the last one.
    ///
    /// # Errors
    /// The first one of `take`.
    pub fn offer(
        &self,
        items: &Items,
        mut count: u32,
        mut take: impl FnMut(ItemId) -> Result<Taken>,
    ) -> Result<()> {
        match self {
            Queue::Fifo(order) => {
                let mut from = 0;
                while count > 0
                    && let Some((position, id)) = order.first_live(from, |id| items.confirm(id))
                {
                    let taken = take(id)?;
                    count -= u32::from(taken != Taken::Refused);
                    from = position + u64::from(taken != Taken::Again);
                }
            }
            Queue::Heap(heap) => {
                while count > 0 {
                    let mut heap = lock(heap);
                    let Some(id) = heap.first() else { break };
                    let taken = take(id)?;
                    count -= u32::from(taken != Taken::Refused);
                    if taken != Taken::Again {
                        heap.pop();
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns an item to the order after its last sample was taken back.
    pub fn put_back(&self, id: ItemId) {
        match self {
            // A live item keeps its position.
            Queue::Fifo(_) => {}
            Queue::Heap(heap) => lock(heap).put_back(id),
        }
    }

    /// Sets the priorities of items that were live a moment ago.
    fn update(&self, ids: &[ItemId], priorities: &[f64]) {
        match self {
            Queue::Fifo(_) => {}
            Queue::Heap(heap) => Heap::update_all(heap, ids, priorities),
        }
    }
}

//! The largest priority of a table: the priority of an item that is pushed without one.

use crate::schema::TableConfig;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

use super::ids::ItemId;
use super::items::Items;
use super::samplers::ranking::{LockedRanking, RankBy};

/// The largest priority ever held, or in a table with `live_max_priority` the largest of the live items.
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

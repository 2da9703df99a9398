//! Items by insertion, for the FIFO sampler: a ring of ids that readers walk without a lock.

use crate::sync::fault::{self, Fault};
use crate::sync::{AtomicU64, Ordering};
use crate::table::ids::ItemId;

/// Ids in the order of insertion. One writer at a time appends (under the table's insert lock); any thread reads.
pub struct InsertionOrder {
    ring: Box<[AtomicU64]>,
    /// Position of the oldest id that may be live; never goes back.
    head: AtomicU64,
    tail: AtomicU64,
}

impl InsertionOrder {
    /// A ring for `capacity` live items and as many that died out of order.
    pub fn new(capacity: u32) -> Self {
        InsertionOrder {
            ring: (0..Self::positions(capacity)).map(|_| AtomicU64::new(0)).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
        }
    }

    /// Bytes that such a ring allocates.
    pub fn bytes(capacity: u32) -> u64 {
        Self::positions(capacity) * size_of::<AtomicU64>() as u64
    }

    fn positions(capacity: u32) -> u64 {
        2 * u64::from(capacity)
    }

    /// Whether `count` ids can be appended, once dead ids are dropped from the front. Only under the insert lock.
    pub fn has_room(&self, count: usize, is_live: impl Fn(ItemId) -> bool) -> bool {
        self.first_live(0, is_live);
        let used = self.tail.load(Ordering::Relaxed) - self.head.load(Ordering::Relaxed);
        used + count as u64 <= self.ring.len() as u64
    }

    /// Appends an id, after [`Self::has_room`]. Only under the insert lock.
    pub fn append(&self, id: ItemId) {
        let tail = self.tail.load(Ordering::Relaxed);
        // Release, both: pairs with the Acquire loads in `first_live`.
        self.at(tail).store(id.to_word(), Ordering::Release);
        self.tail.store(tail + 1, fault::weakened(Fault::EarlyTail, Ordering::Release));
    }

    /// The first live item at or after `from`, and its position.
    pub fn first_live(&self, from: u64, is_live: impl Fn(ItemId) -> bool) -> Option<(u64, ItemId)> {
        let mut position = from;
        loop {
            let head = self.head.load(Ordering::Acquire);
            position = position.max(head);
            if position >= self.tail.load(Ordering::Acquire) {
                return None;
            }
            let id = ItemId::from_word(self.at(position).load(Ordering::Acquire));
            if is_live(id) {
                // Once the head has passed, another id may have been written over this one.
                if fault::injected(Fault::StaleHead) || self.head.load(Ordering::Acquire) <= position {
                    return Some((position, id));
                }
            } else if position == head && fault::injected(Fault::BlindSkip) {
                self.head.fetch_add(1, Ordering::AcqRel);
            } else if position == head {
                // An Err: another reader has moved the head over the dead id.
                let _ = self.head.compare_exchange(head, head + 1, Ordering::AcqRel, Ordering::Relaxed);
            } else {
                position += 1;
            }
        }
    }

    fn at(&self, position: u64) -> &AtomicU64 {
        &self.ring[(position % self.ring.len() as u64) as usize]
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    fn id(slot: u32) -> ItemId {
        ItemId { slot, generation: 1 }
    }

    #[test]
    fn walks_live_ids_and_drops_dead_ones_from_the_front() {
        let order = InsertionOrder::new(2);
        (0..4).for_each(|slot| order.append(id(slot)));
        let live = |k: ItemId| k.slot != 0 && k.slot != 2;
        assert!(!order.has_room(2, live), "only the front can be dropped");
        assert!(order.has_room(1, live));
        order.append(id(4));
        let (at, first) = order.first_live(0, live).unwrap();
        assert_eq!((at, first), (1, id(1)));
        assert_eq!(order.first_live(at + 1, live), Some((3, id(3))));
        assert_eq!(order.first_live(4, live), Some((4, id(4))));
        assert_eq!(order.first_live(5, live), None);
        assert!(order.has_room(4, |_| false));
    }
}

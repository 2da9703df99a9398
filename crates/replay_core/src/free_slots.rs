//! Free slots of a slab, and of the items of a table: a Treiber stack with a preallocated link for each slot.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Below the lowest free slot.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct FreeSlots {
    /// By slot, the free one below it while it is free.
    below: Box<[AtomicU32]>,
    /// Pops so far, modulo 2^32 (against ABA), then the highest free slot.
    top: AtomicU64,
}

impl FreeSlots {
    /// `capacity` free slots, fewer than 2^32 - 1, the lowest on top.
    pub fn all(capacity: u32) -> Self {
        assert!(capacity < NONE, "there are fewer than 2^32 - 1 slots");
        let below = |slot| AtomicU32::new(if slot + 1 < capacity { slot + 1 } else { NONE });
        let top = if capacity == 0 { NONE } else { 0 };
        FreeSlots { below: (0..capacity).map(below).collect(), top: AtomicU64::new(top.into()) }
    }

    /// Bytes that it allocates for a slot.
    pub const SLOT_BYTES: usize = size_of::<AtomicU32>();

    /// Takes a slot, with all that its last owner wrote before it gave the slot back.
    pub fn pop(&self) -> Option<u32> {
        let pop = |top: u64| {
            // Another thread may take and give back the slot meanwhile: then this link is old, and the exchange fails.
            let below = self.below.get(top as u32 as usize)?.load(Ordering::Relaxed);
            Some((top >> 32).wrapping_add(1) << 32 | u64::from(below))
        };
        // Acquire: pairs with the Release in `push`.
        self.top.fetch_update(Ordering::Acquire, Ordering::Acquire, pop).ok().map(|top| top as u32)
    }

    /// Gives a slot back, once.
    pub fn push(&self, slot: u32) {
        let push = |top: u64| {
            self.below[slot as usize].store(top as u32, Ordering::Relaxed);
            Some(top >> 32 << 32 | u64::from(slot))
        };
        // Release: pairs with the Acquire in `pop`. It never fails: `push` always returns a top.
        let _ = self.top.fetch_update(Ordering::Release, Ordering::Relaxed, push);
    }

    pub fn count(&self) -> usize {
        let slot = |number: u32| self.below.get(number as usize).map(|below| below.load(Ordering::Relaxed));
        std::iter::successors(Some(self.top.load(Ordering::Relaxed) as u32), |&number| slot(number)).count() - 1
    }
}

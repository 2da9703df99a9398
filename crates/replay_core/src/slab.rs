//! Values that readers pin against eviction. Slots are never freed while the slab lives, so looking up a stale handle is
//! safe, and refused.
//!
//! One atomic word holds the state of a slot:
//!
//! ```text
//!   generation: 32 bits | live: 1 bit | pins: 31 bits
//!
//!   free     not live, no pins     insert -> live
//!   live     live, any pins        pin adds one, unpin takes one, retire -> retired, or free without pins
//!   retired  not live, some pins   the last unpin drops the value -> free, next generation
//! ```
//!
//! A pin is one compare-and-exchange of that word: with a check before a separate count, the value could be
//! dropped in between. `insert`, `pin`, `unpin` and `retire` are lock-free.
//!
//! # Invariant
//!
//! A chunk is pinned by compare-and-exchange on one word of generation, liveness and references. Releasing the last
//! reference frees it. A batch holds slices of payloads, no pins.

use std::mem::MaybeUninit;
use std::ops::Deref;

use crate::processor::{filled, prefetch};
use crate::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell, fence};
use base::planted;

const LIVE: u64 = 1 << 31;
const PINS: u64 = LIVE - 1;

/// Reference to a value, refused once the value is retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    pub slot: u32,
    /// How often the slot had been freed when the value was inserted, modulo 2^32.
    pub generation: u32,
}

impl Handle {
    /// The handle in one number, for an atomic.
    pub const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.slot as u64
    }

    /// The handle in a number of [`Handle::to_bits`]. Any other number gives a handle that is safe to use.
    pub const fn from_bits(bits: u64) -> Self {
        Handle { slot: bits as u32, generation: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Slot<T> {
    word: AtomicU64,
    /// Initialised while the slot is live or retired.
    value: UnsafeCell<MaybeUninit<T>>,
}

/// A fixed number of slots for values of `T`. Allocated at once: for a large `T` use a `Box`.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Box<[Slot<T>]>,
    free: FreeSlots,
}

// SAFETY: the slab hands `&T` to several threads (`T: Sync`) and drops on any of them (`T: Send`). A value is written
// and dropped only by the one thread that its slot's word gives it to, while no pin refers to it.
unsafe impl<T: Send + Sync> Sync for Slab<T> {}
// SAFETY: it owns its values.
unsafe impl<T: Send> Send for Slab<T> {}

impl<T> Slab<T> {
    /// A slab of `capacity` free slots, fewer than 2^32 - 1.
    pub fn new(capacity: u32) -> Self {
        let slot = |_| Slot { word: AtomicU64::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) };
        Slab { slots: filled(capacity as usize, slot), free: FreeSlots::all(capacity) }
    }

    pub fn bytes(capacity: u32) -> u64 {
        u64::from(capacity) * (size_of::<Slot<T>>() + FreeSlots::SLOT_BYTES) as u64
    }

    /// Stores a value; hands it back when every slot has a value that is live, or retired and pinned.
    pub fn insert(&self, value: T) -> Result<Handle, T> {
        let Some(index) = self.free.pop() else {
            return Err(value);
        };
        let slot = &self.slots[index as usize];
        slot.value.with_mut(|cell| {
            // SAFETY: the slot was free and this thread took it off the list: no other thread touches its value until
            // it is live.
            unsafe { (*cell).write(value) };
        });
        // Release: pairs with the Acquire in `pin`.
        let free = slot.word.fetch_or(LIVE, Ordering::Release);
        Ok(Handle { slot: index, generation: (free >> 32) as u32 })
    }

    /// Keeps a value from being dropped before the pin; `None` when it is retired, or has 2^31 - 1 pins.
    pub fn pin(&self, handle: Handle) -> Option<Pinned<'_, T>> {
        let slot = self.slots.get(handle.slot as usize)?;
        let count = |word| (is_live(word, handle) && word & PINS != PINS).then(|| word + 1);
        if planted!(LateCount) {
            count(slot.word.load(Ordering::Relaxed))?;
            slot.word.fetch_add(1, Ordering::Acquire);
        } else {
            // Acquire: pairs with the Release in `insert`. Every change in between is a read-modify-write and
            // carries that release on.
            slot.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, count).ok()?;
        }
        Some(Pinned { slab: self, slot: handle.slot })
    }

    /// Asks for a slot's cache line ahead of a pin.
    #[inline(always)]
    pub fn prefetch(&self, handle: Handle) {
        if let Some(slot) = self.slots.get(handle.slot as usize) {
            prefetch(slot);
        }
    }

    /// Ends a value: no new pins, and it is dropped now or with its last pin. True for exactly one caller; false
    /// when it was retired before. A handle of another thread has come by a lock or an Acquire: without one the value
    /// may not be seen to be live, and keeps its slot for ever.
    pub fn retire(&self, handle: Handle) -> bool {
        let Some(slot) = self.slots.get(handle.slot as usize) else {
            return false;
        };
        let end = |word| is_live(word, handle).then_some(word & !LIVE);
        // Acquire: pairs with the Release in `unpin` and in `insert`, for the drop below. Release: the caller's
        // reads of the value come before the drop, which may be that of the last pin.
        let ended = slot.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, end);
        let Ok(word) = ended else {
            return false;
        };
        if word & PINS <= planted!(FreedPin).into() {
            // SAFETY: the word says that the slot is neither live nor pinned, and only the thread whose exchange did
            // that reaches this line.
            unsafe { self.release(handle.slot) };
        }
        true
    }

    fn unpin(&self, index: u32) {
        let slot = &self.slots[index as usize];
        // Release: this thread's reads of the value come before the drop, on whichever thread. Pairs with the Acquire
        // fence below and the Acquire in `retire`.
        let word = slot.word.fetch_sub(1, Ordering::Release);
        if word & (LIVE | PINS) == 1 {
            // Pairs with the Release of the other pins' `unpin` and of `retire`.
            fence(Ordering::Acquire);
            // SAFETY: the word was retired with one pin, this one: it cannot be pinned again, and only this thread
            // reaches this line.
            unsafe { self.release(index) };
        }
    }

    /// Drops the value and frees the slot.
    ///
    /// # Safety
    /// The slot holds a value, is not live, has no pins, and the caller is the one thread that brought it there.
    unsafe fn release(&self, index: u32) {
        let slot = &self.slots[index as usize];
        // The mistake would free what a pin refers to: its value stays allocated.
        if !planted!(FreedPin) {
            slot.value.with_mut(|cell| {
                // SAFETY: the caller has the value to itself.
                unsafe { (*cell).assume_init_drop() };
            });
        }
        let generation = slot.word.load(Ordering::Relaxed) >> 32;
        let next = (generation as u32).wrapping_add(1);
        // Relaxed: `push` publishes it to the next insert.
        slot.word.store(u64::from(next) << 32, Ordering::Relaxed);
        self.free.push(index);
    }
}

fn is_live(word: u64, handle: Handle) -> bool {
    word & LIVE != 0 && (word >> 32) as u32 == handle.generation
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        for slot in &self.slots {
            // A pin borrows the slab, so there are no pins: a slot is live or free.
            if slot.word.load(Ordering::Acquire) & LIVE != 0 {
                slot.value.with_mut(|cell| {
                    // SAFETY: the slot is live, and the slab is borrowed exclusively.
                    unsafe { (*cell).assume_init_drop() };
                });
            }
        }
    }
}

/// A value that stays until this is dropped, whether or not it is retired.
#[derive(Debug)]
pub struct Pinned<'a, T> {
    slab: &'a Slab<T>,
    slot: u32,
}

impl<T> Deref for Pinned<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.slab.slots[self.slot as usize].value.with(|cell| {
            // SAFETY: the value was initialised when it was pinned, and is not dropped or written while it has pins.
            // The reference cannot outlive this pin.
            unsafe { (*cell).assume_init_ref() }
        })
    }
}

impl<T> Drop for Pinned<'_, T> {
    fn drop(&mut self) {
        self.slab.unpin(self.slot);
    }
}

/// Below the lowest free slot.
const NONE: u32 = u32::MAX;

/// Free slots of a slab, and of the items of a table: a Treiber stack with a preallocated link for each slot.
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

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    /// Two halves that differ only while, or after, the value is written over.
    struct Counted<'a> {
        halves: [u64; 2],
        drops: &'a AtomicUsize,
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            assert_eq!(self.halves[0], self.halves[1], "dropped twice");
            self.halves = [0, u64::MAX];
            self.drops.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_full_slab_hands_the_value_back() {
        let slab = Slab::new(2);
        let first = slab.insert("a").unwrap();
        let second = slab.insert("b").unwrap();
        assert_eq!(slab.insert("c"), Err("c"));
        let pinned = slab.pin(first).unwrap();
        assert!(slab.retire(first) && !slab.retire(first));
        assert_eq!(slab.insert("c"), Err("c"), "the slot is pinned");
        assert_eq!(*pinned, "a");
        drop(pinned);
        let third = slab.insert("c").unwrap();
        assert_eq!((third.slot, third.generation), (first.slot, first.generation + 1));
        assert!(slab.pin(first).is_none());
        assert_eq!(*slab.pin(second).unwrap(), "b");
        assert_eq!(Slab::new(0).insert("d"), Err("d"));
    }

    #[test]
    fn any_number_makes_a_handle_that_is_safe_to_use() {
        let slab = Slab::new(1);
        let handle = slab.insert(5).unwrap();
        assert_eq!(Handle::from_bits(handle.to_bits()), handle);
        for bits in [1, 1 << 32, u64::MAX, u64::from(u32::MAX)] {
            let handle = Handle::from_bits(bits);
            assert!(slab.pin(handle).is_none() && !slab.retire(handle));
        }
    }

    #[test]
    fn threads_that_pin_and_retire_lose_and_double_nothing() {
        const ROUNDS: u64 = if cfg!(miri) { 100 } else { 20_000 };
        let drops = AtomicUsize::new(0);
        // The handle of the newest value, for all threads.
        let newest = AtomicU64::new(u64::MAX);
        let slab = Slab::new(4);
        let inserted: usize = thread::scope(|scope| {
            let users: Vec<_> = (0..3u64)
                .map(|user| {
                    let (slab, newest, drops) = (&slab, &newest, &drops);
                    scope.spawn(move || {
                        let mut inserted = 0;
                        for round in 0..ROUNDS {
                            let pinned = slab.pin(Handle::from_bits(newest.load(Ordering::Acquire)));
                            let value = Counted { halves: [user * ROUNDS + round; 2], drops };
                            inserted += 1;
                            if let Ok(handle) = slab.insert(value) {
                                let old = newest.swap(handle.to_bits(), Ordering::AcqRel);
                                slab.retire(Handle::from_bits(old));
                            }
                            if let Some(value) = pinned {
                                assert_eq!(value.halves[0], value.halves[1]);
                            }
                        }
                        inserted
                    })
                })
                .collect();
            users.into_iter().map(|user| user.join().unwrap()).sum()
        });
        assert!(slab.retire(Handle::from_bits(newest.load(Ordering::Relaxed))));
        let free: Vec<_> = (0..4).map(|_| slab.insert(Counted { halves: [1; 2], drops: &drops }).ok()).collect();
        assert!(free.iter().all(Option::is_some), "a slot was lost");
        drop(slab);
        assert_eq!(drops.load(Ordering::Relaxed), inserted + 4);
    }
}

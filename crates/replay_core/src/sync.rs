//! Atomics, cells and a queue from `std` and crossbeam. With the cargo feature `loom` they are loom's, which runs a model under
//! every interleaving and every value that weak memory allows. Used by the modelled modules `sum_tree`, `slab`,
//! `limiter`, `table::items` and `table::samplers::order`; the rest of the crate compiles with the feature but is not run under it.

#[cfg(not(feature = "loom"))]
pub use std::{
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

#[cfg(not(feature = "loom"))]
pub(crate) use crossbeam_queue::ArrayQueue;

#[cfg(feature = "loom")]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

/// Stand-in for crossbeam's queue, whose atomics loom does not see: a lock orders the pop of a value after its push.
#[cfg(feature = "loom")]
#[derive(Debug)]
pub(crate) struct ArrayQueue<T> {
    values: loom::sync::Mutex<std::collections::VecDeque<T>>,
    capacity: usize,
}

#[cfg(feature = "loom")]
impl<T> ArrayQueue<T> {
    pub fn new(capacity: usize) -> Self {
        ArrayQueue {
            values: loom::sync::Mutex::default(),
            capacity,
        }
    }

    /// Appends a value, or returns it if the queue is full.
    pub fn push(&self, value: T) -> std::result::Result<(), T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        if values.len() == self.capacity {
            return Err(value);
        }
        values.push_back(value);
        Ok(())
    }

    pub fn pop(&self) -> Option<T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        values.pop_front()
    }

    pub fn len(&self) -> usize {
        let values = self.values.lock().expect("no thread panics with the lock");
        values.len()
    }
}

/// `std`'s cell behind loom's interface.
#[cfg(not(feature = "loom"))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "loom"))]
impl<T> UnsafeCell<T> {
    /// Wraps a value.
    pub const fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Calls `f` with a pointer for reading.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Calls `f` with a pointer for writing.
    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

pub mod fault {
    //! Mutations of the lock-free code, injected by loom models to show that the models find them. Without the feature `loom`
    //! they are compiled away.

    use super::Ordering;

    /// A mutation that a model has to find.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Fault {
        /// The sum tree does not add a change to one level.
        LostDelta,
        /// The sum tree activates a leaf without a release ordering.
        RelaxedPublication,
        /// The sum tree stores a new priority without compare-and-exchange.
        BlindUpdate,
        /// A sample from the sum tree returns the root's first sum, 0, after a restart has sampled a leaf.
        StaleTotal,
        /// The slab checks a slot and counts the pin in two steps instead of one.
        LateCount,
        /// A table writes an item's metadata without ordering it after the end of the slot's last item.
        UnorderedMetadata,
        /// A sample uses its pinned chunks without checking that the sampled item still exists.
        UnconfirmedPin,
        /// A sample is counted for the slot's current item, which may be another one.
        ForeignClaim,
        /// A table counts a new item's samples as available without a release ordering after its activation.
        EarlySamples,
        /// A table checks for batches of claims only before it reads the number of items with mass, and not after.
        OneLook,
        /// The order of insertion publishes its new end without a release ordering.
        EarlyTail,
        /// The order of insertion returns an id without checking that its position is still in use.
        StaleHead,
        /// The order of insertion moves its head over a dead id without checking that it is still there.
        BlindSkip,
        /// The rate limiter ends the count of an admitted push without a release ordering.
        EarlyEnd,
        /// The rate limiter does not count pushes that have ended.
        ForgottenEnd,
        /// The rate limiter admits a sample by counts of two epochs.
        MixedEpochs,
        /// The rate limiter takes back a sample of an earlier epoch.
        ForeignCredit,
    }

    /// `ordering`, or relaxed if `fault` was injected.
    #[inline(always)]
    pub fn weakened(fault: Fault, ordering: Ordering) -> Ordering {
        if injected(fault) {
            Ordering::Relaxed
        } else {
            ordering
        }
    }

    /// Whether `fault` was injected.
    #[cfg(not(feature = "loom"))]
    #[inline(always)]
    pub const fn injected(_fault: Fault) -> bool {
        false
    }

    #[cfg(feature = "loom")]
    pub use with_loom::{inject, injected};

    #[cfg(feature = "loom")]
    mod with_loom {
        use super::Fault;
        use std::cell::Cell;

        // Loom runs all threads of a model on the test's own thread, so other tests are not affected.
        thread_local!(static INJECTED: Cell<Option<Fault>> = const { Cell::new(None) });

        /// Whether `fault` was injected.
        pub fn injected(fault: Fault) -> bool {
            INJECTED.get() == Some(fault)
        }

        /// Injects a fault for the rest of the calling test.
        pub fn inject(fault: Fault) {
            INJECTED.set(Some(fault));
        }
    }
}

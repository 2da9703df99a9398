//! Atomics, cells and a queue, from `std` and crossbeam or, with the cargo feature `loom`, from loom, which runs a
//! model under every interleaving and every value a weak memory may show. Only `sum_tree`, `slab` and `table::items`
//! use this module: the rest of the crate is compiled with the feature, never run under it.

#[cfg(not(feature = "loom"))]
pub use std::{
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

#[cfg(not(feature = "loom"))]
pub use crossbeam_queue::ArrayQueue;

#[cfg(feature = "loom")]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

/// Crossbeam's queue as a model sees it, since loom does not see crossbeam's atomics: a lock orders the pop of a value
/// after its push.
#[cfg(feature = "loom")]
#[derive(Debug)]
pub struct ArrayQueue<T> {
    values: loom::sync::Mutex<std::collections::VecDeque<T>>,
    capacity: usize,
}

#[cfg(feature = "loom")]
impl<T> ArrayQueue<T> {
    /// An empty queue with room for `capacity` values.
    pub fn new(capacity: usize) -> Self {
        ArrayQueue {
            values: loom::sync::Mutex::default(),
            capacity,
        }
    }

    /// Appends a value.
    ///
    /// # Errors
    /// Hands the value back when the queue is full.
    pub fn push(&self, value: T) -> Result<(), T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        if values.len() == self.capacity {
            return Err(value);
        }
        values.push_back(value);
        Ok(())
    }

    /// Takes the oldest value.
    pub fn pop(&self) -> Option<T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        values.pop_front()
    }

    /// Values in it.
    pub fn len(&self) -> usize {
        let values = self.values.lock().expect("no thread panics with the lock");
        values.len()
    }

    /// Whether there is no value in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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

    /// Calls `f` with a pointer to read through.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Calls `f` with a pointer to write through.
    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

pub mod fault {
    //! Faults that the loom models put in to show that they would be found. Without the feature `loom` no
    //! fault can be put in, and the questions for one are compiled away.

    use super::Ordering;

    /// A mistake that a model has to find.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Fault {
        /// The sum tree forgets to add a change to one level.
        LostDelta,
        /// The sum tree makes a leaf live without publishing what was written before.
        RelaxedPublication,
        /// The sum tree stores a new priority where it has to compare and exchange.
        BlindUpdate,
        /// The slab looks at a slot, then counts the pin, where it has to do both at once.
        LateCount,
        /// A table writes an item's metadata without ordering them after the end of the slot's last item.
        UnorderedMetadata,
        /// A draw takes what it has pinned without asking whether the drawn item is still there.
        UnconfirmedPin,
        /// A draw is counted for whichever item has the slot now.
        ForeignClaim,
        /// A table offers a new item's draws without publishing its mass.
        EarlyDraws,
        /// A table looks for batches once, before the mass, where one may begin in between.
        OneLook,
    }

    /// `ordering`, or none at all if `fault` was put in.
    #[inline(always)]
    pub fn weakened(fault: Fault, ordering: Ordering) -> Ordering {
        if injected(fault) {
            Ordering::Relaxed
        } else {
            ordering
        }
    }

    /// Whether `fault` was put in.
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

        // Loom runs all threads of a model on the thread of its test, so tests beside it see nothing of this.
        thread_local!(static INJECTED: Cell<Option<Fault>> = const { Cell::new(None) });

        /// Whether `fault` was put in.
        pub fn injected(fault: Fault) -> bool {
            INJECTED.get() == Some(fault)
        }

        /// Puts a fault in, for the rest of the calling test.
        pub fn inject(fault: Fault) {
            INJECTED.set(Some(fault));
        }
    }
}

//! Atomics, locks, events and cells, from `std` and event-listener. With a cargo feature they come from a model checker:
//!
//! - `loom` runs a model under every interleaving and every value that weak memory allows. It is for the lock-free modules `sum_tree`,
//!   `slab` and `table::items`; the rest of the crate compiles with it, on std's locks.
//! - `shuttle` runs whole tables under random schedules, each atomic access being a point where another thread may go on. It takes all
//!   accesses as sequentially consistent.

#[cfg(feature = "shuttle")]
mod for_shuttle;

#[cfg(not(feature = "model"))]
pub use std::{
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

#[cfg(not(feature = "shuttle"))]
pub(crate) use {
    base::wait::lock,
    event_listener::{Event, EventListener, Listener},
    std::sync::atomic::{AtomicBool, AtomicUsize},
    std::sync::{Mutex, MutexGuard},
};

#[cfg(feature = "loom")]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

#[cfg(feature = "shuttle")]
pub use shuttle::{
    sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence},
    thread,
};

#[cfg(feature = "shuttle")]
pub(crate) use {
    for_shuttle::{Event, EventListener, Listener, lock},
    shuttle::sync::atomic::{AtomicBool, AtomicUsize},
    shuttle::sync::{Mutex, MutexGuard},
};

/// Whether a holder of the lock has panicked.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn is_poisoned<T>(mutex: &Mutex<T>) -> bool {
    mutex.is_poisoned()
}

/// Whether a holder of the lock has panicked: then shuttle has ended the test.
#[cfg(feature = "shuttle")]
pub(crate) fn is_poisoned<T>(_mutex: &Mutex<T>) -> bool {
    false
}

/// `std`'s cell behind loom's interface.
#[cfg(not(feature = "loom"))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "loom"))]
impl<T> UnsafeCell<T> {
    pub const fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

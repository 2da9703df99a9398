//! Locks whose data stay whole if a holder panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the mutex, also one that a panic has poisoned.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

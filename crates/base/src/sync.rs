//! Locks whose data stay whole if a holder panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, whoever panicked with it.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

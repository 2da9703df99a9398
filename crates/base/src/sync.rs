//! Mutex locking that ignores poisoning, for data that stay valid if a holder panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the mutex even if it is poisoned.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

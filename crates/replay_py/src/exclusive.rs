//! A mutex for values that a thread may hold during a blocking call: waiting for it respects the waiting thread's deadline and
//! Ctrl-C.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use base::sync::lock;
use base::wait::Wait;
use replay_link::error::{Error, Result};

/// A value that one thread uses at a time.
pub struct Exclusive<T> {
    /// Locked only by the owner of `taken`, so locking it never blocks.
    value: Mutex<T>,
    taken: Mutex<bool>,
    ended: Condvar,
    what: &'static str,
}

/// Exclusive use of the value, until dropped.
pub struct ExclusiveGuard<'a, T> {
    value: MutexGuard<'a, T>,
    _end: End<'a>,
}

/// Releases the value on drop. The last field of [`ExclusiveGuard`], so that it is dropped after the value's lock.
struct End<'a> {
    taken: &'a Mutex<bool>,
    ended: &'a Condvar,
}

impl<T> Exclusive<T> {
    /// A value that errors call `what`.
    pub fn new(what: &'static str, value: T) -> Self {
        Exclusive { value: Mutex::new(value), taken: Mutex::new(false), ended: Condvar::new(), what }
    }

    fn waited_for(&self) -> String {
        format!("another thread is using this {}", self.what)
    }

    /// Waits until no other thread has the value.
    ///
    /// # Errors
    /// [`Error::Deadline`] and [`Error::Interrupted`].
    pub fn take(&self, wait: &Wait<'_>) -> Result<ExclusiveGuard<'_, T>> {
        let mut slices = wait.slices(wait.deadline);
        while std::mem::replace(&mut *lock(&self.taken), true) {
            let now = Instant::now();
            if wait.deadline.is_some_and(|deadline| now >= deadline) {
                return Err(Error::deadline(self.waited_for()));
            }
            wait.report(now, Wait::REPORT_AFTER, || self.waited_for());
            // Before the lock: an interrupt check may wait for the interpreter lock.
            let slice = slices.next_wake(now)?.saturating_duration_since(now);
            let taken = lock(&self.taken);
            if *taken {
                drop(self.ended.wait_timeout(taken, slice));
            }
        }
        let end = End { taken: &self.taken, ended: &self.ended };
        Ok(ExclusiveGuard { value: lock(&self.value), _end: end })
    }
}

impl<T> Deref for ExclusiveGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ExclusiveGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        *lock(self.taken) = false;
        self.ended.notify_one();
    }
}

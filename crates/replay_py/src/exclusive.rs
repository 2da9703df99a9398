//! A mutex for values that a thread may hold during a blocking call: waiting for it respects the waiting thread's deadline and
//! Ctrl-C.

use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use base::wait::Wait;
use replay_link::error::{Error, Result};

/// A value that one thread uses at a time.
pub struct Exclusive<T> {
    value: Mutex<T>,
    what: &'static str,
}

impl<T> Exclusive<T> {
    /// A value that errors call `what`.
    pub fn new(what: &'static str, value: T) -> Self {
        Exclusive { value: Mutex::new(value), what }
    }

    /// Waits until no other thread has the value.
    ///
    /// # Errors
    /// [`Error::Deadline`] and [`Error::Interrupted`].
    pub fn take(&self, wait: &Wait<'_>) -> Result<MutexGuard<'_, T>> {
        let waited_for = || format!("another thread is using this {}", self.what);
        let mut slices = wait.slices(wait.deadline);
        let mut until = Instant::now();
        loop {
            if let Some(value) = self.value.try_lock_until(until) {
                return Ok(value);
            }
            let now = Instant::now();
            if wait.deadline.is_some_and(|deadline| now >= deadline) {
                return Err(Error::deadline(waited_for()));
            }
            wait.report(now, Wait::REPORT_AFTER, waited_for);
            until = slices.next_wake(now)?;
        }
    }
}

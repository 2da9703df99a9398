//! Blocking calls: their deadline, and the time slices in which they notice an interrupt.

use std::time::{Duration, Instant};

/// Deadline and interrupt of a blocking call.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// The call fails with [`Error::Deadline`](crate::Error::Deadline) after this instant; `None` waits for ever.
    pub deadline: Option<Instant>,
    /// Asked about ten times a second while blocked: `true` ends the call with
    /// [`Error::Interrupted`](crate::Error::Interrupted). Python passes its signal check.
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
}

impl Wait<'static> {
    /// Waits until `deadline`, and cannot be interrupted.
    pub fn until(deadline: Option<Instant>) -> Self {
        Wait {
            deadline,
            interrupted: &|| false,
        }
    }

    /// Waits for ever.
    pub fn forever() -> Self {
        Self::until(None)
    }
}

impl Wait<'_> {
    /// Length of a slice: how often a blocked call asks `interrupted`.
    pub const CHECK_EVERY: Duration = Duration::from_millis(100);

    /// Asks `interrupted`.
    ///
    /// # Errors
    /// [`Interrupted`] when it says so.
    pub fn check(&self) -> Result<(), Interrupted> {
        match (self.interrupted)() {
            true => Err(Interrupted),
            false => Ok(()),
        }
    }

    /// Slices of a call that blocks until `until`; `None` is for ever.
    pub fn slices(&self, until: Option<Instant>) -> Slices<'_> {
        Slices {
            wait: self,
            until,
            check: Instant::now() + Wait::CHECK_EVERY,
        }
    }
}

/// A signal that ended a blocked call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupted;

/// Time slices of a blocked call, which sleeps for one at a time.
pub struct Slices<'a> {
    wait: &'a Wait<'a>,
    until: Option<Instant>,
    /// The next interrupt check.
    check: Instant,
}

impl Slices<'_> {
    /// End of the slice at `now`: the next interrupt check, or the end of the call if that is earlier. Asks
    /// `interrupted` once a slice has ended: hold no lock that others wait for.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn next_wake(&mut self, now: Instant) -> Result<Instant, Interrupted> {
        if now >= self.check {
            self.wait.check()?;
            self.check = now + Wait::CHECK_EVERY;
        }
        Ok(self.until.map_or(self.check, |until| until.min(self.check)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_slice_ends_with_a_check_or_with_the_call() {
        let asked = AtomicU32::new(0);
        let second = || asked.fetch_add(1, Ordering::Relaxed) == 1;
        let wait = Wait {
            deadline: None,
            interrupted: &second,
        };
        let start = Instant::now();
        let end = start + Wait::CHECK_EVERY * 3;
        let mut slices = wait.slices(Some(end));
        let first = slices.next_wake(start).unwrap();
        assert!(first >= start + Wait::CHECK_EVERY && first < end);
        assert_eq!(asked.load(Ordering::Relaxed), 0);
        let late = first + Wait::CHECK_EVERY * 2;
        assert_eq!(slices.next_wake(late), Ok(end), "the call ends first");
        assert_eq!(slices.next_wake(late), Ok(end), "one check for each slice");
        assert_eq!(slices.next_wake(late + Wait::CHECK_EVERY), Err(Interrupted));
    }
}

//! Locks, and blocking calls: their deadline, the time slices in which they notice an interrupt, and the log line of a long wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::system;

/// Locks a mutex, also one whose holder panicked: for data that stay valid if a holder panics.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deadline, interrupt and log line of a blocking call.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// The call fails after this instant, with an error that says what it waited for; `None` waits for ever.
    pub deadline: Option<Instant>,
    /// Polled about ten times a second while blocked: `true` ends the call with [`Interrupted`]. Python checks signals.
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
    /// The call's log line, see [`Wait::report`]; `None` for a call that logs nothing.
    pub notice: Option<&'a WaitNotice<'a>>,
}

/// Advice from the caller, appended to the reason of a wait for writers of a table; the memory cannot know it.
pub type Advice<'a> = dyn Fn(&str) -> Option<String> + Sync + 'a;

/// The log line of one blocking call, which is written at most once.
#[derive(Default)]
pub struct WaitNotice<'a> {
    /// When the call was found blocked.
    since: OnceLock<Instant>,
    logged: AtomicBool,
    advice: Option<&'a Advice<'a>>,
    /// Table whose writers the call waits for, by the last reason of its wait.
    awaited: Mutex<Option<String>>,
}

impl<'a> WaitNotice<'a> {
    /// A notice whose line ends with this advice if the wait is for writers.
    pub fn advised(advice: &'a Advice<'a>) -> Self {
        WaitNotice { advice: Some(advice), ..WaitNotice::default() }
    }
}

impl Wait<'static> {
    /// Waits until `deadline`, and cannot be interrupted.
    pub fn until(deadline: Option<Instant>) -> Self {
        Wait { deadline, interrupted: &|| false, notice: None }
    }

    /// Waits for ever.
    pub fn forever() -> Self {
        Self::until(None)
    }
}

impl Wait<'_> {
    /// Length of a slice: the interval between checks of `interrupted`.
    pub const CHECK_EVERY: Duration = Duration::from_millis(100);

    /// Time after which a call logs the reason of its wait.
    pub const REPORT_AFTER: Duration = Duration::from_secs(5);

    /// Logs `reason` once per call, after it has been blocked for `after`. Call it in each slice while blocked: the first time
    /// starts the clock. Logging may block on Python's interpreter: hold no lock.
    pub fn report(&self, now: Instant, after: Duration, reason: impl FnOnce() -> String) {
        let Some(notice) = self.notice else { return };
        let waited = now.saturating_duration_since(*notice.since.get_or_init(|| now));
        // Relaxed: no other data is published with the flag, and one thread makes the call.
        if waited < after || notice.logged.swap(true, Ordering::Relaxed) {
            return;
        }
        let (waited, reason) = (waited.as_secs(), reason());
        match self.deadline {
            Some(deadline) => {
                let left = deadline.saturating_duration_since(now).as_secs_f64();
                tracing::warn!("still waiting after {waited} s, for up to {left:.0} s more: {reason}");
            }
            None => tracing::warn!("still waiting after {waited} s, without a timeout: {reason}"),
        }
    }

    /// Notes whether the call waits for writers of a table.
    pub fn awaits(&self, table: Option<&str>) {
        if let Some(notice) = self.notice {
            let mut awaited = lock(&notice.awaited);
            if awaited.as_deref() != table {
                *awaited = table.map(str::to_owned);
            }
        }
    }

    /// The table whose writers the call waits for, if it does.
    pub fn awaited(&self) -> Option<String> {
        lock(&self.notice?.awaited).clone()
    }

    /// Advice from the caller, for a wait for writers.
    pub fn advice(&self) -> Option<&Advice<'_>> {
        self.notice?.advice
    }

    /// Calls `interrupted`.
    ///
    /// # Errors
    /// [`Interrupted`] if it returns `true`.
    pub fn check(&self) -> Result<(), Interrupted> {
        match (self.interrupted)() {
            true => Err(Interrupted),
            false => Ok(()),
        }
    }

    /// Slices of a call that blocks until `until`; `None` is for ever.
    pub fn slices(&self, until: Option<Instant>) -> Slices<'_> {
        Slices { wait: self, until, check: system::now() + Wait::CHECK_EVERY }
    }
}

/// A signal that ended a blocked call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Time slices of a blocked call, which sleeps for one at a time.
pub struct Slices<'a> {
    wait: &'a Wait<'a>,
    until: Option<Instant>,
    /// The next interrupt check.
    check: Instant,
}

impl Slices<'_> {
    /// End of the slice at `now`: the next interrupt check, or the end of the call if that is earlier. Calls `interrupted` once
    /// a slice has ended: hold no lock that others wait for.
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
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn a_long_wait_is_reported_once() {
        let notice = WaitNotice::default();
        let wait = Wait { notice: Some(&notice), ..Wait::forever() };
        let start = Instant::now();
        let reported = AtomicU32::new(0);
        let blocked = |wait: &Wait<'_>, after: Duration| {
            wait.report(start + after, Wait::REPORT_AFTER, || {
                reported.fetch_add(1, Ordering::Relaxed);
                "more items".to_owned()
            });
            reported.load(Ordering::Relaxed)
        };
        for (after, times) in [(0, 0), (4_999, 0), (5_000, 1), (11_000, 1)] {
            assert_eq!(blocked(&wait, Duration::from_millis(after)), times, "{after} ms");
        }
        let silent = Wait::forever();
        assert_eq!(blocked(&silent, Duration::from_secs(60)), 1);
    }

    #[test]
    fn a_slice_ends_with_a_check_or_with_the_call() {
        let asked = AtomicU32::new(0);
        let second = || asked.fetch_add(1, Ordering::Relaxed) == 1;
        let wait = Wait { interrupted: &second, ..Wait::forever() };
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

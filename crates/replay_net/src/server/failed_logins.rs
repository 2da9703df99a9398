//! Warnings about clients that failed to log in, at a bounded rate.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use replay_core::error::Error;

/// Shortest time between two warnings: strangers must not fill the log.
const INTERVAL: Duration = Duration::from_secs(1);

/// The last warning, and the failures since.
#[derive(Default)]
pub struct FailedLogins(Mutex<Since>);

#[derive(Default)]
struct Since {
    warned: Option<Instant>,
    unreported: u64,
}

impl FailedLogins {
    /// Logs a failure by `peer` at `now`, or counts it for the next warning. Returns whether it was logged.
    pub fn report(&self, peer: &str, error: &Error, now: Instant) -> bool {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = |warned: Instant| now.saturating_duration_since(warned) < INTERVAL;
        if since.warned.is_some_and(recent) {
            since.unreported += 1;
            return false;
        }
        let unreported = std::mem::take(&mut since.unreported);
        since.warned = Some(now);
        drop(since);
        tracing::warn!(peer, %error, unreported, "a client failed to log in");
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_a_second_is_logged_and_the_others_are_counted() {
        let failed = FailedLogins::default();
        let error = Error::Authentication("as in the test".into());
        let start = Instant::now();
        let report = |after| failed.report("10.0.0.1:1", &error, start + after);
        assert!(report(Duration::ZERO));
        for _ in 0..3 {
            assert!(!report(INTERVAL / 2));
        }
        assert_eq!(failed.0.lock().unwrap().unreported, 3);
        assert!(report(INTERVAL));
        assert_eq!(failed.0.lock().unwrap().unreported, 0);
    }
}

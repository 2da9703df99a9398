//! Rate-limited log lines about unauthenticated clients.

use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::sync::lock;

/// Shortest time between two lines of one kind, so that unauthenticated clients cannot fill the log.
const INTERVAL: Duration = Duration::from_secs(1);

/// Kind of a line. Each has a limit of its own, so that none hides the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrangerEvent {
    /// A missing or wrong token, or TLS that failed.
    FailedLogin,
    /// A limit of connections.
    Refused,
    /// An invalid frame, or a handshake that took too long.
    Dropped,
    /// A connection that ended during its handshake.
    Left,
    /// A failed accept.
    NotAccepted,
    /// A broken connection of statistics over HTTP.
    Http,
}

/// Time of the last line of each kind, and the events since.
#[derive(Default)]
pub struct StrangerLog([Mutex<Since>; 6]);

#[derive(Default)]
struct Since {
    logged: Option<Instant>,
    unreported: u64,
}

impl StrangerLog {
    /// Logs an event of `peer` at `now`, or counts it for the next line of its kind. Returns whether it was logged.
    pub fn report(&self, event: StrangerEvent, peer: &str, error: &dyn Display, now: Instant) -> bool {
        let since = &self.0[event as usize];
        let mut since = lock(since);
        let recent = |logged: Instant| now.saturating_duration_since(logged) < INTERVAL;
        if since.logged.is_some_and(recent) {
            since.unreported += 1;
            return false;
        }
        let unreported = std::mem::take(&mut since.unreported);
        since.logged = Some(now);
        drop(since);
        match event {
            StrangerEvent::FailedLogin => tracing::warn!(peer, %error, unreported, "a client failed to log in"),
            StrangerEvent::Refused => tracing::warn!(peer, %error, unreported, "connection refused"),
            StrangerEvent::Dropped => {
                tracing::warn!(peer, %error, unreported, "connection dropped before its handshake")
            }
            StrangerEvent::Left => tracing::info!(peer, %error, unreported, "connection ended before its handshake"),
            StrangerEvent::NotAccepted => tracing::warn!(peer, %error, unreported, "accepting a connection failed"),
            StrangerEvent::Http => tracing::debug!(peer, %error, unreported, "HTTP connection broken"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_of_a_kind_is_logged_in_a_second_and_the_others_are_counted() {
        let log = StrangerLog::default();
        let start = Instant::now();
        let report = |event, after| log.report(event, "10.0.0.1:1", &"a guess", start + after);
        let unreported = |event| log.0[event as usize].lock().unwrap().unreported;
        assert!(report(StrangerEvent::FailedLogin, Duration::ZERO));
        for _ in 0..3 {
            assert!(!report(StrangerEvent::FailedLogin, INTERVAL / 2));
        }
        assert!(report(StrangerEvent::Http, INTERVAL / 2), "another kind");
        assert_eq!(unreported(StrangerEvent::FailedLogin), 3);
        assert!(report(StrangerEvent::FailedLogin, INTERVAL));
        assert_eq!(unreported(StrangerEvent::FailedLogin), 0);
    }
}

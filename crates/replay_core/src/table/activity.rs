//! Whether a writer is idle: its pushes, and the frames of its connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pushes of a writer, or frames of a connection, that wait.
#[derive(Debug)]
pub struct Activity {
    start: Instant,
    /// Milliseconds from `start` to the last attempt at a push, or to the end of the last wait.
    used: AtomicU64,
    /// Pushes or frames that wait.
    waiting: AtomicUsize,
    ended: AtomicBool,
}

impl Activity {
    /// Nothing waits; used at the time `now`.
    pub fn new(now: Instant) -> Arc<Self> {
        Arc::new(Activity {
            start: now,
            used: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        })
    }

    /// The connection has ended at the time `now`.
    pub fn end(&self, now: Instant) {
        self.touch(now);
        // Relaxed, as the load in `has_ended`: a writer that is looked at meanwhile expires a moment later.
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Used at the time `now`.
    pub fn touch(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.start).as_millis();
        let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
        // Relaxed: under the lock of the entries, or before the release of `waiting`.
        self.used.store(elapsed, Ordering::Relaxed);
    }

    /// A push or a frame waits, until the returned value is dropped.
    pub fn wait(self: &Arc<Self>) -> Waiting {
        // Relaxed: an attempt at a push has just set `used`, so that the writer is not idle either way. A frame that begins to
        // wait at the instant when its writer expires is one that came too late.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self.clone())
    }

    /// Time of the last use; `None` while a push or a frame waits.
    pub fn idle_since(&self) -> Option<Instant> {
        // Acquire: pairs with the release in `Waiting::drop`, after which `used` is the end of the wait.
        let waits = self.waiting.load(Ordering::Acquire) > 0;
        (!waits).then(|| self.start + Duration::from_millis(self.used.load(Ordering::Relaxed)))
    }
}

/// A push or a frame that waits: its writer is not idle.
pub struct Waiting(Arc<Activity>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.touch(Instant::now());
        // Release: pairs with the acquire in `Activity::idle_since`.
        self.0.waiting.fetch_sub(1, Ordering::Release);
    }
}

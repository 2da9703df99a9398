//! Idle detection of writers, by their pushes and the frames of their connections.

use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use base::host;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Last use and number of waiting pushes of a writer, or of waiting frames of a connection.
#[derive(Debug)]
pub struct Activity {
    start: Instant,
    /// Milliseconds from `start` to the last attempt at a push, or to the end of the last wait.
    used: AtomicU64,
    /// Milliseconds from `start` to the last push that was applied; [`u64::MAX`] before the first.
    pushed: AtomicU64,
    /// Pushes or frames that wait.
    waiting: AtomicUsize,
    ended: AtomicBool,
}

impl Activity {
    /// An activity used at `now`, without waiting pushes or frames.
    pub fn new(now: Instant) -> Arc<Self> {
        Arc::new(Activity {
            start: now,
            used: AtomicU64::new(0),
            pushed: AtomicU64::new(u64::MAX),
            waiting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        })
    }

    /// Records at `now` that the connection has ended.
    pub fn end(&self, now: Instant) {
        self.touch(now);
        // Relaxed, as the load in `has_ended`: after a concurrent check the writer expires a moment later.
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Records a use at `now`.
    pub fn touch(&self, now: Instant) {
        // Relaxed: under the lock of the entries, or before the release of `waiting`.
        self.used.store(self.elapsed(now), Ordering::Relaxed);
    }

    /// Records that a push is applied at `now`.
    pub fn push(&self, now: Instant) {
        // Relaxed, as the load in `last_push`: a statistic.
        self.pushed.store(self.elapsed(now), Ordering::Relaxed);
    }

    /// Time of the last push that was applied.
    pub fn last_push(&self) -> Option<Instant> {
        let pushed = Some(self.pushed.load(Ordering::Relaxed)).filter(|&pushed| pushed < u64::MAX);
        pushed.map(|pushed| self.start + Duration::from_millis(pushed))
    }

    fn elapsed(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX)
    }

    /// Counts a push or a frame as waiting until the returned guard is dropped.
    pub fn wait(self: &Arc<Self>) -> Waiting {
        // Relaxed: an attempt at a push has just set `used`, so that the writer is not idle either way. A frame that starts to
        // wait just as its writer expires is too late.
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

/// Guard of a waiting push or frame, whose writer is not idle.
pub struct Waiting(Arc<Activity>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.touch(host::now());
        // Release: pairs with the acquire in `Activity::idle_since`.
        self.0.waiting.fetch_sub(1, Ordering::Release);
    }
}

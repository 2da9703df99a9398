//! What shuttle lacks: events as event-listener has them.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use shuttle::sync::{Condvar, Mutex, MutexGuard};

/// Locks the mutex even if it is poisoned.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Notifications {
    count: Mutex<u64>,
    rises: Condvar,
}

#[derive(Default)]
pub struct Event(Arc<Notifications>);

impl Event {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn listen(&self) -> EventListener {
        EventListener { seen: *lock(&self.0.count), event: self.0.clone() }
    }

    /// Notifies all listeners: the crate never notifies fewer.
    pub fn notify(&self, listeners: usize) {
        assert_eq!(listeners, usize::MAX);
        *lock(&self.0.count) += 1;
        self.0.rises.notify_all();
    }
}

/// Completes when its event is notified.
pub struct EventListener {
    event: Arc<Notifications>,
    seen: u64,
}

/// Blocking waits.
pub trait Listener {
    /// Returns at the first notification. There is no time in a schedule, so that a wait whose notification is lost never ends, and
    /// shuttle reports it as a deadlock.
    fn wait_deadline(self, deadline: Instant) -> Option<()>;
}

impl Listener for EventListener {
    fn wait_deadline(self, _deadline: Instant) -> Option<()> {
        let mut count = lock(&self.event.count);
        while *count == self.seen {
            count = self.event.rises.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        Some(())
    }
}

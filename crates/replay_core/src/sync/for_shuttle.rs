//! What shuttle lacks: events as event-listener has them.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use shuttle::sync::{Condvar, Mutex, MutexGuard};

/// Locks the mutex even if it is poisoned.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notifies its listeners. The pair is the number of notifications so far, and a condition for the next one.
#[derive(Default)]
pub struct Event(Arc<(Mutex<u64>, Condvar)>);

impl Event {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn listen(&self) -> EventListener {
        EventListener { seen: *lock(&self.0.0), event: self.0.clone() }
    }

    /// Notifies all listeners: the crate never notifies fewer.
    pub fn notify(&self, listeners: usize) {
        assert_eq!(listeners, usize::MAX);
        *lock(&self.0.0) += 1;
        self.0.1.notify_all();
    }
}

/// Completes when its event is notified.
pub struct EventListener {
    event: Arc<(Mutex<u64>, Condvar)>,
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
        let (count, rises) = &*self.event;
        drop(rises.wait_while(lock(count), |count| *count == self.seen).unwrap_or_else(PoisonError::into_inner));
        Some(())
    }
}

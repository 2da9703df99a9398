//! Memory for replies that clients have not read yet: rows copied for samples, statistics, versions of parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_listener::{Event, EventListener};

/// Bytes of unread replies of all connections of a server. A full budget stops further samples and parameters; a reply that
/// exists is always counted, so each I/O thread may exceed the limit by one reply.
pub struct ReplyBudget {
    limit: u64,
    held: AtomicU64,
    freed: Event,
}

/// Bytes of one reply, returned when dropped.
pub struct ReplyShare {
    budget: Arc<ReplyBudget>,
    bytes: u64,
}

impl ReplyBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(ReplyBudget {
            limit,
            held: AtomicU64::new(0),
            freed: Event::new(),
        })
    }

    /// Counts a reply.
    pub fn hold(self: &Arc<Self>, bytes: u64) -> ReplyShare {
        // A count: no data is published with it.
        self.held.fetch_add(bytes, Ordering::Relaxed);
        ReplyShare {
            budget: Arc::clone(self),
            bytes,
        }
    }

    /// Bytes of unread replies.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether the limit is reached.
    pub fn is_full(&self) -> bool {
        self.held() >= self.limit
    }

    /// Listens for the next reply that a client has read.
    pub fn freed(&self) -> EventListener {
        self.freed.listen()
    }
}

impl Drop for ReplyShare {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget.freed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_reply_that_was_read_makes_room_and_says_so() {
        let budget = ReplyBudget::new(100);
        let first = budget.hold(60);
        assert!(!budget.is_full());
        let second = budget.hold(60);
        assert!(budget.is_full());
        let mut freed = budget.freed();
        assert!((&mut freed).now_or_never().is_none());
        drop(first);
        assert!(freed.now_or_never().is_some());
        assert_eq!((budget.held(), budget.is_full()), (60, false));
        drop(second);
        assert_eq!(budget.held(), 0);
    }
}

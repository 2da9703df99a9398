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

    /// Whether there is room for another reply. A caller that finds room wakes the next listener: so a release wakes as many
    /// listeners as fit, and not all.
    pub fn has_room(&self) -> bool {
        let has_room = self.held() < self.limit;
        if has_room {
            self.freed.notify(1);
        }
        has_room
    }

    /// Listens for room. Callers ask `has_room` again after this call: room that came before it wakes nobody. A listener
    /// that was woken and is dropped passes that on to the next.
    pub fn freed(&self) -> EventListener {
        self.freed.listen()
    }
}

impl Drop for ReplyShare {
    fn drop(&mut self) {
        let before = self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
        if before - self.bytes < self.budget.limit {
            self.budget.freed.notify(1);
        }
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
        assert!(budget.has_room());
        let second = budget.hold(60);
        assert!(!budget.has_room());
        let mut freed = budget.freed();
        assert!((&mut freed).now_or_never().is_none());
        drop(first);
        assert!(freed.now_or_never().is_some());
        assert_eq!((budget.held(), budget.has_room()), (60, true));
        drop(second);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_reply_that_was_read_wakes_only_who_fits() {
        let budget = ReplyBudget::new(100);
        let (small, large) = (budget.hold(10), budget.hold(150));
        let mut waiting: Vec<_> = (0..5).map(|_| budget.freed()).collect();
        let woken = |waiting: &mut Vec<EventListener>| {
            let before = waiting.len();
            waiting.retain_mut(|one| one.now_or_never().is_none());
            before - waiting.len()
        };
        drop(small);
        assert_eq!(woken(&mut waiting), 0, "the limit is still reached");
        drop(large);
        for _ in 0..2 {
            assert_eq!(woken(&mut waiting), 1);
            assert!(budget.has_room());
            std::mem::forget(budget.hold(50));
        }
        assert_eq!(woken(&mut waiting), 1);
        assert!(!budget.has_room());
        assert_eq!(woken(&mut waiting), 0);
    }

    #[test]
    fn who_was_woken_and_is_gone_leaves_its_turn_to_the_next() {
        let budget = ReplyBudget::new(100);
        let full = budget.hold(100);
        let [gone, next] = [budget.freed(), budget.freed()];
        drop(full);
        drop(gone);
        assert!(next.now_or_never().is_some());
    }
}

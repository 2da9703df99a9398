//! Memory for replies that clients have not read yet: rows copied for samples, statistics, versions of parameters.
//!
//! Each role has a [`ReplyBudget`] of its own, so actors cannot take what learners and operators need. A full budget stops
//! further large replies of its role. While one waits for room, readers of the role that do not take their replies are
//! dropped, one at a time.
//!
//! # Invariant
//!
//! Unread replies have a budget for each role; a connection has at most a quarter of it (or one reply). A shared
//! buffer counts once. Readers that stall while others wait for room are closed.

mod reader;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::sync::lock;

use bytes::Bytes;
use event_listener::{Event, EventListener};

use replay_wire::role::Role;

pub use reader::{LargeReply, NoRoom, Reader, ReplyShare};

/// The budgets of a server.
pub struct ReplyBudgets([Arc<ReplyBudget>; 3]);

impl ReplyBudgets {
    /// Budgets of `bytes` together, in equal parts for `roles` roles that clients can have.
    pub fn new(bytes: u64, roles: usize) -> Self {
        let limit = bytes / (roles.max(1) as u64);
        ReplyBudgets([(); 3].map(|()| ReplyBudget::new(limit)))
    }

    /// The budget of a role.
    pub fn of(&self, role: Role) -> &Arc<ReplyBudget> {
        &self.0[role as usize]
    }

    /// Bytes of unread replies.
    pub fn held(&self) -> u64 {
        self.0.iter().map(|budget| budget.held()).sum()
    }
}

/// Bytes of the unread replies of one role. A reply that exists is always counted, so each I/O thread may exceed the limit
/// by one reply.
pub struct ReplyBudget {
    limit: u64,
    /// A count: no data is published with it. Events fence: who listens and then finds no room is notified of what is
    /// released after that.
    held: AtomicU64,
    /// Buffers that several replies may share, by their address, and the number of these replies.
    shared: Mutex<HashMap<usize, usize>>,
    /// Notified when there is room.
    freed: Event,
    /// Notified when a reply finds no room. Its listeners are the stalled readers, in the order in which they stalled.
    needed: Event,
}

impl ReplyBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(ReplyBudget {
            limit,
            held: AtomicU64::new(0),
            shared: Mutex::default(),
            freed: Event::new(),
            needed: Event::new(),
        })
    }

    /// The limit of [`Self::held`].
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of unread replies; a buffer that several of them share counts once.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether there is room for another reply.
    pub fn has_room(&self) -> bool {
        self.held() < self.limit
    }

    /// Whether `buffer` counts already, because an unread reply has it.
    pub fn counts(&self, buffer: &Bytes) -> bool {
        lock(&self.shared).contains_key(&address(buffer))
    }

    /// Completes when a reply finds no room. Callers are stalled readers, which then end.
    pub async fn needed(&self) {
        loop {
            let needed = self.needed.listen();
            // Who began to wait before this call has notified others.
            if self.waits_for_room() {
                return;
            }
            needed.await;
            if !self.has_room() {
                return;
            }
        }
    }

    /// Listens for room. Callers look for room again after this call, and call [`Self::pass_on`] when they were notified and
    /// take none: one listener at a time is notified, and a reply that is counted notifies the next.
    fn freed(&self) -> EventListener {
        self.freed.listen()
    }

    /// Notifies the next listener, if there is room.
    pub fn pass_on(&self) {
        if self.has_room() {
            self.freed.notify(1);
        }
    }

    /// Notifies the reader that has been stalled longest.
    pub fn press(&self) {
        self.needed.notify(1);
    }

    fn waits_for_room(&self) -> bool {
        !self.has_room() && self.freed.total_listeners() > 0
    }

    /// After a change of `held`.
    fn changed(&self) {
        if self.has_room() {
            self.freed.notify(1);
        } else if self.freed.total_listeners() > 0 {
            self.press();
        }
    }

    /// Counts a reply of `bytes` and a `shared` buffer, which is empty if there is none.
    fn hold(&self, bytes: u64, shared: &Bytes) {
        let mut counted = bytes;
        let mut first = false;
        if !shared.is_empty() {
            let mut buffers = lock(&self.shared);
            let replies = buffers.entry(address(shared)).or_default();
            first = *replies == 0;
            *replies += 1;
            if first {
                counted += shared.len() as u64;
            }
        }
        self.held.fetch_add(counted, Ordering::Relaxed);
        if first {
            // Replies that wait for room may share this buffer.
            self.freed.notify(usize::MAX);
        }
        self.changed();
    }

    fn release(&self, bytes: u64, shared: &Bytes) {
        let mut counted = bytes;
        if !shared.is_empty() {
            let mut buffers = lock(&self.shared);
            match buffers.get_mut(&address(shared)) {
                Some(replies) if *replies > 1 => *replies -= 1,
                _ => {
                    buffers.remove(&address(shared));
                    counted += shared.len() as u64;
                }
            }
        }
        self.held.fetch_sub(counted, Ordering::Relaxed);
        self.changed();
    }
}

/// Identifies a buffer for as long as somebody holds it.
fn address(buffer: &Bytes) -> usize {
    buffer.as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    fn none() -> Bytes {
        Bytes::new()
    }

    #[test]
    fn each_role_has_its_part() {
        let budgets = ReplyBudgets::new(300, 3);
        budgets.of(Role::Actor).hold(100, &none());
        assert!(!budgets.of(Role::Actor).has_room());
        for role in [Role::Learner, Role::Operator] {
            budgets.of(role).hold(99, &none());
            assert!(budgets.of(role).has_room());
        }
        assert_eq!(budgets.held(), 298);
        assert_eq!(ReplyBudgets::new(300, 0).of(Role::Operator).limit(), 300);
    }

    #[test]
    fn a_shared_buffer_counts_while_any_reply_has_it() {
        let budget = ReplyBudget::new(100);
        let [version, next] = [Bytes::from(vec![1; 60]), Bytes::from(vec![1; 60])];
        budget.hold(1, &version);
        budget.hold(1, &version.clone());
        assert_eq!((budget.held(), budget.has_room()), (62, true));
        assert!(budget.counts(&version) && !budget.counts(&next));
        budget.hold(1, &next);
        assert_eq!(budget.held(), 123);
        budget.release(1, &version);
        assert_eq!(budget.held(), 122);
        budget.release(1, &version);
        assert_eq!((budget.held(), budget.counts(&version)), (61, false));
        budget.release(1, &next);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_reply_that_was_read_wakes_only_who_fits() {
        let budget = ReplyBudget::new(100);
        budget.hold(10, &none());
        budget.hold(150, &none());
        let mut waiting: Vec<_> = (0..5).map(|_| budget.freed()).collect();
        let woken = |waiting: &mut Vec<EventListener>| {
            let before = waiting.len();
            waiting.retain_mut(|one| one.now_or_never().is_none());
            before - waiting.len()
        };
        budget.release(10, &none());
        assert_eq!(woken(&mut waiting), 0, "the limit is still reached");
        budget.release(150, &none());
        for _ in 0..2 {
            assert_eq!(woken(&mut waiting), 1);
            budget.hold(40, &none());
        }
        assert_eq!(woken(&mut waiting), 1, "there is room for one more");
        budget.hold(40, &none());
        assert_eq!(woken(&mut waiting), 0);
    }

    #[test]
    fn who_was_woken_and_is_gone_leaves_its_turn_to_the_next() {
        let budget = ReplyBudget::new(100);
        budget.hold(100, &none());
        let [gone, next] = [budget.freed(), budget.freed()];
        budget.release(100, &none());
        drop(gone);
        assert!(next.now_or_never().is_some());
    }

    #[test]
    fn the_reader_that_stalled_first_ends_first_and_only_if_somebody_waits() {
        let budget = ReplyBudget::new(100);
        budget.hold(100, &none());
        budget.hold(100, &none());
        let (mut first, mut second) = (pin!(budget.needed()), pin!(budget.needed()));
        assert!(first.as_mut().now_or_never().is_none());
        assert!(second.as_mut().now_or_never().is_none());
        let waiting = budget.freed();
        budget.press();
        assert!(second.as_mut().now_or_never().is_none());
        assert!(first.now_or_never().is_some());
        // Its replies made too little room.
        budget.release(100, &none());
        assert!(second.now_or_never().is_some());
        // One that stalls while another waits.
        assert!(budget.needed().now_or_never().is_some());
        budget.release(100, &none());
        assert!(budget.needed().now_or_never().is_none());
        assert!(waiting.now_or_never().is_some());
    }
}

//! Memory for replies that clients have not read yet: rows copied for samples, statistics, versions of parameters.
//!
//! Each role has its own [`ReplyBudget`], so actors cannot take memory from learners and operators. A full budget blocks further large
//! replies of its role. While one is blocked, stalled readers of the role are disconnected, one at a time.
//!
//! # Invariant
//!
//! Unread replies have a budget for each role; a connection has at most a quarter of it (or one reply). A shared buffer counts once.
//! Stalled readers are disconnected while others wait for memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use event_listener::{Event, EventListener};

use base::wait::lock;
use replay_wire::Role;

/// The budgets of a server.
pub struct ReplyBudgets([Arc<ReplyBudget>; 3]);

impl ReplyBudgets {
    /// Splits `bytes` equally among `roles` roles.
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

/// Budget for the unread replies of one role. A finished reply is always counted, so each I/O thread may exceed the limit by one reply.
pub struct ReplyBudget {
    limit: u64,
    /// Relaxed: a count that publishes no other data. No wake-up is lost: a caller registers with `freed` or `needed` before it reads the
    /// count, and events fence.
    held: AtomicU64,
    /// Reference counts of shared buffers, by address: the number of unread replies with the buffer.
    shared: Mutex<HashMap<usize, usize>>,
    /// Notified when memory is released.
    freed: Event,
    /// Notified when a reply is blocked. Listeners are stalled readers, in the order in which they stalled.
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

    /// Whether another reply fits.
    pub fn has_room(&self) -> bool {
        self.held() < self.limit
    }

    /// Whether `buffer` is counted already, because another unread reply shares it.
    pub fn counts(&self, buffer: &Bytes) -> bool {
        lock(&self.shared).contains_key(&address(buffer))
    }

    /// Completes when a reply is blocked. A stalled reader awaits this, and then disconnects.
    pub async fn needed(&self) {
        loop {
            let needed = self.needed.listen();
            // A reply that was blocked before this call has notified other listeners only.
            if self.waits_for_room() {
                return;
            }
            needed.await;
            if !self.has_room() {
                return;
            }
        }
    }

    /// Listens for released memory. Callers check again after this call. A notified caller that uses no memory calls [`Self::pass_on`]:
    /// only one listener is notified at a time, and a counted reply notifies the next.
    fn freed(&self) -> EventListener {
        self.freed.listen()
    }

    /// Notifies the next listener if memory is free.
    pub fn pass_on(&self) {
        if self.has_room() {
            self.freed.notify(1);
        }
    }

    /// Notifies the longest stalled reader.
    pub fn press(&self) {
        self.needed.notify(1);
    }

    fn waits_for_room(&self) -> bool {
        !self.has_room() && self.freed.total_listeners() > 0
    }

    /// Notifies listeners after a change of `held`.
    fn changed(&self) {
        if self.has_room() {
            self.freed.notify(1);
        } else if self.freed.total_listeners() > 0 {
            self.press();
        }
    }

    /// Counts a reply of `bytes`, and `shared` unless it is empty.
    fn hold(&self, bytes: u64, shared: &Bytes) {
        let first = !shared.is_empty() && {
            let mut buffers = lock(&self.shared);
            let replies = buffers.entry(address(shared)).or_default();
            *replies += 1;
            *replies == 1
        };
        let counted = bytes + if first { shared.len() as u64 } else { 0 };
        self.held.fetch_add(counted, Ordering::Relaxed);
        if first {
            // Blocked replies may share this buffer, which is now counted.
            self.freed.notify(usize::MAX);
        }
        self.changed();
    }

    fn release(&self, bytes: u64, shared: &Bytes) {
        let last = !shared.is_empty() && {
            let mut buffers = lock(&self.shared);
            let left = buffers.remove(&address(shared)).map_or(0, |replies| replies - 1);
            if left > 0 {
                buffers.insert(address(shared), left);
            }
            left == 0
        };
        let counted = bytes + if last { shared.len() as u64 } else { 0 };
        self.held.fetch_sub(counted, Ordering::Relaxed);
        self.changed();
    }
}

/// Key of a buffer, unique while the buffer is alive.
fn address(buffer: &Bytes) -> usize {
    buffer.as_ptr() as usize
}

/// Divisor of the role's budget: one connection holds at most this fraction, so that several have memory.
const PARTS: u64 = 4;

/// Unread bytes up to which a connection gets reports although the budget is full, so that an operator can see the cause.
const REPORTS: u64 = 64 << 10;

/// A large reply, by its memory use.
#[derive(Debug, Clone)]
pub enum LargeReply {
    /// Newly allocated memory.
    Copy,
    /// A buffer that the replay memory holds anyway.
    Shared(Bytes),
    /// A few kilobytes: statistics, a list.
    Report,
}

/// Reason for which a reply is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoom {
    /// Limit of the connection, with its unread bytes.
    Own(u64),
    /// Limit of the role, with its unread bytes.
    Role(u64),
}

/// The unread replies of one connection.
pub struct UnreadReplies {
    budget: Arc<ReplyBudget>,
    limit: u64,
    held: Cell<u64>,
    /// Notified when the client has read a reply.
    freed: Event,
    /// Held by the connection's request that waits for memory, so that its other requests queue and connections take turns.
    line: tokio::sync::Mutex<()>,
}

/// Bytes of one reply, returned when dropped.
pub struct ReplyShare {
    unread: Rc<UnreadReplies>,
    bytes: u64,
    shared: Bytes,
}

impl UnreadReplies {
    /// A connection whose replies count in `budget`.
    pub fn new(budget: &Arc<ReplyBudget>) -> Rc<Self> {
        Rc::new(UnreadReplies {
            limit: (budget.limit() / PARTS).max(1),
            budget: Arc::clone(budget),
            held: Cell::new(0),
            freed: Event::new(),
            line: tokio::sync::Mutex::new(()),
        })
    }

    /// The budget of its role.
    pub fn budget(&self) -> &ReplyBudget {
        &self.budget
    }

    /// Counts a reply of `bytes`, which include the `shared` buffer unless it is empty.
    pub fn hold(self: &Rc<Self>, bytes: u64, shared: Bytes) -> ReplyShare {
        let alone = bytes.saturating_sub(shared.len() as u64);
        self.held.set(self.held.get() + bytes);
        self.budget.hold(alone, &shared);
        ReplyShare { unread: Rc::clone(self), bytes, shared }
    }

    /// Checks that `reply` may be built now.
    ///
    /// # Errors
    /// The limit that blocks it: wait with [`Self::room`].
    pub fn check(&self, reply: &LargeReply) -> Result<(), NoRoom> {
        let held = self.held.get();
        if held >= self.limit {
            return Err(NoRoom::Own(held));
        }
        let fits = self.budget.has_room()
            || match reply {
                LargeReply::Copy => false,
                LargeReply::Shared(buffer) => self.budget.counts(buffer),
                LargeReply::Report => held < REPORTS,
            };
        if fits { Ok(()) } else { Err(NoRoom::Role(self.budget.held())) }
    }

    /// Waits until `check` succeeds. While the role's budget is full, stalled readers are disconnected.
    pub async fn room(&self, check: impl Fn() -> Result<(), NoRoom>) {
        let _first = self.line.lock().await;
        let mut place = None;
        loop {
            let own = self.freed.listen();
            // Registered before the check, so that no later change is missed.
            place.get_or_insert_with(|| self.budget.freed());
            match check() {
                Ok(()) => return,
                Err(NoRoom::Own(_)) => {
                    place = None;
                    own.await;
                }
                Err(NoRoom::Role(_)) => {
                    self.budget.press();
                    let Some(freed) = &mut place else { continue };
                    tokio::select! {
                        biased;
                        () = freed => {
                            place = None;
                            if check().is_ok() {
                                return;
                            }
                            self.budget.pass_on();
                        }
                        () = own => {}
                    }
                }
            }
        }
    }
}

impl Drop for ReplyShare {
    fn drop(&mut self) {
        base::planted!(KeptReply => return);
        let unread = &self.unread;
        unread.held.set(unread.held.get() - self.bytes);
        unread.freed.notify(1);
        let alone = self.bytes.saturating_sub(self.shared.len() as u64);
        unread.budget.release(alone, &self.shared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::pin::pin;

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
        // The first reader's replies released too little memory.
        budget.release(100, &none());
        assert!(second.now_or_never().is_some());
        // A reader that stalls while a reply is blocked ends at once.
        assert!(budget.needed().now_or_never().is_some());
        budget.release(100, &none());
        assert!(budget.needed().now_or_never().is_none());
        assert!(waiting.now_or_never().is_some());
    }
}

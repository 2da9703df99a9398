//! The unread replies of one connection.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use event_listener::Event;
use tokio::sync::Mutex;

use super::ReplyBudget;

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

/// A connection that reads its replies.
pub struct Reader {
    budget: Arc<ReplyBudget>,
    limit: u64,
    held: Cell<u64>,
    /// Notified when the client has read a reply.
    freed: Event,
    /// Held by the connection's request that waits for memory, so that its other requests queue and connections take turns.
    line: Mutex<()>,
}

/// Bytes of one reply, returned when dropped.
pub struct ReplyShare {
    reader: Rc<Reader>,
    bytes: u64,
    shared: Bytes,
}

impl Reader {
    /// A connection whose replies count in `budget`.
    pub fn new(budget: &Arc<ReplyBudget>) -> Rc<Self> {
        Rc::new(Reader {
            limit: (budget.limit() / PARTS).max(1),
            budget: Arc::clone(budget),
            held: Cell::new(0),
            freed: Event::new(),
            line: Mutex::new(()),
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
        ReplyShare { reader: Rc::clone(self), bytes, shared }
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
        let reader = &self.reader;
        reader.held.set(reader.held.get() - self.bytes);
        reader.freed.notify(1);
        let alone = self.bytes.saturating_sub(self.shared.len() as u64);
        reader.budget.release(alone, &self.shared);
    }
}

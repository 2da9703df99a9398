//! The unread replies of one connection.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use event_listener::Event;
use tokio::sync::Mutex;

use super::ReplyBudget;

/// Part of its role's budget from which on one connection waits for itself: so there is room for several.
const PARTS: u64 = 4;

/// Unread bytes of a connection up to which its reports are made even if the budget is full: an operator sees what fills it.
const REPORTS: u64 = 64 << 10;

/// A large reply, by what it takes.
#[derive(Debug, Clone)]
pub enum LargeReply {
    /// Memory of its own.
    Copy,
    /// A buffer of the memory.
    Shared(Bytes),
    /// A few kilobytes: statistics, a list.
    Report,
}

/// Why a reply is not made yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoom {
    /// The connection has this many unread bytes.
    Own(u64),
    /// The connections of its role have this many.
    Role(u64),
}

/// A connection that reads its replies.
pub struct Reader {
    budget: Arc<ReplyBudget>,
    limit: u64,
    held: Cell<u64>,
    /// Notified when the client has read a reply.
    freed: Event,
    /// The connection's request that waits for room; others wait for it. So connections take turns.
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

    /// Counts a reply of `bytes`, of which the `shared` buffer of the memory is a part; it may be empty.
    pub fn hold(self: &Rc<Self>, bytes: u64, shared: Bytes) -> ReplyShare {
        let alone = bytes.saturating_sub(shared.len() as u64);
        self.held.set(self.held.get() + bytes);
        self.budget.hold(alone, &shared);
        ReplyShare {
            reader: Rc::clone(self),
            bytes,
            shared,
        }
    }

    /// Whether `reply` may be made.
    ///
    /// # Errors
    /// What it waits for. [`Self::room`] waits.
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
        match fits {
            true => Ok(()),
            false => Err(NoRoom::Role(self.budget.held())),
        }
    }

    /// Waits until `check` finds room. While its role has none, readers that are stalled are dropped.
    pub async fn room(&self, check: impl Fn() -> Result<(), NoRoom>) {
        let _first = self.line.lock().await;
        let mut place = None;
        loop {
            let own = self.freed.listen();
            // Before the check, so that no change after it is missed.
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
        let reader = &self.reader;
        reader.held.set(reader.held.get() - self.bytes);
        reader.freed.notify(1);
        let alone = self.bytes.saturating_sub(self.shared.len() as u64);
        reader.budget.release(alone, &self.shared);
    }
}

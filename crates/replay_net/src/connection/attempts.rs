//! Attempts at the requests of one connection, with room for its replies, and its sessions with extensions.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use event_listener::EventListener;
use futures_util::FutureExt;
use tokio::sync::watch;

use super::Phase;
use crate::error::Result;
use crate::extension::Session;
use crate::reply_budget::{NoRoom, Reader};
use crate::service::Service;
use replay_core::cause::WaitReason;
use replay_core::table::{Attempt, Turn};
use replay_wire::{Extension, ReplyBody, RequestBody};

/// Requests of one connection, and its unread replies.
pub struct Attempts<'a> {
    service: &'a Service,
    reader: Rc<Reader>,
    phase: watch::Receiver<Phase>,
    /// Sessions with extensions, by their names.
    sessions: RefCell<Vec<(&'static str, Box<dyn Session>)>>,
}

impl<'a> Attempts<'a> {
    /// A connection without sessions.
    pub fn new(service: &'a Service, reader: Rc<Reader>, phase: watch::Receiver<Phase>) -> Self {
        Attempts {
            service,
            reader,
            phase,
            sessions: RefCell::default(),
        }
    }

    /// [`Service::attempt`] for this connection, which is blocked also while clients do not read their replies.
    ///
    /// # Errors
    /// Any. The error is the request's answer.
    pub fn attempt(
        &self,
        request: &RequestBody,
        last: bool,
        turn: &mut Turn,
    ) -> Result<Attempt<ReplyBody>> {
        if let RequestBody::Extension(Extension { name, message }) = request {
            let attempt = self.with_session(name, |session| session.attempt(message))??;
            let name = name.clone();
            return Ok(attempt.map(|message| ReplyBody::Extension(Extension { name, message })));
        }
        let attempt = match self.check_room(request) {
            Err(full) => {
                // Calls behind it in its table's line do not wait for its client to read.
                turn.give_up_place();
                if matches!(full, NoRoom::Role(_)) {
                    self.reader.budget().press();
                }
                Attempt::Blocked(full.into())
            }
            Ok(()) => self.service.attempt(request, last, turn)?,
        };
        if turn.waits() {
            // It takes no room yet.
            self.reader.budget().pass_on();
        }
        Ok(attempt)
    }

    /// Completes after the next change that may unblock a request that was blocked. What this connection waits for is listened
    /// for from now on.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::error::Error::Internal) for a request that never blocks.
    pub fn changed<'r>(
        &'r self,
        request: &'r RequestBody,
        turn: &Turn,
    ) -> Result<impl Future<Output = ()> + use<'r, 'a>> {
        if Self::waits_for_readers(request, turn) {
            return Ok(self.reader.room(|| self.check_room(request)).right_future());
        }
        let changed: EventListener = match request {
            RequestBody::Extension(Extension { name, .. }) => {
                self.with_session(name, |session| session.changed())?
            }
            _ => turn.changed()?,
        };
        Ok(changed.left_future())
    }

    /// Whether a request that was blocked waits for nothing of a table, but for clients to read their replies.
    pub fn waits_for_readers(request: &RequestBody, turn: &Turn) -> bool {
        request.has_large_reply() && !turn.waits()
    }

    fn check_room(&self, request: &RequestBody) -> std::result::Result<(), NoRoom> {
        let large = self.service.large_reply(request);
        large.map_or(Ok(()), |large| self.reader.check(&large))
    }

    /// Uses the session with an extension, which begins with its first request.
    fn with_session<T>(&self, name: &str, work: impl FnOnce(&mut dyn Session) -> T) -> Result<T> {
        let mut sessions = self.sessions.borrow_mut();
        let index = match sessions.iter().position(|(of, _)| *of == name) {
            Some(index) => index,
            None => {
                let extension = self.service.extension(name)?.clone();
                sessions.push((extension.name(), extension.session()));
                sessions.len() - 1
            }
        };
        Ok(work(&mut *sessions[index].1))
    }
}

impl From<NoRoom> for WaitReason {
    fn from(full: NoRoom) -> Self {
        match full {
            NoRoom::Own(bytes) => WaitReason::OwnReplies(bytes),
            NoRoom::Role(bytes) => WaitReason::RoleReplies(bytes),
        }
    }
}

impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        // When the server ends, all connections end.
        if *self.phase.borrow() == Phase::Serving {
            let sessions = self.sessions.get_mut().iter_mut();
            sessions.for_each(|(_, session)| session.end());
        }
    }
}

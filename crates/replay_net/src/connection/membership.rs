//! Requests of one connection to the service: with room for its replies, and with its membership in a gradient job, which
//! ends with the connection.

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use futures_util::FutureExt;
use tokio::sync::watch;

use super::Phase;
use crate::error::{Error, Result};
use crate::reply_budget::{NoRoom, Reader};
use crate::service::Service;
use replay_core::cause::WaitReason;
use replay_core::table::{Attempt, Turn};
use replay_wire::{ReplyBody, RequestBody};

/// Requests of one connection, its unread replies, and the gradient job that it may have joined.
pub struct Membership<'a> {
    service: &'a Service,
    reader: Rc<Reader>,
    phase: watch::Receiver<Phase>,
    /// Address of the aggregator, and session there.
    session: Cell<Option<(SocketAddr, u32)>>,
}

impl<'a> Membership<'a> {
    /// A connection that has not joined a job.
    pub fn new(service: &'a Service, reader: Rc<Reader>, phase: watch::Receiver<Phase>) -> Self {
        Membership {
            service,
            reader,
            phase,
            session: Cell::new(None),
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
        if let (RequestBody::JoinGradients(_), Some(_)) = (request, self.session.get()) {
            return Err(Error::protocol(
                "this connection has joined a gradient job already: join over one connection for each worker".to_owned(),
            ));
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
        if let Attempt::Ready(ReplyBody::Gradients(joined)) = &attempt {
            let session = (joined.address, joined.ticket.session);
            self.session.set(Some(session));
        }
        Ok(attempt)
    }

    /// Completes after the next change that may unblock a request that was blocked. What this connection waits for is listened
    /// for from now on.
    ///
    /// # Errors
    /// Errors of [`Service::changed`].
    pub fn changed<'r>(
        &'r self,
        request: &'r RequestBody,
        turn: &Turn,
    ) -> Result<impl Future<Output = ()> + use<'r, 'a>> {
        if Self::waits_for_readers(request, turn) {
            return Ok(self.reader.room(|| self.check_room(request)).right_future());
        }
        Ok(self.service.changed(request, turn)?.left_future())
    }

    /// Whether a request that was blocked waits for nothing of a table, but for clients to read their replies.
    pub fn waits_for_readers(request: &RequestBody, turn: &Turn) -> bool {
        request.has_large_reply() && !turn.waits()
    }

    fn check_room(&self, request: &RequestBody) -> std::result::Result<(), NoRoom> {
        let large = self.service.large_reply(request);
        large.map_or(Ok(()), |large| self.reader.check(&large))
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

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        let Some((at, session)) = self.session.get() else {
            return;
        };
        // When the server ends, all connections end: no worker is reported as missing.
        if *self.phase.borrow() == Phase::Serving {
            self.service.leave_gradients(at, session);
        }
    }
}

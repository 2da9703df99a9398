//! Membership of a connection in a gradient job, which ends with the connection.

use std::cell::Cell;
use std::net::SocketAddr;

use tokio::sync::watch;

use super::Phase;
use crate::service::Service;
use replay_core::cause::WaitReason;
use replay_core::error::{Error, Result};
use replay_core::table::{Attempt, Turn};
use replay_wire::{ReplyBody, RequestBody};

/// Requests of one connection, and the gradient job that it may have joined.
pub struct Membership<'a> {
    service: &'a Service,
    phase: watch::Receiver<Phase>,
    /// Address of the aggregator, and session there.
    session: Cell<Option<(SocketAddr, u32)>>,
}

impl<'a> Membership<'a> {
    /// A connection that has not joined a job.
    pub fn new(service: &'a Service, phase: watch::Receiver<Phase>) -> Self {
        Membership {
            service,
            phase,
            session: Cell::new(None),
        }
    }

    /// [`Service::attempt`] for this connection, which is blocked also while clients do not read their replies.
    ///
    /// # Errors
    /// Any. The error is the request's answer; for a request that is still blocked at its `last` attempt,
    /// [`Error::Deadline`].
    pub fn attempt(
        &self,
        request: &RequestBody,
        last: bool,
        turn: &mut Turn,
    ) -> Result<Attempt<ReplyBody>> {
        if let (RequestBody::JoinGradients { .. }, Some(_)) = (request, self.session.get()) {
            return Err(Error::Protocol(
                "this connection has joined a gradient job already: join over one connection for each worker".to_owned(),
            ));
        }
        let large = matches!(
            request,
            RequestBody::Sample(_) | RequestBody::GetParameters { .. }
        );
        let attempt = match large && !self.service.reply_budget().has_room() {
            true => Attempt::Blocked(WaitReason::Other(format!(
                "{} bytes of replies wait for clients to read them, which is the server's limit (--reply-bytes)",
                self.service.reply_budget().held()
            ))),
            false => self.service.attempt(request, last, turn)?,
        };
        if let Attempt::Ready(ReplyBody::Gradients(joined)) = &attempt {
            let session = (joined.address, joined.ticket.session);
            self.session.set(Some(session));
        }
        match attempt {
            Attempt::Blocked(reason) if last => Err(Error::Deadline {
                waited_for: reason.to_string(),
            }),
            attempt => Ok(attempt),
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

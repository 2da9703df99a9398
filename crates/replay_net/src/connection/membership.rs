//! Membership of a connection in a gradient job, which ends with the connection.

use std::cell::Cell;
use std::net::SocketAddr;

use tokio::sync::watch;

use super::Phase;
use crate::service::Service;
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

    /// [`Service::attempt`] for this connection; `None` if the request is blocked and this was not the last attempt.
    ///
    /// # Errors
    /// Any. The error is the request's answer; for a request that is still blocked, [`Error::Deadline`].
    pub fn attempt(
        &self,
        request: &RequestBody,
        last: bool,
        turn: &mut Turn,
    ) -> Result<Option<ReplyBody>> {
        if let (RequestBody::JoinGradients { .. }, Some(_)) = (request, self.session.get()) {
            return Err(Error::Protocol(
                "this connection has joined a gradient job already: join over one connection for each worker".to_owned(),
            ));
        }
        let large = matches!(
            request,
            RequestBody::Sample(_) | RequestBody::GetParameters { .. }
        );
        if large && self.service.reply_budget().is_full() {
            return match last {
                true => Err(Error::Deadline {
                    waited_for: format!(
                        "{} bytes of replies wait for clients to read them, which is the server's limit (--reply-bytes)",
                        self.service.reply_budget().held()
                    ),
                }),
                false => Ok(None),
            };
        }
        let reply = match self.service.attempt(request, last, turn)? {
            Attempt::Ready(reply) => reply,
            Attempt::Blocked(waited_for) if last => return Err(Error::Deadline { waited_for }),
            Attempt::Blocked(_) => return Ok(None),
        };
        if let ReplyBody::Gradients(joined) = &reply {
            let session = (joined.address, joined.ticket.session);
            self.session.set(Some(session));
        }
        Ok(Some(reply))
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

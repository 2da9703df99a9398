//! Membership of a connection in a gradient job, which ends with the connection.

use std::cell::Cell;
use std::net::SocketAddr;

use tokio::sync::watch;

use super::Phase;
use crate::service::{Outcome, Service};
use replay_core::error::{Error, Result};
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

    /// [`Service::attempt`] for this connection.
    ///
    /// # Errors
    /// Any. The error is the request's answer.
    pub fn attempt(&self, request: &RequestBody, last: bool) -> Result<Outcome> {
        if let (RequestBody::JoinGradients { .. }, Some(_)) = (request, self.session.get()) {
            return Err(Error::Protocol(
                "this connection has joined a gradient job already: join over one connection for each worker".to_owned(),
            ));
        }
        let outcome = self.service.attempt(request, last)?;
        if let Outcome::Ready(ReplyBody::Gradients(joined)) = &outcome {
            let session = (joined.address, joined.ticket.session);
            self.session.set(Some(session));
        }
        Ok(outcome)
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

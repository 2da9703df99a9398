//! The place in a gradient job that belongs to a connection, and ends with it.

use std::cell::Cell;
use std::net::SocketAddr;

use tokio::sync::watch;

use super::Phase;
use crate::service::{Outcome, Service};
use replay_core::error::{Error, Result};
use replay_wire::{ReplyBody, RequestBody};

/// The requests of one connection, and the place that one of them may have taken.
pub struct Membership<'a> {
    service: &'a Service,
    phase: watch::Receiver<Phase>,
    /// The aggregator, and the session there.
    place: Cell<Option<(SocketAddr, u32)>>,
}

impl<'a> Membership<'a> {
    /// Of a connection that has none yet.
    pub fn new(service: &'a Service, phase: watch::Receiver<Phase>) -> Self {
        Membership {
            service,
            phase,
            place: Cell::new(None),
        }
    }

    /// [`Service::attempt`] for this connection.
    ///
    /// # Errors
    /// Any: the request's answer is then that error.
    pub fn attempt(&self, request: &RequestBody, last: bool) -> Result<Outcome> {
        if let (RequestBody::JoinGradients { .. }, Some(_)) = (request, self.place.get()) {
            return Err(Error::Protocol(
                "this connection has a place in a gradient job: join over one connection for each worker".to_owned(),
            ));
        }
        let outcome = self.service.attempt(request, last)?;
        if let Outcome::Ready(ReplyBody::Gradients(joined)) = &outcome {
            let place = (joined.address, joined.ticket.session);
            self.place.set(Some(place));
        }
        Ok(outcome)
    }
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        let Some((at, session)) = self.place.get() else {
            return;
        };
        // A server that ends lets go of everybody: no worker is to blame, and each sees its own connection end.
        if *self.phase.borrow() == Phase::Serving {
            self.service.leave_gradients(at, session);
        }
    }
}

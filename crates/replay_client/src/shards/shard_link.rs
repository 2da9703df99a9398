//! Requests to one server for its shares of batches, and its last answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::connection::no_answer;
use super::super::dialer::Dialer;
use super::super::link::Link;
use super::super::pipeline::{RequestPipeline, answer, expect};
use super::group::{silent, within_grace};
use super::partial::Seen;
use base::system;
use base::wait::Wait;
use replay_core::replay::{SampleRequest, Sampled};
use replay_link::error::{Error, Result};
use replay_wire::RequestBody;

/// The requests to one server.
pub struct ShardLink {
    /// Requests end with their connection: their items are divided again among the servers.
    link: Link<ShareRequest>,
    /// The connection has answered, and no request on it has timed out since.
    pub has_answered: bool,
    /// Round trip, measured when the connection was opened.
    pub round_trip: Duration,
    /// The last answer on this connection.
    pub seen: Option<Seen>,
    /// The server's state has to be asked again before the next batch.
    pub stale: bool,
}

/// A request for the server's share of a batch.
pub struct ShareRequest {
    /// Index of the batch, from 1.
    pub batch: u64,
    request: SampleRequest,
    sent: Instant,
}

impl ShareRequest {
    /// Requested items.
    pub fn count(&self) -> u32 {
        self.request.count
    }

    /// Samples requested from the rate limiter.
    fn take(&self) -> u32 {
        self.request.share.map_or(0, |share| share.take)
    }
}

impl ShardLink {
    /// A link that connects at its first request.
    pub fn new(dialer: Arc<Dialer>) -> Self {
        ShardLink { link: Link::new(dialer), has_answered: false, round_trip: Duration::ZERO, seen: None, stale: false }
    }

    /// Closes the connection. Returns the requests in flight, whose answers are lost.
    pub fn reset(&mut self) -> Vec<ShareRequest> {
        let lost = std::mem::replace(self, ShardLink::new(self.link.dialer.clone()));
        lost.link.into_requests()
    }

    /// Whether a request of this batch is in flight.
    pub fn awaits(&self, batch: u64) -> bool {
        self.link.requests().any(|share| share.batch == batch)
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.link.is_empty()
    }

    /// Samples requested from the rate limiter that are in flight.
    pub fn taking(&self) -> f64 {
        self.link.requests().map(|share| f64::from(share.take())).sum()
    }

    /// Samples that the rate limiter will still admit after the requests in flight.
    pub fn allowance(&self) -> f64 {
        let allowed = self.seen.map_or(0.0, |seen| seen.state.allowance);
        (allowed - self.taking()).max(0.0)
    }

    /// Writes queued requests, as far as the socket accepts them.
    pub fn try_flush(&mut self) {
        if let Ok(connection) = self.link.connection() {
            connection.try_flush();
        }
    }

    /// Requests a share of a batch. Connects if necessary, and then returns the round trip.
    pub fn send(
        &mut self,
        table: &str,
        batch: u64,
        request: SampleRequest,
        wait: &Wait<'_>,
    ) -> Result<Option<Duration>> {
        let connects = self.link.connection().is_err();
        if connects {
            let mut connection = self.link.dialer.dial(wait)?;
            self.round_trip = connection.pipeline().round_trip;
            self.link.send_all_over(connection);
        }
        self.link.queue(ShareRequest { batch, request, sent: system::now() }, 0);
        let sent = self.link.send(usize::MAX, None, |_, share| (table, RequestBody::Sample(share.request)));
        sent.inspect_err(|_| self.link.take_back())?;
        Ok(connects.then_some(self.round_trip))
    }

    /// Waits for the next reply, which a server sends at once. Returns its request, and the server's answer or error.
    ///
    /// # Errors
    /// [`Error::Deadline`] at the caller's deadline, but not before the grace of a request has ended; [`Error::Interrupted`];
    /// [`Error::Disconnected`] for a connection that broke, or a server that does not answer in time.
    pub fn receive(&mut self, wait: &Wait<'_>) -> Result<(ShareRequest, Result<Sampled>)> {
        let dialer = self.link.dialer.clone();
        let (name, grace) = (&dialer.address, dialer.options.grace);
        let sent = self.link.requests().next().map_or_else(system::now, |share| share.sent);
        let patient = Wait { deadline: wait.deadline.map(|deadline| deadline.max(sent + grace)), ..*wait };
        // The grace begins now, because a caller that paused has not read meanwhile.
        let reply = within_grace(&dialer, &patient, |wait| {
            let until = self.link.until(wait.deadline, false);
            self.link.connection()?.run(wait, until, || no_answer(name), RequestPipeline::reply)
        })?;
        let Some(reply) = reply else {
            self.has_answered = false;
            return Err(silent(&dialer));
        };
        self.has_answered = true;
        let Some((_, share)) = self.link.take(reply.id) else {
            return Err(Error::protocol(format!("{name} answered request {}, which is not in flight", reply.id)));
        };
        let body = match answer(reply.body) {
            Ok(body) => body,
            Err(error) => return Ok((share, Err(error))),
        };
        let sampled: Sampled = expect(body)?;
        let Some(state) = sampled.state else {
            return Err(Error::protocol(format!("{name} sampled its share of a batch without the state of the table")));
        };
        if sampled.items.len() > share.count() as usize || state.taken > share.take() {
            return Err(Error::protocol(format!(
                "{name} answered a request for {} items and {} samples of its rate limiter with {} and {}",
                share.count(),
                share.take(),
                sampled.items.len(),
                state.taken
            )));
        }
        self.seen = Some(Seen { state, with_mass: sampled.live_items, min_probability: sampled.min_probability });
        Ok((share, Ok(sampled)))
    }
}

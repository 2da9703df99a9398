//! Requests to one server, and its last answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::dialer::Dialer;
use super::super::link::Link;
use super::super::pipeline::{answer, expect_reply};
use super::partial::Seen;
use base::host;
use base::wait::Wait;
use replay_core::replay::{SampleRequest, Sampled};
use replay_link::error::{Error, Result};
use replay_wire::{ReplyBody, RequestBody};

/// The requests to one server.
pub struct Lane {
    /// They end with their connection: their parts are divided again among the servers.
    link: Link<Part>,
    /// The connection has answered, and no request on it has timed out since.
    answers: bool,
    /// Round trip, measured when the connection was opened.
    pub round_trip: Duration,
    /// The last answer; `None` if the server's state has to be asked again.
    pub seen: Option<Seen>,
}

/// A request for a part of a batch.
pub struct Part {
    /// Number of the batch.
    pub batch: u64,
    /// The request.
    request: SampleRequest,
    /// Deadline in the request.
    due: Instant,
}

impl Part {
    /// Number of requested items.
    pub fn count(&self) -> u32 {
        self.request.count
    }

    /// Number of samples charged to the server's rate limiter.
    pub fn limiter_samples(&self) -> u32 {
        self.request.part.map_or(0, |part| part.limiter_samples)
    }
}

impl Lane {
    /// A lane that connects at its first request.
    pub fn new(dialer: Arc<Dialer>) -> Self {
        Lane { link: Link::new(dialer), answers: false, round_trip: Duration::ZERO, seen: None }
    }

    /// Closes the connection. Returns the requests in flight, whose answers are lost.
    pub fn reset(&mut self) -> Vec<Part> {
        let lost = std::mem::replace(self, Lane::new(self.link.dialer.clone()));
        lost.link.into_requests()
    }

    /// Whether a request of this batch is in flight.
    pub fn awaits(&self, batch: u64) -> bool {
        self.link.requests().any(|part| part.batch == batch)
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.link.is_empty()
    }

    /// Whether the connection has answered, and not timed out since.
    pub fn has_answered(&self) -> bool {
        self.answers
    }

    /// Samples that the rate limiter will still admit after the requests in flight.
    pub fn allowance(&self) -> f64 {
        let in_flight: f64 = self.link.requests().map(|part| f64::from(part.limiter_samples())).sum();
        self.seen.map_or(0.0, |seen| seen.state.allowance) - in_flight
    }

    /// Writes queued requests, as far as the socket accepts them.
    pub fn try_flush(&mut self) {
        if let Ok(connection) = self.link.connection() {
            connection.try_flush();
        }
    }

    /// Requests a part of a batch, which the server may delay until `due`. Connects if necessary, and then returns the round trip.
    ///
    /// # Errors
    /// Errors of connecting, [`Error::Disconnected`].
    pub fn send(
        &mut self,
        table: &str,
        batch: u64,
        request: SampleRequest,
        due: Instant,
        wait: &Wait<'_>,
    ) -> Result<Option<Duration>> {
        let connects = self.link.connection().is_err();
        if connects {
            let mut connection = self.link.dialer.dial(wait)?;
            self.round_trip = connection.round_trip()?;
            self.link.send_all_over(connection);
        }
        let part = Part { batch, request, due };
        self.link.send_now(part, 0, Some(due), table, RequestBody::Sample(request))?;
        Ok(connects.then_some(self.round_trip))
    }

    /// Waits for the next reply. Returns its request, and the server's answer or error.
    ///
    /// # Errors
    /// [`Error::Deadline`] at the caller's deadline, [`Error::Interrupted`]; [`Error::Disconnected`] for a connection that broke, or
    /// a server that does not answer in time.
    pub fn receive(&mut self, wait: &Wait<'_>) -> Result<(Part, Result<Sampled>)> {
        let (name, grace) = (self.link.dialer.address.to_string(), self.link.dialer.options.grace);
        let now = host::now();
        let due = self.link.requests().map(|part| part.due).min().unwrap_or(now);
        // The grace covers the network after the request's deadline. It begins now at the earliest, because a caller that paused has not
        // read meanwhile. A caller whose own deadline is before that of a prefetched request does not wait for the answer.
        let silent = due.max(now) + grace;
        let until = match wait.deadline {
            Some(deadline) if deadline.max(now) < due => deadline,
            _ => silent,
        };
        let late = || Error::deadline(format!("{name} did not answer"));
        let reply = self.link.connection()?.reply(wait, Some(until), late);
        if matches!(reply, Err(Error::Deadline { .. })) && host::now() >= silent {
            self.answers = false;
            return Err(Error::Disconnected {
                address: name,
                reason: format!("no answer for {} s", grace.as_secs_f64()),
            });
        }
        let reply = reply?;
        self.answers = true;
        let Some((_, part)) = self.link.take(reply.id) else {
            return Err(Error::protocol(format!("{name} answered request {}, which is not in flight", reply.id)));
        };
        let body = match answer(reply.body) {
            Ok(body) => body,
            Err(error) => return Ok((part, Err(error))),
        };
        let sampled = expect_reply!(body, ReplyBody::Sampled(sampled) => sampled)?;
        if sampled.items.len() > part.count() as usize {
            return Err(Error::protocol(format!(
                "{name} answered a request for {} items with {}",
                part.count(),
                sampled.items.len()
            )));
        }
        let Some(state) = sampled.shard else {
            return Err(Error::protocol(format!("{name} answered a part of a batch without its table's state")));
        };
        self.seen = Some(Seen { state, with_priority: sampled.live_items, min_probability: sampled.min_probability });
        Ok((part, Ok(sampled)))
    }
}

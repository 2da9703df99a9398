//! Requests to one server, and its last answer.

use std::time::{Duration, Instant};

use super::super::Client;
use super::super::connection::{Connection, deadline_ms};
use super::super::pipeline::{answer, expect_reply};
use super::partial::Seen;
use crate::error::{Error, Result};
use base::host;
use base::wait::Wait;
use replay_core::replay::{SampleRequest, Sampled};
use replay_wire::{ReplyBody, RequestBody};

/// The connection to one server.
#[derive(Default)]
pub struct Lane {
    connection: Option<Connection>,
    /// The connection has answered, and no request on it has timed out since.
    answers: bool,
    pending: Vec<Pending>,
    /// Round trip, measured when the connection was opened.
    pub round_trip: Duration,
    /// The last answer; `None` if the server's state has to be asked again.
    pub seen: Option<Seen>,
}

/// A request in flight.
pub struct Pending {
    id: u64,
    /// Number of the batch.
    pub batch: u64,
    /// Number of requested items.
    pub count: u32,
    /// Number of samples charged to the server's rate limiter.
    pub limiter_samples: u32,
    /// Deadline in the request.
    due: Instant,
}

impl Lane {
    /// Whether a request of this batch is in flight.
    pub fn awaits(&self, batch: u64) -> bool {
        self.pending.iter().any(|pending| pending.batch == batch)
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether the connection has answered, and not timed out since.
    pub fn has_answered(&self) -> bool {
        self.answers
    }

    /// Requests in flight, whose answers are lost.
    pub fn into_pending(self) -> Vec<Pending> {
        self.pending
    }

    /// Samples that the rate limiter will still admit after the requests in flight.
    pub fn allowance(&self) -> f64 {
        let in_flight = self.pending.iter().map(|p| f64::from(p.limiter_samples));
        let allowed = self.seen.map_or(0.0, |seen| seen.state.allowance);
        allowed - in_flight.sum::<f64>()
    }

    /// Writes queued requests, as far as the socket accepts them.
    pub fn try_flush(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.try_flush();
        }
    }

    /// Requests a part of a batch, which the server may delay until `due`. Connects if necessary, and then returns the round trip.
    ///
    /// # Errors
    /// Errors of connecting, [`Error::Disconnected`].
    pub fn send(
        &mut self,
        client: &Client,
        table: &str,
        batch: u64,
        request: SampleRequest,
        due: Instant,
        wait: &Wait<'_>,
    ) -> Result<Option<Duration>> {
        let (mut connection, round_trip) = match self.connection.take() {
            Some(connection) => (connection, None),
            None => {
                let mut connection = client.dialer.dial(wait)?;
                self.round_trip = connection.round_trip()?;
                (connection, Some(self.round_trip))
            }
        };
        let count = request.count;
        let limiter_samples = request.part.map_or(0, |part| part.limiter_samples);
        let sent = connection.send(deadline_ms(Some(due)), Some(table), RequestBody::Sample(request));
        self.connection = Some(connection);
        self.pending.push(Pending { id: sent?, batch, count, limiter_samples, due });
        Ok(round_trip)
    }

    /// Waits for the next reply. Returns its request, and the server's answer or error.
    ///
    /// # Errors
    /// [`Error::Deadline`] at the caller's deadline, [`Error::Interrupted`]; [`Error::Disconnected`] for a connection that broke, or
    /// a server that does not answer in time.
    pub fn receive(&mut self, client: &Client, wait: &Wait<'_>) -> Result<(Pending, Result<Sampled>)> {
        let (name, grace) = (client.address().to_string(), client.dialer.options.grace);
        let now = host::now();
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        let due = self.pending.iter().map(|pending| pending.due).min();
        let due = due.unwrap_or(now);
        // The grace covers the network after the request's deadline. It begins now at the earliest, because a caller that paused has not
        // read meanwhile. A caller whose own deadline is before that of a prefetched request does not wait for the answer.
        let silent = due.max(now) + grace;
        let until = match wait.deadline {
            Some(deadline) if deadline.max(now) < due => deadline,
            _ => silent,
        };
        let late = || Error::deadline(format!("{name} did not answer"));
        let reply = connection.reply(wait, Some(until), late);
        if matches!(reply, Err(Error::Deadline { .. })) && host::now() >= silent {
            self.answers = false;
            return Err(Error::Disconnected {
                address: name,
                reason: format!("no answer for {} s", grace.as_secs_f64()),
            });
        }
        let reply = reply?;
        self.answers = true;
        let of = |pending: &Pending| pending.id == reply.id;
        let Some(at) = self.pending.iter().position(of) else {
            return Err(Error::protocol(format!("{name} answered request {}, which is not in flight", reply.id)));
        };
        let pending = self.pending.remove(at);
        let body = match answer(reply.body) {
            Ok(body) => body,
            Err(error) => return Ok((pending, Err(error))),
        };
        let sampled = expect_reply!(body, ReplyBody::Sampled(sampled) => sampled)?;
        if sampled.items.len() > pending.count as usize {
            return Err(Error::protocol(format!(
                "{name} answered a request for {} items with {}",
                pending.count,
                sampled.items.len()
            )));
        }
        let Some(state) = sampled.shard else {
            return Err(Error::protocol(format!("{name} answered a part of a batch without its table's state")));
        };
        self.seen = Some(Seen { state, with_priority: sampled.live_items, min_probability: sampled.min_probability });
        Ok((pending, Ok(sampled)))
    }
}

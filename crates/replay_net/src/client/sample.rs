//! Draws with several requests in flight: the server prepares the next batches while the client decodes one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer, deadline_ms, no_answer};
use super::keys::IncarnationTag;
use super::pipeline::{RequestPipeline, answer, is_broken, unexpected};
use super::pool::Retry;
use replay_core::error::{Error, Result};
use replay_core::replay::{SampleChannel, SampleRequest, Sampled, Wait};
use replay_wire::{Reply, ReplyBody, RequestBody};

/// One draw repeated over a connection of its own.
pub struct Samples {
    dialer: Arc<Dialer>,
    request: SampleRequest,
    in_flight: usize,
    connection: Option<Connection>,
    pending: Vec<PendingDraw>,
    /// Start of the current time without a connection.
    broken_since: Option<Instant>,
}

/// A request in flight.
struct PendingDraw {
    id: u64,
    /// Deadline in the request.
    deadline: Option<Instant>,
    /// Whether an earlier call sent it: its batch is used, its error is not this call's.
    earlier: bool,
}

impl Samples {
    /// A channel that connects on its first batch.
    pub fn new(dialer: Arc<Dialer>, request: SampleRequest, in_flight: usize) -> Self {
        Samples {
            dialer,
            request,
            in_flight: in_flight.max(1),
            connection: None,
            pending: Vec::new(),
            broken_since: None,
        }
    }

    fn next_on_this_connection(
        &mut self,
        wait: &Wait<'_>,
        patience: Option<Duration>,
    ) -> Result<Sampled> {
        loop {
            self.top_up(wait.deadline, wait)?;
            let (draw, body, tag) = self.reply(wait)?;
            match answer(body) {
                Ok(ReplyBody::Sampled(sampled)) => {
                    // The server draws the next batch while the caller decodes this one.
                    let deadline = patience.and_then(|p| Instant::now().checked_add(p));
                    if self.top_up(deadline, wait).is_ok()
                        && let Some(connection) = &mut self.connection
                    {
                        connection.try_flush();
                    }
                    return Ok(with_tagged_keys(sampled, tag));
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(error) if draw.earlier && !is_broken(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends requests until `in_flight` are pending.
    fn top_up(&mut self, deadline: Option<Instant>, wait: &Wait<'_>) -> Result<()> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => {
                self.pending.clear();
                self.connection.insert(self.dialer.dial(wait)?)
            }
        };
        while self.pending.len() < self.in_flight {
            let body = RequestBody::Sample(self.request.clone());
            self.pending.push(PendingDraw {
                id: connection.send(deadline_ms(deadline), body)?,
                deadline,
                earlier: false,
            });
        }
        Ok(())
    }

    /// Error of a call that ends without a connection. Within `reconnect_for` a call with a deadline gets
    /// [`Error::Deadline`], so that a reader with short deadlines waits for its server as long as one without.
    fn ended(&mut self, error: Error, wait: &Wait<'_>) -> Error {
        let since = *self.broken_since.get_or_insert_with(Instant::now);
        let patient = since.elapsed() < self.dialer.options.reconnect_for;
        if patient && wait.deadline.is_some() && is_broken(&error) {
            let waited_for = error.to_string();
            return Error::Deadline { waited_for };
        }
        error
    }

    /// The next reply, with its request and the server's tag.
    fn reply(&mut self, wait: &Wait<'_>) -> Result<(PendingDraw, ReplyBody, IncarnationTag)> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        // The grace covers the server's answer at the deadline; it does not apply if all requests have later deadlines.
        let told = |draw: &PendingDraw| draw.deadline.is_some_and(|d| Some(d) <= wait.deadline);
        let grace = match self.pending.iter().any(told) {
            true => self.dialer.options.grace,
            false => Duration::ZERO,
        };
        let late = || no_answer(&self.dialer.address);
        let until = wait.deadline.map(|d| d + grace);
        let Reply { id, body } = connection.run(wait, until, late, RequestPipeline::reply)?;
        match self.pending.iter().position(|draw| draw.id == id) {
            Some(at) => Ok((self.pending.remove(at), body, connection.tag)),
            None => Err(Error::Protocol(format!(
                "the server answered request {id}, which is not in flight"
            ))),
        }
    }
}

impl SampleChannel for Samples {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        self.dialer.check_process()?;
        let patience = wait
            .deadline
            .map(|d| d.saturating_duration_since(Instant::now()));
        for draw in &mut self.pending {
            draw.earlier = true;
        }
        let dialer = self.dialer.clone();
        let mut retry = Retry::new(&dialer, wait);
        loop {
            let error = match self.next_on_this_connection(wait, patience) {
                Ok(sampled) => {
                    self.broken_since = None;
                    return Ok(sampled);
                }
                // Before the next arm: a server that shuts down answers with `Error::Remote`.
                Err(error) if is_broken(&error) => error,
                // The connection still works, and its requests stay in flight.
                Err(
                    error @ (Error::Remote { .. } | Error::Deadline { .. } | Error::Interrupted),
                ) => {
                    return Err(error);
                }
                Err(error) => error,
            };
            self.connection = None;
            if let Err(error) = retry.after(error) {
                return Err(self.ended(error, wait));
            }
        }
    }
}

/// The batch with its server's tag on all keys.
pub(super) fn with_tagged_keys(mut sampled: Sampled, tag: IncarnationTag) -> Sampled {
    for item in &mut sampled.items {
        item.key = tag.tag_key(item.key);
    }
    sampled
}

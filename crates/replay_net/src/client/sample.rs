//! Sampling with several requests in flight: the server prepares the next batches while the client decodes one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer, deadline_ms, no_answer};
use super::pipeline::{RequestPipeline, answer, is_broken, is_closed, is_renewal, unexpected};
use super::pool::retry_since;
use replay_core::error::{Error, Result};
use replay_core::replay::{SampleChannel, SampleRequest, Sampled, Wait};
use replay_wire::{Reply, ReplyBody, RequestBody};

/// One request for samples, repeated over its own connection.
pub struct Samples {
    dialer: Arc<Dialer>,
    request: SampleRequest,
    in_flight: usize,
    connection: Option<Connection>,
    pending: Vec<PendingSample>,
    /// Time of the break, while there is no connection.
    broken_since: Option<Instant>,
}

/// A request in flight.
struct PendingSample {
    id: u64,
    /// Deadline in the request.
    deadline: Option<Instant>,
    /// Whether an earlier call sent it. Its batch is used; its error is dropped.
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
            let (request, body) = self.reply(wait)?;
            match answer(body) {
                Ok(ReplyBody::Sampled(sampled)) => {
                    // The server prepares the next batch while the caller decodes this one.
                    let deadline = patience.and_then(|p| Instant::now().checked_add(p));
                    if self.top_up(deadline, wait).is_ok()
                        && let Some(connection) = &mut self.connection
                    {
                        connection.try_flush();
                    }
                    return Ok(sampled);
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(error) if is_renewal(&error) => {}
                Err(error) if request.earlier && !is_broken(&error) && !is_closed(&error) => {}
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
            self.pending.push(PendingSample {
                id: connection.send(deadline_ms(deadline), body)?,
                deadline,
                earlier: false,
            });
        }
        Ok(())
    }

    /// Error of a failed call. Within `reconnect_for` of a broken connection a call with a deadline gets
    /// [`Error::Deadline`], so that a reader with short deadlines waits for its server as long as one without.
    fn failed(&self, error: Error, wait: &Wait<'_>) -> Error {
        let longest = self.dialer.options.reconnect_for;
        let over = || self.broken_since.is_none_or(|at| at.elapsed() >= longest);
        if !is_broken(&error) || wait.deadline.is_none() || over() {
            return error;
        }
        let waited_for = error.to_string();
        Error::Deadline { waited_for }
    }

    /// The next reply, with its request.
    fn reply(&mut self, wait: &Wait<'_>) -> Result<(PendingSample, ReplyBody)> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        // The grace covers the server's answer at the deadline; it does not apply if all requests have later deadlines.
        let due =
            |sample: &PendingSample| sample.deadline.is_some_and(|d| Some(d) <= wait.deadline);
        let grace = match self.pending.iter().any(due) {
            true => self.dialer.options.grace,
            false => Duration::ZERO,
        };
        let late = || no_answer(&self.dialer.address);
        let until = wait.deadline.map(|d| d + grace);
        let Reply { id, body } = connection.run(wait, until, late, RequestPipeline::reply)?;
        match self.pending.iter().position(|request| request.id == id) {
            Some(at) => Ok((self.pending.remove(at), body)),
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
        for request in &mut self.pending {
            request.earlier = true;
        }
        let dialer = self.dialer.clone();
        let mut broken_since = self.broken_since;
        let next = retry_since(&mut broken_since, &dialer, wait, || {
            let next = self.next_on_this_connection(wait, patience);
            if let Err(error) = &next
                && (is_broken(error) || is_closed(error) || !is_harmless(error))
            {
                self.connection = None;
            }
            next
        });
        self.broken_since = broken_since;
        next.map_err(|error| self.failed(error, wait))
    }
}

/// Whether the connection still works, with its requests in flight, after an error that is not of a broken connection.
fn is_harmless(error: &Error) -> bool {
    matches!(
        error,
        Error::Remote { .. } | Error::Deadline { .. } | Error::Interrupted
    )
}

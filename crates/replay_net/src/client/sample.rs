//! Draws with several requests under way: while one batch is decoded, the server prepares the next ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer, Retry, deadline_ms, no_answer};
use super::keys::Stamp;
use super::pipeline::{Link, answer, is_broken, unexpected};
use replay_core::error::{Error, Result};
use replay_core::replay::{SampleChannel, SampleRequest, Sampled, Wait};
use replay_wire::{Reply, ReplyBody, RequestBody};

/// The same draw again and again over a connection of its own.
pub struct Samples {
    dialer: Arc<Dialer>,
    request: SampleRequest,
    in_flight: usize,
    connection: Option<Connection>,
    under_way: Vec<Asked>,
    /// Since when calls end without a connection.
    broken_since: Option<Instant>,
}

/// A request that waits for its batch.
struct Asked {
    id: u64,
    /// The deadline that the server was told.
    deadline: Option<Instant>,
    /// Asked by an earlier call: its batch is as good as any, its error has nothing to say to this call.
    earlier: bool,
}

impl Samples {
    /// A channel that connects with its first batch.
    pub fn new(dialer: Arc<Dialer>, request: SampleRequest, in_flight: usize) -> Self {
        Samples {
            dialer,
            request,
            in_flight: in_flight.max(1),
            connection: None,
            under_way: Vec::new(),
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
            let (asked, body, stamp) = self.reply(wait)?;
            match answer(body) {
                Ok(ReplyBody::Sampled(sampled)) => {
                    // The server draws the next batch while the caller decodes this one.
                    let deadline = patience.and_then(|p| Instant::now().checked_add(p));
                    if self.top_up(deadline, wait).is_ok()
                        && let Some(connection) = &mut self.connection
                    {
                        connection.nudge();
                    }
                    return Ok(marked(sampled, stamp));
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(error) if asked.earlier && !is_broken(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps `in_flight` requests queued or under way.
    fn top_up(&mut self, deadline: Option<Instant>, wait: &Wait<'_>) -> Result<()> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => {
                self.under_way.clear();
                self.connection.insert(self.dialer.dial(wait)?)
            }
        };
        while self.under_way.len() < self.in_flight {
            let body = RequestBody::Sample(self.request.clone());
            self.under_way.push(Asked {
                id: connection.send(deadline_ms(deadline), body)?,
                deadline,
                earlier: false,
            });
        }
        Ok(())
    }

    /// What a call says that ends without a connection. A reader that asks again and again with short deadlines
    /// waits for a server as long as one that has none.
    fn ended(&mut self, error: Error, wait: &Wait<'_>) -> Error {
        let since = *self.broken_since.get_or_insert_with(Instant::now);
        let patient = since.elapsed() < self.dialer.options.reconnect_for;
        if patient && wait.deadline.is_some() && is_broken(&error) {
            let waited_for = error.to_string();
            return Error::Deadline { waited_for };
        }
        error
    }

    /// The next reply, and what it answers.
    fn reply(&mut self, wait: &Wait<'_>) -> Result<(Asked, ReplyBody, Stamp)> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        // Only where the server was told this deadline, or an earlier one, is its answer worth the grace.
        let told = |asked: &Asked| asked.deadline.is_some_and(|d| Some(d) <= wait.deadline);
        let grace = match self.under_way.iter().any(told) {
            true => self.dialer.options.grace,
            false => Duration::ZERO,
        };
        let late = || no_answer(&self.dialer.address);
        let until = wait.deadline.map(|d| d + grace);
        let Reply { id, body } = connection.run(wait, until, late, Link::reply)?;
        match self.under_way.iter().position(|asked| asked.id == id) {
            Some(at) => Ok((self.under_way.remove(at), body, connection.stamp)),
            None => Err(Error::Protocol(format!(
                "the server answered request {id}, which is not under way"
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
        for asked in &mut self.under_way {
            asked.earlier = true;
        }
        let dialer = self.dialer.clone();
        let mut retry = Retry::new(&dialer, wait);
        loop {
            let error = match self.next_on_this_connection(wait, patience) {
                Ok(sampled) => {
                    self.broken_since = None;
                    return Ok(sampled);
                }
                // A server that is going away says so with an answer.
                Err(error) if is_broken(&error) => error,
                // The connection is as good as before: what is under way stays so.
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

/// The batch with its server's stamp on the keys.
pub(super) fn marked(mut sampled: Sampled, stamp: Stamp) -> Sampled {
    for item in &mut sampled.items {
        item.key = stamp.mark(item.key);
    }
    sampled
}

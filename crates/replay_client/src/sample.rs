//! Sampling with several requests in flight: the server prepares the next batches while the client decodes one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::connection::no_answer;
use super::dialer::Dialer;
use super::link::{self, Channel, Link};
use super::pipeline::{answer, is_broken, is_closed, unexpected};
use base::system;
use base::wait::Wait;
use replay_core::replay::{SampleChannel, SampleRequest, Sampled};
use replay_link::error::{Error, Result};
use replay_wire::{Reply, ReplyBody, RequestBody};

/// Repeats one sample request over a dedicated connection.
pub struct Samples {
    /// Requests in flight. They end with their connection: the next one has new requests.
    link: Link<Asked>,
    table: String,
    request: SampleRequest,
    /// Minimum of requests in flight; 0 sends one request per call, with no prefetch.
    in_flight: usize,
    pipelining: Pipelining,
    /// The batch of this call.
    arrived: Option<Sampled>,
    /// Time of the break while disconnected.
    broken_since: Option<Instant>,
}

/// A request in flight.
pub struct Asked {
    /// By an earlier call: its batch is used, its error is ignored.
    earlier: bool,
    /// Count of batches received on this connection before it was sent.
    received_before: u64,
}

/// Requests in flight beyond the minimum: twice the batches received per round trip. Requests then reach the server before it is
/// idle, and the rate can grow to that of the server, the link or the learner, whichever is lowest. A learner that pauses has few
/// requests in flight.
#[derive(Default)]
pub struct Pipelining {
    /// Shortest round trip so far.
    pub round_trip: Duration,
    /// Count of batches received.
    pub received: u64,
    /// Requests in flight beyond the minimum.
    more: usize,
}

impl Pipelining {
    /// Round trips below this limit are local: no more requests are needed.
    const LOCAL: Duration = Duration::from_micros(500);
    /// Limit of requests in flight: a server reads as many per connection.
    const MAX_REQUESTS: usize = 64;
    /// Limit of reply bytes in flight, for requests beyond the minimum.
    const MAX_BYTES: usize = 64 << 20;

    /// Records a reply of `bytes` to a request sent at `sent`, after `received_before` batches.
    pub fn note(&mut self, sent: Instant, received_before: u64, now: Instant, bytes: usize) {
        let taken = now.saturating_duration_since(sent);
        self.round_trip = self.round_trip.min(taken);
        self.received += 1;
        self.more = 0;
        if self.round_trip >= Self::LOCAL {
            let batches = (self.received - received_before) as f64;
            let wanted = 2.0 * batches * self.round_trip.div_duration_f64(taken);
            self.more = (wanted as usize).min(Self::MAX_BYTES / bytes.max(1));
        }
    }

    /// Requests in flight during a call, at least `least`. A minimum of 0 or 1 gives exactly one.
    pub fn wanted(&self, least: usize) -> usize {
        match least {
            0 | 1 => 1,
            least => (least + self.more).min(Self::MAX_REQUESTS.max(least)),
        }
    }
}

impl Samples {
    /// A channel that connects on its first batch.
    pub fn new(dialer: Arc<Dialer>, table: &str, request: SampleRequest, in_flight: usize) -> Self {
        Samples {
            link: Link::new(dialer),
            table: table.to_owned(),
            request,
            in_flight,
            pipelining: Pipelining::default(),
            arrived: None,
            broken_since: None,
        }
    }

    /// Error of a failed call. Within `reconnect_for` of a break, a call with a deadline gets [`Error::Deadline`], so that learners with
    /// short deadlines wait as long for a server as learners without one.
    fn failed(&self, error: Error, wait: &Wait<'_>) -> Error {
        let over = || self.broken_since.is_none_or(|at| system::elapsed(at) >= self.link.reconnect_for);
        if !is_broken(&error) || wait.deadline.is_none() || over() {
            return error;
        }
        Error::deadline(error.to_string())
    }
}

impl Channel for Samples {
    type Request = Asked;

    const IN_ORDER: bool = false;

    fn link(&mut self) -> &mut Link<Asked> {
        &mut self.link
    }

    fn connect(&mut self, wait: &Wait<'_>) -> Result<()> {
        let mut connection = self.link.dialer.dial(wait)?;
        self.link.clear();
        self.pipelining = Pipelining { round_trip: connection.pipeline().round_trip, ..Pipelining::default() };
        self.link.send_all_over(connection);
        Ok(())
    }

    /// Sends as many requests as are to be in flight, unless the call has its batch.
    fn send(&mut self, deadline: Option<Instant>) -> Result<()> {
        if self.is_full() {
            return Ok(());
        }
        let wanted = self.pipelining.wanted(self.in_flight.max(1));
        while self.link.len() < wanted {
            self.link.queue(Asked { earlier: false, received_before: self.pipelining.received }, 0);
        }
        let sample = self.request;
        self.link.send(wanted, deadline, |_, _| (&self.table, RequestBody::Sample(sample)))
    }

    fn settle(&mut self, reply: Reply) -> Result<()> {
        let Some((sent, asked)) = self.link.take(reply.id) else {
            return Err(Error::protocol(format!("the server answered request {}, which is not in flight", reply.id)));
        };
        match answer(reply.body) {
            Ok(ReplyBody::Sampled(sampled)) => {
                let bytes = sampled.rows.len() + sampled.blobs.iter().map(Bytes::len).sum::<usize>();
                self.pipelining.note(sent.at, asked.received_before, system::now(), bytes);
                self.arrived = Some(sampled);
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            Err(error) if asked.earlier && !is_broken(&error) && !is_closed(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn is_full(&self) -> bool {
        self.arrived.is_some()
    }

    fn late(&self) -> Error {
        no_answer(&self.link.dialer.address)
    }

    /// A connection with unanswered requests ends, too: without prefetch nobody reads their answers, which would take items of a queue.
    fn ends_connection(&self, error: &Error) -> bool {
        let left = self.in_flight == 0 && !self.link.is_empty();
        left || is_broken(error) || is_closed(error) || !is_harmless(error)
    }
}

impl SampleChannel<Error> for Samples {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        self.link.dialer.check_process()?;
        let patience = wait.deadline.map(|d| d.saturating_duration_since(system::now()));
        self.link.requests_mut().for_each(|asked| asked.earlier = true);
        let mut broken_since = self.broken_since;
        let worked = link::work(self, &mut broken_since, wait, Self::is_full);
        self.broken_since = broken_since;
        worked.map_err(|error| self.failed(error, wait))?;
        let sampled = self.arrived.take().ok_or(Error::Closed("the batch"))?;
        // The server prepares the next batch while the caller decodes this one. The next call meets the same error.
        let deadline = patience.and_then(|patience| system::now().checked_add(patience));
        if self.in_flight > 0
            && self.send(deadline).is_ok()
            && let Ok(connection) = self.link.connection()
        {
            connection.try_flush();
        }
        Ok(sampled)
    }
}

/// Whether the connection stays usable after an error other than a broken connection.
fn is_harmless(error: &Error) -> bool {
    matches!(error, Error::Remote { .. } | Error::Deadline { .. } | Error::RemoteDeadline { .. } | Error::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LEAST: usize = 2;

    /// Simulates `batches` of `bytes` from a server that needs `served` for each, one at a time, at a distance of `round_trip`. Returns the
    /// requests in flight at the end, and the time of the second half.
    fn read(batches: u32, bytes: usize, round_trip: Duration, served: Duration, read: Duration) -> (usize, Duration) {
        let mut pipelining = Pipelining { round_trip: round_trip + served, ..Pipelining::default() };
        let began = Instant::now();
        let (mut now, mut server, mut half) = (began, began, began);
        // Send times, batches received before, arrival times.
        let mut pending = VecDeque::new();
        for batch in 0..batches {
            while pending.len() < LEAST + pipelining.more {
                server = server.max(now + round_trip / 2) + served;
                pending.push_back((now, pipelining.received, server + round_trip / 2));
            }
            let (sent, received, arrival) = pending.pop_front().unwrap();
            now = now.max(arrival);
            pipelining.note(sent, received, now, bytes);
            now += read;
            if batch == batches / 2 {
                half = now;
            }
        }
        (LEAST + pipelining.more, now - half)
    }

    #[test]
    fn requests_in_flight_cover_the_round_trip_at_the_lower_rate_of_server_and_reader() {
        for (served, reading) in [(3, 0), (1, 0), (0, 3), (1, 3), (3, 1)] {
            let (served, reading) = (served * MS, reading * MS);
            for round_trip in [0, 1, 10, 40] {
                let (in_flight, taken) = read(400, 1 << 20, round_trip * MS, served, reading);
                let best = 199 * served.max(reading);
                assert!(
                    taken.as_secs_f64() < 1.05 * best.as_secs_f64(),
                    "{round_trip} ms, {served:?}, {reading:?}: {taken:?} with {in_flight}"
                );
                // At most twice the batches per round trip, and a few more.
                let needed = (round_trip * MS).div_duration_f64(served.max(reading));
                assert!(in_flight as f64 <= 2.0 * needed + 4.0, "{in_flight}");
            }
        }
    }

    #[test]
    fn a_local_server_and_a_slow_reader_have_the_least_in_flight() {
        assert_eq!(read(100, 1000, MS / 10, MS / 100, Duration::ZERO).0, LEAST);
        assert_eq!(read(100, 1000, 10 * MS, MS, 500 * MS).0, LEAST);
    }

    #[test]
    fn large_replies_bound_the_requests_in_flight() {
        let (in_flight, _) = read(400, 16 << 20, 100 * MS, MS, Duration::ZERO);
        assert_eq!(in_flight, LEAST + 4);
    }
}

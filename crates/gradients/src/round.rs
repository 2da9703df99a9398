//! One sum, as a worker sees it: contributions leave as the congestion window allows, sums replace the values, and missing sums are queried.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::arithmetic::{self, Arithmetic, Grid};
use super::packet::{ALL_SEGMENTS, Ack, PacketHeader, PacketKind, Status};
use super::worker::{Exchange, WorkerSession};
use super::{Error, Result, Transmit};

/// Reordering threshold: a sum counts as lost once a sum more than this many segments later has arrived. One path hardly reorders more.
const REORDERING: usize = 8;
/// Most segments queried at a time, the oldest first.
pub(super) const MAX_QUERIES: usize = 16;
/// Silence after which the aggregator counts as gone. It is queried several times in that time.
const SILENCE: Duration = Duration::from_secs(1);

/// Result of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Workers in the sum: the fewest in any segment.
    pub workers: u32,
}

/// A round in progress. Sums replace the values segment by segment, so after a failure some are replaced and some are not.
pub struct Round<'a> {
    session: &'a mut WorkerSession,
    values: &'a mut [f32],
    /// Divide each sum by the number of its workers.
    mean: bool,
    /// Block exponent of each segment (fixed point only).
    exponents: Vec<u8>,
    /// Kind of the contributions in this stage.
    kind: PacketKind,
    round: u64,
    segments: u32,
    /// First segment that has not been sent.
    next: u32,
    /// Segments from the oldest one without a sum to `next`.
    in_flight: VecDeque<SegmentInFlight>,
    /// Segments in flight without a sum.
    waiting: usize,
    min_workers: u32,
    started: Instant,
    deadline: Instant,
    /// Arrival of the aggregator's last datagram.
    last_heard: Option<Instant>,
    /// Workers that the aggregator waited for when it last answered a query: a bit each, and their names.
    missing: u64,
    waiting_on: String,
    failure: Option<Error>,
    /// Result already returned.
    finished: bool,
}

struct SegmentInFlight {
    sent: Instant,
    next_query: Instant,
    queries: u32,
    /// A later sum has caused a query.
    overtaken: bool,
    has_sum: bool,
}

impl<'a> Round<'a> {
    /// Replaces `values` by their sum over all workers, or by their `mean`. All workers pass vectors of one length. Fails at `deadline`.
    pub fn new(
        session: &'a mut WorkerSession,
        values: &'a mut [f32],
        mean: bool,
        now: Instant,
        deadline: Instant,
    ) -> Self {
        let segments = values.len().div_ceil(session.segment_values);
        let mut round = Round {
            failure: session.broken.then_some(Error::Broken),
            min_workers: session.world,
            mean,
            exponents: Vec::new(),
            kind: PacketKind::Float,
            round: session.next_round,
            segments: segments as u32,
            next: 0,
            in_flight: VecDeque::new(),
            waiting: 0,
            started: now,
            deadline,
            last_heard: None,
            missing: 0,
            waiting_on: String::new(),
            finished: false,
            session,
            values,
        };
        if segments as u64 >= u64::from(ALL_SEGMENTS) {
            round.failure = Some(Error::Config(format!(
                "{segments} segments are too many for a round, which has fewer than {ALL_SEGMENTS}: sum in parts"
            )));
        } else if segments > 0 && round.failure.is_none() {
            match round.session.arithmetic {
                Arithmetic::Float => round.begin(PacketKind::Float),
                Arithmetic::Fixed => {
                    let blocks = round.values.chunks(round.session.segment_values);
                    round.exponents = blocks.map(arithmetic::exponent).collect();
                    round.exponents.resize(segments.next_multiple_of(4), 0);
                    round.begin(PacketKind::Exponents);
                }
            }
        }
        round
    }

    /// Begins a stage: the exponents, or the values.
    fn begin(&mut self, kind: PacketKind) {
        self.kind = kind;
        self.round = self.session.next_round;
        self.session.next_round += 1;
        self.session.window.begin_round();
        self.next = 0;
        self.missing = 0;
        self.waiting_on.clear();
        self.segments = match kind {
            PacketKind::Exponents => self.exponents.len().div_ceil(self.segment_bytes()),
            _ => self.values.len().div_ceil(self.session.segment_values),
        } as u32;
    }

    fn segment_bytes(&self) -> usize {
        4 * self.session.segment_values
    }

    /// Range of the exponents in a segment of the first stage.
    fn exponents(&self, segment: u32) -> Range<usize> {
        let start = segment as usize * self.segment_bytes();
        start..self.exponents.len().min(start + self.segment_bytes())
    }

    fn send<T: Transmit>(&mut self, segment: u32, out: &mut T) {
        let values = self.session.range(segment, self.values.len());
        let mut written = std::mem::take(&mut self.session.scratch);
        let mut body = match self.kind {
            PacketKind::Exponents => &self.exponents[self.exponents(segment)],
            PacketKind::Fixed => {
                self.grid(segment).write(&self.values[values], &mut written);
                &written
            }
            _ => arithmetic::bytes_of(&self.values[values]),
        };
        // The grid of a round in fixed point has compared the lengths.
        let tells_length = match self.kind {
            PacketKind::Exponents => segment == 0,
            PacketKind::Float => segment == 0 && self.segments > 1,
            _ => false,
        };
        let with_length;
        if tells_length {
            with_length = [body, &(self.values.len() as u32).to_le_bytes()].concat();
            body = &with_length;
        }
        self.session.send(self.kind, self.round, segment, body, out);
        self.session.scratch = written;
    }

    fn grid(&self, segment: u32) -> Grid {
        Grid::new(self.exponents[segment as usize], self.session.world)
    }

    /// Index in `in_flight` of a segment without a sum.
    fn index_in_flight(&self, segment: u32) -> Option<usize> {
        let first = self.next - self.in_flight.len() as u32;
        let index = segment.checked_sub(first)? as usize;
        self.in_flight.get(index).filter(|at| !at.has_sum)?;
        Some(index)
    }

    fn receive_sum<T: Transmit>(&mut self, now: Instant, header: PacketHeader, body: &[u8], out: &mut T) -> Option<()> {
        let index = self.index_in_flight(header.segment)?;
        let (workers, body) = match header.kind {
            PacketKind::Partial => {
                let (counted, body) = body.split_first_chunk::<8>()?;
                (u64::from_le_bytes(*counted).count_ones().max(1), body)
            }
            _ => (self.session.world, body),
        };
        if self.kind == PacketKind::Exponents {
            let range = self.exponents(header.segment);
            let exponents = &mut self.exponents[range];
            (exponents.len() == body.len()).then(|| exponents.copy_from_slice(body))?;
        } else {
            let grid = (self.kind == PacketKind::Fixed).then(|| self.grid(header.segment));
            let range = self.session.range(header.segment, self.values.len());
            let values = &mut self.values[range];
            if 4 * values.len() != body.len() {
                return None;
            }
            match grid {
                Some(grid) => grid.read(body, values),
                None => arithmetic::read_floats(body, values),
            }
            if self.mean {
                arithmetic::divide(values, workers);
            }
        }
        self.min_workers = self.min_workers.min(workers);
        let at = &mut self.in_flight[index];
        at.has_sum = true;
        self.waiting -= 1;
        let round_trip = (at.queries == 0).then(|| now.saturating_duration_since(at.sent));
        self.session.window.on_sum(round_trip);
        self.query_overtaken(now, index, out);
        while self.in_flight.front().is_some_and(|front| front.has_sum) {
            self.in_flight.pop_front();
        }
        Some(())
    }

    /// Queries segments whose sum should have arrived before the one at `index`.
    fn query_overtaken<T: Transmit>(&mut self, now: Instant, index: usize, out: &mut T) {
        let first = self.next - self.in_flight.len() as u32;
        for earlier in 0..index.saturating_sub(REORDERING) {
            let at = &mut self.in_flight[earlier];
            if at.has_sum || at.overtaken {
                continue;
            }
            at.overtaken = true;
            let segment = first + earlier as u32;
            self.session.window.on_loss(segment, self.next);
            self.query(now, earlier, out);
        }
    }

    fn query<T: Transmit>(&mut self, now: Instant, index: usize, out: &mut T) {
        let first = self.next - self.in_flight.len() as u32;
        let at = &mut self.in_flight[index];
        at.queries += 1;
        at.next_query = now + self.session.window.timeout(at.queries);
        self.session.send(PacketKind::Help, self.round, first + index as u32, &[], out);
    }

    fn receive_ack(&mut self, header: PacketHeader, ack: Ack) {
        let Some(round) = header.round_near(self.round) else {
            return;
        };
        match ack.status {
            Status::Reset if round > self.round => {
                self.session.next_round = self.session.next_round.max(round);
                self.failure = Some(Error::Reset(ack.text));
            }
            // From before a reset.
            _ if round < self.round => {}
            Status::Failed => {
                self.failure = Some(Error::Missing { workers: worker_numbers(ack.missing), reason: ack.text });
            }
            Status::Halted => self.failure = Some(Error::Halted(ack.text)),
            // Not the answer to a control.
            Status::Refused if [self.kind, PacketKind::Help].contains(&ack.about) => {
                self.failure = Some(Error::Refused(ack.text));
            }
            Status::Gone if self.index_in_flight(header.segment).is_some() => {
                self.failure = Some(Error::Behind { round });
            }
            Status::Waiting => (self.missing, self.waiting_on) = (ack.missing, ack.text),
            _ => {}
        }
    }

    /// The error at the deadline.
    fn late(&self, now: Instant) -> Error {
        let since = |then| now.saturating_duration_since(then);
        // After the aggregator fell silent, contributions of the workers that it named may have arrived, so they are not blamed.
        let silent = self.last_heard.is_none_or(|heard| since(heard) >= SILENCE);
        if silent {
            return Error::Silent {
                address: self.session.aggregator,
                waited_ms: since(self.last_heard.unwrap_or(self.started)).as_millis(),
            };
        }
        let waited_ms = since(self.started).as_millis();
        let whom = match self.waiting_on.as_str() {
            "" => format!("the aggregator at {}", self.session.aggregator),
            whom => whom.to_owned(),
        };
        Error::Missing {
            workers: worker_numbers(self.missing),
            reason: format!("round {} waited {waited_ms} ms for {whom}", self.round),
        }
    }

    fn send_due<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        let due: Vec<usize> =
            self.oldest_waiting().filter(|(_, at)| at.next_query <= now).map(|(index, _)| index).collect();
        for index in due {
            self.query(now, index, out);
        }
        let window = self.session.window.size();
        // The limit keeps the oldest segment without a sum and the next one in different entries of the aggregator's window.
        while self.next < self.segments
            && self.in_flight.len() < self.session.window.limit() as usize
            && self.waiting < window
        {
            self.send(self.next, out);
            self.next += 1;
            self.waiting += 1;
            self.in_flight.push_back(SegmentInFlight {
                sent: now,
                next_query: now + self.session.window.timeout(0),
                queries: 0,
                overtaken: false,
                has_sum: false,
            });
        }
    }

    fn oldest_waiting(&self) -> impl Iterator<Item = (usize, &SegmentInFlight)> {
        let waiting = self.in_flight.iter().enumerate();
        waiting.filter(|(_, at)| !at.has_sum).take(MAX_QUERIES)
    }
}

impl Exchange for Round<'_> {
    type Output = Sum;

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        let Some((header, body)) = self.session.read(from, datagram) else {
            return;
        };
        self.last_heard = Some(now);
        if self.failure.is_some() || self.session.receive_path_validation(header, body) {
            return;
        }
        if header.kind == PacketKind::Ack {
            if let Some(ack) = Ack::decode(body) {
                self.receive_ack(header, ack);
            }
            return;
        }
        if header.round_near(self.round) != Some(self.round) {
            return;
        }
        if header.kind == PacketKind::Help {
            if let Some(index) = self.index_in_flight(header.segment) {
                let at = &mut self.in_flight[index];
                at.queries = at.queries.max(1);
                at.next_query = now + self.session.window.timeout(1);
                self.session.window.on_loss(header.segment, self.next);
                self.send(header.segment, out);
            }
        } else if header.kind == self.kind || (header.kind == PacketKind::Partial && self.kind == PacketKind::Float) {
            // A sum of the wrong length is ignored: the segment is queried again until the deadline.
            let _ = self.receive_sum(now, header, body, out);
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Sum>> {
        if self.next == self.segments && self.in_flight.is_empty() && self.failure.is_none() {
            if self.kind != PacketKind::Exponents {
                let workers = self.min_workers;
                self.finished = true;
                return Some(Ok(Sum { workers }));
            }
            self.begin(PacketKind::Fixed);
        }
        if self.failure.is_none() && now >= self.deadline {
            self.failure = Some(self.late(now));
        }
        if let Some(failure) = self.failure.clone() {
            self.finished = true;
            self.session.broken |= !matches!(failure, Error::Reset(_) | Error::Config(_));
            return Some(Err(failure));
        }
        if self.session.validate_path(now, out) {
            self.send_due(now, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let query = self.oldest_waiting().map(|(_, at)| at.next_query).min();
        let wake = self.session.next_path_try().or(query);
        wake.map_or(self.deadline, |wake| wake.min(self.deadline))
    }

    fn waits_for(&self, now: Instant) -> String {
        match self.late(now) {
            Error::Missing { reason, .. } => reason,
            silent => silent.to_string(),
        }
    }
}

impl Drop for Round<'_> {
    /// Contributions of an unfinished round may still arrive, so the session needs a reset.
    fn drop(&mut self) {
        self.session.broken |= !self.finished && self.segments > 0;
    }
}

/// Numbers of the workers whose bits are set.
pub(super) fn worker_numbers(bits: u64) -> Vec<u16> {
    (0..64).filter(|worker| bits & 1 << worker != 0).collect()
}

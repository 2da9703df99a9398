//! One sum, as a worker sees it: contributions leave as the congestion window allows, and sums replace the values.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::arithmetic::{self, Arithmetic, Grid};
use super::packet::{ALL_SEGMENTS, Ack, PacketHeader, PacketKind, Status};
use super::worker::{Exchange, Message, WorkerSession, failure_of, worker_numbers};
use super::{Error, Result, Transmit};

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
    min_workers: u32,
    started: Instant,
    deadline: Instant,
    /// Workers that the aggregator waited for when it last answered a query: a bit each, and their names.
    waiting_on: (u64, String),
    failure: Option<Error>,
}

impl<'a> Round<'a> {
    /// Replaces `values` by their sum over all workers, or by their `mean`. All workers pass vectors of one length. Fails at `deadline`.
    /// If it is dropped before its end, the session needs a reset, as contributions may still arrive.
    pub fn new(
        session: &'a mut WorkerSession,
        values: &'a mut [f32],
        mean: bool,
        now: Instant,
        deadline: Instant,
    ) -> Self {
        let segments = values.len().div_ceil(session.segment_values);
        session.unanswered_since = Some(now);
        session.flights.begin();
        let mut round = Round {
            failure: session.broken.then_some(Error::Broken),
            min_workers: session.world,
            mean,
            exponents: Vec::new(),
            kind: PacketKind::Float,
            round: session.next_round,
            segments: 0,
            next: 0,
            started: now,
            deadline,
            waiting_on: (0, String::new()),
            session,
            values,
        };
        if segments as u64 >= u64::from(ALL_SEGMENTS) {
            round.failure = Some(Error::Config(format!(
                "{segments} segments are too many for a round, which has fewer than {ALL_SEGMENTS}: sum in parts"
            )));
        } else if segments > 0 && round.failure.is_none() {
            round.session.broken = true;
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
        self.session.flights.begin();
        self.next = 0;
        self.waiting_on = (0, String::new());
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

    fn send<T: Transmit>(&mut self, now: Instant, segment: u32, out: &mut T) {
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
        self.session.send(now, self.kind, self.round, segment, body, out);
        self.session.scratch = written;
    }

    fn query<T: Transmit>(&mut self, now: Instant, segments: Vec<u32>, out: &mut T) {
        for segment in segments {
            self.session.send(now, PacketKind::Help, self.round, segment, &[], out);
        }
    }

    fn grid(&self, segment: u32) -> Grid {
        Grid::new(self.exponents[segment as usize], self.session.world)
    }

    /// Replaces values by their sum. A sum of the wrong length is ignored: the segment is queried again until the deadline.
    fn receive_sum<T: Transmit>(&mut self, now: Instant, segment: u32, counted: Option<u64>, body: &[u8], out: &mut T) {
        if !self.session.flights.contains(segment) {
            return;
        }
        let workers = counted.map_or(self.session.world, |counted| counted.count_ones().max(1));
        if self.kind == PacketKind::Exponents {
            let range = self.exponents(segment);
            if range.len() != body.len() {
                return;
            }
            self.exponents[range].copy_from_slice(body);
        } else {
            let grid = (self.kind == PacketKind::Fixed).then(|| self.grid(segment));
            let range = self.session.range(segment, self.values.len());
            let values = &mut self.values[range];
            if 4 * values.len() != body.len() {
                return;
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
        self.session.flights.land(now, segment);
        let overtaken = self.session.flights.overtaken(now, segment, self.next);
        self.query(now, overtaken, out);
    }

    fn receive_ack(&mut self, header: PacketHeader, ack: Ack) {
        let Some(round) = header.round_near(self.round) else {
            return;
        };
        let fails = match ack.status {
            Status::Reset if round > self.round => {
                self.session.next_round = self.session.next_round.max(round);
                true
            }
            // From before a reset.
            _ if round < self.round => false,
            Status::Failed | Status::Halted => true,
            // Not the answer to a control.
            Status::Refused => [self.kind, PacketKind::Help].contains(&ack.about),
            Status::Gone => self.session.flights.contains(header.segment),
            Status::Waiting => {
                self.session.flights.note_waiting(header.segment);
                self.waiting_on = (ack.missing, ack.text);
                return;
            }
            Status::Done | Status::Reset => false,
        };
        if fails {
            self.failure = failure_of(ack, round);
        }
    }

    /// The error at the deadline.
    fn late(&self, now: Instant) -> Error {
        let waited = |since| now.saturating_duration_since(since);
        // After the aggregator fell silent, contributions of the workers that it named may have arrived, so they are not blamed.
        let silent = |since: &Instant| *since == self.started || waited(*since) >= SILENCE;
        if let Some(since) = self.session.unanswered_since.filter(silent) {
            return self.session.silent(now, since);
        }
        let (missing, whom) = &self.waiting_on;
        let whom = match whom.as_str() {
            "" => format!("the aggregator at {}", self.session.up.ticket.address),
            whom => whom.to_owned(),
        };
        let waited_ms = waited(self.started).as_millis();
        let reason = format!("round {} waited {waited_ms} ms for {whom}", self.round);
        Error::Missing { workers: worker_numbers(*missing), reason }
    }

    fn send_due<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        let overdue = self.session.flights.overdue(now);
        self.query(now, overdue, out);
        while self.next < self.segments
            && self.session.flights.may_launch()
            && self.session.flights.are_within_limit(self.next)
        {
            self.send(now, self.next, out);
            self.session.flights.launch(now, self.next);
            self.next += 1;
        }
    }
}

impl Exchange for Round<'_> {
    type Output = Sum;

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        let Some((header, message)) = self.session.receive(from, datagram).filter(|_| self.failure.is_none()) else {
            return;
        };
        let is_own = header.round_near(self.round) == Some(self.round);
        match message {
            Message::Answer(ack) => self.receive_ack(header, ack),
            Message::Request if is_own && self.session.flights.lose(now, header.segment, self.next) => {
                self.send(now, header.segment, out);
            }
            Message::Sum { counted, values }
                if is_own && (header.kind == self.kind || counted.is_some() && self.kind == PacketKind::Float) =>
            {
                self.receive_sum(now, header.segment, counted, values, out);
            }
            _ => {}
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Sum>> {
        if self.next == self.segments && self.session.flights.is_empty() && self.failure.is_none() {
            if self.kind != PacketKind::Exponents {
                self.session.broken = false;
                return Some(Ok(Sum { workers: self.min_workers }));
            }
            self.begin(PacketKind::Fixed);
        }
        if self.failure.is_none() && now >= self.deadline {
            self.failure = Some(self.late(now));
        }
        if let Some(failure) = &self.failure {
            self.session.broken &= !matches!(failure, Error::Reset(_));
            return Some(Err(failure.clone()));
        }
        if self.session.up.validate(now, out) {
            self.send_due(now, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        self.session.next_wake().map_or(self.deadline, |wake| wake.min(self.deadline))
    }

    fn waits_for(&self, now: Instant) -> String {
        match self.late(now) {
            Error::Missing { reason, .. } => reason,
            silent => silent.to_string(),
        }
    }
}

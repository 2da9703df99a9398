//! One sum, as a worker sees it: contributions go out as the window allows, sums come in and take their place in the vector, and what is
//! missing is asked for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::Transmit;
use super::arithmetic::{self, Arithmetic, Grid};
use super::packet::{ALL_SEGMENTS, Ack, Header, Kind, Status};
use super::worker::{Exchange, Failure, Worker};

/// A sum so many segments later shows that this one was lost: on one path datagrams hardly overtake each other by more.
const REORDERING: usize = 8;
/// Segments asked for at a time, the oldest first.
const QUESTIONS: usize = 16;
/// An aggregator that has not answered for so long, in which it was asked several times, is not there.
const SILENCE: Duration = Duration::from_secs(1);

/// What a round came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Workers in the sum; where segments differ, in the one with the fewest.
    pub workers: u32,
}

/// A round under way. The vector's values are replaced by the sum's, segment by segment: after a failure some are replaced and some not.
pub struct Round<'a> {
    worker: &'a mut Worker,
    values: &'a mut [f32],
    /// Divide each sum by the number of its workers.
    mean: bool,
    /// Of each segment; in fixed point.
    exponents: Vec<u8>,
    /// Of the contributions of this stage.
    kind: Kind,
    round: u64,
    segments: u32,
    /// The first segment that has not been sent.
    next: u32,
    /// From the oldest one without a sum to `next`.
    under_way: VecDeque<UnderWay>,
    /// Those of them that have no sum yet.
    waiting: usize,
    fewest: u32,
    begun: Instant,
    deadline: Instant,
    /// When the aggregator was last heard.
    heard: Option<Instant>,
    /// Who the aggregator waited for when it was last asked, and the same for people.
    missing: u64,
    waits_for: String,
    failure: Option<Failure>,
    /// Whether its end has been told.
    over: bool,
}

struct UnderWay {
    sent: Instant,
    ask: Instant,
    tries: u32,
    /// Whether a sum after it has led to a question.
    overtaken: bool,
    done: bool,
}

impl<'a> Round<'a> {
    /// Sums `values` over all workers, each of which sums as many; or takes their mean. Fails at `deadline`.
    pub fn new(
        worker: &'a mut Worker,
        values: &'a mut [f32],
        mean: bool,
        now: Instant,
        deadline: Instant,
    ) -> Self {
        let segments = values.len().div_ceil(worker.segment_values);
        let mut round = Round {
            failure: worker.broken.then_some(Failure::Broken),
            fewest: worker.world,
            mean,
            exponents: Vec::new(),
            kind: Kind::Float,
            round: worker.next_round,
            segments: segments as u32,
            next: 0,
            under_way: VecDeque::new(),
            waiting: 0,
            begun: now,
            deadline,
            heard: None,
            missing: 0,
            waits_for: String::new(),
            over: false,
            worker,
            values,
        };
        if segments as u64 >= u64::from(ALL_SEGMENTS) {
            round.failure = Some(Failure::Refused(format!(
                "{segments} segments are too many for a round, which has fewer than {ALL_SEGMENTS}: sum in parts"
            )));
        } else if segments > 0 && round.failure.is_none() {
            match round.worker.arithmetic {
                Arithmetic::Float => round.begin(Kind::Float),
                Arithmetic::Fixed => {
                    let blocks = round.values.chunks(round.worker.segment_values);
                    round.exponents = blocks.map(arithmetic::exponent).collect();
                    round.exponents.resize(segments.next_multiple_of(4), 0);
                    round.begin(Kind::Exponents);
                }
            }
        }
        round
    }

    /// Begins a stage: the exponents, or the values.
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.round = self.worker.next_round;
        self.worker.next_round += 1;
        self.worker.window.begin();
        self.next = 0;
        self.missing = 0;
        self.waits_for.clear();
        self.segments = match kind {
            Kind::Exponents => self.exponents.len().div_ceil(self.segment_bytes()),
            _ => self.values.len().div_ceil(self.worker.segment_values),
        } as u32;
    }

    fn segment_bytes(&self) -> usize {
        4 * self.worker.segment_values
    }

    fn range(&self, segment: u32, size: usize, length: usize) -> std::ops::Range<usize> {
        let start = segment as usize * size;
        start..length.min(start + size)
    }

    fn send<T: Transmit>(&mut self, segment: u32, out: &mut T) {
        let values = self.range(segment, self.worker.segment_values, self.values.len());
        let mut written = Vec::new();
        let body = match self.kind {
            Kind::Exponents => {
                let bytes = self.range(segment, self.segment_bytes(), self.exponents.len());
                &self.exponents[bytes]
            }
            Kind::Fixed => {
                written = std::mem::take(&mut self.worker.scratch);
                self.grid(segment).write(&self.values[values], &mut written);
                &written
            }
            _ => arithmetic::bytes_of(&self.values[values]),
        };
        self.worker.send(self.kind, self.round, segment, body, out);
        if self.kind == Kind::Fixed {
            self.worker.scratch = written;
        }
    }

    fn grid(&self, segment: u32) -> Grid {
        Grid::new(self.exponents[segment as usize], self.worker.world)
    }

    /// Where a segment stands among those under way, if it waits for its sum.
    fn place(&self, segment: u32) -> Option<usize> {
        let first = self.next - self.under_way.len() as u32;
        let index = segment.checked_sub(first)? as usize;
        self.under_way.get(index).filter(|at| !at.done)?;
        Some(index)
    }

    fn take_sum<T: Transmit>(
        &mut self,
        now: Instant,
        header: Header,
        body: &[u8],
        out: &mut T,
    ) -> Option<()> {
        let index = self.place(header.segment)?;
        let (counted, body) = match header.kind {
            Kind::Partial => {
                let (counted, body) = body.split_first_chunk::<8>()?;
                (u64::from_le_bytes(*counted).count_ones().max(1), body)
            }
            _ => (self.worker.world, body),
        };
        if self.kind == Kind::Exponents {
            let bytes = self.range(header.segment, self.segment_bytes(), self.exponents.len());
            let exponents = &mut self.exponents[bytes];
            (exponents.len() == body.len()).then(|| exponents.copy_from_slice(body))?;
        } else {
            let grid = (self.kind == Kind::Fixed).then(|| self.grid(header.segment));
            let range = self.range(
                header.segment,
                self.worker.segment_values,
                self.values.len(),
            );
            let values = &mut self.values[range];
            if 4 * values.len() != body.len() {
                return None;
            }
            match grid {
                Some(grid) => grid.read(body, values),
                None => arithmetic::read_floats(body, values),
            }
            if self.mean {
                arithmetic::divide(values, counted);
            }
        }
        self.fewest = self.fewest.min(counted);
        let arrived = &mut self.under_way[index];
        arrived.done = true;
        self.waiting -= 1;
        let took = (arrived.tries == 0).then(|| now.saturating_duration_since(arrived.sent));
        self.worker.window.sum(took);
        self.ask_for_overtaken(now, index, out);
        while self.under_way.front().is_some_and(|front| front.done) {
            self.under_way.pop_front();
        }
        Some(())
    }

    /// Asks for what should have come before the sum at `index`.
    fn ask_for_overtaken<T: Transmit>(&mut self, now: Instant, index: usize, out: &mut T) {
        let first = self.next - self.under_way.len() as u32;
        for earlier in 0..index.saturating_sub(REORDERING) {
            let at = &mut self.under_way[earlier];
            if at.done || at.overtaken {
                continue;
            }
            at.overtaken = true;
            let segment = first + earlier as u32;
            self.worker.window.loss(segment, self.next);
            self.ask(now, earlier, out);
        }
    }

    fn ask<T: Transmit>(&mut self, now: Instant, index: usize, out: &mut T) {
        let first = self.next - self.under_way.len() as u32;
        let at = &mut self.under_way[index];
        at.tries += 1;
        at.ask = now + self.worker.window.patience(at.tries);
        self.worker
            .send(Kind::Help, self.round, first + index as u32, &[], out);
    }

    fn take_answer(&mut self, header: Header, ack: Ack) {
        let Some(round) = header.round_near(self.round) else {
            return;
        };
        match ack.status {
            Status::Reset if round > self.round => {
                self.worker.next_round = self.worker.next_round.max(round);
                self.failure = Some(Failure::Reset(ack.text));
            }
            // Of an earlier round: from before a reset.
            _ if round < self.round => {}
            Status::Failed => {
                self.failure = Some(Failure::Missing {
                    workers: numbers(ack.missing),
                    reason: ack.text,
                });
            }
            Status::Halted => self.failure = Some(Failure::Halted(ack.text)),
            Status::Gone if self.place(header.segment).is_some() => {
                self.failure = Some(Failure::Behind { round });
            }
            Status::Waiting => (self.missing, self.waits_for) = (ack.missing, ack.text),
            _ => {}
        }
    }

    /// What to say at the deadline.
    fn late(&self, now: Instant) -> Failure {
        let since = |then| now.saturating_duration_since(then);
        // Whoever it waited for when it was last heard, it has not said so since.
        let silent = self.heard.is_none_or(|heard| since(heard) >= SILENCE);
        if silent {
            return Failure::Silent {
                address: self.worker.aggregator,
                waited_ms: since(self.heard.unwrap_or(self.begun)).as_millis(),
            };
        }
        let waited_ms = since(self.begun).as_millis();
        let whom = match self.waits_for.as_str() {
            "" => format!("the aggregator at {}", self.worker.aggregator),
            whom => whom.to_owned(),
        };
        Failure::Missing {
            workers: numbers(self.missing),
            reason: format!("round {} waited {waited_ms} ms for {whom}", self.round),
        }
    }

    fn send_what_is_due<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        let due: Vec<usize> = self
            .oldest()
            .filter(|(_, at)| at.ask <= now)
            .map(|(index, _)| index)
            .collect();
        for index in due {
            self.ask(now, index, out);
        }
        let window = self.worker.window.allowed();
        // The oldest one without a sum and the next one never share a place at the aggregator.
        while self.next < self.segments
            && self.under_way.len() < self.worker.window.limit() as usize
            && self.waiting < window
        {
            self.send(self.next, out);
            self.next += 1;
            self.waiting += 1;
            self.under_way.push_back(UnderWay {
                sent: now,
                ask: now + self.worker.window.patience(0),
                tries: 0,
                overtaken: false,
                done: false,
            });
        }
    }

    fn oldest(&self) -> impl Iterator<Item = (usize, &UnderWay)> {
        let waiting = self.under_way.iter().enumerate().filter(|(_, at)| !at.done);
        waiting.take(QUESTIONS)
    }
}

impl Exchange for Round<'_> {
    type Output = Sum;

    fn receive<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        datagram: &[u8],
        out: &mut T,
    ) {
        let Some((header, body)) = self.worker.read(from, datagram) else {
            return;
        };
        self.heard = Some(now);
        if self.failure.is_some() || self.worker.proving(header, body) {
            return;
        }
        if header.kind == Kind::Ack {
            if let Some(ack) = Ack::decode(body) {
                self.take_answer(header, ack);
            }
            return;
        }
        if header.round_near(self.round) != Some(self.round) {
            return;
        }
        if header.kind == Kind::Help {
            if let Some(index) = self.place(header.segment) {
                let at = &mut self.under_way[index];
                at.tries = at.tries.max(1);
                at.ask = now + self.worker.window.patience(1);
                self.worker.window.loss(header.segment, self.next);
                self.send(header.segment, out);
            }
        } else if header.kind == self.kind
            || (header.kind == Kind::Partial && self.kind == Kind::Float)
        {
            // What does not fit is left to the deadline.
            let _ = self.take_sum(now, header, body, out);
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Sum, Failure>> {
        if self.next == self.segments && self.under_way.is_empty() && self.failure.is_none() {
            if self.kind != Kind::Exponents {
                let workers = self.fewest;
                self.over = true;
                return Some(Ok(Sum { workers }));
            }
            self.begin(Kind::Fixed);
        }
        if self.failure.is_none() && now >= self.deadline {
            self.failure = Some(self.late(now));
        }
        if let Some(failure) = self.failure.clone() {
            self.over = true;
            self.worker.broken |= !matches!(failure, Failure::Reset(_) | Failure::Refused(_));
            return Some(Err(failure));
        }
        if self.worker.prove(now, out) {
            self.send_what_is_due(now, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let ask = self.oldest().map(|(_, at)| at.ask).min();
        let ask = self.worker.wake_to_prove().or(ask);
        ask.map_or(self.deadline, |ask| ask.min(self.deadline))
    }
}

impl Drop for Round<'_> {
    /// A round that was given up in its middle has contributions on their way.
    fn drop(&mut self) {
        self.worker.broken |= !self.over && self.segments > 0;
    }
}

/// The numbers of the bits that are set.
pub(super) fn numbers(bits: u64) -> Vec<u16> {
    (0..64).filter(|worker| bits & 1 << worker != 0).collect()
}

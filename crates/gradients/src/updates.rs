//! A job whose workers do not wait for each other: every worker takes the same sequence of means, and contributes a gradient when it has one.
//!
//! Update `r` is the mean of the first H contributions to round `r`, segment by segment. A worker holds the weights of some update, its index,
//! and names the round that each segment is meant for: the first whose sum it has not got. Where that round was complete without it, the
//! segment goes into the next one, unless the weights that the gradient is of would then be more than S updates old: then it is dropped.
//! So no contribution older than S is ever counted, and each is counted once: the sum says who is in it.
//!
//! Rounds come to their end segment by segment, so that parts of one gradient may be in a sum while others have missed it and wait, each in the
//! next round for a contribution of somebody else, who may have such parts, too. So that nobody waits for ever, what waits at the aggregator
//! does not keep the worker from its next gradient, whose part goes into the round after that.
//!
//! The aggregator keeps S + 1 sums of each segment. A worker that needs an older one is told so, pulls the weights of a later update, and
//! goes on from there with [`Updates::restart`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::arithmetic;
use super::packet::{Ack, Header, Kind, Status};
use super::round::numbers;
use super::worker::{Exchange, Failure, Worker};
use super::{JoinJob, Transmit};

/// Segments asked for at a time, the oldest first.
const QUESTIONS: usize = 16;
/// How often a worker without contributions under way asks whether there is a sum.
const PROBE_EVERY: Duration = Duration::from_millis(50);

/// What became of a worker's gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contributions {
    /// Gradients that were offered.
    pub offered: u64,
    /// Gradients that are in the sums as a whole. A part that was on its way at a restart, or left to the aggregator, may stand for one of
    /// the next gradient.
    pub counted: u64,
    /// Gradients of which a part, or everything, was older than the staleness bound.
    pub dropped: u64,
    /// Segments that missed a round and went into a later one.
    pub late_segments: u64,
    /// Segments that were dropped.
    pub dropped_segments: u64,
    /// How often the worker was too far behind.
    pub restarts: u64,
}

/// A worker of an asynchronous job. Poll it as an [`Exchange`], which never comes to an end but by a failure.
pub struct Updates {
    worker: Worker,
    number: u16,
    values: usize,
    staleness: u64,
    /// No contribution is meant for a later round.
    last: u64,
    /// The update that was taken last.
    index: u64,
    /// The means of the updates after that one, the next first: always S + 1 of them.
    arriving: VecDeque<Arriving>,
    segments: Vec<Segment>,
    gradient: Vec<f32>,
    /// The update whose weights the gradient is of.
    gradient_index: u64,
    /// Segments of the gradient that are neither counted nor dropped.
    left: usize,
    gradient_dropped: bool,
    /// Segments that have not been sent for the round they are meant for now.
    unsent: VecDeque<u32>,
    /// Segments that have, the oldest first.
    flight: VecDeque<Flight>,
    contributions: Contributions,
    deadline: Duration,
    /// Since when the aggregator owes an answer.
    unanswered: Option<Instant>,
    probe: Instant,
    failure: Option<Failure>,
}

struct Arriving {
    mean: Vec<f32>,
    missing: usize,
}

#[derive(Clone, Copy)]
struct Segment {
    /// The round whose sum comes next.
    round: u64,
    /// Whether the gradient's part waits to be counted.
    offered: bool,
    /// Whether the aggregator has a part of the gradient before for that round.
    given: bool,
}

struct Flight {
    segment: u32,
    sent: Instant,
    ask: Instant,
    tries: u32,
    /// The aggregator has it; others are missing.
    arrived: bool,
}

impl Updates {
    /// The worker that joined with `request`, which says how the job is asynchronous; it has the weights of update `index` and contributes to
    /// rounds up to `last`. Fails when the aggregator owes an answer for longer than `deadline`.
    ///
    /// # Panics
    /// For a request of a synchronous job.
    pub fn new(
        worker: Worker,
        request: &JoinJob,
        index: u64,
        last: u64,
        deadline: Duration,
        now: Instant,
    ) -> Self {
        let Some(terms) = request.asynchronous else {
            panic!("{} is a synchronous job", request.job);
        };
        let values = terms.values as usize;
        let segments = terms.segments(request.segment_values) as usize;
        let arriving = || Arriving {
            mean: vec![0.0; values],
            missing: segments,
        };
        Updates {
            number: request.worker,
            values,
            staleness: terms.staleness.into(),
            last,
            index,
            arriving: (0..=terms.staleness).map(|_| arriving()).collect(),
            segments: vec![
                Segment {
                    round: index + 1,
                    offered: false,
                    given: false,
                };
                segments
            ],
            gradient: vec![0.0; values],
            gradient_index: 0,
            left: 0,
            gradient_dropped: false,
            unsent: VecDeque::new(),
            flight: VecDeque::new(),
            contributions: Contributions::default(),
            deadline,
            unanswered: None,
            probe: now,
            failure: None,
            worker,
        }
    }

    /// The update that was taken last, or restarted from.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// What became of the gradients.
    pub fn contributions(&self) -> Contributions {
        self.contributions
    }

    /// Whether a gradient is still on its way into the sums.
    pub fn is_busy(&self) -> bool {
        self.left > 0
    }

    /// Whether there is a mean to take.
    pub fn has_mean(&self) -> bool {
        self.arriving[0].missing == 0
    }

    /// Why nothing goes on.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Contributes a gradient of the weights of update `index`; `false` while the one before is on its way.
    ///
    /// # Panics
    /// For a gradient of another length than the job's, or of an update to come.
    pub fn offer(&mut self, gradient: &[f32], index: u64) -> bool {
        assert_eq!(gradient.len(), self.values, "a gradient of another length");
        assert!(index <= self.index, "a gradient of weights to come");
        if self.is_busy() {
            return false;
        }
        self.gradient.copy_from_slice(gradient);
        self.gradient_index = index;
        self.gradient_dropped = false;
        self.left = self.segments.len();
        self.contributions.offered += 1;
        self.flight.clear();
        self.unsent.clear();
        for (number, segment) in (0..).zip(&mut self.segments) {
            segment.offered = true;
            if !segment.given {
                self.unsent.push_back(number);
            }
        }
        true
    }

    /// Whether the round that a segment of the gradient is meant for now is too late for it.
    fn is_too_old(&self, segment: u32) -> bool {
        let round = self.segments[segment as usize].round;
        round > self.last.min(self.gradient_index + 1 + self.staleness)
    }

    /// A segment of the gradient is counted or dropped.
    fn settle(&mut self, segment: u32) {
        self.segments[segment as usize].offered = false;
        self.left -= 1;
        if self.left == 0 {
            let dropped = u64::from(self.gradient_dropped);
            self.contributions.dropped += dropped;
            self.contributions.counted += 1 - dropped;
        }
    }

    /// Copies the mean of the next update, if it is there whole, and returns that update's number.
    pub fn take(&mut self, into: &mut [f32]) -> Option<u64> {
        if !self.has_mean() {
            return None;
        }
        let mut first = self.arriving.pop_front()?;
        into.copy_from_slice(&first.mean);
        first.missing = self.segments.len();
        self.arriving.push_back(first);
        self.index += 1;
        Some(self.index)
    }

    /// Goes on from the weights of update `index`. A gradient under way is dropped.
    pub fn restart(&mut self, index: u64, now: Instant) {
        if self.left > 0 {
            self.contributions.dropped_segments += self.left as u64;
            self.contributions.dropped += 1;
        }
        self.left = 0;
        self.unsent.clear();
        self.flight.clear();
        self.index = index;
        self.segments.fill(Segment {
            round: index + 1,
            offered: false,
            given: false,
        });
        for arriving in &mut self.arriving {
            arriving.missing = self.segments.len();
        }
        self.contributions.restarts += 1;
        self.failure = None;
        self.unanswered = None;
        self.probe = now;
    }

    fn range(&self, segment: u32) -> std::ops::Range<usize> {
        let start = segment as usize * self.worker.segment_values;
        start..self.values.min(start + self.worker.segment_values)
    }

    /// Which of the means to come is that of `round`, if there is room for it.
    fn room(&self, round: u64) -> Option<usize> {
        let place = usize::try_from(round.checked_sub(self.index + 1)?).ok()?;
        (place < self.arriving.len()).then_some(place)
    }

    fn take_sum(&mut self, now: Instant, header: Header, body: &[u8]) -> Option<()> {
        let segment = *self.segments.get(header.segment as usize)?;
        if header.round_near(segment.round) != Some(segment.round) {
            return None;
        }
        let place = self.room(segment.round)?;
        let (counted, body) = match header.kind {
            Kind::Partial => {
                let (counted, body) = body.split_first_chunk::<8>()?;
                (u64::from_le_bytes(*counted), body)
            }
            _ => (u64::MAX >> (64 - self.worker.world.clamp(1, 64)), body),
        };
        let range = self.range(header.segment);
        let arriving = &mut self.arriving[place];
        let mean = &mut arriving.mean[range];
        if 4 * mean.len() != body.len() || counted == 0 {
            return None;
        }
        arithmetic::read_floats(body, mean);
        arithmetic::divide(mean, counted.count_ones());
        arriving.missing -= 1;
        let next = &mut self.segments[header.segment as usize];
        next.round += 1;
        next.given = false;
        self.probe = now + self.worker.window.patience(0);
        let flown = self.take_out_of_flight(now, header.segment);
        if segment.offered {
            if segment.given {
                self.unsent.push_back(header.segment);
            } else if flown && counted & 1 << self.number != 0 {
                self.settle(header.segment);
            } else {
                self.contributions.late_segments += 1;
                if flown {
                    self.unsent.push_back(header.segment);
                }
            }
        }
        Some(())
    }

    /// Whether the segment had been sent.
    fn take_out_of_flight(&mut self, now: Instant, segment: u32) -> bool {
        let position = self.flight.iter().position(|at| at.segment == segment);
        let Some(flown) = position.and_then(|position| self.flight.remove(position)) else {
            return false;
        };
        let took = (flown.tries == 0).then(|| now.saturating_duration_since(flown.sent));
        self.worker.window.sum(took);
        true
    }

    fn take_answer(&mut self, header: Header, ack: &Ack) {
        let failure = match ack.status {
            Status::Failed => Failure::Missing {
                workers: numbers(ack.missing),
                reason: ack.text.clone(),
            },
            Status::Halted => Failure::Halted(ack.text.clone()),
            Status::Reset => Failure::Reset(ack.text.clone()),
            Status::Refused if self.is_next(header) => Failure::Refused(ack.text.clone()),
            Status::Gone if self.is_next(header) => Failure::Behind {
                round: self.index + 1,
            },
            Status::Waiting if self.is_next(header) && ack.missing & 1 << self.number == 0 => {
                let flown = self.flight.iter_mut();
                for at in flown.filter(|at| at.segment == header.segment) {
                    at.arrived = true;
                }
                return self.leave_to_the_aggregator();
            }
            _ => return,
        };
        self.failure = Some(failure);
    }

    /// Where parts of the gradient are counted and all others wait at the aggregator, they will be counted there: the worker may go on. A
    /// gradient that waits as a whole holds nothing back, and stays.
    fn leave_to_the_aggregator(&mut self) {
        let in_parts = (1..self.segments.len()).contains(&self.left);
        if in_parts && self.unsent.is_empty() && self.flight.iter().all(|at| at.arrived) {
            while let Some(at) = self.flight.pop_front() {
                self.segments[at.segment as usize].given = true;
                self.settle(at.segment);
            }
        }
    }

    /// Whether it is about the sum that comes next in its segment, and that there is room for.
    fn is_next(&self, header: Header) -> bool {
        let segment = self.segments.get(header.segment as usize);
        segment.is_some_and(|segment| {
            header.round_near(segment.round) == Some(segment.round)
                && self.room(segment.round).is_some()
        })
    }

    fn send<T: Transmit>(&mut self, now: Instant, segment: u32, out: &mut T) {
        self.unanswered.get_or_insert(now);
        let body = arithmetic::bytes_of(&self.gradient[self.range(segment)]);
        let round = self.segments[segment as usize].round;
        self.worker.send(Kind::Float, round, segment, body, out);
    }

    fn send_again<T: Transmit>(&mut self, now: Instant, segment: u32, out: &mut T) {
        let patience = self.worker.window.patience(1);
        let Some(at) = self.flight.iter_mut().find(|at| at.segment == segment) else {
            return;
        };
        at.tries = at.tries.max(1);
        at.ask = now + patience;
        at.arrived = false;
        let next = self.segments.len() as u32;
        self.worker.window.loss(segment, next);
        self.send(now, segment, out);
    }

    fn send_what_is_due<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        for position in self.questions() {
            let at = &mut self.flight[position];
            if at.ask <= now {
                at.tries += 1;
                at.ask = now + self.worker.window.patience(at.tries);
                let segment = at.segment;
                self.ask(now, segment, out);
            }
        }
        let allowed = self.worker.window.allowed();
        let mut on_the_way = self.flight.iter().filter(|at| !at.arrived).count();
        while on_the_way < allowed
            && let Some(segment) = self.unsent.pop_front()
        {
            if self.is_too_old(segment) {
                self.contributions.dropped_segments += 1;
                self.gradient_dropped = true;
                self.settle(segment);
                continue;
            }
            self.send(now, segment, out);
            on_the_way += 1;
            self.flight.push_back(Flight {
                segment,
                sent: now,
                ask: now + self.worker.window.patience(0),
                tries: 0,
                arrived: false,
            });
        }
        // It is no whole gradient any more, and what it waits for may wait for others that wait.
        if self.gradient_dropped && self.flight.is_empty() && self.unsent.is_empty() {
            for segment in 0..self.segments.len() as u32 {
                if self.segments[segment as usize].offered {
                    self.contributions.dropped_segments += 1;
                    self.settle(segment);
                }
            }
        }
        if self.probe <= now {
            self.probe = now + PROBE_EVERY;
            self.ask_for_what_others_have(now, out);
            self.ask_for_what_keeps_the_gradient(now, out);
        }
    }

    /// Sums that parts before the gradient's are in may have been lost, too.
    fn ask_for_what_keeps_the_gradient<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        let keeps = |segment: &Segment| {
            segment.given && segment.offered && self.room(segment.round).is_some()
        };
        let segments = (0..).zip(&self.segments);
        let keeping = segments.filter(|(_, segment)| keeps(segment));
        let keeping: Vec<u32> = keeping.map(|(number, _)| number).take(QUESTIONS).collect();
        for segment in keeping {
            self.ask(now, segment, out);
        }
    }

    /// Sums may have been lost on their way to a worker that has nothing to contribute to them.
    fn ask_for_what_others_have<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        let oldest = self.segments.iter().map(|segment| segment.round).min();
        let newest = self.segments.iter().map(|segment| segment.round).max();
        let Some(round) = oldest.filter(|&round| self.room(round).is_some()) else {
            return;
        };
        let most = if oldest == newest { 1 } else { QUESTIONS };
        let lagging = self.segments.iter().enumerate();
        let lagging = lagging.filter(|(_, segment)| segment.round == round);
        let lagging: Vec<u32> = lagging
            .map(|(number, _)| number as u32)
            .take(most)
            .collect();
        for segment in lagging {
            self.ask(now, segment, out);
        }
    }

    fn ask<T: Transmit>(&mut self, now: Instant, segment: u32, out: &mut T) {
        self.unanswered.get_or_insert(now);
        let round = self.segments[segment as usize].round;
        self.worker.send(Kind::Help, round, segment, &[], out);
    }

    /// Where to ask, in the flight: first for what may not have arrived.
    fn questions(&self) -> Vec<usize> {
        let of = |arrived| {
            let flight = self.flight.iter().enumerate();
            let flight = flight.filter(move |(_, at)| at.arrived == arrived);
            flight.map(|(position, _)| position).take(QUESTIONS)
        };
        of(false).chain(of(true)).take(QUESTIONS).collect()
    }
}

impl Exchange for Updates {
    type Output = ();

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
        self.unanswered = None;
        if self.failure.is_some() || self.worker.proving(header, body) {
            return;
        }
        match header.kind {
            Kind::Ack => {
                if let Some(ack) = Ack::decode(body) {
                    self.take_answer(header, &ack);
                }
            }
            Kind::Help if self.is_next(header) => self.send_again(now, header.segment, out),
            Kind::Float | Kind::Partial => {
                // What does not fit is asked for again.
                let _ = self.take_sum(now, header, body);
            }
            _ => {}
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<(), Failure>> {
        let silent = self
            .unanswered
            .map(|since| now.saturating_duration_since(since));
        if let Some(silent) = silent.filter(|&silent| silent >= self.deadline)
            && self.failure.is_none()
        {
            self.failure = Some(Failure::Silent {
                address: self.worker.aggregator,
                waited_ms: silent.as_millis(),
            });
        }
        if let Some(failure) = &self.failure {
            return Some(Err(failure.clone()));
        }
        if self.worker.prove(now, out) {
            self.send_what_is_due(now, out);
        } else {
            self.unanswered.get_or_insert(now);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let end = self.unanswered.map(|since| since + self.deadline);
        let proof = self.worker.wake_to_prove();
        let wake = proof.unwrap_or_else(|| {
            let asks = self.questions().into_iter();
            let asks = asks.map(|position| self.flight[position].ask);
            asks.fold(self.probe, Instant::min)
        });
        end.map_or(wake, |end| end.min(wake))
    }
}

//! Session of an asynchronous worker.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::flights::MAX_QUERIES;
use super::packet::{Ack, PacketHeader, PacketKind, Status};
use super::worker::{Exchange, Message, WorkerSession, failure_of};
use super::{Asynchronous, Contributions, Error, Result, Transmit, arithmetic};

/// Interval of probes: queries for sums that may be lost although the worker has no contribution to them in flight.
const PROBE_EVERY: Duration = Duration::from_millis(50);

/// Session of a worker of an asynchronous job, an [`Exchange`] that ends only by a failure. Workers do not wait for each other, and every
/// worker takes the same sequence of means.
///
/// Update `r` is the mean of the first H contributions to round `r`, segment by segment. A worker's index is the last update in its
/// weights. A worker contributes each segment of a gradient to the first round whose sum it has not received. If that round completes
/// without the segment, the segment moves to the next round, or is dropped if the gradient's weights would then be more than S updates old.
/// Sums list their contributors, so each contribution counts at most once.
///
/// Segments complete independently: one segment of a gradient may be counted while another missed its round and waits in the next one for
/// workers that wait for this worker in turn. To avoid this deadlock, a worker may offer its next gradient while segments of the previous
/// one wait at the aggregator; the next gradient's segments then go into the round after.
///
/// The aggregator keeps S + 1 sums of each segment. A worker that needs an older one fails with [`Error::Behind`], pulls the weights of a later
/// update, and continues with [`AsynchronousSession::restart`].
pub struct AsynchronousSession {
    session: WorkerSession,
    number: u16,
    staleness: u64,
    /// Last round to contribute to.
    last: u64,
    /// Last update taken.
    index: u64,
    /// Means of the S + 1 updates after that one, the next first.
    means: VecDeque<PendingMean>,
    segments: Vec<SegmentProgress>,
    gradient: Gradient,
    /// Segments not yet sent to their present round.
    unsent: VecDeque<u32>,
    contributions: Contributions,
    deadline: Duration,
    next_probe: Instant,
    failure: Option<Error>,
}

struct PendingMean {
    mean: Vec<f32>,
    /// Segments whose sum has not arrived.
    missing: usize,
}

/// The gradient that was offered last.
struct Gradient {
    values: Vec<f32>,
    /// Update of the weights that it was computed with.
    index: u64,
    /// Segments that are neither counted nor dropped.
    unresolved: usize,
    /// Whether a segment was dropped.
    dropped: bool,
}

#[derive(Clone, Copy)]
struct SegmentProgress {
    /// Round of the next sum.
    round: u64,
    /// The gradient's segment is neither counted nor dropped.
    pending: bool,
    /// The aggregator holds the previous gradient's segment for that round.
    held: bool,
}

impl SegmentProgress {
    /// Progress of a segment after update `index`.
    fn after(index: u64) -> Self {
        SegmentProgress { round: index + 1, pending: false, held: false }
    }
}

impl AsynchronousSession {
    /// Session of a worker, by its number, that joined a job with these settings. It has the weights of update 0, and contributes to rounds
    /// up to `last`. Fails if the aggregator does not answer within `deadline`.
    pub fn new(
        session: WorkerSession,
        number: u16,
        settings: Asynchronous,
        last: u64,
        deadline: Duration,
        now: Instant,
    ) -> Self {
        let values = settings.values as usize;
        let segments = values.div_ceil(session.segment_values);
        let mean = || PendingMean { mean: vec![0.0; values], missing: segments };
        AsynchronousSession {
            number,
            staleness: settings.staleness.into(),
            last,
            index: 0,
            means: (0..=settings.staleness).map(|_| mean()).collect(),
            segments: vec![SegmentProgress::after(0); segments],
            gradient: Gradient { values: vec![0.0; values], index: 0, unresolved: 0, dropped: false },
            unsent: VecDeque::new(),
            contributions: Contributions::default(),
            deadline,
            next_probe: now,
            failure: None,
            session,
        }
    }

    /// Last update taken, or restarted from.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Counts of its gradients.
    pub fn contributions(&self) -> Contributions {
        self.contributions
    }

    /// Whether a gradient has segments that are neither counted nor dropped.
    pub fn is_busy(&self) -> bool {
        self.gradient.unresolved > 0
    }

    /// Whether there is a mean to take.
    pub fn has_mean(&self) -> bool {
        self.means[0].missing == 0
    }

    /// The failure, after which nothing is sent until a restart.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    fn check_length(&self, length: usize) -> Result<()> {
        let values = self.gradient.values.len();
        if length == values {
            return Ok(());
        }
        Err(Error::Config(format!("{length} values, but the job's gradients have {values}")))
    }

    /// Contributes a gradient of the weights of update `index`; `false` while the worker is busy with the previous one.
    ///
    /// # Errors
    /// [`Error::Config`] for a gradient of another length, or an index beyond the last update taken.
    pub fn offer(&mut self, gradient: &[f32], index: u64) -> Result<bool> {
        self.check_length(gradient.len())?;
        if index > self.index {
            return Err(Error::Config(format!(
                "index {index} is no update taken so far: the last one is {}",
                self.index
            )));
        }
        if self.is_busy() {
            return Ok(false);
        }
        self.gradient.values.copy_from_slice(gradient);
        self.gradient.index = index;
        self.gradient.dropped = false;
        self.gradient.unresolved = self.segments.len();
        self.contributions.offered += 1;
        self.unsent.clear();
        self.session.flights.begin();
        for (number, segment) in (0..).zip(&mut self.segments) {
            segment.pending = true;
            if !segment.held {
                self.unsent.push_back(number);
            }
        }
        Ok(true)
    }

    /// Notes that a segment of the gradient is counted or dropped.
    fn resolve(&mut self, segment: u32) {
        self.segments[segment as usize].pending = false;
        self.gradient.unresolved -= 1;
        if self.gradient.unresolved == 0 {
            let dropped = u64::from(self.gradient.dropped);
            self.contributions.dropped += dropped;
            self.contributions.counted += 1 - dropped;
        }
    }

    /// Copies the mean of the next update and returns that update's number; `None` while segments of it are missing.
    ///
    /// # Errors
    /// The job's failure, once the means that arrived before it are taken; [`Error::Config`] for a slice of another length.
    pub fn take(&mut self, into: &mut [f32]) -> Result<Option<u64>> {
        self.check_length(into.len())?;
        if !self.has_mean() {
            return self.failure.clone().map_or(Ok(None), Err);
        }
        let first = &mut self.means[0];
        into.copy_from_slice(&first.mean);
        first.missing = self.segments.len();
        self.means.rotate_left(1);
        self.index += 1;
        Ok(Some(self.index))
    }

    /// Continues from the weights of update `index`. A gradient in progress is dropped.
    pub fn restart(&mut self, index: u64, now: Instant) {
        self.contributions.dropped += u64::from(self.is_busy());
        self.contributions.dropped_segments += self.gradient.unresolved as u64;
        self.gradient.unresolved = 0;
        self.unsent.clear();
        self.session.flights.begin();
        self.index = index;
        self.segments.fill(SegmentProgress::after(index));
        for mean in &mut self.means {
            mean.missing = self.segments.len();
        }
        self.contributions.restarts += 1;
        self.failure = None;
        self.session.unanswered_since = None;
        self.next_probe = now;
    }

    /// Index in `means` of `round`; `None` if its mean was taken, or if it is more than S rounds ahead of the next.
    fn mean_index(&self, round: u64) -> Option<usize> {
        let index = usize::try_from(round.checked_sub(self.index + 1)?).ok()?;
        (index < self.means.len()).then_some(index)
    }

    /// Takes a part of a mean. A sum of the wrong length is ignored, and queried again.
    fn receive_sum(&mut self, now: Instant, header: PacketHeader, counted: Option<u64>, body: &[u8]) {
        let Some(index) = self.next_mean(header) else {
            return;
        };
        let number = header.segment;
        let counted = counted.unwrap_or(u64::MAX >> (64 - self.session.world.clamp(1, 64)));
        let range = self.session.range(number, self.gradient.values.len());
        let pending = &mut self.means[index];
        let mean = &mut pending.mean[range];
        if 4 * mean.len() != body.len() || counted == 0 {
            return;
        }
        arithmetic::read_floats(body, mean);
        arithmetic::divide(mean, counted.count_ones());
        pending.missing -= 1;
        let next = &mut self.segments[number as usize];
        let segment = *next;
        next.round += 1;
        next.held = false;
        self.next_probe = now + self.session.flights.timeout();
        let was_sent = self.session.flights.land(now, number);
        if !segment.pending {
            return;
        }
        if segment.held {
            self.unsent.push_back(number);
        } else if was_sent && counted & 1 << self.number != 0 {
            self.resolve(number);
        } else {
            self.contributions.late_segments += 1;
            if was_sent {
                self.unsent.push_back(number);
            }
        }
    }

    fn receive_ack(&mut self, header: PacketHeader, ack: Ack) {
        let is_next = self.next_mean(header).is_some();
        let fails = match ack.status {
            Status::Failed | Status::Halted | Status::Reset => true,
            Status::Refused | Status::Gone => is_next,
            Status::Waiting if is_next && ack.missing & 1 << self.number == 0 => {
                self.session.flights.acknowledge(header.segment);
                return self.leave_rest_to_aggregator();
            }
            Status::Waiting | Status::Done => false,
        };
        if fails {
            self.failure = failure_of(ack, self.index + 1);
        }
    }

    /// Finishes a gradient once some segments are counted and all others wait at the aggregator, which will count them. A gradient without
    /// a counted segment is kept: it cannot be part of a deadlock.
    fn leave_rest_to_aggregator(&mut self) {
        let in_parts = (1..self.segments.len()).contains(&self.gradient.unresolved);
        if in_parts && self.unsent.is_empty() && self.session.flights.are_acknowledged() {
            for segment in self.session.flights.segments() {
                self.segments[segment as usize].held = true;
                self.resolve(segment);
            }
            self.session.flights.begin();
        }
    }

    /// Index in `means` of a datagram's round; `None` unless it is the next round of the datagram's segment.
    fn next_mean(&self, header: PacketHeader) -> Option<usize> {
        let round = self.segments.get(header.segment as usize)?.round;
        (header.round_near(round) == Some(round)).then(|| self.mean_index(round))?
    }

    /// Sends a segment of the gradient (`Float`), or a query for its sum (`Help`).
    fn send<T: Transmit>(&mut self, now: Instant, kind: PacketKind, segment: u32, out: &mut T) {
        let round = self.segments[segment as usize].round;
        let range = match kind {
            PacketKind::Help => 0..0,
            _ => self.session.range(segment, self.gradient.values.len()),
        };
        let body = arithmetic::bytes_of(&self.gradient.values[range]);
        self.session.send(now, kind, round, segment, body, out);
    }

    fn send_due<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        for segment in self.session.flights.overdue(now) {
            self.send(now, PacketKind::Help, segment, out);
        }
        let newest = self.last.min(self.gradient.index + 1 + self.staleness);
        while self.session.flights.may_launch()
            && let Some(segment) = self.unsent.pop_front()
        {
            if self.segments[segment as usize].round > newest {
                self.drop_segment(segment);
            } else {
                self.send(now, PacketKind::Float, segment, out);
                self.session.flights.launch(now, segment);
            }
        }
        // A gradient with a dropped segment is dropped once nothing of it is in flight: what it waits for may be part of a deadlock.
        if self.gradient.dropped && self.session.flights.is_empty() && self.unsent.is_empty() {
            for segment in 0..self.segments.len() as u32 {
                if self.segments[segment as usize].pending {
                    self.drop_segment(segment);
                }
            }
        }
        if self.next_probe <= now {
            self.next_probe = now + PROBE_EVERY;
            for segment in self.segments_to_probe() {
                self.send(now, PacketKind::Help, segment, out);
            }
        }
    }

    fn drop_segment(&mut self, segment: u32) {
        self.contributions.dropped_segments += 1;
        self.gradient.dropped = true;
        self.resolve(segment);
    }

    /// Segments whose sums may be lost without a contribution in flight that would be queried: first those in the oldest missing round,
    /// then segments of the previous gradient that wait at the aggregator.
    fn segments_to_probe(&self) -> Vec<u32> {
        let rounds = self.segments.iter().map(|segment| segment.round);
        let (oldest, newest) = (rounds.clone().min(), rounds.max());
        let most = if oldest == newest { 1 } else { MAX_QUERIES };
        let untaken = |segment: &SegmentProgress| self.mean_index(segment.round).is_some();
        let segments = || (0..).zip(&self.segments).filter(|(_, segment)| untaken(segment));
        let lagging = segments().filter(|(_, segment)| Some(segment.round) == oldest);
        let held = segments().filter(|(_, segment)| segment.held && segment.pending);
        let probed = lagging.take(most).chain(held.take(MAX_QUERIES));
        probed.map(|(number, _)| number).collect()
    }
}

impl Exchange for AsynchronousSession {
    type Output = ();

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        let Some((header, message)) = self.session.receive(from, datagram).filter(|_| self.failure.is_none()) else {
            return;
        };
        match message {
            Message::Answer(ack) => self.receive_ack(header, ack),
            Message::Request if self.next_mean(header).is_some() => {
                let next = self.segments.len() as u32;
                if self.session.flights.lose(now, header.segment, next) {
                    self.send(now, PacketKind::Float, header.segment, out);
                }
            }
            Message::Sum { counted, values } if [PacketKind::Float, PacketKind::Partial].contains(&header.kind) => {
                self.receive_sum(now, header, counted, values);
            }
            _ => {}
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<()>> {
        let overdue = |since: &Instant| now.saturating_duration_since(*since) >= self.deadline;
        if let Some(since) = self.session.unanswered_since.filter(overdue) {
            self.failure.get_or_insert(self.session.silent(now, since));
        }
        if let Some(failure) = &self.failure {
            return Some(Err(failure.clone()));
        }
        if self.session.up.validate(now, out) {
            self.send_due(now, out);
        } else {
            self.session.unanswered_since.get_or_insert(now);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let end = self.session.unanswered_since.map(|since| since + self.deadline);
        let probe = self.session.up.is_valid.then_some(self.next_probe);
        let wakes = [end, probe, self.session.next_wake()];
        wakes.into_iter().flatten().min().unwrap_or(self.next_probe)
    }

    fn waits_for(&self, _now: Instant) -> String {
        format!("the mean of update {} is not complete", self.index() + 1)
    }
}

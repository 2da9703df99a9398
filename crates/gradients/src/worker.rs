//! A worker's session at an aggregator, and the controls that it can send.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::packet::{ALL_SEGMENTS, Ack, Cookie, PacketHeader, PacketKind, SessionKey, Status, next_control};
use super::window::CongestionWindow;
use super::{Arithmetic, Error, JoinJob, Result, Ticket, Transmit};

/// Time to the first retry of a control. It doubles with each retry.
const CONTROL_TIMEOUT: Duration = Duration::from_millis(20);
/// Longest time between two tries of a control.
const MAX_CONTROL_TIMEOUT: Duration = Duration::from_millis(500);

/// An exchange with an aggregator, without I/O: datagrams and the time are arguments, and datagrams are sent through [`Transmit`].
pub trait Exchange {
    /// Its result.
    type Output;
    /// Receives a datagram from `from`.
    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T);
    /// Sends due datagrams, and returns the result once there is one.
    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Self::Output>>;
    /// Time of the next poll, if nothing arrives before.
    fn next_wake(&self) -> Instant;
    /// The reason of its wait, for the log.
    fn waits_for(&self, now: Instant) -> String;
}

impl<E: Exchange> Exchange for &mut E {
    type Output = E::Output;

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        (**self).receive(now, from, datagram, out);
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Self::Output>> {
        (**self).poll(now, out)
    }

    fn next_wake(&self) -> Instant {
        (**self).next_wake()
    }

    fn waits_for(&self, now: Instant) -> String {
        (**self).waits_for(now)
    }
}

/// Session of a worker that has joined a job.
pub struct WorkerSession {
    pub(super) aggregator: SocketAddr,
    pub(super) session: u32,
    pub(super) world: u32,
    pub(super) arithmetic: Arithmetic,
    pub(super) segment_values: usize,
    pub(super) next_round: u64,
    pub(super) window: CongestionWindow,
    /// A sum failed, and the job has not been reset since.
    pub(super) broken: bool,
    /// Number of the last control. None has 0, the segment of what is sent to all members.
    controls: u32,
    key: SessionKey,
    path: PathValidation,
    /// Buffer for a contribution in fixed point.
    pub(super) scratch: Vec<u8>,
}

/// Proof for the aggregator that this worker receives at its address: the worker returns a cookie that was sent there.
#[derive(Default)]
struct PathValidation {
    done: bool,
    cookie: Cookie,
    tries: u32,
    next_try: Option<Instant>,
}

impl WorkerSession {
    /// Session of the worker that joined the aggregator at `aggregator` with `request` and was given `ticket`.
    pub fn new(aggregator: SocketAddr, request: &JoinJob, ticket: &Ticket) -> Self {
        WorkerSession {
            aggregator,
            session: ticket.session,
            world: request.world,
            arithmetic: request.arithmetic,
            segment_values: request.segment_values.into(),
            next_round: ticket.round,
            window: CongestionWindow::new(ticket.window),
            broken: false,
            controls: 0,
            key: ticket.key,
            path: PathValidation::default(),
            scratch: Vec::new(),
        }
    }

    /// Number of the next round.
    pub fn next_round(&self) -> u64 {
        self.next_round
    }

    pub(super) fn send<T: Transmit>(&self, kind: PacketKind, round: u64, segment: u32, body: &[u8], out: &mut T) {
        let header = PacketHeader::new(kind, self.session, round, segment);
        out.send(self.aggregator, &header.encode(), body);
    }

    /// Range of a segment in a vector of `length` values.
    pub(super) fn range(&self, segment: u32, length: usize) -> Range<usize> {
        let start = segment as usize * self.segment_values;
        start..length.min(start + self.segment_values)
    }

    /// Header and body of a datagram from the aggregator to this worker; `None` for any other.
    pub(super) fn read<'a>(&self, from: SocketAddr, datagram: &'a [u8]) -> Option<(PacketHeader, &'a [u8])> {
        let (header, body) = PacketHeader::decode(datagram)?;
        (from == self.aggregator && header.session == self.session).then_some((header, body))
    }

    /// Continues path validation; `true` once it is done.
    pub(super) fn validate_path<T: Transmit>(&mut self, now: Instant, out: &mut T) -> bool {
        if !self.path.done && self.path.next_try.is_none_or(|at| at <= now) {
            self.path.next_try = Some(now + control_timeout(self.path.tries));
            self.path.tries += 1;
            let body = [self.key.as_slice(), &self.path.cookie].concat();
            self.send(PacketKind::Join, self.next_round, 0, &body, out);
        }
        self.path.done
    }

    /// Handles datagrams of path validation; `false` for any other.
    pub(super) fn receive_path_validation(&mut self, header: PacketHeader, body: &[u8]) -> bool {
        if header.kind == PacketKind::Join {
            if let Ok(cookie) = body.try_into()
                && !self.path.done
            {
                self.path.cookie = cookie;
                // Returned by the next poll.
                self.path.next_try = None;
            }
            return true;
        }
        // Fast path: most datagrams are sums.
        if header.kind != PacketKind::Ack {
            return false;
        }
        let ack = Ack::decode(body);
        let done = ack.is_some_and(|a| (a.status, a.about) == (Status::Done, PacketKind::Join));
        self.path.done |= done;
        done
    }

    /// Time of the next try of path validation.
    pub(super) fn next_path_try(&self) -> Option<Instant> {
        self.path.next_try.filter(|_| !self.path.done)
    }

    /// Sends a control until it is answered, or until `deadline`.
    pub fn call(&mut self, control: Control, now: Instant, deadline: Instant) -> ControlCall<'_> {
        let mut body = self.key.to_vec();
        match &control {
            Control::SetThreshold(threshold) => body.extend(threshold.to_le_bytes()),
            Control::Halt(reason) => {
                let reason = Ack::new(Status::Halted, PacketKind::Halt).with_text(reason);
                body.extend(reason.encode());
            }
            Control::Force => body.extend(ALL_SEGMENTS.to_le_bytes()),
            _ => {}
        }
        let round = match control {
            // The round that was given up.
            Control::Reset => self.next_round - 1,
            _ => self.next_round,
        };
        self.controls = next_control(self.controls);
        ControlCall {
            session: self,
            control,
            body,
            round,
            tries: 0,
            started: now,
            next_try: now,
            deadline,
            waiting_on: String::new(),
            answer: None,
        }
    }
}

/// Time to wait for the answer to a control, after `tries` retries.
pub(super) fn control_timeout(tries: u32) -> Duration {
    (CONTROL_TIMEOUT * (1 << tries.min(8))).min(MAX_CONTROL_TIMEOUT)
}

/// A request of a worker about its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    /// Validate the path, before the first sum.
    Join,
    /// Leave the job.
    Leave,
    /// Drop segments in flight, and continue after a failure.
    Reset,
    /// Set the number of contributions that complete a sum.
    SetThreshold(u16),
    /// Send the incomplete sums of this worker's next round.
    Force,
    /// Suspend the job, for this reason.
    Halt(String),
}

impl Control {
    fn kind(&self) -> PacketKind {
        match self {
            Control::Join => PacketKind::Join,
            Control::Leave => PacketKind::Leave,
            Control::Reset => PacketKind::Reset,
            Control::SetThreshold(_) => PacketKind::SetH,
            Control::Force => PacketKind::FBcast,
            Control::Halt(_) => PacketKind::Halt,
        }
    }
}

/// A control in flight.
pub struct ControlCall<'a> {
    session: &'a mut WorkerSession,
    control: Control,
    body: Vec<u8>,
    round: u64,
    tries: u32,
    started: Instant,
    next_try: Instant,
    deadline: Instant,
    /// Aggregator above the own one that has not answered a reset, else empty.
    waiting_on: String,
    answer: Option<Result<()>>,
}

impl Exchange for ControlCall<'_> {
    type Output = ();

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], _out: &mut T) {
        let Some((header, body)) = self.session.read(from, datagram) else {
            return;
        };
        if self.session.receive_path_validation(header, body) {
            if self.session.path.done && self.control == Control::Join {
                self.answer = Some(Ok(()));
            }
            return;
        }
        if header.kind != PacketKind::Ack {
            return;
        }
        let Some(ack) = Ack::decode(body) else {
            return;
        };
        if ack.about != self.control.kind() {
            return;
        }
        // The answer to an earlier control has another number.
        let is_own = header.segment == self.session.controls;
        match ack.status {
            Status::Done if is_own && self.control == Control::Reset => {
                let next = header.round_near(self.session.next_round);
                if let Some(next) = next.filter(|next| *next >= self.session.next_round) {
                    self.session.next_round = next;
                    self.session.broken = false;
                    self.answer = Some(Ok(()));
                }
            }
            Status::Done if is_own => self.answer = Some(Ok(())),
            Status::Refused if is_own => self.answer = Some(Err(Error::Refused(ack.text))),
            Status::Waiting if is_own => self.waiting_on = ack.text,
            // A rack is reset by its parent, and answers the next try.
            Status::Reset => self.next_try = now,
            _ => {}
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<()>> {
        if self.answer.is_some() {
            return self.answer.take();
        }
        if now >= self.deadline {
            let waited_ms = now.duration_since(self.started).as_millis();
            return Some(Err(match self.waiting_on.as_str() {
                "" => Error::Silent { address: self.session.aggregator, waited_ms },
                whom => Error::Missing {
                    workers: Vec::new(),
                    reason: format!(
                        "the reset waited {waited_ms} ms for {whom}: check that it runs and that its datagrams reach the servers below it"
                    ),
                },
            }));
        }
        let is_valid = self.session.validate_path(now, out);
        if is_valid && self.control != Control::Join && self.next_try <= now {
            self.next_try = now + control_timeout(self.tries);
            self.tries += 1;
            self.session.send(self.control.kind(), self.round, self.session.controls, &self.body, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let wake = self.session.next_path_try().unwrap_or(self.next_try);
        wake.min(self.deadline)
    }

    fn waits_for(&self, _now: Instant) -> String {
        match self.waiting_on.as_str() {
            "" => format!("the aggregator at {} has not answered", self.session.aggregator),
            whom => format!("the reset waits for {whom}"),
        }
    }
}

//! A worker's session at an aggregator, which its sums and updates share, and the controls that it can send.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Instant;

use super::flights::Flights;
use super::packet::{ALL_SEGMENTS, Ack, PacketHeader, PacketKind, Status, next_control};
use super::uplink::{Retry, Uplink};
use super::{Arithmetic, Error, JoinJob, Result, Ticket, Transmit};

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

/// Session of a worker that has joined a job.
pub struct WorkerSession {
    pub(super) up: Uplink,
    pub(super) world: u32,
    pub(super) arithmetic: Arithmetic,
    pub(super) segment_values: usize,
    pub(super) next_round: u64,
    pub(super) flights: Flights,
    /// Time of the first datagram that the aggregator has not answered.
    pub(super) unanswered_since: Option<Instant>,
    /// A sum failed or runs, and the job has not been reset since.
    pub(super) broken: bool,
    /// Number of the last control. None has 0, the segment of what is sent to all members.
    controls: u32,
    /// Buffer for a contribution in fixed point.
    pub(super) scratch: Vec<u8>,
}

/// A datagram of the aggregator.
pub(super) enum Message<'a> {
    Answer(Ack),
    /// The contribution is to be sent again.
    Request,
    /// A sum, of the workers whose bits are set in `counted`, or of all.
    Sum {
        counted: Option<u64>,
        values: &'a [u8],
    },
}

impl WorkerSession {
    /// Session of the worker that joined with `request` and was given `ticket`.
    pub fn new(request: &JoinJob, ticket: &Ticket) -> Self {
        WorkerSession {
            up: Uplink::new(ticket),
            world: request.world,
            arithmetic: request.arithmetic,
            segment_values: request.segment_values.into(),
            next_round: ticket.round,
            flights: Flights::new(ticket.window),
            unanswered_since: None,
            broken: false,
            controls: 0,
            scratch: Vec::new(),
        }
    }

    /// Number of the next round.
    pub fn next_round(&self) -> u64 {
        self.next_round
    }

    /// Sends a contribution, or a query (`Help`).
    pub(super) fn send<T: Transmit>(
        &mut self,
        now: Instant,
        kind: PacketKind,
        round: u64,
        segment: u32,
        body: &[u8],
        out: &mut T,
    ) {
        self.unanswered_since.get_or_insert(now);
        self.up.send(kind, round, segment, body, out);
    }

    /// Range of a segment in a vector of `length` values.
    pub(super) fn range(&self, segment: u32, length: usize) -> Range<usize> {
        let start = segment as usize * self.segment_values;
        start..length.min(start + self.segment_values)
    }

    /// Reads a datagram of the aggregator to this worker. `None` for any other, and for path validation, which is handled here.
    pub(super) fn receive<'a>(&mut self, from: SocketAddr, datagram: &'a [u8]) -> Option<(PacketHeader, Message<'a>)> {
        let (header, body) = PacketHeader::decode(datagram)?;
        if from != self.up.ticket.address || header.session != self.up.ticket.session {
            return None;
        }
        self.unanswered_since = None;
        let message = match header.kind {
            PacketKind::Join => {
                self.up.take_cookie(body);
                return None;
            }
            PacketKind::Ack => {
                let ack = Ack::decode(body)?;
                if (ack.status, ack.about) == (Status::Done, PacketKind::Join) {
                    self.up.is_valid = true;
                    return None;
                }
                Message::Answer(ack)
            }
            PacketKind::Help => Message::Request,
            PacketKind::Partial => {
                let (counted, values) = body.split_first_chunk()?;
                Message::Sum { counted: Some(u64::from_le_bytes(*counted)), values }
            }
            _ => Message::Sum { counted: None, values: body },
        };
        Some((header, message))
    }

    /// The error of an aggregator that has been silent since `since`.
    pub(super) fn silent(&self, now: Instant, since: Instant) -> Error {
        let waited_ms = now.saturating_duration_since(since).as_millis();
        Error::Silent { address: self.up.ticket.address, waited_ms }
    }

    /// Time of the next try of path validation, or of the next query.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.up.next_try().or_else(|| self.flights.next_query())
    }

    /// Sends a control until it is answered, or until `deadline`.
    pub fn call(&mut self, control: Control, now: Instant, deadline: Instant) -> ControlCall<'_> {
        let argument = match &control {
            Control::SetThreshold(threshold) => threshold.to_le_bytes().to_vec(),
            Control::Halt(reason) => Ack::new(Status::Halted, PacketKind::Halt).with_text(reason).encode(),
            Control::Force => ALL_SEGMENTS.to_le_bytes().to_vec(),
            _ => Vec::new(),
        };
        let round = match control {
            // The round that was given up.
            Control::Reset => self.next_round - 1,
            _ => self.next_round,
        };
        self.controls = next_control(self.controls);
        ControlCall {
            session: self,
            control,
            argument,
            round,
            retry: Retry::default(),
            started: now,
            deadline,
            waiting_on: String::new(),
            answer: None,
        }
    }
}

/// The failure of a sum that an answer means; `round` is the missed one if its sum is gone.
pub(super) fn failure_of(ack: Ack, round: u64) -> Option<Error> {
    Some(match ack.status {
        Status::Failed => Error::Missing { workers: worker_numbers(ack.missing), reason: ack.text },
        Status::Halted => Error::Halted(ack.text),
        Status::Reset => Error::Reset(ack.text),
        Status::Refused => Error::Refused(ack.text),
        Status::Gone => Error::Behind { round },
        Status::Done | Status::Waiting => return None,
    })
}

/// Numbers of the workers whose bits are set.
pub(super) fn worker_numbers(bits: u64) -> Vec<u16> {
    (0..64).filter(|worker| bits & 1 << worker != 0).collect()
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
    argument: Vec<u8>,
    round: u64,
    retry: Retry,
    started: Instant,
    deadline: Instant,
    /// Aggregator above the own one that has not answered a reset, else empty.
    waiting_on: String,
    answer: Option<Result<()>>,
}

impl Exchange for ControlCall<'_> {
    type Output = ();

    fn receive<T: Transmit>(&mut self, _now: Instant, from: SocketAddr, datagram: &[u8], _out: &mut T) {
        let Some((header, Message::Answer(ack))) = self.session.receive(from, datagram) else {
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
            Status::Reset => self.retry.hurry(),
            _ => {}
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<()>> {
        if self.answer.is_some() {
            return self.answer.take();
        }
        if self.session.up.is_valid && self.control == Control::Join {
            return Some(Ok(()));
        }
        if now >= self.deadline {
            return Some(Err(match self.waiting_on.as_str() {
                "" => self.session.silent(now, self.started),
                whom => Error::Missing {
                    workers: Vec::new(),
                    reason: format!(
                        "the reset waited {} ms for {whom}: check that it runs and that its datagrams reach the servers below it",
                        now.saturating_duration_since(self.started).as_millis()
                    ),
                },
            }));
        }
        if self.session.up.validate(now, out) && self.retry.is_due(now) {
            let number = self.session.controls;
            self.session.up.send_control(self.control.kind(), self.round, number, &self.argument, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let tries = [self.session.up.next_try(), self.retry.next];
        let wake = tries.into_iter().flatten().next();
        wake.unwrap_or(self.started).min(self.deadline)
    }

    fn waits_for(&self, _now: Instant) -> String {
        match self.waiting_on.as_str() {
            "" => format!("the aggregator at {} has not answered", self.session.up.ticket.address),
            whom => format!("the reset waits for {whom}"),
        }
    }
}

//! The path of a worker, or of a rack, to its aggregator: session, key, and the proof that it receives at its address.

use std::time::{Duration, Instant};

use super::packet::{ALL_SEGMENTS, Ack, Cookie, PacketHeader, PacketKind};
use super::{Ticket, Transmit};

/// Time to the first retry. It doubles with each retry.
const TIMEOUT: Duration = Duration::from_millis(20);
/// Longest time between two tries.
const MAX_TIMEOUT: Duration = Duration::from_millis(500);

/// Tries of one message until it is answered. The first one is due at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retry {
    tries: u32,
    /// Time of the next try; `None` before the first one.
    pub next: Option<Instant>,
}

impl Retry {
    /// Whether a try is due; counts it.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = self.next.is_none_or(|at| at <= now);
        if due {
            self.next = Some(now + (TIMEOUT * (1 << self.tries.min(8))).min(MAX_TIMEOUT));
            self.tries += 1;
        }
        due
    }

    /// Makes the next try due at once.
    pub fn hurry(&mut self) {
        self.next = None;
    }
}

/// Membership at an aggregator, and the path to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    pub ticket: Ticket,
    /// The aggregator has validated the path: the cookie that it sent here was returned.
    pub is_valid: bool,
    cookie: Cookie,
    validation: Retry,
}

impl Uplink {
    pub fn new(ticket: &Ticket) -> Self {
        Uplink { ticket: ticket.clone(), is_valid: false, cookie: Cookie::default(), validation: Retry::default() }
    }

    pub fn send<T: Transmit>(&self, kind: PacketKind, round: u64, segment: u32, body: &[u8], out: &mut T) {
        let header = PacketHeader::new(kind, self.ticket.session, round, segment);
        out.send(self.ticket.address, &header.encode(), body);
    }

    /// Sends a control, which begins with the key.
    pub fn send_control<T: Transmit>(&self, kind: PacketKind, round: u64, number: u32, argument: &[u8], out: &mut T) {
        self.send(kind, round, number, &[self.ticket.key.as_slice(), argument].concat(), out);
    }

    /// Continues path validation; `true` once it is done.
    pub fn validate<T: Transmit>(&mut self, now: Instant, out: &mut T) -> bool {
        if !self.is_valid && self.validation.is_due(now) {
            self.send_control(PacketKind::Join, 0, 0, &self.cookie, out);
        }
        self.is_valid
    }

    /// Stores a cookie for the next call of [`Uplink::validate`]; `false` for an invalid one.
    pub fn take_cookie(&mut self, body: &[u8]) -> bool {
        let cookie = body.try_into();
        if let Ok(cookie) = cookie
            && !self.is_valid
        {
            self.cookie = cookie;
            self.validation.hurry();
        }
        cookie.is_ok()
    }

    /// Time of the next try of path validation.
    pub fn next_try(&self) -> Option<Instant> {
        self.validation.next.filter(|_| !self.is_valid)
    }
}

/// The parent aggregator of a job, as its child sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentAggregator {
    /// Membership of the child at the parent, and the path to it.
    pub(super) up: Uplink,
    /// Workers below the child, on all levels.
    pub below: u32,
    /// Unacknowledged failure: its round and reason, and the tries to report it. A reset ends it.
    pub(super) failure: Option<(u64, Ack, Retry)>,
    /// Last round without a sum, and the members that the parent waited for.
    pub(super) waiting_on: Option<(u64, String)>,
}

impl ParentAggregator {
    /// The parent that gave `ticket` to an aggregator with `below` workers.
    pub fn new(ticket: &Ticket, below: u32) -> Self {
        let up = Uplink::new(ticket);
        ParentAggregator { up, below, failure: None, waiting_on: None }
    }

    /// Number of the session at the parent.
    pub fn session(&self) -> u32 {
        self.up.ticket.session
    }

    /// Display name, with the members that the parent waits for in `round`.
    pub(super) fn describe(&self, round: u64) -> String {
        let name = format!("the aggregator at {}", self.up.ticket.address);
        match &self.waiting_on {
            _ if !self.up.is_valid => format!("{name}, which has not answered"),
            Some((of, whom)) if *of == round => format!("{name}, which waits for {whom}"),
            _ => name,
        }
    }

    /// Sends the message that the parent has not answered, if it is due: path validation, then a failure.
    pub(super) fn retry<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        if self.up.validate(now, out)
            && let Some((round, reason, retry)) = &mut self.failure
            && retry.is_due(now)
        {
            self.up.send_control(PacketKind::Halt, *round, number(*round), &reason.encode(), out);
        }
    }

    /// Reports a failure, which suspends the job at the parent.
    pub(super) fn report<T: Transmit>(&mut self, now: Instant, round: u64, reason: &Ack, out: &mut T) {
        self.failure = Some((round, reason.clone(), Retry::default()));
        self.retry(now, out);
    }

    /// Forgets the failure that the parent has acknowledged, unless the answer is late and about one before a reset.
    pub(super) fn acknowledge_failure(&mut self, answered: u32) {
        self.failure.take_if(|(round, ..)| number(*round) == answered);
    }
}

/// Number of the report of a failure: a reset lies between two failures, so their rounds differ.
fn number(round: u64) -> u32 {
    round as u32 & ALL_SEGMENTS
}

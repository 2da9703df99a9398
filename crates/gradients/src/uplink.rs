//! The path of a worker, or of a rack, to its aggregator: session, key, and the proof that it receives at its address.

use std::time::{Duration, Instant};

use super::packet::{Cookie, PacketHeader, PacketKind};
use super::{Ticket, Transmit};

/// Time to the first retry. It doubles with each retry.
const TIMEOUT: Duration = Duration::from_millis(20);
/// Longest time between two tries.
const MAX_TIMEOUT: Duration = Duration::from_millis(500);

/// Tries of one message until it is answered. The first one is due at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retry {
    tries: u32,
    next: Option<Instant>,
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

    /// Time of the next try; `None` before the first one.
    pub fn next(&self) -> Option<Instant> {
        self.next
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
        self.validation.next().filter(|_| !self.is_valid)
    }
}

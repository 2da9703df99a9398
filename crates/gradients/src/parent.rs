//! The parent aggregator of a job: validation of the path to it, and failures to report. Both are sent again until the parent answers.

use std::net::SocketAddr;
use std::time::Instant;

use super::packet::{ALL_SEGMENTS, Ack, Cookie, PacketHeader, PacketKind};
use super::worker::control_timeout;
use super::{Ticket, Transmit};

/// The parent aggregator of a job, as its child sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentAggregator {
    /// UDP address of the parent.
    pub address: SocketAddr,
    /// Membership of the child at the parent.
    pub ticket: Ticket,
    /// Workers below the child, on all levels.
    pub below: u32,
    /// The parent has validated the path, and accepts contributions.
    pub(super) path_valid: bool,
    /// The connection to the parent has ended.
    pub(super) lost: bool,
    /// Reason for which this job can never be reset again.
    pub(super) refusal: Option<String>,
    cookie: Cookie,
    /// Unacknowledged failure: its round and reason.
    failure: Option<(u64, Ack)>,
    /// Last round without a sum, and the members that the parent waited for.
    pub(super) waiting_on: Option<(u64, String)>,
    next_try: Option<Instant>,
    tries: u32,
}

impl ParentAggregator {
    /// The parent at `address`, which gave `ticket` to an aggregator with `below` workers.
    pub fn new(address: SocketAddr, ticket: &Ticket, below: u32) -> Self {
        ParentAggregator {
            address,
            ticket: ticket.clone(),
            below,
            path_valid: false,
            lost: false,
            refusal: None,
            cookie: Cookie::default(),
            failure: None,
            waiting_on: None,
            next_try: None,
            tries: 0,
        }
    }

    /// Display name, with the members that the parent waits for in `round`.
    pub(super) fn describe(&self, round: u64) -> String {
        let name = format!("the aggregator at {}", self.address);
        match &self.waiting_on {
            _ if !self.path_valid => format!("{name}, which has not answered"),
            Some((of, whom)) if *of == round => format!("{name}, which waits for {whom}"),
            _ => name,
        }
    }

    fn is_unanswered(&self) -> bool {
        !self.lost && (!self.path_valid || self.failure.is_some())
    }

    /// Time of the next retry.
    pub(super) fn next_try(&self) -> Option<Instant> {
        self.next_try.filter(|_| self.is_unanswered())
    }

    /// Sends the unanswered message, if it is due. The first try is due at once.
    pub(super) fn retry<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        if self.is_unanswered() && self.next_try.is_none_or(|at| at <= now) {
            self.next_try = Some(now + control_timeout(self.tries));
            self.tries += 1;
            self.send_unanswered(out);
        }
    }

    fn send_unanswered<T: Transmit>(&self, out: &mut T) {
        if !self.path_valid {
            let body = [self.ticket.key.as_slice(), &self.cookie].concat();
            self.send(PacketKind::Join, 0, 0, &body, out);
        } else if let Some((round, reason)) = &self.failure {
            let body = [self.ticket.key.as_slice(), &reason.encode()].concat();
            self.send(PacketKind::Halt, *round, number(*round), &body, out);
        }
    }

    /// Returns a cookie of path validation.
    pub(super) fn return_cookie<T: Transmit>(&mut self, cookie: Cookie, out: &mut T) {
        if !self.path_valid {
            self.cookie = cookie;
            self.send_unanswered(out);
        }
    }

    /// Notes that the parent has validated the path. `false` if it had before.
    pub(super) fn on_path_valid<T: Transmit>(&mut self, now: Instant, out: &mut T) -> bool {
        let is_new = !std::mem::replace(&mut self.path_valid, true);
        if is_new {
            self.start(now, out);
        }
        is_new
    }

    /// Reports a failure, which suspends the job at the parent.
    pub(super) fn report<T: Transmit>(&mut self, now: Instant, round: u64, reason: &Ack, out: &mut T) {
        self.failure = Some((round, reason.clone()));
        if self.path_valid {
            self.start(now, out);
        }
    }

    /// Forgets the failure that the parent has acknowledged, unless the answer is late and about one before a reset.
    pub(super) fn acknowledge_failure(&mut self, answered: u32) {
        self.failure.take_if(|(round, _)| number(*round) == answered);
    }

    /// Forgets the failure: the job was reset.
    pub(super) fn clear_failure(&mut self) {
        self.failure = None;
    }

    fn start<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        (self.next_try, self.tries) = (None, 0);
        self.retry(now, out);
    }

    /// Sends one datagram.
    pub(super) fn send<T: Transmit>(&self, kind: PacketKind, round: u64, segment: u32, body: &[u8], out: &mut T) {
        let header = PacketHeader::new(kind, self.ticket.session, round, segment);
        out.send(self.address, &header.encode(), body);
    }
}

/// Number of the report of a failure: a reset lies between two failures, so their rounds differ.
fn number(round: u64) -> u32 {
    round as u32 & ALL_SEGMENTS
}

//! The parent aggregator of a job, and failures to report, which are sent again until the parent answers.

use std::time::Instant;

use super::packet::{ALL_SEGMENTS, Ack, PacketKind};
use super::uplink::{Retry, Uplink};
use super::{Ticket, Transmit};

/// The parent aggregator of a job, as its child sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentAggregator {
    /// Membership of the child at the parent, and the path to it.
    pub(super) up: Uplink,
    /// Workers below the child, on all levels.
    pub below: u32,
    /// Unacknowledged failure: its round and reason, and the tries to report it.
    failure: Option<(u64, Ack, Retry)>,
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

    /// Forgets the failure: the job was reset.
    pub(super) fn clear_failure(&mut self) {
        self.failure = None;
    }
}

/// Number of the report of a failure: a reset lies between two failures, so their rounds differ.
fn number(round: u64) -> u32 {
    round as u32 & ALL_SEGMENTS
}

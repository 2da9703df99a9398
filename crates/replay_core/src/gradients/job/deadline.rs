//! What becomes of a round that misses a worker.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::{Job, Seat};
use crate::gradients::Transmit;
use crate::gradients::aggregator::Counters;
use crate::gradients::packet::{self, Ack, Header, Kind, Status};
use crate::gradients::slots::{Slot, State};

impl Job {
    /// Fails the job if a segment has waited for too long.
    pub fn expire<T: Transmit>(&mut self, now: Instant, counters: &mut Counters, out: &mut T) {
        let overdue = self
            .waiting()
            .filter(|slot| now.saturating_duration_since(slot.opened) >= self.patience(slot))
            .min_by_key(|slot| slot.tag);
        let Some(slot) = overdue.copied() else {
            return;
        };
        let waited = self.patience(&slot).as_millis();
        let missing = match slot.state {
            State::Raised => 0,
            _ => self.everybody() & !slot.counted,
        };
        let whom = match &self.upstream {
            Some(upstream) if missing == 0 => format!("the aggregator at {}", upstream.address),
            _ => self.describe(missing, now),
        };
        let failed = Ack {
            missing,
            text: format!("round {} waited {waited} ms for {whom}", slot.tag.round),
            ..Ack::new(Status::Failed, slot.kind)
        };
        self.fail(failed, counters, out);
    }

    /// When [`Job::expire`] may have something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.waiting().map(|slot| slot.opened + self.patience(slot));
        deadlines.min()
    }

    /// How long a segment may wait. For the parent longer: where a worker is missing elsewhere, the aggregator that it should have sent to
    /// fails the job, and can name it. That is enough for a parent that waits up to 5/4 as long as we do.
    fn patience(&self, slot: &Slot) -> Duration {
        match slot.state {
            State::Raised => self.terms.deadline * 13 / 10,
            _ => self.terms.deadline,
        }
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &Slot> {
        self.slots
            .iter()
            .map(|(_, slot)| slot)
            .filter(|slot| matches!(slot.state, State::Open | State::Raised))
    }

    /// The missing workers, by number and name.
    pub(super) fn describe(&self, missing: u64, now: Instant) -> String {
        let mut text = String::new();
        for (worker, seat) in self.seats.iter().enumerate() {
            if missing & 1 << worker == 0 {
                continue;
            }
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = match seat {
                Seat::Empty => write!(text, "{comma}worker {worker}, which never joined"),
                Seat::Left(name) => write!(text, "{comma}worker {worker} ({name}), which left"),
                Seat::Joined(member) => write!(
                    text,
                    "{comma}worker {worker} ({}), last heard {:.1} s ago",
                    member.name,
                    now.saturating_duration_since(member.heard).as_secs_f64()
                ),
            };
        }
        text
    }

    /// A bit for each worker.
    pub(super) fn everybody(&self) -> u64 {
        u64::MAX >> (64 - self.terms.workers)
    }

    /// Halts here and above.
    pub(super) fn fail<T: Transmit>(&mut self, reason: Ack, counters: &mut Counters, out: &mut T) {
        counters.failed += 1;
        if let Some(upstream) = &self.upstream {
            let header = Header::new(Kind::Halt, upstream.session, self.newest, 0);
            let text = packet::cut(&reason.text, Ack::MAX_TEXT / 2);
            out.send(
                upstream.address,
                &header.encode(),
                &[&upstream.key, text.as_bytes()].concat(),
            );
        }
        self.halt(reason, out);
    }

    /// Adds nothing up until a reset, and tells everybody why.
    pub(super) fn halt<T: Transmit>(&mut self, reason: Ack, out: &mut T) {
        self.slots.clear();
        self.tell_all(self.newest, 0, &reason, out);
        self.halted = Some(reason);
    }
}

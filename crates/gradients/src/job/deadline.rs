//! What becomes of a round that misses a worker.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::{Job, Seat};
use crate::counters::Counters;
use crate::packet::{Ack, Status};
use crate::slots::{Slot, State};
use crate::terms::who;
use crate::{Transmit, Upstream};

impl Job {
    /// Fails the job if a segment has waited for too long.
    pub fn expire<T: Transmit>(&mut self, now: Instant, counters: &mut Counters, out: &mut T) {
        self.remind_parent(now, out);
        let due = self.due().filter(|(due, _)| *due <= now);
        let Some(slot) = due.map(|(_, slot)| *slot) else {
            return;
        };
        let waited = self.patience(&slot).as_millis();
        let missing = match slot.state {
            State::Raised => 0,
            _ => self.everybody() & !slot.counted,
        };
        let whom = match slot.state {
            State::Raised => self.parent_waits_for(slot.tag.round),
            _ => self.describe(missing, now),
        };
        let failed = Ack {
            missing: self.numbers(missing),
            text: format!("round {} waited {waited} ms for {whom}", slot.tag.round),
            ..Ack::new(Status::Failed, slot.kind)
        };
        self.fail(failed, counters, out);
    }

    /// When [`Job::expire`] may have something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let due = self.due().map(|(due, _)| due);
        let reminder = self.upstream.as_ref().and_then(Upstream::wake);
        due.into_iter().chain(reminder).min()
    }

    /// The segment that the job fails by, and when. Where workers wait for each other that is the first one that has no sum: all of them ask
    /// for it, while of later ones lost contributions may be missing, too.
    fn due(&self) -> Option<(Instant, &Slot)> {
        let waiting = self.waiting();
        let waiting = waiting.map(|slot| (slot.opened + self.patience(slot), slot));
        match self.terms.asynchronous {
            None => waiting.min_by_key(|(_, slot)| slot.tag),
            Some(_) => waiting.min_by_key(|(due, slot)| (*due, slot.tag)),
        }
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

    /// Those that are missing, where they are workers: racks are named in the text alone, as numbers are those of workers in their rack.
    pub(super) fn numbers(&self, missing: u64) -> u64 {
        match self.terms.racks {
            true => 0,
            false => missing,
        }
    }

    /// Those that are missing, by number and name.
    pub(super) fn describe(&self, missing: u64, now: Instant) -> String {
        let mut text = String::new();
        let who = who(self.terms.racks);
        for (worker, seat) in self.seats.iter().enumerate() {
            if missing & 1 << worker == 0 {
                continue;
            }
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = match seat {
                Seat::Empty => write!(text, "{comma}{who} {worker}, which never joined"),
                Seat::Left(name) => write!(text, "{comma}{who} {worker} ({name}), which left"),
                Seat::Joined(member) => write!(
                    text,
                    "{comma}{who} {worker} ({}), last heard {:.1} s ago",
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
        let round = self.next_round();
        if let Some(upstream) = &mut self.upstream {
            // It may be some time since a worker was heard: then it is only repeated sooner.
            upstream.halt(self.heard, round, &reason, out);
        }
        self.halt(reason, out);
    }

    /// Adds nothing up until a reset, and tells everybody why.
    pub(super) fn halt<T: Transmit>(&mut self, reason: Ack, out: &mut T) {
        self.slots.clear();
        self.tell_all(self.next_round(), 0, &reason, out);
        self.halted = Some(reason);
    }
}

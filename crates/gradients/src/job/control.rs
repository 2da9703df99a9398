//! What workers ask of a job beside sums: threshold, forced broadcasts, resets, leaving.

use super::{Job, Seat};
use crate::Transmit;
use crate::arithmetic::Arithmetic;
use crate::counters::Counters;
use crate::packet::{ALL_SEGMENTS, Ack, Header, Kind, Status};
use crate::slots::State;
use crate::terms::who;

/// Rounds from the newest one that a contribution came for to the first one after a reset. Contributions to the one after it may be on their
/// way, and controls of who has sent them, which name the one after that: all of these are told by their round.
pub(super) const APART: u64 = 3;

impl Job {
    /// Applies a control whose key was right.
    pub fn control<T: Transmit>(
        &mut self,
        worker: u16,
        header: Header,
        argument: &[u8],
        counters: &mut Counters,
        out: &mut T,
    ) {
        let about = header.kind;
        let refused = match about {
            Kind::Reset => {
                self.reset_from(worker, header, out);
                return;
            }
            Kind::Halt | Kind::SetH if self.is_of_before(header) => {
                Some("the job was reset after this was sent: reset it here as well, then ask again")
            }
            Kind::Halt => match Ack::decode(argument) {
                None => {
                    counters.malformed += 1;
                    return;
                }
                Some(reason) => {
                    if self.halted.is_none() {
                        let reason = self.attribute(worker, reason);
                        self.fail(reason, counters, out);
                    }
                    None
                }
            },
            _ if self.terms.arithmetic == Arithmetic::Fixed => Some(
                "in fixed point every worker has to be counted: the grid is made for all of them",
            ),
            _ if u32::from(self.terms.workers) != self.terms.world => {
                Some("with a parent aggregator every worker has to be counted")
            }
            Kind::SetH => self.set_threshold(argument, counters, out),
            _ => self.force(header, counters, out),
        };
        let ack = match refused {
            None => Ack::new(Status::Done, about),
            Some(reason) => Ack {
                text: reason.to_owned(),
                ..Ack::new(Status::Refused, about)
            },
        };
        let next = self.floor.max(self.newest);
        self.tell(worker, next, header.segment, &ack, out);
    }

    /// Whether a control was sent before the last reset.
    fn is_of_before(&self, header: Header) -> bool {
        let round = header.round_near(self.newest);
        round.is_none_or(|round| round < self.floor)
    }

    /// Why a worker or a rack suspends the job, with its name. A rack says who is missing there.
    fn attribute(&self, worker: u16, reason: Ack) -> Ack {
        let (about, who) = (Kind::Halt, who(self.terms.racks));
        if !self.terms.racks {
            return Ack {
                text: format!("{who} {worker} suspended the job: {}", reason.text),
                ..Ack::new(Status::Halted, about)
            };
        }
        let seat = self.seats.get(usize::from(worker)).and_then(Seat::member);
        let name = seat.map_or("", |member| &member.name);
        let status = match reason.status {
            Status::Failed => Status::Failed,
            _ => Status::Halted,
        };
        Ack {
            missing: reason.missing,
            text: format!("in {who} {worker} ({name}): {}", reason.text),
            ..Ack::new(status, about)
        }
    }

    pub(super) fn set_threshold<T: Transmit>(
        &mut self,
        argument: &[u8],
        counters: &mut Counters,
        out: &mut T,
    ) -> Option<&'static str> {
        let threshold = u32::from(u16::from_le_bytes(argument.try_into().unwrap_or_default()));
        if threshold == 0 || threshold > self.terms.workers.into() {
            return Some("the threshold is from 1 to the number of workers");
        }
        self.threshold = threshold;
        for index in self.open() {
            self.complete(index, counters, out);
        }
        None
    }

    /// Sends what there is of one segment, or of all of a round.
    pub(super) fn force<T: Transmit>(
        &mut self,
        header: Header,
        counters: &mut Counters,
        out: &mut T,
    ) -> Option<&'static str> {
        let round = header.round_near(self.newest);
        for index in self.open() {
            let tag = self.slots.slot(index).tag;
            if Some(tag.round) == round && [tag.segment, ALL_SEGMENTS].contains(&header.segment) {
                self.finish(index, counters, out);
            }
        }
        None
    }

    /// Segments of which contributions are missing.
    pub(super) fn open(&self) -> Vec<usize> {
        self.slots
            .iter()
            .filter(|(_, slot)| slot.state == State::Open)
            .map(|(index, _)| index)
            .collect()
    }

    /// A worker gave up a round, of which nothing may be counted any more. Where there is a parent, it says what comes next.
    pub(super) fn reset_from<T: Transmit>(&mut self, worker: u16, header: Header, out: &mut T) {
        let Some(given_up) = header.round_near(self.newest.max(self.floor)) else {
            return;
        };
        // A suspended job waits for a reset, also by one who has sent nothing since the last.
        let goes_on = self.halted.is_some() && given_up + 1 >= self.floor;
        if given_up >= self.floor || goes_on {
            if let Some(upstream) = &self.upstream {
                if upstream.lost {
                    let text = "the aggregator above this one is gone: leave the job and join it again, all workers";
                    let refused = Ack {
                        text: text.to_owned(),
                        ..Ack::new(Status::Refused, Kind::Reset)
                    };
                    return self.tell(worker, self.floor, 0, &refused, out);
                }
                // Whoever asked asks again, until the parent has said what comes next.
                if upstream.proved {
                    upstream.send(Kind::Reset, given_up, 0, &upstream.key, out);
                }
                return;
            }
            let text = format!("{} {worker} reset the job", who(self.terms.racks));
            self.reset(self.newest.max(given_up) + APART, &text, out);
        }
        self.tell(
            worker,
            self.floor,
            0,
            &Ack::new(Status::Done, Kind::Reset),
            out,
        );
    }

    /// Drops what is under way; `first` is the round that comes next.
    pub(super) fn reset<T: Transmit>(&mut self, first: u64, text: &str, out: &mut T) {
        self.slots.clear();
        self.halted = None;
        if let Some(upstream) = &mut self.upstream {
            upstream.settle();
        }
        self.floor = first;
        self.newest = first - 1;
        let ack = Ack {
            text: text.to_owned(),
            ..Ack::new(Status::Reset, Kind::Reset)
        };
        self.tell_all(first, 0, &ack, out);
    }

    /// Takes a worker out of the membership table. A segment under way would wait for it in vain.
    pub fn leave<T: Transmit>(&mut self, worker: u16, counters: &mut Counters, out: &mut T) {
        let seat = &mut self.seats[usize::from(worker)];
        let Seat::Joined(member) = seat else { return };
        let name = std::mem::take(&mut member.name);
        let who = who(self.terms.racks);
        let text = format!("{who} {worker} ({name}) left in the middle of round");
        *seat = Seat::Left(name);
        let open = self.open();
        let oldest = open.iter().map(|&index| self.slots.slot(index).tag).min();
        if let Some(tag) = oldest
            && (self.joined() as u32) < self.threshold
        {
            let failed = Ack {
                missing: self.numbers(1 << worker),
                text: format!("{text} {}", tag.round),
                ..Ack::new(Status::Failed, Kind::Leave)
            };
            self.fail(failed, counters, out);
        }
    }
}

//! A job whose sums go on to an aggregator above this one.

use std::time::Instant;

use super::Job;
use crate::Transmit;
use crate::counters::Counters;
use crate::packet::{Ack, Header, Kind, Status};
use crate::slots::{Place, State, Tag};

impl Job {
    /// Sends what is complete here to the parent, if that takes it.
    pub(super) fn raise<T: Transmit>(&self, index: usize, out: &mut T) {
        let slot = self.slots.slot(index);
        self.send_up(slot.kind, slot.tag, self.slots.values(index), out);
    }

    pub(super) fn ask_parent<T: Transmit>(&self, index: usize, out: &mut T) {
        self.send_up(Kind::Help, self.slots.slot(index).tag, &[], out);
    }

    fn send_up<T: Transmit>(&self, kind: Kind, tag: Tag, body: &[u8], out: &mut T) {
        // Before it takes anything the proof of this path is under way, and then all that is complete is sent.
        if let Some(upstream) = self.upstream.as_ref().filter(|up| up.proved) {
            upstream.send(kind, tag.round, tag.segment, body, out);
        }
    }

    /// For people: the parent, and who it waits for.
    pub(super) fn parent_waits_for(&self, round: u64) -> String {
        let upstream = self.upstream.as_ref();
        upstream.map_or_else(String::new, |upstream| upstream.describe(round))
    }

    /// Sends again what the parent has not answered, and begins to show it where this aggregator is.
    pub(crate) fn remind_parent<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        if let Some(upstream) = &mut self.upstream {
            upstream.repeat(now, out);
        }
    }

    /// Takes what the parent sent.
    pub fn take_from_parent<T: Transmit>(
        &mut self,
        now: Instant,
        header: Header,
        body: &[u8],
        counters: &mut Counters,
        out: &mut T,
    ) {
        let Some(round) = header.round_near(self.newest) else {
            counters.malformed += 1;
            return;
        };
        let tag = Tag {
            round,
            segment: header.segment,
        };
        match header.kind {
            Kind::Float | Kind::Fixed | Kind::Exponents | Kind::Help => {
                let Place::Found(index) = self.slots.find(tag) else {
                    counters.stale += 1;
                    return;
                };
                let slot = self.slots.slot(index);
                if slot.state != State::Raised {
                    counters.duplicates += 1;
                } else if header.kind == Kind::Help {
                    self.raise(index, out);
                } else if slot.kind == header.kind && self.slots.values(index).len() == body.len() {
                    self.slots.put(index, body);
                    self.finish(index, counters, out);
                } else {
                    counters.malformed += 1;
                }
            }
            Kind::Join => {
                let Some(upstream) = &mut self.upstream else {
                    return;
                };
                match body.try_into() {
                    Ok(cookie) => upstream.take_cookie(cookie, out),
                    Err(_) => counters.malformed += 1,
                }
            }
            Kind::Ack => match Ack::decode(body) {
                Some(ack) if ack.status == Status::Gone => self.parent_dropped(tag, counters, out),
                Some(ack) => self.parent_says(now, ack, round, out),
                None => counters.malformed += 1,
            },
            _ => counters.malformed += 1,
        }
    }

    /// The parent has no place for a segment any more. Where that is still waited for, the windows are not the same, and it would be for ever.
    fn parent_dropped<T: Transmit>(&mut self, tag: Tag, counters: &mut Counters, out: &mut T) {
        let (Place::Found(index), Some(upstream)) = (self.slots.find(tag), &self.upstream) else {
            return;
        };
        if self.slots.slot(index).state != State::Raised {
            return;
        }
        let text = format!(
            "the aggregator above this one, at {}, no longer keeps segment {} of round {}, of which this one has no sum",
            upstream.address, tag.segment, tag.round
        );
        let halted = Ack {
            text,
            ..Ack::new(Status::Halted, Kind::Float)
        };
        self.fail(halted, counters, out);
    }

    /// Whether it had a parent that has gone.
    pub fn is_orphan(&self) -> bool {
        self.upstream.as_ref().is_some_and(|up| up.lost)
    }

    /// Nothing comes from the parent any more.
    pub fn lose_parent<T: Transmit>(&mut self, counters: &mut Counters, out: &mut T) {
        let Some(upstream) = &mut self.upstream else {
            return;
        };
        upstream.lost = true;
        counters.failed += 1;
        let halted = Ack {
            text: format!(
                "the aggregator above this one, at {}, ended its connection: leave the job and join it again, all workers",
                upstream.address
            ),
            ..Ack::new(Status::Halted, Kind::Leave)
        };
        self.halt(halted, out);
    }

    fn parent_says<T: Transmit>(&mut self, now: Instant, ack: Ack, round: u64, out: &mut T) {
        let Some(upstream) = &mut self.upstream else {
            return;
        };
        match (ack.status, ack.about) {
            (Status::Done, Kind::Join) => {
                let is_news = upstream.prove(now, out);
                if is_news {
                    self.raise_all(out);
                }
            }
            (Status::Waiting, _) => upstream.waits_for = Some((round, ack.text)),
            // A refused one is of before a reset.
            (Status::Done | Status::Refused, Kind::Halt) => upstream.settle(),
            (Status::Done, Kind::Reset) | (Status::Reset, _) if round > self.floor => {
                self.reset(round, "the job was reset", out);
            }
            // What is of an earlier round is from before a reset.
            (Status::Failed | Status::Halted, _)
                if self.halted.is_none() && round >= self.floor =>
            {
                let text = format!("above this aggregator: {}", ack.text);
                self.halt(Ack { text, ..ack }, out);
            }
            _ => {}
        }
    }

    fn raise_all<T: Transmit>(&self, out: &mut T) {
        for (index, slot) in self.slots.iter() {
            if slot.state == State::Raised {
                self.raise(index, out);
            }
        }
    }
}

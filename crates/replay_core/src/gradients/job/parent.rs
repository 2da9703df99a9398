//! A job whose sums go on to an aggregator above this one.

use super::Job;
use crate::gradients::Transmit;
use crate::gradients::aggregator::Counters;
use crate::gradients::packet::{Ack, Header, Kind, Status};
use crate::gradients::slots::{Place, State, Tag};

impl Job {
    /// Sends what is complete here to the parent.
    pub(super) fn raise<T: Transmit>(&self, index: usize, out: &mut T) {
        let Some(upstream) = &self.upstream else {
            return;
        };
        if !upstream.proved {
            return upstream.prove(out);
        }
        let slot = self.slots.slot(index);
        let Tag { round, segment } = slot.tag;
        let header = Header::new(slot.kind, upstream.session, round, segment);
        out.send(upstream.address, &header.encode(), self.slots.values(index));
    }

    pub(super) fn ask_parent<T: Transmit>(&self, index: usize, out: &mut T) {
        let Some(upstream) = &self.upstream else {
            return;
        };
        if !upstream.proved {
            return upstream.prove(out);
        }
        let Tag { round, segment } = self.slots.slot(index).tag;
        let header = Header::new(Kind::Help, upstream.session, round, segment);
        out.send(upstream.address, &header.encode(), &[]);
    }

    /// Takes what the parent sent.
    pub fn take_from_parent<T: Transmit>(
        &mut self,
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
                    Ok(cookie) => upstream.cookie = cookie,
                    Err(_) => counters.malformed += 1,
                }
                upstream.prove(out);
            }
            Kind::Ack => match Ack::decode(body) {
                Some(ack) => self.parent_says(ack, round, out),
                None => counters.malformed += 1,
            },
            _ => counters.malformed += 1,
        }
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

    pub(super) fn parent_says<T: Transmit>(&mut self, ack: Ack, round: u64, out: &mut T) {
        match (ack.status, ack.about) {
            (Status::Done, Kind::Join) => {
                if let Some(upstream) = &mut self.upstream {
                    upstream.proved = true;
                }
                let raised: Vec<usize> = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| slot.state == State::Raised)
                    .map(|(index, _)| index)
                    .collect();
                for index in raised {
                    self.raise(index, out);
                }
            }
            (Status::Done, Kind::Reset) | (Status::Reset, _) if round > self.floor => {
                self.reset(round, "the job was reset", out);
            }
            // What is of an earlier round is from before a reset.
            (Status::Failed | Status::Halted, _)
                if self.halted.is_none() && round >= self.floor =>
            {
                let text = format!("above this aggregator: {}", ack.text);
                self.halt(
                    Ack {
                        missing: 0,
                        text,
                        ..ack
                    },
                    out,
                );
            }
            _ => {}
        }
    }
}

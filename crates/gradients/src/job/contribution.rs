//! Contributions: counted, added up, and answered with sums.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Instant;

use super::Job;
use crate::Transmit;
use crate::counters::Counters;
use crate::packet::{ALL_SEGMENTS, Ack, HEADER_BYTES, Header, Kind, Status};
use crate::slots::{Place, State, Tag};

impl Job {
    /// Counts a contribution, or answers with the sum where it is there already.
    #[inline(always)]
    pub fn contribute<T: Transmit>(
        &mut self,
        now: Instant,
        worker: u16,
        header: Header,
        body: &[u8],
        counters: &mut Counters,
        out: &mut T,
    ) {
        match self.expected(worker, header, body) {
            Some((index, tag)) => {
                self.slots.add(index, worker, body);
                self.count(worker, tag, counters);
                self.complete(index, counters, out);
            }
            None => self.judge(now, worker, header, body, counters, out),
        }
    }

    /// The segment that waits for just this contribution. What is under way has passed every check when it began, and is of no job that
    /// was halted or reset since.
    #[inline(always)]
    fn expected(&self, worker: u16, header: Header, body: &[u8]) -> Option<(usize, Tag)> {
        let tag = Tag {
            round: header.round_near(self.newest)?,
            segment: header.segment,
        };
        let index = self.slots.awaiting(tag, header.kind, worker, body.len())?;
        debug_assert!(self.halted.is_none() && tag.round >= self.floor);
        Some((index, tag))
    }

    /// Takes a contribution that begins a segment, has been counted before, does not fit, or has no place.
    #[inline(never)]
    fn judge<T: Transmit>(
        &mut self,
        now: Instant,
        worker: u16,
        header: Header,
        body: &[u8],
        counters: &mut Counters,
        out: &mut T,
    ) {
        let most = self.terms.stride();
        let fits = !body.is_empty() && body.len() <= most && body.len().is_multiple_of(4);
        let segments = self.segments();
        if !fits || !self.terms.arithmetic.has(header.kind) || header.segment >= segments {
            counters.malformed += 1;
            return;
        }
        let Some(tag) = self.tag(worker, header, counters, out) else {
            return;
        };
        let kind = header.kind;
        let index = match self.slots.find(tag) {
            Place::Found(index) => index,
            Place::Free(index) => {
                self.slots.begin(index, tag, kind, worker, body, now);
                self.count(worker, tag, counters);
                self.newest = self.newest.max(tag.round);
                return self.complete(index, counters, out);
            }
            Place::Gone => {
                counters.stale += 1;
                return self.answer(worker, header, Ack::new(Status::Gone, kind), out);
            }
            Place::Ahead => {
                counters.ahead += 1;
                return;
            }
        };
        let slot = self.slots.slot(index);
        let counted = slot.counted & 1 << worker != 0;
        match slot.state {
            State::Done => {
                counters.duplicates += u64::from(counted);
                counters.late += u64::from(!counted);
                self.send_sum(worker..worker + 1, index, out);
            }
            _ if slot.kind != kind || self.slots.values(index).len() != body.len() => {
                let text = format!(
                    "worker {worker} sent {} bytes ({kind:?}) for segment {} of round {}, another worker {} ({:?}): \
                     all workers have to sum vectors of the same length",
                    body.len(),
                    tag.segment,
                    tag.round,
                    self.slots.values(index).len(),
                    slot.kind,
                );
                let failed = Ack {
                    text,
                    ..Ack::new(Status::Halted, kind)
                };
                self.fail(failed, counters, out);
            }
            // It has been counted, or it would have been expected.
            state => {
                counters.duplicates += 1;
                if state == State::Raised {
                    self.raise(index, out);
                }
            }
        }
    }

    /// Segments that there may be.
    fn segments(&self) -> u32 {
        let terms = &self.terms;
        let of_vector = terms.asynchronous.map(|a| a.segments(terms.segment_values));
        of_vector.unwrap_or(ALL_SEGMENTS)
    }

    #[inline]
    fn count(&mut self, worker: u16, tag: Tag, counters: &mut Counters) {
        counters.counted += 1;
        self.contributed[usize::from(worker)] = tag.round;
    }

    /// The segment that a worker means; answered here where the job does not add it up.
    pub(super) fn tag<T: Transmit>(
        &mut self,
        worker: u16,
        header: Header,
        counters: &mut Counters,
        out: &mut T,
    ) -> Option<Tag> {
        let round = header.round_near(self.newest);
        if self.terms.asynchronous.is_some() && round.is_none_or(|round| round > self.newest + 1) {
            counters.ahead += 1;
            return self.refuse_weights(worker, header, out);
        }
        let Some(round) = round else {
            counters.malformed += 1;
            return None;
        };
        if round < self.floor {
            counters.stale += 1;
            let ack = Ack {
                text: "the job was reset".into(),
                ..Ack::new(Status::Reset, header.kind)
            };
            self.tell(worker, self.floor, 0, &ack, out);
            return None;
        }
        if let Some(halted) = self.halted.clone() {
            if round == self.newest + 1 {
                // It has been sent, so the rounds after a reset begin behind it.
                self.newest = round;
            }
            self.answer(worker, header, halted, out);
            return None;
        }
        if round > self.newest + 1 {
            counters.ahead += 1;
            return None;
        }
        Some(Tag {
            round,
            segment: header.segment,
        })
    }

    /// A worker that follows the updates of this job waits for one that comes next at the latest.
    fn refuse_weights<T: Transmit>(&self, worker: u16, header: Header, out: &mut T) -> Option<Tag> {
        let refused = Ack {
            text: format!(
                "worker {worker} has weights of a later update than this job's newest, {}: they are of an earlier job of this name; give \
                 each job a name of its own",
                self.newest
            ),
            ..Ack::new(Status::Refused, header.kind)
        };
        self.tell(worker, header.round.into(), header.segment, &refused, out);
        None
    }

    /// Sends the sum to everybody, or up, if the threshold is reached.
    #[inline]
    pub(super) fn complete<T: Transmit>(
        &mut self,
        index: usize,
        counters: &mut Counters,
        out: &mut T,
    ) {
        if self.slots.slot(index).counted.count_ones() < self.threshold {
            return;
        }
        if self.upstream.is_some() {
            let heard = self.heard;
            let slot = self.slots.slot_mut(index);
            slot.state = State::Raised;
            slot.opened = heard;
            self.raise(index, out);
        } else {
            self.finish(index, counters, out);
        }
    }

    pub(super) fn finish<T: Transmit>(
        &mut self,
        index: usize,
        counters: &mut Counters,
        out: &mut T,
    ) {
        self.slots.slot_mut(index).state = State::Done;
        counters.sums += 1;
        self.send_sum(0..self.terms.workers, index, out);
    }

    /// Sends a sum to these workers, if they have shown where they are.
    #[inline]
    pub(super) fn send_sum<T: Transmit>(&self, workers: Range<u16>, index: usize, out: &mut T) {
        let slot = self.slots.slot(index);
        let Tag { round, segment } = slot.tag;
        let reach = |kind| {
            let seats = &self.seats[usize::from(workers.start)..usize::from(workers.end)];
            seats.iter().filter_map(move |seat| {
                let member = seat.member()?;
                let header = Header::new(kind, member.session, round, segment);
                Some((member.path?, header.encode()))
            })
        };
        let values = self.slots.values(index);
        if slot.counted == self.everybody() {
            return out.send_each(reach(slot.kind), values);
        }
        let with_who = |(to, header): (SocketAddr, [u8; HEADER_BYTES])| {
            let mut head = [0; HEADER_BYTES + 8];
            head[..HEADER_BYTES].copy_from_slice(&header);
            head[HEADER_BYTES..].copy_from_slice(&slot.counted.to_le_bytes());
            (to, head)
        };
        out.send_each(reach(Kind::Partial).map(with_who), values);
    }
}

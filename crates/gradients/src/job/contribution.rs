//! Contributions: counted, added up, and answered with sums.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Instant;

use super::Job;
use crate::Transmit;
use crate::packet::{ALL_SEGMENTS, Ack, HEADER_BYTES, PacketHeader, PacketKind, Status};
use crate::segments::{Lookup, SegmentId, SegmentSlot, SegmentState};

/// Element type of contributions of `kind`, for errors.
fn content(kind: PacketKind) -> &'static str {
    match kind {
        PacketKind::Fixed => "int32",
        PacketKind::Exponents => "block exponents",
        _ => "float32",
    }
}

impl Job {
    /// Counts a contribution, or answers with the sum if that is complete.
    #[inline(always)]
    pub fn contribute<T: Transmit>(
        &mut self,
        now: Instant,
        worker: u16,
        header: PacketHeader,
        body: &[u8],
        out: &mut T,
    ) {
        match self.awaiting_segment(worker, header, body) {
            Some((index, id)) => {
                self.slots.add(index, worker, body);
                self.count(worker, id);
                self.finish_if_complete(index, out);
            }
            None => self.contribute_checked(now, worker, header, body, out),
        }
    }

    /// The open segment that waits for this contribution. It passed all checks when it began, and a reset or a suspension would have freed it.
    #[inline(always)]
    fn awaiting_segment(&self, worker: u16, header: PacketHeader, body: &[u8]) -> Option<(usize, SegmentId)> {
        let id = SegmentId::new(header.round_near(self.newest)?, header.segment);
        let index = self.slots.awaiting(id, header.kind, worker, body.len())?;
        debug_assert!(self.halted.is_none() && id.round >= self.floor);
        Some((index, id))
    }

    /// Handles a contribution that begins a segment, is a duplicate, does not fit, or comes too early or too late.
    #[inline(never)]
    fn contribute_checked<T: Transmit>(
        &mut self,
        now: Instant,
        worker: u16,
        header: PacketHeader,
        body: &[u8],
        out: &mut T,
    ) {
        let most = self.settings.segment_bytes();
        let Some((body, length)) = self.split_length(header, body) else {
            self.counters.malformed += 1;
            return;
        };
        let fits = !body.is_empty() && body.len() <= most && body.len().is_multiple_of(4);
        let segments = self.segments();
        if !fits || !self.settings.arithmetic.has(header.kind) || header.segment >= segments {
            self.counters.malformed += 1;
            return;
        }
        let Some(id) = self.check_segment(worker, header, out) else {
            return;
        };
        let kind = header.kind;
        let index = match self.slots.find(id) {
            Lookup::Found(index) => index,
            Lookup::Free(index) => {
                let segment = SegmentSlot::open(id, kind, worker, length, now);
                self.slots.begin(index, segment, body);
                self.count(worker, id);
                self.newest = self.newest.max(id.round);
                if !self.fail_if_too_many_left(now, id, out) {
                    self.finish_if_complete(index, out);
                }
                return;
            }
            Lookup::Gone => {
                self.counters.stale += 1;
                return self.reply(worker, header, Ack::new(Status::Gone, kind), out);
            }
            Lookup::Ahead => {
                self.counters.ahead += 1;
                return;
            }
        };
        let slot = self.slots.slot(index);
        let is_counted = slot.counted & 1 << worker != 0;
        let same_bytes = slot.bytes == body.len();
        match slot.state {
            // Segment 0, which is asked for again if it was lost, fails the job with both lengths.
            _ if !same_bytes && slot.kind == kind && length.is_none() && id.segment > 0 => self.counters.ahead += 1,
            _ if !same_bytes || slot.kind != kind || slot.length != length => {
                let text = self.difference(slot, worker, kind, length, body.len());
                self.fail(Ack::new(Status::Halted, kind).with_text(text), out);
            }
            SegmentState::Complete => {
                self.counters.duplicates += u64::from(is_counted);
                self.counters.late += u64::from(!is_counted);
                self.send_sum(worker..worker + 1, index, out);
            }
            SegmentState::Open if !is_counted => {
                self.slots.add(index, worker, body);
                self.count(worker, id);
                self.finish_if_complete(index, out);
            }
            // A duplicate.
            state => {
                self.counters.duplicates += 1;
                if state == SegmentState::AwaitingParent {
                    self.send_to_parent(index, out);
                }
            }
        }
    }

    /// The values of a contribution, and the length of the vector if it tells it; `None` for a body that is too short. All members tell the
    /// length in the first segment of a round, so vectors of different lengths never begin to be added up.
    fn split_length<'a>(&self, header: PacketHeader, body: &'a [u8]) -> Option<(&'a [u8], Option<u32>)> {
        let is_first = header.segment == 0 && self.settings.asynchronous.is_none();
        match header.kind {
            PacketKind::Float if is_first && body.len() <= self.settings.segment_bytes() => {
                Some((body, Some((body.len() / 4) as u32)))
            }
            PacketKind::Float | PacketKind::Exponents if is_first => {
                let (body, length) = body.split_last_chunk()?;
                Some((body, Some(u32::from_le_bytes(*length))))
            }
            _ => Some((body, None)),
        }
    }

    /// The difference of a contribution of `bytes` bytes from the segment that it belongs to.
    fn difference(
        &self,
        slot: &SegmentSlot,
        worker: u16,
        kind: PacketKind,
        length: Option<u32>,
        bytes: usize,
    ) -> String {
        let role = self.settings.role();
        let SegmentId { round, segment } = slot.id;
        let other = slot.counted.trailing_zeros();
        let sums = |kind, length: Option<u32>, bytes| match length {
            Some(values) => format!("{values} values ({})", content(kind)),
            None => format!("{bytes} bytes ({}) as segment {segment}", content(kind)),
        };
        let (own, others) = (sums(kind, length, bytes), sums(slot.kind, slot.length, slot.bytes));
        format!(
            "{role} {worker} sums {own} in round {round}, {role} {other} {others}: all workers have to sum vectors of the same length"
        )
    }

    /// Number of segments that a round may have.
    fn segments(&self) -> u32 {
        let settings = &self.settings;
        let of_vector = settings.asynchronous.map(|a| a.segments(settings.segment_values));
        of_vector.unwrap_or(ALL_SEGMENTS)
    }

    #[inline]
    fn count(&mut self, worker: u16, id: SegmentId) {
        self.counters.counted += 1;
        self.contributed[usize::from(worker)] = id.round;
    }

    /// The segment that `header` names. Answers the member and returns `None` if it cannot be added up: from before a reset, in a
    /// suspended job, or too far ahead.
    pub(super) fn check_segment<T: Transmit>(
        &mut self,
        worker: u16,
        header: PacketHeader,
        out: &mut T,
    ) -> Option<SegmentId> {
        let round = header.round_near(self.newest);
        if self.settings.asynchronous.is_some() && round.is_none_or(|round| round > self.newest + 1) {
            self.counters.ahead += 1;
            return self.refuse_weights(worker, header, out);
        }
        let Some(round) = round else {
            self.counters.malformed += 1;
            return None;
        };
        if round < self.floor {
            self.counters.stale += 1;
            let ack = Ack::new(Status::Reset, header.kind).with_text("the job was reset");
            self.send_ack(worker, SegmentId::new(self.floor, 0), &ack, out);
            return None;
        }
        if let Some(halted) = self.halted.clone() {
            if round == self.newest + 1 {
                // The round exists, so a reset must continue after it.
                self.newest = round;
            }
            self.reply(worker, header, halted, out);
            return None;
        }
        if round > self.newest + 1 {
            self.counters.ahead += 1;
            return None;
        }
        Some(SegmentId::new(round, header.segment))
    }

    /// Refuses a worker of an asynchronous job that contributes beyond round `newest + 1`: its weights are newer than the job's sums.
    fn refuse_weights<T: Transmit>(&self, worker: u16, header: PacketHeader, out: &mut T) -> Option<SegmentId> {
        let text = format!(
            "worker {worker} has weights of a later update than this job's newest, {}: they are of an earlier job of this name; give \
             each job a name of its own",
            self.newest
        );
        let refused = Ack::new(Status::Refused, header.kind).with_text(text);
        let id = SegmentId::new(header.round.into(), header.segment);
        self.send_ack(worker, id, &refused, out);
        None
    }

    /// Sends the sum to all members, or to the parent, if the threshold is reached.
    #[inline]
    pub(super) fn finish_if_complete<T: Transmit>(&mut self, index: usize, out: &mut T) {
        if self.slots.slot(index).counted.count_ones() < self.threshold {
            return;
        }
        if self.parent.is_some() {
            let now = self.last_heard;
            let slot = self.slots.slot_mut(index);
            slot.state = SegmentState::AwaitingParent;
            slot.waiting_since = now;
            self.send_to_parent(index, out);
        } else {
            self.finish(index, out);
        }
    }

    /// Makes a sum final, and sends it to all members.
    #[inline]
    pub(super) fn finish<T: Transmit>(&mut self, index: usize, out: &mut T) {
        self.slots.slot_mut(index).state = SegmentState::Complete;
        self.counters.sums += 1;
        self.send_sum(0..self.settings.workers, index, out);
    }

    /// Sends a sum to these members, if their addresses are validated.
    #[inline]
    pub(super) fn send_sum<T: Transmit>(&self, workers: Range<u16>, index: usize, out: &mut T) {
        let slot = self.slots.slot(index);
        let SegmentId { round, segment } = slot.id;
        let headers = |kind| {
            let members = &self.members[usize::from(workers.start)..usize::from(workers.end)];
            members.iter().filter_map(move |state| {
                let member = state.member()?;
                let header = PacketHeader::new(kind, member.session, round, segment);
                Some((member.address?, header.encode()))
            })
        };
        let values = self.slots.values(index);
        if slot.counted == self.all_members() {
            return out.send_each(headers(slot.kind), values);
        }
        let with_members = |(to, header): (SocketAddr, [u8; HEADER_BYTES])| {
            let mut head = [0; HEADER_BYTES + 8];
            head[..HEADER_BYTES].copy_from_slice(&header);
            head[HEADER_BYTES..].copy_from_slice(&slot.counted.to_le_bytes());
            (to, head)
        };
        out.send_each(headers(PacketKind::Partial).map(with_members), values);
    }
}

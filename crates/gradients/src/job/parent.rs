//! Traffic with the parent of a job.

use std::time::Instant;

use super::Job;
use crate::Transmit;
use crate::packet::{Ack, PacketHeader, PacketKind, Status};
use crate::segments::{Lookup, SegmentId, SegmentState};

impl Job {
    /// Sends a segment that is complete here to the parent.
    pub(super) fn send_to_parent<T: Transmit>(&self, index: usize, out: &mut T) {
        let (slot, values) = (self.slots.slot(index), self.slots.values(index));
        match slot.length {
            // Of one segment, its own bytes tell the length.
            Some(length) if slot.kind == PacketKind::Exponents || 4 * length as usize > values.len() => {
                self.send_up(slot.kind, slot.id, &[values, &length.to_le_bytes()].concat(), out);
            }
            _ => self.send_up(slot.kind, slot.id, values, out),
        }
    }

    pub(super) fn query_parent<T: Transmit>(&self, index: usize, out: &mut T) {
        self.send_up(PacketKind::Help, self.slots.slot(index).id, &[], out);
    }

    fn send_up<T: Transmit>(&self, kind: PacketKind, id: SegmentId, body: &[u8], out: &mut T) {
        // Before path validation the parent would drop it. Segments that are complete by then are sent once the path is valid.
        if let Some(parent) = self.parent.as_ref().filter(|parent| parent.up.is_valid) {
            parent.up.send(kind, id.round, id.segment, body, out);
        }
    }

    /// Display name of the parent, with the members that it waits for.
    pub(super) fn describe_parent(&self, round: u64) -> String {
        let parent = self.parent.as_ref();
        parent.map_or_else(String::new, |parent| parent.describe(round))
    }

    /// Resends the message that the parent has not answered. The first call starts path validation.
    pub(crate) fn retry_parent<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        if let Some(parent) = &mut self.parent {
            parent.retry(now, out);
        }
    }

    /// Handles a datagram of the parent. Returns the reason if the job is over, for all members.
    pub fn receive_from_parent<T: Transmit>(
        &mut self,
        now: Instant,
        header: PacketHeader,
        body: &[u8],
        out: &mut T,
    ) -> Option<String> {
        let Some(round) = header.round_near(self.newest) else {
            self.counters.malformed += 1;
            return None;
        };
        let id = SegmentId::new(round, header.segment);
        match header.kind {
            PacketKind::Float | PacketKind::Fixed | PacketKind::Exponents | PacketKind::Help => {
                let Lookup::Found(index) = self.slots.find(id) else {
                    self.counters.stale += 1;
                    return None;
                };
                let slot = self.slots.slot(index);
                if slot.state != SegmentState::AwaitingParent {
                    self.counters.duplicates += 1;
                } else if header.kind == PacketKind::Help {
                    self.send_to_parent(index, out);
                } else if slot.kind == header.kind && self.slots.values(index).len() == body.len() {
                    self.slots.replace(index, body);
                    self.finish(index, out);
                } else {
                    self.counters.malformed += 1;
                }
            }
            PacketKind::Join => {
                let parent = self.parent.as_mut()?;
                match parent.up.take_cookie(body) {
                    true => parent.retry(now, out),
                    false => self.counters.malformed += 1,
                }
            }
            PacketKind::Ack => match Ack::decode(body) {
                Some(ack) => return self.receive_parent_ack(now, ack, id, out),
                None => self.counters.malformed += 1,
            },
            _ => self.counters.malformed += 1,
        }
        None
    }

    fn receive_parent_ack<T: Transmit>(
        &mut self,
        now: Instant,
        ack: Ack,
        id: SegmentId,
        out: &mut T,
    ) -> Option<String> {
        let parent = self.parent.as_mut()?;
        let round = id.round;
        match (ack.status, ack.about) {
            (Status::Done, PacketKind::Join) if parent.up.is_valid => {}
            (Status::Done, PacketKind::Join) => {
                parent.up.is_valid = true;
                parent.retry(now, out);
                self.send_all_to_parent(out);
            }
            (Status::Waiting, _) => parent.waiting_on = Some((round, ack.text)),
            // Refused: the failure was from before a reset.
            (Status::Done | Status::Refused, PacketKind::Halt) => parent.acknowledge_failure(id.segment),
            // The parent has lost its own parent, or another rack has replaced this one there.
            (Status::Refused, _) => return Some(format!("above this aggregator: {}", ack.text)),
            (Status::Done, PacketKind::Reset) | (Status::Reset, _) if round > self.floor => {
                self.reset(round, "the job was reset", out);
            }
            // A failure of an earlier round is from before a reset.
            (Status::Failed | Status::Halted, _) if self.halted.is_none() && round >= self.floor => {
                let text = format!("above this aggregator: {}", ack.text);
                self.halt(Ack { text, ..ack }, out);
            }
            _ => {}
        }
        None
    }

    fn send_all_to_parent<T: Transmit>(&self, out: &mut T) {
        for (index, slot) in self.slots.iter() {
            if slot.state == SegmentState::AwaitingParent {
                self.send_to_parent(index, out);
            }
        }
    }
}

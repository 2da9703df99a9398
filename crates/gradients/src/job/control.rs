//! Controls of workers: threshold, forced broadcasts, suspensions, resets, leaving. Traffic with the parent of a job.

use std::time::Instant;

use super::{Job, MemberState};
use crate::Transmit;
use crate::arithmetic::Arithmetic;
use crate::packet::{ALL_SEGMENTS, Ack, PacketHeader, PacketKind, Status, is_later_control};
use crate::segments::{Lookup, SegmentId, SegmentState};

/// Distance from the newest round with a contribution to the first round after a reset. Contributions to the next round may be in flight,
/// and controls of their senders name the round after that: at this distance the round number identifies datagrams from before the reset.
pub(super) const RESET_DISTANCE: u64 = 3;

impl Job {
    /// Applies a control with a valid key.
    pub fn control<T: Transmit>(&mut self, worker: u16, header: PacketHeader, argument: &[u8], out: &mut T) {
        let about = header.kind;
        let refused = match about {
            PacketKind::Reset => {
                self.reset_from(worker, header, out);
                return;
            }
            PacketKind::Halt | PacketKind::SetH
                if header.round_near(self.newest).is_none_or(|round| round < self.floor) =>
            {
                Some("the job was reset after this was sent: reset it here as well, then ask again")
            }
            PacketKind::Halt => match Ack::decode(argument) {
                None => {
                    self.counters.malformed += 1;
                    return;
                }
                Some(reason) => {
                    if self.halted.is_none() {
                        let reason = self.name_sender(worker, reason);
                        self.fail(reason, out);
                    }
                    None
                }
            },
            _ if self.settings.arithmetic == Arithmetic::Fixed => {
                Some("in fixed point every worker has to be counted: the grid is made for all of them")
            }
            _ if u32::from(self.settings.workers) != self.settings.world => {
                Some("with a parent aggregator every worker has to be counted")
            }
            PacketKind::SetH => self.set_threshold(worker, header.segment, argument, out),
            _ => self.force(header, argument, out),
        };
        let ack = match refused {
            None => Ack::new(Status::Done, about),
            Some(reason) => Ack::new(Status::Refused, about).with_text(reason),
        };
        let id = SegmentId::new(self.next_round(), header.segment);
        self.send_ack(worker, id, &ack, out);
    }

    /// A member's reason for a suspension, with its name. A rack's reason has the numbers of its missing workers.
    fn name_sender(&self, worker: u16, reason: Ack) -> Ack {
        if self.settings.below.is_none() {
            let text = format!("worker {worker} suspended the job: {}", reason.text);
            return Ack::new(Status::Halted, PacketKind::Halt).with_text(text);
        }
        let member = self.members[usize::from(worker)].member();
        let name = member.map_or("", |member| &member.name);
        let status = match reason.status {
            Status::Failed => Status::Failed,
            _ => Status::Halted,
        };
        Ack {
            missing: reason.missing,
            text: format!("in rack {worker} ({name}): {}", reason.text),
            ..Ack::new(status, PacketKind::Halt)
        }
    }

    /// Sets the number of contributions that complete a sum, for the control `number` of a worker. Returns the reason of a refusal.
    fn set_threshold<T: Transmit>(
        &mut self,
        worker: u16,
        number: u32,
        argument: &[u8],
        out: &mut T,
    ) -> Option<&'static str> {
        let threshold = u32::from(u16::from_le_bytes(argument.try_into().unwrap_or_default()));
        if threshold == 0 || threshold > self.settings.workers.into() {
            return Some("the threshold is from 1 to the number of workers");
        }
        if let MemberState::Joined(member) = &mut self.members[usize::from(worker)] {
            // A copy that arrives late does not undo a newer threshold.
            if !is_later_control(number, member.threshold_set) {
                return None;
            }
            member.threshold_set = number;
        }
        self.threshold = threshold;
        for index in self.open_segments() {
            self.finish_if_complete(index, out);
        }
        None
    }

    /// Sends the incomplete sum of one segment, or of all open segments of a round. Returns the reason of a refusal.
    fn force<T: Transmit>(&mut self, header: PacketHeader, argument: &[u8], out: &mut T) -> Option<&'static str> {
        let Ok(segment) = argument.try_into().map(u32::from_le_bytes) else {
            return Some("the segment has four bytes");
        };
        let round = header.round_near(self.newest);
        for index in self.open_segments() {
            let id = self.slots.slot(index).id;
            if Some(id.round) == round && [id.segment, ALL_SEGMENTS].contains(&segment) {
                self.finish(index, out);
            }
        }
        None
    }

    /// Slots of segments without all contributions.
    fn open_segments(&self) -> Vec<usize> {
        self.slots.iter().filter(|(_, slot)| slot.state == SegmentState::Open).map(|(index, _)| index).collect()
    }

    /// Resets the job for a member that gave up a round, or passes the request to the parent, which chooses the next round.
    fn reset_from<T: Transmit>(&mut self, worker: u16, header: PacketHeader, out: &mut T) {
        let Some(given_up) = header.round_near(self.newest.max(self.floor)) else {
            return;
        };
        // A suspended job accepts a reset even from a member that has sent nothing since the last reset.
        let resumes = self.halted.is_some() && given_up + 1 >= self.floor;
        if given_up >= self.floor || resumes {
            if let Some(parent) = &self.parent {
                // The member retries until the parent's answer has reset this job.
                if parent.up.is_valid {
                    parent.up.send_control(PacketKind::Reset, given_up, 0, &[], out);
                }
                let waiting = Ack::new(Status::Waiting, PacketKind::Reset).with_text(parent.describe(given_up));
                return self.reply(worker, header, waiting, out);
            }
            let text = format!("{} {worker} reset the job", self.settings.role());
            self.reset(self.newest.max(given_up) + RESET_DISTANCE, &text, out);
        }
        let done = Ack::new(Status::Done, PacketKind::Reset);
        self.send_ack(worker, SegmentId::new(self.floor, header.segment), &done, out);
    }

    /// Drops the segments in flight. `first` is the next round.
    pub(super) fn reset<T: Transmit>(&mut self, first: u64, text: &str, out: &mut T) {
        self.slots.clear();
        self.halted = None;
        if let Some(parent) = &mut self.parent {
            parent.failure = None;
        }
        self.floor = first;
        self.newest = first - 1;
        let ack = Ack::new(Status::Reset, PacketKind::Reset).with_text(text);
        self.send_ack_to_all(first, &ack, out);
    }

    /// Removes a member. Fails the job if an open segment cannot be completed without it.
    pub fn leave<T: Transmit>(&mut self, worker: u16, out: &mut T) {
        let state = &mut self.members[usize::from(worker)];
        let MemberState::Joined(member) = state else {
            return;
        };
        let name = std::mem::take(&mut member.name);
        let role = self.settings.role();
        let text = format!("{role} {worker} ({name}) left in the middle of round");
        *state = MemberState::Left(name);
        let open = self.open_segments();
        let oldest = open.iter().map(|&index| self.slots.slot(index).id).min();
        if let Some(id) = oldest
            && (self.joined() as u32) < self.threshold
        {
            self.fail_without(1 << worker, PacketKind::Leave, format!("{text} {}", id.round), out);
        }
    }
}

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

    pub(super) fn send_up<T: Transmit>(&self, kind: PacketKind, id: SegmentId, body: &[u8], out: &mut T) {
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
                for (index, slot) in self.slots.iter() {
                    if slot.state == SegmentState::AwaitingParent {
                        self.send_to_parent(index, out);
                    }
                }
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
}

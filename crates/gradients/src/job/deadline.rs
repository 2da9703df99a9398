//! Deadlines: a segment that waits too long fails the job.
//!
//! The aggregator that knows the missing worker has to fail first, as only it can name the worker. So each level waits longer than the
//! level below, in units of the deadline that workers pass to their aggregator:
//!
//! | wait | time | set in |
//! | --- | --- | --- |
//! | an aggregator for its workers | 1 | [`Job::patience`] |
//! | a parent for its racks | 9/8 | `gradients_net::Aggregators::join` |
//! | a rack for its parent, once its own workers are complete | 13/10 | [`Job::patience`] |
//! | a worker for its aggregator | 4/3 | `gradients_net::worker`, which passes 3/4 of the user's deadline |

use std::time::{Duration, Instant};

use super::{Job, Member, MemberState};
use crate::Transmit;
use crate::packet::{Ack, PacketKind, Status};
use crate::segments::{SegmentId, SegmentSlot, SegmentState};

/// Scans for overdue segments in the time of a deadline: a scan takes milliseconds in a large job. A scan is late by less than the distance
/// of any two waits in the table.
const SCANS: u32 = 64;

impl Job {
    /// Fails the job if a segment has waited too long. A missing worker may have joined one of the `others`, the aggregator's other jobs.
    pub fn expire<T: Transmit>(&mut self, now: Instant, others: &[Option<Job>], out: &mut T) {
        self.retry_parent(now, out);
        if now < self.next_scan {
            return;
        }
        self.next_scan = now + self.settings.deadline / SCANS;
        let due = self.first_due().filter(|(due, _)| *due <= now);
        let Some(slot) = due.map(|(_, slot)| *slot) else {
            return;
        };
        let waited = self.patience(&slot).as_millis();
        let (missing, whom) = match slot.state {
            SegmentState::AwaitingParent => (0, self.describe_parent(slot.id.round)),
            _ => {
                let missing = self.all_members() & !slot.counted;
                (missing, self.describe(missing, now, others))
            }
        };
        let text = format!("round {} waited {waited} ms for {whom}", slot.id.round);
        self.fail_without(missing, slot.kind, text, out);
    }

    /// The segment that fails the job, and its deadline. In a synchronous job this is the first segment without a sum, which all workers
    /// query; later segments may only miss contributions that were lost.
    fn first_due(&self) -> Option<(Instant, &SegmentSlot)> {
        match self.settings.asynchronous {
            None => self.waiting().min_by_key(|(_, slot)| slot.id),
            Some(_) => self.waiting().min_by_key(|(due, slot)| (*due, slot.id)),
        }
    }

    /// Segments without a sum, with their deadlines.
    fn waiting(&self) -> impl Iterator<Item = (Instant, &SegmentSlot)> {
        let slots = self.slots.iter().map(|(_, slot)| slot);
        let waiting = |slot: &&SegmentSlot| matches!(slot.state, SegmentState::Open | SegmentState::AwaitingParent);
        slots.filter(waiting).map(|slot| (slot.waiting_since + self.patience(slot), slot))
    }

    /// Longest time that a segment may wait: see the table above.
    fn patience(&self, slot: &SegmentSlot) -> Duration {
        match slot.state {
            SegmentState::AwaitingParent => self.settings.deadline * 13 / 10,
            _ => self.settings.deadline,
        }
    }

    /// Numbers and names of missing members.
    pub(super) fn describe(&self, missing: u64, now: Instant, others: &[Option<Job>]) -> String {
        let role = self.settings.role();
        let members = self.members.iter().enumerate();
        let missing = members.filter(|(worker, _)| missing & 1 << worker != 0);
        let described = missing.map(|(worker, member)| match member {
            MemberState::NeverJoined => match self.job_instead(worker, others) {
                None => format!("{role} {worker}, which never joined"),
                Some(other) => format!(
                    "{role} {worker}, which never joined {:?} (one has joined {:?}: give all the same job)",
                    self.settings.job, other.settings.job
                ),
            },
            MemberState::Left(name) => format!("{role} {worker} ({name}), which left"),
            MemberState::Joined(Member { name, last_heard, .. }) => {
                let silent = now.saturating_duration_since(*last_heard).as_secs_f64();
                format!("{role} {worker} ({name}), last heard {silent:.1} s ago")
            }
        });
        described.collect::<Vec<_>>().join(", ")
    }

    /// The job that `worker` has joined instead of this one: a job of the same size, without any of this one's members.
    fn job_instead<'a>(&self, worker: usize, others: &'a [Option<Job>]) -> Option<&'a Job> {
        others.iter().flatten().find(|other| {
            let pairs = || self.members.iter().zip(&other.members);
            let both = |(own, theirs): (&MemberState, &MemberState)| own.member().and(theirs.member()).is_some();
            let size = |job: &Job| (job.settings.workers, job.settings.role(), job.settings.world);
            size(self) == size(other) && other.members[worker].member().is_some() && !pairs().any(both)
        })
    }

    /// Fails a job in which a segment has begun that too many members have left to complete.
    pub(super) fn fail_if_too_many_left<T: Transmit>(&mut self, now: Instant, id: SegmentId, out: &mut T) -> bool {
        let members = self.members.iter().enumerate();
        let left = members.filter(|(_, member)| matches!(member, MemberState::Left(_)));
        let left = left.fold(0_u64, |bits, (worker, _)| bits | 1 << worker);
        if self.members.len() as u32 - left.count_ones() >= self.threshold {
            return false;
        }
        let text = format!("round {} waits for {}", id.round, self.describe(left, now, &[]));
        self.fail_without(left, PacketKind::Leave, text, out);
        true
    }

    /// A bit for each member.
    pub(super) fn all_members(&self) -> u64 {
        u64::MAX >> (64 - self.settings.workers)
    }

    /// Fails the job, which lacks the members whose bits are set.
    pub(super) fn fail_without<T: Transmit>(&mut self, missing: u64, about: PacketKind, text: String, out: &mut T) {
        // Workers would read the bits of racks as numbers within their own rack.
        let missing = if self.settings.below.is_some() { 0 } else { missing };
        self.fail(Ack { missing, text, ..Ack::new(Status::Failed, about) }, out);
    }

    /// Suspends the job here and at the parent.
    pub(super) fn fail<T: Transmit>(&mut self, reason: Ack, out: &mut T) {
        self.counters.failed += 1;
        let round = self.next_round();
        if let Some(parent) = &mut self.parent {
            // `last_heard` approximates now: if it is old, the first retry is only earlier.
            parent.report(self.last_heard, round, &reason, out);
        }
        self.halt(reason, out);
    }

    /// Suspends the job here, and sends every member the reason.
    pub fn halt<T: Transmit>(&mut self, reason: Ack, out: &mut T) {
        self.slots.clear();
        if let Some(parent) = &mut self.parent {
            // Members that the parent waited for in this round are not those that it waits for in a reset.
            parent.waiting_on = None;
        }
        self.send_ack_to_all(self.next_round(), &reason, out);
        self.halted = Some(reason);
    }
}

//! One job: its members, its threshold, and its segments.
//!
//! # Invariant
//!
//! Each contribution to a gradient sum counts at most once, and not across a reset. A segment past its deadline fails the job, with the
//! names of the missing workers.

mod contribution;
mod control;
mod deadline;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use super::counters::AggregatorCounters;
use super::packet::{Ack, Cookie, PacketHeader, PacketKind, SessionKey, Status};
use super::segments::{Lookup, SegmentId, SegmentState, SegmentTable};
use super::{Error, JoinJob, ParentAggregator, Result, Transmit};

/// Entry of the membership table.
pub enum MemberState {
    NeverJoined,
    Joined(Member),
    /// The member with this name has left.
    Left(String),
}

impl MemberState {
    fn member(&self) -> Option<&Member> {
        match self {
            MemberState::Joined(member) => Some(member),
            _ => None,
        }
    }
}

/// A worker or a rack that has joined.
pub struct Member {
    /// Display name.
    pub name: String,
    pub session: u32,
    /// Secret, in the body of its controls.
    pub key: SessionKey,
    /// Workers in its contributions: 1, or the workers of a rack.
    pub workers: u32,
    /// Validated UDP address.
    pub address: Option<SocketAddr>,
    /// Path validation in progress: address, and the cookie that was sent there.
    pub challenge: Option<(SocketAddr, Cookie)>,
    /// Arrival of its last datagram.
    pub last_heard: Instant,
    /// Number of the last `SetH` that was applied.
    pub threshold_set: u32,
}

/// State of a job.
pub struct Job {
    /// Request of the first member, whose settings all others share.
    pub settings: JoinJob,
    /// Membership table, by number.
    pub members: Vec<MemberState>,
    /// Arrival of any member's last datagram.
    pub last_heard: Instant,
    pub parent: Option<ParentAggregator>,
    /// Most segments in flight.
    pub window: u32,
    pub counters: AggregatorCounters,
    threshold: u32,
    slots: SegmentTable,
    /// Newest round with a contribution.
    newest: u64,
    /// First round since the last reset: contributions to earlier ones are not counted.
    floor: u64,
    /// Newest round that each member has contributed to, 0 for none.
    contributed: Vec<u64>,
    /// Reason of a suspension: nothing is added up until a reset.
    halted: Option<Ack>,
    /// Next scan for overdue segments.
    next_scan: Instant,
}

/// A job, for statistics.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct JobStatus {
    /// Its name.
    #[serde(skip)]
    pub name: String,
    /// Members when all have joined.
    pub workers: u16,
    /// Workers of the job.
    pub world: u32,
    /// Members that have joined and not left.
    pub joined: usize,
    /// Contributions that complete a sum.
    pub threshold: u32,
    /// Newest round with a contribution.
    pub round: u64,
    /// Reason of a suspension, else empty.
    pub halted: String,
}

impl Job {
    /// A job without members that begins with round `first`. A synchronous job has `window` segments in flight.
    pub fn new(settings: &JoinJob, parent: Option<ParentAggregator>, window: u32, first: u64, now: Instant) -> Self {
        let (entries, depth) = settings.table_size(window);
        let threshold = settings.asynchronous.map_or(settings.workers, |a| a.threshold);
        let members = (0..settings.workers).map(|_| MemberState::NeverJoined);
        Job {
            settings: settings.clone(),
            members: members.collect(),
            last_heard: now,
            parent,
            window,
            counters: AggregatorCounters::default(),
            threshold: threshold.into(),
            slots: SegmentTable::new(entries, depth, settings.segment_bytes(), now),
            newest: first - 1,
            floor: first,
            contributed: vec![0; settings.workers.into()],
            halted: None,
            next_scan: now,
        }
    }

    pub fn status(&self) -> JobStatus {
        let halted = self.halted.as_ref().map(|ack| ack.text.clone());
        JobStatus {
            name: self.settings.job.clone(),
            workers: self.settings.workers,
            world: self.settings.world,
            joined: self.joined(),
            threshold: self.threshold,
            round: self.newest,
            halted: halted.unwrap_or_default(),
        }
    }

    pub fn member(&mut self, worker: u16) -> Option<&mut Member> {
        match self.members.get_mut(usize::from(worker)) {
            Some(MemberState::Joined(member)) => Some(member),
            _ => None,
        }
    }

    /// Members that have joined and not left.
    pub fn joined_members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter_map(MemberState::member)
    }

    /// Number of [`Job::joined_members`].
    pub fn joined(&self) -> usize {
        self.joined_members().count()
    }

    /// Checks that the workers of all racks add up to the workers of this aggregator once `rack` has joined. Otherwise a sum would have
    /// fewer or more workers than it claims.
    pub fn count_workers(&self, rack: u16, member: &Member) -> Result<()> {
        if self.settings.below.is_none() {
            return Ok(());
        }
        let others = self.members.iter().zip(0..);
        let mut known: BTreeMap<u16, u32> =
            others.filter_map(|(other, number)| Some((number, other.member()?.workers))).collect();
        known.insert(rack, member.workers);
        let total: u64 = known.values().map(|&workers| u64::from(workers)).sum();
        // Each absent rack has at least one worker.
        let absent = self.members.len() - known.len();
        let below = u64::from(self.parent.as_ref().map_or(self.settings.world, |parent| parent.below));
        let fits = match absent {
            0 => total == below,
            _ => total + absent as u64 <= below,
        };
        if fits {
            return Ok(());
        }
        let each = known.iter().map(|(rack, workers)| format!("rack {rack} has {workers}"));
        Err(Error::Config(format!(
            "the gradient job {:?} is to have {below} workers here, but {}, of {} racks: give each server a --rack of its own and the same \
             --racks, a server with racks and a parent its --rack-workers, and each worker the number of those at its server and in all",
            self.settings.job,
            each.collect::<Vec<_>>().join(", "),
            self.members.len(),
        )))
    }

    /// Adds a member. Returns the member that it replaces, and the round to begin with. A synchronous job to which that
    /// member has contributed is reset: otherwise its contributions would count for the new member.
    pub fn admit<T: Transmit>(&mut self, worker: u16, member: Member, out: &mut T) -> (Option<Member>, u64) {
        let state = &mut self.members[usize::from(worker)];
        let name = member.name.clone();
        let before = match std::mem::replace(state, MemberState::Joined(member)) {
            MemberState::Joined(before) => Some(before),
            _ => None,
        };
        let is_synchronous = self.settings.asynchronous.is_none();
        if is_synchronous && self.contributed[usize::from(worker)] >= self.floor {
            let role = self.settings.role();
            let text = format!("{role} {worker} came back as another process ({name})");
            match self.parent {
                None => self.reset(self.newest + control::RESET_DISTANCE, &text, out),
                // Only the parent chooses the first round after a reset.
                Some(_) => {
                    let halted = Ack::new(Status::Halted, PacketKind::Join);
                    self.fail(halted.with_text(text + "; reset the job"), out);
                }
            }
        }
        (before, self.next_round())
    }

    /// Answers a status query: with the sum, with a request for the contribution, or with the members that are missing.
    pub fn answer_query<T: Transmit>(&mut self, worker: u16, header: PacketHeader, out: &mut T) {
        self.counters.helped += 1;
        let Some(id) = self.check_segment(worker, header, out) else {
            return;
        };
        let index = match self.slots.find(id) {
            Lookup::Found(index) => index,
            Lookup::Gone => {
                let gone = Ack::new(Status::Gone, PacketKind::Help);
                return self.reply(worker, header, gone, out);
            }
            Lookup::Free(_) | Lookup::Ahead => return self.request_contribution(worker, id, out),
        };
        let slot = self.slots.slot(index);
        let counted = slot.counted;
        let mut waiting = Ack::new(Status::Waiting, PacketKind::Help);
        match slot.state {
            SegmentState::Complete => return self.send_sum(worker..worker + 1, index, out),
            _ if counted & 1 << worker == 0 => return self.request_contribution(worker, id, out),
            SegmentState::AwaitingParent => {
                self.send_up(PacketKind::Help, id, &[], out);
                waiting.text = self.describe_parent(id.round);
            }
            _ => {
                waiting.missing = self.all_members() & !counted;
                // `last_heard` is the arrival of this query, so it is now.
                waiting.text = self.describe(waiting.missing, self.last_heard, &[]);
            }
        }
        self.reply(worker, header, waiting, out);
    }

    fn request_contribution<T: Transmit>(&self, worker: u16, id: SegmentId, out: &mut T) {
        self.send(PacketKind::Help, worker, id, &[], out);
    }

    fn reply<T: Transmit>(&self, worker: u16, header: PacketHeader, ack: Ack, out: &mut T) {
        let round = header.round_near(self.newest).unwrap_or(self.newest);
        self.send_ack(worker, SegmentId::new(round, header.segment), &ack, out);
    }

    fn send_ack_to_all<T: Transmit>(&self, round: u64, ack: &Ack, out: &mut T) {
        for worker in 0..self.settings.workers {
            self.send_ack(worker, SegmentId::new(round, 0), ack, out);
        }
    }

    /// Sends an answer to a member with a validated address.
    pub fn send_ack<T: Transmit>(&self, worker: u16, id: SegmentId, ack: &Ack, out: &mut T) {
        self.send(PacketKind::Ack, worker, id, &ack.encode(), out);
    }

    /// Sends a datagram to a member with a validated address.
    fn send<T: Transmit>(&self, kind: PacketKind, worker: u16, id: SegmentId, body: &[u8], out: &mut T) {
        if let Some(member) = self.members[usize::from(worker)].member()
            && let Some(address) = member.address
        {
            let header = PacketHeader::new(kind, member.session, id.round, id.segment);
            out.send(address, &header.encode(), body);
        }
    }

    /// Round that a new member begins with.
    pub fn next_round(&self) -> u64 {
        self.floor.max(self.newest)
    }
}

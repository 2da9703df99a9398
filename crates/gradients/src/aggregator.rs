//! The aggregator: its jobs, and the sessions of their members.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::counters::{AggregatorCounters, FrameCounters};
use super::job::{Job, JobStatus, Member};
use super::packet::{Ack, MAX_SEGMENT_VALUES, PacketHeader, PacketKind, Status};
use super::segments::{SegmentId, SegmentTable};
use super::sessions::{SessionOwner, SessionTable};
use super::settings::MAX_WORKERS;
use super::{Error, JoinJob, ParentAggregator, Result, Ticket, Transmit};
use base::allocation::{self, TooLarge, check_size};
use base::system::random;

/// Number of the first round. Not 0, because a job's newest round starts one below it.
const FIRST_ROUND: u64 = 1;

/// Interval of calls of [`Aggregator::expire`].
pub const EXPIRE_EVERY: Duration = Duration::from_millis(10);

/// Limits of an aggregator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregatorLimits {
    /// Most jobs at a time.
    pub jobs: usize,
    /// Most segments in flight of a job; twice as many are kept.
    pub window: u32,
    /// Most bytes for the segments of an asynchronous job.
    pub job_bytes: usize,
}

impl Default for AggregatorLimits {
    fn default() -> Self {
        AggregatorLimits { jobs: 16, window: 256, job_bytes: 128 << 20 }
    }
}

impl AggregatorLimits {
    /// Most bytes for the segments of all jobs.
    pub fn bytes(&self) -> usize {
        let synchronous = SegmentTable::bytes(self.window, 2, 4 * MAX_SEGMENT_VALUES);
        self.jobs * synchronous.max(self.job_bytes)
    }
}

/// Adds up contributions of all jobs, without I/O.
pub struct Aggregator {
    address: SocketAddr,
    limits: AggregatorLimits,
    jobs: Vec<Option<Job>>,
    sessions: SessionTable,
    /// Address of each member that a newer one has replaced, or whose job is over, and the answer to its datagrams: by session, until the
    /// member's connection ends.
    removed: HashMap<u32, (SocketAddr, String)>,
    /// Counters of ended jobs, and of datagrams that no job counts.
    counters: AggregatorCounters,
    /// Frame counters of its thread's DPDK devices; `None` for sockets of the operating system.
    pub frames: Option<FrameCounters>,
    outbox: Outbox,
}

/// Datagrams that joining and leaving members cause, until the next [`Aggregator::flush`].
#[derive(Default)]
struct Outbox(Vec<(SocketAddr, Vec<u8>)>);

impl Transmit for Outbox {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.0.push((to, [head, body].concat()));
    }
}

impl Aggregator {
    /// An aggregator without jobs, at a UDP address.
    pub fn new(address: SocketAddr, limits: AggregatorLimits) -> Self {
        Aggregator {
            address,
            limits,
            jobs: (0..limits.jobs).map(|_| None).collect(),
            sessions: SessionTable::new(limits.jobs * usize::from(MAX_WORKERS)),
            removed: HashMap::new(),
            counters: AggregatorCounters::default(),
            frames: None,
            outbox: Outbox::default(),
        }
    }

    /// Datagrams and sums so far.
    pub fn counters(&self) -> AggregatorCounters {
        let mut all = self.counters;
        let jobs = self.jobs.iter().flatten();
        jobs.for_each(|job| all += job.counters);
        all
    }

    /// Number of jobs.
    pub fn jobs(&self) -> usize {
        self.jobs.iter().flatten().count()
    }

    /// Whether the job `name` exists. If not, the next join creates it, perhaps with a parent.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Statistics of all jobs.
    pub fn status(&self) -> impl Iterator<Item = JobStatus> {
        self.jobs.iter().flatten().map(Job::status)
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.jobs.iter().position(|job| job.as_ref().is_some_and(|job| job.settings.job == name))
    }

    /// Adds a worker or a rack to a job. The first join creates the job, with a `parent` if other aggregators have workers of the job, too. A
    /// member with the same number is replaced, and told so: callers authenticate workers.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid settings, for settings that differ from the other workers', and if the workers of all racks do not add up to `world`; [`Error::TooLarge`] if there are too many jobs, or an asynchronous job needs too much memory;
    /// [`Error::OutOfMemory`].
    pub fn join(&mut self, now: Instant, request: &JoinJob, parent: Option<ParentAggregator>) -> Result<Ticket> {
        request.check()?;
        let session = self.new_session();
        let key = random::<16>();
        let index = match self.find(&request.job) {
            Some(index) => index,
            None => self.create_job(now, request, parent)?,
        };
        let Some(job) = &mut self.jobs[index] else {
            return Err(Error::Internal("a job vanished while it was joined".into()));
        };
        let member = Member {
            name: request.name.clone(),
            session,
            key,
            workers: request.below.unwrap_or(1),
            address: None,
            challenge: None,
            last_heard: now,
            threshold_set: 0,
        };
        let agreed = request.check_same(&job.settings);
        if let Err(error) = agreed.and_then(|()| job.count_workers(request.worker, &member)) {
            if job.joined() == 0 {
                self.forget(index);
            }
            return Err(error);
        }
        job.last_heard = now;
        job.retry_parent(now, &mut self.outbox);
        let window = job.window;
        let (replaced, round) = job.admit(request.worker, member, &mut self.outbox);
        if let Some(replaced) = replaced {
            self.sessions.remove(replaced.session);
            if let Some(address) = replaced.address {
                let (role, number) = (request.role(), request.worker);
                let text = format!(
                    "another process ({}) has joined as {role} {number} after this one: give each {role} a number of its own",
                    request.name
                );
                self.removed.insert(replaced.session, (address, text));
            }
        }
        let owner = SessionOwner { job: index as u32, worker: request.worker };
        self.sessions.insert(session, owner);
        Ok(Ticket { address: self.address, session, key, round, window })
    }

    fn create_job(&mut self, now: Instant, request: &JoinJob, parent: Option<ParentAggregator>) -> Result<usize> {
        let Some(index) = self.jobs.iter().position(Option::is_none) else {
            return Err(TooLarge {
                what: "the number of gradient jobs",
                size: self.limits.jobs as u64 + 1,
                limit: self.limits.jobs as u64,
                advice: "wait for another job to end, or raise gradients_jobs of the server",
            }
            .into());
        };
        // A segment in flight also occupies an entry at the parent.
        let window = parent.as_ref().map_or(u32::MAX, |parent| parent.up.ticket.window);
        let window = self.limits.window.min(window);
        let (entries, depth) = request.table_size(window);
        let bytes = SegmentTable::bytes(entries, depth, request.segment_bytes());
        if request.asynchronous.is_some() {
            check_size(
                "the sums that an asynchronous gradient job keeps, in bytes",
                bytes as u64,
                self.limits.job_bytes as u64,
                "lower its staleness bound, or raise gradients_job_bytes of the server",
            )?;
        }
        allocation::check("a gradient job", bytes as u64)?;
        // At the root of a tree, racks have all workers.
        if parent.is_none() && request.below.is_none() && u32::from(request.workers) != request.world {
            return Err(Error::Config(format!(
                "the gradient job {:?} has a world of {} workers and {} here: start this aggregator with --parent, or give it all workers",
                request.job, request.world, request.workers
            )));
        }
        let first = parent.as_ref().map_or(FIRST_ROUND, |parent| parent.up.ticket.round);
        self.jobs[index] = Some(Job::new(request, parent, window, first, now));
        Ok(index)
    }

    fn new_session(&self) -> u32 {
        loop {
            let session = u32::from_le_bytes(random());
            if self.sessions.is_free(session) && !self.removed.contains_key(&session) {
                return session;
            }
        }
    }

    /// Index of the job whose parent gave `session`.
    fn job_of_parent(&self, session: u32) -> Option<usize> {
        let mut jobs = self.jobs.iter();
        jobs.position(|job| {
            let parent = job.as_ref().and_then(|job| job.parent.as_ref());
            parent.is_some_and(|parent| parent.session() == session)
        })
    }

    /// Removes a member whose connection has ended. Unknown sessions are ignored.
    pub fn leave(&mut self, session: u32) {
        self.removed.remove(&session);
        if let Some(SessionOwner { job: index, worker }) = self.sessions.remove(session)
            && let Some(job) = &mut self.jobs[index as usize]
        {
            job.leave(worker, &mut self.outbox);
            if job.joined() == 0 {
                self.forget(index as usize);
            }
        }
    }

    /// Ends the job whose parent gave `session`: the connection to that parent has ended.
    pub fn lose_parent(&mut self, session: u32) {
        if let Some(index) = self.job_of_parent(session)
            && let Some(parent) = self.jobs[index].as_ref().and_then(|job| job.parent.as_ref())
        {
            let text = format!(
                "the aggregator above this one, at {}, ended its connection: leave the job and join it again, all workers",
                parent.up.ticket.address
            );
            self.end_job(index, &text);
        }
    }

    /// Ends a job for good. Its members get the reason as the answer to all that they send.
    fn end_job(&mut self, index: usize, text: &str) {
        if let Some(job) = &mut self.jobs[index] {
            job.counters.failed += 1;
            job.halt(Ack::new(Status::Halted, PacketKind::Leave).with_text(text), &mut self.outbox);
            let addresses = job.joined_members().filter_map(|member| Some((member.session, member.address?)));
            self.removed.extend(addresses.map(|(session, address)| (session, (address, text.to_owned()))));
        }
        self.forget(index);
    }

    fn forget(&mut self, index: usize) {
        if let Some(job) = self.jobs[index].take() {
            self.counters += job.counters;
            if let Some(parent) = job.parent {
                parent.up.send_control(PacketKind::Leave, 0, 0, &[], &mut self.outbox);
            }
        }
        self.sessions.remove_job(index);
    }

    /// Sends what joining and leaving members have caused.
    pub fn flush<T: Transmit>(&mut self, out: &mut T) {
        for (to, datagram) in self.outbox.0.drain(..) {
            out.send(to, &[], &datagram);
        }
    }

    /// Receives a datagram from `from`. Inlined, because a function call takes about as long as adding up a contribution.
    #[inline(always)]
    pub fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        self.counters.received += 1;
        let Some((header, body)) = PacketHeader::decode(datagram) else {
            self.counters.malformed += 1;
            return;
        };
        let Some(owner) = self.sessions.owner(header.session) else {
            return self.receive_from_other(now, from, header, body, out);
        };
        let Some(job) = &mut self.jobs[owner.job as usize] else {
            return;
        };
        let Some(member) = job.member(owner.worker) else {
            return;
        };
        if header.kind == PacketKind::Join {
            return self.validate_path(now, owner, from, header, body, out);
        }
        if member.address != Some(from) {
            return self.receive_from_other(now, from, header, body, out);
        }
        member.last_heard = now;
        job.last_heard = now;
        match header.kind {
            PacketKind::Float | PacketKind::Fixed | PacketKind::Exponents => {
                job.contribute(now, owner.worker, header, body, out);
            }
            _ => self.receive_other(owner, header, body, out),
        }
    }

    /// Handles a member's datagram that is neither a contribution nor path validation.
    #[cold]
    fn receive_other<T: Transmit>(&mut self, owner: SessionOwner, header: PacketHeader, body: &[u8], out: &mut T) {
        let worker = owner.worker;
        let Some(job) = &mut self.jobs[owner.job as usize] else {
            return;
        };
        let Some(key) = job.member(worker).map(|member| member.key) else {
            return;
        };
        let counters = &mut self.counters;
        match header.kind {
            PacketKind::Help => job.answer_query(worker, header, out),
            PacketKind::Leave | PacketKind::Reset | PacketKind::SetH | PacketKind::FBcast | PacketKind::Halt => {
                match body.strip_prefix(&key) {
                    None => counters.strangers += 1,
                    Some(_) if header.kind == PacketKind::Leave => {
                        let ack = Ack::new(Status::Done, PacketKind::Leave);
                        job.send_ack(worker, SegmentId::new(0, header.segment), &ack, out);
                        self.leave(header.session);
                        self.flush(out);
                    }
                    Some(argument) => job.control(worker, header, argument, out),
                }
            }
            _ => counters.malformed += 1,
        }
    }

    /// Handles a datagram of a parent, of a removed member, or of anybody else. A parent may have given a number that a member here has, too:
    /// the address tells them apart.
    #[cold]
    fn receive_from_other<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        header: PacketHeader,
        body: &[u8],
        out: &mut T,
    ) {
        let index = self.job_of_parent(header.session);
        match index.and_then(|index| self.jobs[index].as_mut()) {
            Some(job) if job.parent.as_ref().is_some_and(|p| p.up.ticket.address == from) => {
                let over = job.receive_from_parent(now, header, body, out);
                if let (Some(text), Some(index)) = (over, index) {
                    self.end_job(index, &text);
                    self.flush(out);
                }
            }
            _ => {
                self.counters.strangers += 1;
                // Without an answer the member would wait until its deadline, and call this aggregator silent.
                if let Some((_, text)) = self.removed.get(&header.session).filter(|(address, _)| *address == from) {
                    let refused = Ack::new(Status::Refused, header.kind).with_text(text);
                    let header = PacketHeader { kind: PacketKind::Ack, ..header };
                    out.send(from, &header.encode(), &refused.encode());
                }
            }
        }
    }

    /// Path validation: sends a cookie to the source address of a member's datagram, and accepts the address once it returns the cookie.
    #[cold]
    fn validate_path<T: Transmit>(
        &mut self,
        now: Instant,
        owner: SessionOwner,
        from: SocketAddr,
        header: PacketHeader,
        body: &[u8],
        out: &mut T,
    ) {
        let Some(job) = &mut self.jobs[owner.job as usize] else {
            return;
        };
        let next = SegmentId::new(job.next_round(), 0);
        let Some(member) = job.member(owner.worker) else {
            return;
        };
        let Some(returned) = body.strip_prefix(&member.key) else {
            return self.receive_from_other(now, from, header, body, out);
        };
        let sent = member.challenge.filter(|(to, _)| *to == from);
        if let Some((_, cookie)) = sent
            && returned == cookie
        {
            member.address = Some(from);
            member.last_heard = now;
            let ack = Ack::new(Status::Done, PacketKind::Join);
            return job.send_ack(owner.worker, next, &ack, out);
        }
        let cookie = sent.map_or_else(random, |(_, cookie)| cookie);
        member.challenge = Some((from, cookie));
        let header = PacketHeader::new(PacketKind::Join, member.session, 0, 0);
        out.send(from, &header.encode(), &cookie);
    }

    /// Fails segments that are overdue at `now`, and sends again what parents have not answered: to be called every [`EXPIRE_EVERY`].
    pub fn expire<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        for index in 0..self.jobs.len() {
            let Some(mut job) = self.jobs[index].take() else {
                continue;
            };
            job.expire(now, &self.jobs, out);
            self.jobs[index] = Some(job);
        }
        self.flush(out);
    }
}

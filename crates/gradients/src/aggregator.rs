//! The aggregator: who takes part in which job, and which datagrams are theirs.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::job::{Job, JobStatus, Member};
use super::packet::{Ack, Header, Kind, MAX_SEGMENT_VALUES, Status};
use super::sessions::{Owner, Sessions};
use super::slots::Slots;
use super::terms::{self, Terms};
use super::{JoinJob, Ticket, Transmit, Upstream};
use replay_core::error::{Error, Result};

/// Rounds begin here, so that the one before the first has a number.
const FIRST_ROUND: u64 = 1;

/// What an aggregator may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Jobs at a time.
    pub jobs: usize,
    /// Segments of a job that may be under way; twice as many are kept.
    pub window: u32,
    /// A job that nobody was heard of for so long is forgotten.
    pub idle: Duration,
    /// Bytes for the segments of one job.
    pub job_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            jobs: 16,
            window: 256,
            idle: Duration::from_secs(3600),
            job_bytes: 128 << 20,
        }
    }
}

impl Limits {
    /// Most bytes that the segments of all jobs take.
    pub fn bytes(&self) -> usize {
        let synchronous = Slots::bytes(self.window, 2, 4 * MAX_SEGMENT_VALUES);
        self.jobs * synchronous.max(self.job_bytes)
    }
}

/// All jobs.
pub struct Aggregator {
    limits: Limits,
    jobs: Vec<Option<Job>>,
    sessions: Sessions,
    counters: Counters,
}

impl Aggregator {
    /// An aggregator without jobs.
    pub fn new(limits: Limits) -> Self {
        Aggregator {
            limits,
            jobs: (0..limits.jobs).map(|_| None).collect(),
            sessions: Sessions::new(),
            counters: Counters::default(),
        }
    }

    /// What it has seen.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Jobs there are.
    pub fn jobs(&self) -> usize {
        self.jobs.iter().flatten().count()
    }

    /// Whether a worker that joins the job `name` finds it there.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The jobs as they are.
    pub fn status(&self) -> impl Iterator<Item = JobStatus> {
        self.jobs.iter().flatten().map(Job::status)
    }

    /// A job without its parent comes to nothing: who joins it begins another one.
    fn find(&self, name: &str) -> Option<usize> {
        let named = |job: &Option<Job>| {
            let job = job.as_ref();
            job.is_some_and(|job| job.name == name && !job.is_orphan())
        };
        self.jobs.iter().position(named)
    }

    /// Takes a worker into a job, which is made for the first one. Whoever calls has made sure that it may. A worker whose seat is taken
    /// replaces the one that has it. The first one of a job that has other workers elsewhere comes with the parent.
    ///
    /// # Errors
    /// [`Error::Config`] for a request that does not make sense or differs from those of the other workers, [`Error::TooLarge`] for one
    /// job too many.
    pub fn join<T: Transmit>(
        &mut self,
        now: Instant,
        request: &JoinJob,
        upstream: Option<Upstream>,
        out: &mut T,
    ) -> Result<Ticket> {
        self.admit(now, request, None, upstream, out)
    }

    /// Takes a rack into a job: an aggregator that sends the sums of `below` workers.
    ///
    /// # Errors
    /// Those of [`Aggregator::join`]; [`Error::Config`] where the workers of all racks cannot be as many as the job has.
    pub fn join_rack<T: Transmit>(
        &mut self,
        now: Instant,
        request: &JoinJob,
        below: u32,
        upstream: Option<Upstream>,
        out: &mut T,
    ) -> Result<Ticket> {
        self.admit(now, request, Some(below), upstream, out)
    }

    fn admit<T: Transmit>(
        &mut self,
        now: Instant,
        request: &JoinJob,
        rack: Option<u32>,
        upstream: Option<Upstream>,
        out: &mut T,
    ) -> Result<Ticket> {
        terms::check(request)?;
        let session = self.draw_session()?;
        let key = random::<16>()?;
        let terms = Terms::of(request, rack.is_some());
        let index = match self.find(&request.job) {
            Some(index) => index,
            None => self.make_job(now, request, terms, upstream)?,
        };
        let Some(job) = &mut self.jobs[index] else {
            return Err(Error::Internal("a job vanished while it was joined".into()));
        };
        let member = Member {
            name: request.name.clone(),
            session,
            key,
            workers: rack.unwrap_or(1),
            path: None,
            offered: None,
            heard: now,
        };
        let agreed = job.terms.admit(request, &terms);
        if let Err(error) = agreed.and_then(|()| job.count_workers(request.worker, &member)) {
            if job.joined() == 0 {
                self.forget(index, out);
            }
            return Err(error);
        }
        job.heard = now;
        job.remind_parent(now, out);
        let (replaced, round) = job.seat(request.worker, member, &mut self.counters, out);
        if let Some(replaced) = replaced {
            self.sessions.remove(replaced);
        }
        let owner = Owner {
            job: index as u32,
            worker: request.worker,
        };
        self.sessions.insert(session, owner);
        Ok(Ticket {
            session,
            key,
            round,
            window: job.window,
        })
    }

    fn make_job(
        &mut self,
        now: Instant,
        request: &JoinJob,
        terms: Terms,
        upstream: Option<Upstream>,
    ) -> Result<usize> {
        let Some(index) = self.jobs.iter().position(Option::is_none) else {
            return Err(Error::TooLarge {
                what: "the number of gradient jobs",
                size: self.limits.jobs as u64 + 1,
                limit: self.limits.jobs as u64,
                advice: "wait for another job to end, or start the aggregator with room for more",
            });
        };
        // What the parent has no place for does not begin here.
        let window = upstream.as_ref().map_or(u32::MAX, |up| up.window);
        let window = self.limits.window.min(window);
        let (places, depth) = terms.places(window);
        let bytes = Slots::bytes(places, depth, terms.stride());
        if terms.asynchronous.is_some() && bytes > self.limits.job_bytes {
            return Err(Error::TooLarge {
                what: "the sums that an asynchronous gradient job keeps, in bytes",
                size: bytes as u64,
                limit: self.limits.job_bytes as u64,
                advice: "lower its staleness bound, or start the aggregator with room for more",
            });
        }
        let below = match &upstream {
            Some(upstream) => upstream.below,
            // The top of the tree: all there are send here.
            None if terms.racks => terms.world,
            None => terms.workers.into(),
        };
        if (below != terms.world) != upstream.is_some() {
            return Err(Error::Config(format!(
                "the gradient job {:?} has {} workers in all and {below} here: {}",
                request.job,
                request.world,
                match upstream {
                    None => "start this aggregator with --parent, or give it all workers",
                    Some(_) => "with a parent aggregator say how many workers there are in all",
                }
            )));
        }
        if let Some(upstream) = &upstream
            && self.is_taken(upstream.session)
        {
            return Err(Error::Internal(
                "the parent's session is that of a worker here: join again".into(),
            ));
        }
        let first = upstream.as_ref().map_or(FIRST_ROUND, |up| up.round);
        let mut job = Job::new(&request.job, terms, window, first, now);
        job.below = below;
        job.upstream = upstream;
        self.jobs[index] = Some(job);
        Ok(index)
    }

    fn draw_session(&self) -> Result<u32> {
        loop {
            let session = u32::from_le_bytes(random()?);
            if self.sessions.is_free(session) && !self.is_taken(session) {
                return Ok(session);
            }
        }
    }

    /// Whether a worker has this session, or a parent gave it.
    fn is_taken(&self, session: u32) -> bool {
        self.sessions.owner(session).is_some() || self.job_of_parent(session).is_some()
    }

    /// The job whose parent gave `session`.
    fn job_of_parent(&self, session: u32) -> Option<usize> {
        let given = |job: &Job| {
            job.upstream
                .as_ref()
                .is_some_and(|up| up.session == session)
        };
        let mut jobs = self.jobs.iter();
        jobs.position(|job| job.as_ref().is_some_and(given))
    }

    /// A worker has gone, as its connection showed. A session that is over is ignored.
    pub fn leave<T: Transmit>(&mut self, session: u32, out: &mut T) {
        if let Some(Owner { job: index, worker }) = self.sessions.remove(session)
            && let Some(job) = &mut self.jobs[index as usize]
        {
            job.leave(worker, &mut self.counters, out);
            if job.joined() == 0 {
                self.forget(index as usize, out);
            }
        }
    }

    /// The parent that gave `session` has gone, as the connection to it showed.
    pub fn lose_parent<T: Transmit>(&mut self, session: u32, out: &mut T) {
        if let Some(index) = self.job_of_parent(session)
            && let Some(job) = &mut self.jobs[index]
        {
            job.lose_parent(&mut self.counters, out);
        }
    }

    fn forget<T: Transmit>(&mut self, index: usize, out: &mut T) {
        let job = self.jobs[index].take();
        if let Some(upstream) = job.and_then(|job| job.upstream) {
            upstream.send(Kind::Leave, 0, 0, &upstream.key, out);
        }
        self.sessions.remove_job(index);
    }

    /// Takes a datagram that came from `from`. What is done for each contribution is one piece with the loop over those that have arrived,
    /// and calls as little as it can: it is as little as a call takes.
    #[inline(always)]
    pub fn receive<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        datagram: &[u8],
        out: &mut T,
    ) {
        self.counters.received += 1;
        let Some((header, body)) = Header::decode(datagram) else {
            self.counters.malformed += 1;
            return;
        };
        let Some(owner) = self.sessions.owner(header.session) else {
            return self.take_from_parent(now, from, header, body, out);
        };
        let Some(job) = &mut self.jobs[owner.job as usize] else {
            return;
        };
        let Some(member) = job.member(owner.worker) else {
            return;
        };
        if member.path != Some(from) && header.kind != Kind::Join {
            self.counters.strangers += 1;
            return;
        }
        match header.kind {
            Kind::Float | Kind::Fixed | Kind::Exponents => {
                member.heard = now;
                job.heard = now;
                job.contribute(now, owner.worker, header, body, &mut self.counters, out);
            }
            _ => self.talk(now, owner, from, header, body, out),
        }
    }

    /// Takes what is no contribution, from a worker.
    #[cold]
    fn talk<T: Transmit>(
        &mut self,
        now: Instant,
        owner: Owner,
        from: SocketAddr,
        header: Header,
        body: &[u8],
        out: &mut T,
    ) {
        let (index, worker) = (owner.job as usize, owner.worker);
        if header.kind == Kind::Join {
            return self.prove(now, index, worker, from, body, out);
        }
        let Some(job) = &mut self.jobs[index] else {
            return;
        };
        let Some(member) = job.member(worker) else {
            return;
        };
        let key = member.key;
        member.heard = now;
        job.heard = now;
        let counters = &mut self.counters;
        match header.kind {
            Kind::Help => job.help(worker, header, counters, out),
            Kind::Leave | Kind::Reset | Kind::SetH | Kind::FBcast | Kind::Halt => {
                match body.strip_prefix(&key) {
                    None => counters.strangers += 1,
                    Some(_) if header.kind == Kind::Leave => {
                        let ack = Ack::new(Status::Done, Kind::Leave);
                        job.tell(worker, 0, 0, &ack, out);
                        self.leave(header.session, out);
                    }
                    Some(argument) => job.control(worker, header, argument, counters, out),
                }
            }
            _ => counters.malformed += 1,
        }
    }

    /// Takes what has no session of a worker: a parent's, or a stranger's.
    fn take_from_parent<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        header: Header,
        body: &[u8],
        out: &mut T,
    ) {
        let index = self.job_of_parent(header.session);
        match index.and_then(|index| self.jobs[index].as_mut()) {
            Some(job) if job.upstream.as_ref().is_some_and(|up| up.address == from) => {
                job.take_from_parent(now, header, body, &mut self.counters, out);
            }
            _ => self.counters.strangers += 1,
        }
    }

    /// Sends a cookie to where a worker says it is, and believes it when the cookie comes back from there.
    fn prove<T: Transmit>(
        &mut self,
        now: Instant,
        index: usize,
        worker: u16,
        from: SocketAddr,
        body: &[u8],
        out: &mut T,
    ) {
        let Some(job) = &mut self.jobs[index] else {
            return;
        };
        let next = job.next_round();
        let Some(member) = job.member(worker) else {
            return;
        };
        let Some(returned) = body.strip_prefix(&member.key) else {
            self.counters.strangers += 1;
            return;
        };
        match member.offered {
            Some((to, cookie)) if to == from && returned == cookie => {
                member.path = Some(from);
                member.heard = now;
                let ack = Ack::new(Status::Done, Kind::Join);
                job.tell(worker, next, 0, &ack, out);
            }
            offered => {
                let known = offered.filter(|(to, _)| *to == from);
                let cookie = match known {
                    Some((_, cookie)) => cookie,
                    // Without random bytes there is no proof; the worker asks again.
                    None => match random() {
                        Ok(cookie) => cookie,
                        Err(_) => return,
                    },
                };
                member.offered = Some((from, cookie));
                let header = Header::new(Kind::Join, member.session, 0, 0);
                out.send(from, &header.encode(), &cookie);
            }
        }
    }

    /// Fails what has waited too long at `now`, and forgets jobs that nobody has been heard of.
    pub fn expire<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        for index in 0..self.jobs.len() {
            let Some(job) = &mut self.jobs[index] else {
                continue;
            };
            job.expire(now, &mut self.counters, out);
            if now.saturating_duration_since(job.heard) >= self.limits.idle {
                self.forget(index, out);
            }
        }
    }

    /// When [`Aggregator::expire`] may have something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.jobs.iter().flatten().flat_map(|job| {
            let idle = job.heard + self.limits.idle;
            [Some(idle), job.next_deadline()]
        });
        deadlines.flatten().min()
    }
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::Io {
        what: "drawing random bytes".into(),
        source: std::io::Error::other(error),
    })?;
    Ok(bytes)
}

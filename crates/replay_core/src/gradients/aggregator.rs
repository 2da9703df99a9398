//! The aggregator: who takes part in which job, and which datagrams are theirs.

use std::net::SocketAddr;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use super::arithmetic::Arithmetic;
use super::hash::IntegerMap;
use super::job::{Job, JobStatus, Member, Terms};
use super::packet::{ALL_SEGMENTS, Ack, Cookie, Header, Key, Kind, MAX_SEGMENT_VALUES, Status};
use super::slots::Slots;
use super::{JoinJob, Ticket, Transmit};
use crate::error::{Error, Result};

/// Workers have a bit each.
const MAX_WORKERS: u16 = 64;
/// Bytes of a job's or a worker's name.
const MAX_NAME: usize = 64;
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

/// What an aggregator has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Contributions counted.
    pub counted: u64,
    /// Segments whose sum was sent.
    pub sums: u64,
    /// Contributions that had been counted before.
    pub duplicates: u64,
    /// Contributions that came after the threshold was reached.
    pub late: u64,
    /// Contributions of segments that are over.
    pub stale: u64,
    /// Contributions that came before their turn.
    pub ahead: u64,
    /// Requests for help.
    pub helped: u64,
    /// Jobs that failed or were halted.
    pub failed: u64,
    /// Datagrams of no session, or from elsewhere than the session's worker, or without its key.
    pub strangers: u64,
    /// Datagrams that are none of this protocol.
    pub malformed: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        let Counters {
            received,
            counted,
            sums,
            duplicates,
            late,
            stale,
            ahead,
            helped,
            failed,
            strangers,
            malformed,
        } = other;
        self.received += received;
        self.counted += counted;
        self.sums += sums;
        self.duplicates += duplicates;
        self.late += late;
        self.stale += stale;
        self.ahead += ahead;
        self.helped += helped;
        self.failed += failed;
        self.strangers += strangers;
        self.malformed += malformed;
    }
}

/// The aggregator above this one, as a job of this one has joined it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Where it is.
    pub address: SocketAddr,
    /// Of the ticket it gave.
    pub session: u32,
    /// Of the ticket it gave.
    pub key: Key,
    /// Of the ticket it gave.
    pub round: u64,
    pub(super) cookie: Cookie,
    pub(super) proved: bool,
    /// Nothing comes from it any more.
    pub(super) lost: bool,
}

impl Upstream {
    /// The parent at `address` that gave `ticket`.
    pub fn new(address: SocketAddr, ticket: &Ticket) -> Self {
        Upstream {
            address,
            session: ticket.session,
            key: ticket.key,
            round: ticket.round,
            cookie: Cookie::default(),
            proved: false,
            lost: false,
        }
    }

    /// Shows the parent that this aggregator receives where it sends from.
    pub(super) fn prove<T: Transmit>(&self, out: &mut T) {
        let header = Header::new(Kind::Join, self.session, 0, 0);
        let body = [self.key.as_slice(), &self.cookie].concat();
        out.send(self.address, &header.encode(), &body);
    }
}

/// Whose session it is.
#[derive(Debug, Clone, Copy)]
enum Owner {
    Worker(usize, u16),
    Parent(usize),
}

/// All jobs.
pub struct Aggregator {
    limits: Limits,
    jobs: Vec<Option<Job>>,
    sessions: IntegerMap<u32, Owner>,
    counters: Counters,
}

impl Aggregator {
    /// An aggregator without jobs.
    pub fn new(limits: Limits) -> Self {
        Aggregator {
            limits,
            jobs: (0..limits.jobs).map(|_| None).collect(),
            sessions: IntegerMap::default(),
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

    /// Whether a worker that joins with this request is the first of a job that has a parent: then [`Aggregator::join`] needs an [`Upstream`].
    pub fn needs_parent(&self, request: &JoinJob) -> bool {
        request.world != u32::from(request.workers) && self.find(&request.job).is_none()
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
    /// replaces the one that has it.
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
        check(request)?;
        let session = self.draw_session()?;
        let key = random::<16>()?;
        let index = match self.find(&request.job) {
            Some(index) => index,
            None => self.make_job(now, request, upstream)?,
        };
        let Some(job) = &mut self.jobs[index] else {
            return Err(Error::Internal("a job vanished while it was joined".into()));
        };
        let asked = Terms::of(request);
        if job.terms != asked {
            return Err(Error::Config(format!(
                "worker {} joins the gradient job {:?} with {asked:?}, but it was made with {:?}: give all workers the same",
                request.worker, request.job, job.terms
            )));
        }
        job.heard = now;
        let member = Member {
            name: request.name.clone(),
            session,
            key,
            path: None,
            offered: None,
            heard: now,
        };
        let (replaced, round) = job.seat(request.worker, member, out);
        if let Some(replaced) = replaced {
            self.sessions.remove(&replaced);
        }
        self.sessions
            .insert(session, Owner::Worker(index, request.worker));
        Ok(Ticket {
            session,
            key,
            round,
            window: self.limits.window,
        })
    }

    fn make_job(
        &mut self,
        now: Instant,
        request: &JoinJob,
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
        let terms = Terms::of(request);
        let (places, depth) = terms.places(self.limits.window);
        let bytes = Slots::bytes(places, depth, terms.stride());
        if terms.asynchronous.is_some() && bytes > self.limits.job_bytes {
            return Err(Error::TooLarge {
                what: "the sums that an asynchronous gradient job keeps, in bytes",
                size: bytes as u64,
                limit: self.limits.job_bytes as u64,
                advice: "lower its staleness bound, or start the aggregator with room for more",
            });
        }
        let has_parent = request.world != u32::from(request.workers);
        if has_parent != upstream.is_some() {
            return Err(Error::Config(format!(
                "the gradient job {:?} has {} workers in all and {} here: {}",
                request.job,
                request.world,
                request.workers,
                if has_parent {
                    "start this aggregator with --parent, or give it all workers"
                } else {
                    "with a parent aggregator say how many workers there are in all"
                }
            )));
        }
        if let Some(upstream) = &upstream
            && self
                .sessions
                .insert(upstream.session, Owner::Parent(index))
                .is_some()
        {
            return Err(Error::Internal(
                "the parent's session is that of a worker here: join again".into(),
            ));
        }
        let first = upstream.as_ref().map_or(FIRST_ROUND, |up| up.round);
        let mut job = Job::new(&request.job, terms, self.limits.window, first, now);
        job.upstream = upstream;
        self.jobs[index] = Some(job);
        Ok(index)
    }

    fn draw_session(&self) -> Result<u32> {
        loop {
            let session = u32::from_le_bytes(random()?);
            if !self.sessions.contains_key(&session) {
                return Ok(session);
            }
        }
    }

    /// A worker has gone, as its connection showed. A session that is over is ignored.
    pub fn leave<T: Transmit>(&mut self, session: u32, out: &mut T) {
        if let Some(Owner::Worker(index, worker)) = self.sessions.remove(&session)
            && let Some(job) = &mut self.jobs[index]
        {
            job.leave(worker, &mut self.counters, out);
            if job.joined() == 0 {
                self.forget(index, out);
            }
        }
    }

    /// The parent that gave `session` has gone, as the connection to it showed.
    pub fn lose_parent<T: Transmit>(&mut self, session: u32, out: &mut T) {
        if let Some(&Owner::Parent(index)) = self.sessions.get(&session)
            && let Some(job) = &mut self.jobs[index]
        {
            job.lose_parent(&mut self.counters, out);
        }
    }

    fn forget<T: Transmit>(&mut self, index: usize, out: &mut T) {
        let job = self.jobs[index].take();
        if let Some(upstream) = job.and_then(|job| job.upstream) {
            let header = Header::new(Kind::Leave, upstream.session, 0, 0);
            out.send(upstream.address, &header.encode(), &upstream.key);
        }
        self.sessions.retain(
            |_, owner| !matches!(owner, Owner::Worker(of, _) | Owner::Parent(of) if *of == index),
        );
    }

    /// Takes a datagram that came from `from`.
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
        let (index, worker) = match self.sessions.get(&header.session) {
            Some(&Owner::Worker(index, worker)) => (index, worker),
            Some(&Owner::Parent(index)) => {
                return self.take_from_parent(index, from, header, body, out);
            }
            None => {
                self.counters.strangers += 1;
                return;
            }
        };
        let Some(job) = &mut self.jobs[index] else {
            return;
        };
        let Some(member) = job.member(worker) else {
            return;
        };
        if header.kind == Kind::Join {
            return self.prove(now, index, worker, from, body, out);
        }
        if member.path != Some(from) {
            self.counters.strangers += 1;
            return;
        }
        let key = member.key;
        member.heard = now;
        job.heard = now;
        let counters = &mut self.counters;
        match header.kind {
            Kind::Float | Kind::Fixed | Kind::Exponents => {
                job.contribute(now, worker, header, body, counters, out);
            }
            Kind::Help => job.help(worker, header, counters, out),
            Kind::Partial | Kind::Ack | Kind::Join => counters.malformed += 1,
            _ => match body.strip_prefix(&key) {
                None => counters.strangers += 1,
                Some(_) if header.kind == Kind::Leave => {
                    let ack = Ack::new(Status::Done, Kind::Leave);
                    job.tell(worker, 0, 0, &ack, out);
                    self.leave(header.session, out);
                }
                Some(argument) => job.control(worker, header, argument, counters, out),
            },
        }
    }

    fn take_from_parent<T: Transmit>(
        &mut self,
        index: usize,
        from: SocketAddr,
        header: Header,
        body: &[u8],
        out: &mut T,
    ) {
        match &mut self.jobs[index] {
            Some(job) if job.upstream.as_ref().is_some_and(|up| up.address == from) => {
                job.take_from_parent(header, body, &mut self.counters, out);
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

fn check(request: &JoinJob) -> Result<()> {
    let refuse = |reason: String| Err(Error::Config(format!("a gradient job: {reason}")));
    let JoinJob {
        job,
        worker,
        workers,
        world,
        name,
        arithmetic,
        segment_values,
        deadline,
        asynchronous,
    } = request;
    if job.is_empty() || job.len() > MAX_NAME || name.len() > MAX_NAME {
        return refuse(format!(
            "the names of job and worker have at most {MAX_NAME} bytes, and the job's at least one"
        ));
    }
    if *workers == 0 || *workers > MAX_WORKERS {
        return refuse(format!(
            "an aggregator takes 1 to {MAX_WORKERS} workers, not {workers}: put aggregators with a parent between"
        ));
    }
    if worker >= workers {
        return refuse(format!(
            "worker {worker} of {workers}: numbers begin with 0"
        ));
    }
    if *world < u32::from(*workers) {
        return refuse(format!(
            "{world} workers in all, but {workers} at this aggregator"
        ));
    }
    if *segment_values == 0 || usize::from(*segment_values) > MAX_SEGMENT_VALUES {
        return refuse(format!(
            "a segment has 1 to {MAX_SEGMENT_VALUES} values, not {segment_values}"
        ));
    }
    if deadline.is_zero() {
        return refuse("the deadline has to be longer than 0".to_owned());
    }
    let Some(terms) = asynchronous else {
        return Ok(());
    };
    if *arithmetic != Arithmetic::Float || *world != u32::from(*workers) {
        return refuse(
            "an asynchronous one adds up float32, at an aggregator without a parent".to_owned(),
        );
    }
    if terms.threshold == 0 || terms.threshold > *workers {
        return refuse(format!(
            "the threshold is from 1 to the number of workers ({workers}), not {}",
            terms.threshold
        ));
    }
    let segments = terms.segments(*segment_values);
    if terms.values == 0 || segments >= ALL_SEGMENTS {
        return refuse(format!(
            "an asynchronous one sums vectors of at least one value and fewer than {ALL_SEGMENTS} segments, not {segments}"
        ));
    }
    Ok(())
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::Io {
        what: "drawing random bytes".into(),
        source: std::io::Error::other(error),
    })?;
    Ok(bytes)
}

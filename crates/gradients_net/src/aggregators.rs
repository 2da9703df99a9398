//! Aggregators of a server. One aggregator sums each job, so several threads give the same sums as one. A server with a parent joins it
//! once per job, over a connection of its own, which a thread holds while the job exists.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use event_listener::{Event, EventListener};
use serde_json::{Value, json};

use crate::config::GradientsConfig;
use crate::error::{Error, Result};
use crate::message::Joined;
use crate::worker::join_job;
use base::error::check_size;
use base::sync::lock;
use base::wait::Wait;
use gradients::settings::{self, JobSettings};
use gradients::{
    AggregatorCounters, AggregatorLimits, AggregatorTransport, JoinJob, ParentAggregator, dpdk_aggregators,
    udp_aggregators,
};
use replay_client::ConnectOptions;
use replay_client::dialer::Dialer;
use replay_core::table::Attempt;
use replay_link::error::io_error;
use replay_link::error::{Error as NetError, Result as NetResult};
use replay_server::config::ServerConfig;

/// The parent server.
pub struct ParentServer {
    /// Connects to the parent.
    pub dialer: Dialer,
    /// Number of this server at the parent.
    pub rack: u16,
    /// Number of servers below the parent.
    pub racks: u16,
    /// Workers below this server if they join its racks; 0 if workers join here.
    rack_workers: u32,
}

/// All aggregators of a server. Dropping stops them.
pub struct Aggregators(Arc<Inner>);

struct Inner {
    aggregators: Vec<Box<dyn AggregatorTransport>>,
    limits: AggregatorLimits,
    parent: Option<ParentServer>,
    /// Poisoning is harmless: each entry is changed by one assignment.
    joins: Mutex<PendingJoins>,
    changed: Event,
}

/// Sessions at the parent, by job name.
#[derive(Default)]
struct PendingJoins {
    sessions: HashMap<String, ParentSession>,
    /// Places of the connections that wait for a job.
    places: HashMap<String, Weak<()>>,
}

/// A connection's place among those that wait for a job. When the last one goes, the job leaves the parent.
pub type Place = Arc<()>;

impl PendingJoins {
    /// A place among the connections that wait for `job`.
    fn place(&mut self, job: &str) -> Place {
        let waiting = self.places.get(job).and_then(Weak::upgrade);
        waiting.unwrap_or_else(|| {
            let first = Place::default();
            self.places.insert(job.to_owned(), Arc::downgrade(&first));
            first
        })
    }

    /// Number of jobs, other than `job`, that are not created yet.
    fn count_without(&self, job: &str) -> usize {
        let sessions = self.sessions.iter();
        sessions.filter(|(name, session)| *name != job && !matches!(session.state, SessionState::InUse(_))).count()
    }
}

/// A job's connection to the parent, and the thread that holds it.
struct ParentSession {
    state: SessionState,
    started: Instant,
    settings: JobSettings,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Progress of a session at the parent.
enum SessionState {
    Joining,
    /// The job can be created.
    Joined(ParentAggregator),
    /// The job was created, with this session at the parent.
    InUse(u32),
    Failed(gradients::Error),
}

impl Drop for ParentSession {
    fn drop(&mut self) {
        // Pairs with the loads in `hold_session`. Relaxed: the flag carries no data. The thread checks it about ten times a second, and is
        // joined only when the server ends.
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl ParentServer {
    /// The parent of the settings, if they name one. Reads the files of its token and certificate.
    ///
    /// # Errors
    /// [`NetError::Config`] for a file that cannot be used.
    pub fn of(config: &ServerConfig, own: &GradientsConfig) -> NetResult<Option<Self>> {
        let Some(parent) = &own.parent else {
            return Ok(None);
        };
        let options = ConnectOptions {
            token: config.token_for_servers()?,
            tls_ca: own.parent_tls_ca.clone(),
            ..ConnectOptions::default()
        };
        let dialer = Dialer::new(parent.clone(), options)?;
        Ok(Some(ParentServer { dialer, rack: own.rack, racks: own.racks, rack_workers: own.rack_workers }))
    }

    /// Workers of a job below this server, which `request` is the first to join here, as a rack if `is_rack`.
    fn workers_here(&self, request: &JoinJob, is_rack: bool) -> Result<u32> {
        match (is_rack, self.rack_workers) {
            (false, _) => Ok(request.workers.into()),
            (true, 0) => Err(Error::config(format!(
                "rack {} joins the gradient job {:?} at a server that has a parent and does not know how many workers are below it: start it \
                 with --rack-workers",
                request.worker, request.job
            ))),
            (true, workers) => Ok(workers),
        }
    }
}

impl Aggregators {
    /// Starts the aggregators; `None` without a configured address.
    ///
    /// # Errors
    /// [`NetError::Config`] and [`NetError::Io`] for an address or devices that cannot be used.
    pub fn start(config: &ServerConfig, own: &GradientsConfig) -> NetResult<Option<Self>> {
        let Some(address) = own.gradients else {
            return Ok(None);
        };
        let parent = ParentServer::of(config, own)?;
        let limits = own.limits();
        let aggregators = match own.dpdk() {
            None => udp_aggregators(address, own.gradients_threads, limits),
            Some(dpdk) => dpdk_aggregators(&dpdk, limits),
        };
        Ok(Some(Aggregators(Arc::new(Inner {
            aggregators: aggregators.map_err(Error::from)?,
            limits,
            parent,
            joins: Mutex::default(),
            changed: Event::new(),
        }))))
    }

    /// Address of the first aggregator.
    pub fn address(&self) -> SocketAddr {
        self.0.aggregators[0].address()
    }

    /// Adds a worker to a job, or a rack with `below` workers. Blocked while the parent has not answered: join again
    /// after [`Aggregators::changed`]. The connection has `place` until it has joined.
    ///
    /// # Errors
    /// Errors of [`Aggregator::join`](gradients::Aggregator::join), and [`Error::Sum`] if the parent refuses.
    pub fn join(&self, request: &JoinJob, below: Option<u32>, place: &mut Option<Place>) -> Result<Attempt<Joined>> {
        settings::check(request)?;
        let requested = request;
        let mut request = request.clone();
        if below.is_some() {
            // Longer than the rack waits for its workers: see `job::deadline`.
            request.deadline = request.deadline * 9 / 8;
        }
        let mut joins = lock(&self.0.joins);
        *place = Some(joins.place(&request.job));
        self.0.prune(&mut joins);
        let aggregator = self.0.aggregator_for(&request.job, &joins)?;
        let mut parent = None;
        if let Some(server) = &self.0.parent
            && !aggregator.aggregator().has(&request.job)
        {
            let here = server.workers_here(&request, below.is_some())?;
            if here != request.world {
                let settings = JobSettings::of(&request, below.is_some());
                let sessions = &mut joins.sessions;
                match self.0.join_parent(sessions, server, requested, settings, here)? {
                    Attempt::Ready(joined) => parent = Some(joined),
                    Attempt::Blocked(waited_for) => return Ok(Attempt::Blocked(waited_for)),
                }
            }
        }
        let at_parent = parent.as_ref().map(ParentAggregator::session);
        let ticket = aggregator.join(&request, below, parent)?;
        if let Some(number) = at_parent
            && let Some(session) = joins.sessions.get_mut(&request.job)
        {
            session.state = SessionState::InUse(number);
        }
        *place = None;
        let address = aggregator.address();
        Ok(Attempt::Ready(Joined { address, ticket }))
    }

    /// Removes a member, whose connection has ended, from the aggregator at `address`.
    pub fn leave(&self, address: SocketAddr, session: u32) {
        let mut aggregators = self.0.aggregators.iter();
        if let Some(aggregator) = aggregators.find(|one| one.address() == address) {
            aggregator.leave(session);
        }
        self.prune();
    }

    /// Leaves the parent in jobs that have ended, or that no connection waits for any more.
    pub fn prune(&self) {
        self.0.prune(&mut lock(&self.0.joins));
    }

    /// Listens for an answer of the parent.
    pub fn changed(&self) -> EventListener {
        self.0.changed.listen()
    }

    /// Counters and jobs, as one JSON object.
    pub fn stats(&self) -> Value {
        let mut total = AggregatorCounters::default();
        let mut jobs = serde_json::Map::new();
        for aggregator in &self.0.aggregators {
            let aggregator = aggregator.aggregator();
            total += aggregator.counters();
            for job in aggregator.status() {
                jobs.insert(job.name.clone(), json!(job));
            }
        }
        let mut stats = json!(total);
        if let Some(frames) = self.0.aggregators.first().and_then(|one| one.frames()) {
            stats["frames"] = json!(frames);
        }
        stats["address"] = json!(self.address().to_string());
        stats["threads"] = json!(self.0.aggregators.len());
        stats["max_bytes"] = json!(self.0.limits.bytes());
        stats["jobs"] = Value::Object(jobs);
        stats
    }
}

impl Drop for Aggregators {
    fn drop(&mut self) {
        let sessions = std::mem::take(&mut *lock(&self.0.joins)).sessions;
        let threads = sessions.into_values().filter_map(|mut session| session.thread.take());
        // Collecting drops all sessions, which stops every thread before the first join.
        for thread in threads.collect::<Vec<_>>() {
            if thread.join().is_err() {
                tracing::error!("a thread of the parent's connection panicked");
            }
        }
    }
}

impl Inner {
    /// The aggregator that has the job, or the one with the fewest jobs.
    fn aggregator_for(&self, job: &str, joins: &PendingJoins) -> Result<&dyn AggregatorTransport> {
        if let Some(found) = self.aggregators.iter().find(|one| one.aggregator().has(job)) {
            return Ok(&**found);
        }
        let counts: Vec<usize> = self.aggregators.iter().map(|one| one.aggregator().jobs()).collect();
        let jobs = counts.iter().sum::<usize>() + joins.count_without(job);
        check_size(
            "the number of gradient jobs",
            jobs as u64 + 1,
            self.limits.jobs as u64,
            "wait for another job to end, or start the server with a larger --gradients-jobs",
        )?;
        let fewest = counts.iter().zip(&self.aggregators).min_by_key(|(jobs, _)| **jobs);
        fewest
            .map(|(_, one)| &**one)
            .ok_or_else(|| NetError::Internal("a server sums gradients without a thread".into()).into())
    }

    /// Drops sessions whose job has ended, was not created in time, or is not waited for any more.
    fn prune(&self, joins: &mut PendingJoins) {
        let PendingJoins { sessions, places } = joins;
        places.retain(|_, place| place.strong_count() > 0);
        sessions.retain(|job, session| match session.state {
            SessionState::Joining => places.contains_key(job),
            SessionState::Joined(_) | SessionState::Failed(_) => {
                places.contains_key(job) && session.started.elapsed() < session.settings.deadline
            }
            SessionState::InUse(_) => self.aggregators.iter().any(|one| one.aggregator().has(job)),
        });
    }

    /// Joins the parent for a new job. Blocked until the parent answers.
    fn join_parent(
        self: &Arc<Self>,
        sessions: &mut HashMap<String, ParentSession>,
        parent: &ParentServer,
        request: &JoinJob,
        settings: JobSettings,
        below: u32,
    ) -> Result<Attempt<ParentAggregator>> {
        let address = &parent.dialer.address;
        let reason = format!("the parent at {address} has not answered");
        let blocked = Attempt::Blocked(reason.into());
        let Some(session) = sessions.get(&request.job) else {
            let session = self.clone().start_session(parent, request, settings, below)?;
            sessions.insert(request.job.clone(), session);
            return Ok(blocked);
        };
        if let Err(error) = session.settings.check_same(request, &settings) {
            let is_old = session.started.elapsed() >= request.deadline;
            if is_old && !matches!(session.state, SessionState::InUse(_)) {
                // Workers of a join whose deadline is over have given up. One that still waits has to join again.
                sessions.remove(&request.job);
                self.changed.notify(usize::MAX);
            }
            return Err(error.into());
        }
        match &session.state {
            SessionState::Joining | SessionState::InUse(_) => Ok(blocked),
            SessionState::Joined(parent) => Ok(Attempt::Ready(parent.clone())),
            SessionState::Failed(failure) => {
                let failure = failure.clone();
                sessions.remove(&request.job);
                Err(failure.into())
            }
        }
    }

    fn start_session(
        self: Arc<Self>,
        parent: &ParentServer,
        request: &JoinJob,
        settings: JobSettings,
        below: u32,
    ) -> Result<ParentSession> {
        let request = JoinJob {
            worker: parent.rack,
            workers: parent.racks,
            // The longest IPv6 address with a port has 47 bytes.
            name: format!("aggregator at {}", self.aggregators[0].address()),
            ..request.clone()
        };
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new()
            .name("innet-parent".into())
            .spawn({
                let stop = stop.clone();
                move || self.hold_session(&request, below, &stop)
            })
            .map_err(io_error("cannot start a thread for the parent's connection"))?;
        Ok(ParentSession {
            state: SessionState::Joining,
            started: Instant::now(),
            settings,
            stop,
            thread: Some(thread),
        })
    }

    /// Joins the parent, and keeps the connection until the job is over or the connection ends.
    fn hold_session(&self, request: &JoinJob, below: u32, stop: &Arc<AtomicBool>) {
        let Some(parent) = &self.parent else { return };
        // Pairs with the store in `ParentSession::drop`. Relaxed: the flag carries no data.
        let stopped = || stop.load(Ordering::Relaxed);
        let until = Instant::now() + request.deadline;
        let wait = Wait { interrupted: &stopped, ..Wait::until(Some(until)) };
        let refused = |reason: String| {
            let address = &parent.dialer.address;
            gradients::Error::Refused(format!("the parent at {address}: {reason}"))
        };
        let mut joined = match join_job(&parent.dialer, request, Some(below), until, &wait) {
            Ok(joined) => joined,
            Err(error) => {
                let failed = SessionState::Failed(refused(error.to_string()));
                return self.set_state(&request.job, stop, failed);
            }
        };
        let address = match path(self.aggregators[0].address(), joined.aggregator) {
            Ok(address) => address,
            Err(reason) => return self.set_state(&request.job, stop, SessionState::Failed(refused(reason))),
        };
        let aggregator = ParentAggregator::new(address, &joined.ticket, below);
        self.set_state(&request.job, stop, SessionState::Joined(aggregator));
        let reason = joined.session.ended(&Wait { interrupted: &stopped, ..Wait::forever() });
        if stopped() {
            return;
        }
        tracing::warn!(job = request.job, reason, "the connection to the parent ended");
        self.set_state(&request.job, stop, SessionState::Failed(refused(reason)));
    }

    /// Sets the state of the session that owns `stop`, unless a newer session of the job has replaced it.
    fn set_state(&self, job: &str, stop: &Arc<AtomicBool>, state: SessionState) {
        let mut joins = lock(&self.joins);
        let sessions = &mut joins.sessions;
        if let Some(session) = sessions.get_mut(job)
            && Arc::ptr_eq(&session.stop, stop)
        {
            match session.state {
                // The job has lost its parent: the next join opens a new session. With the lock of the joins, so that none creates the
                // job in between.
                SessionState::InUse(number) => {
                    sessions.remove(job);
                    let mut aggregators = self.aggregators.iter();
                    if let Some(one) = aggregators.find(|one| one.aggregator().has(job)) {
                        one.lose_parent(number);
                    }
                }
                _ => session.state = state,
            }
        }
        drop(joins);
        self.changed.notify(usize::MAX);
    }
}

/// Address to which an aggregator at `own` sends the datagrams for its parent's aggregator, at `parent`; the error says why none arrive.
fn path(own: SocketAddr, parent: SocketAddr) -> Result<SocketAddr, String> {
    // Another machine's, unless it can be bound here.
    let is_remote = || !parent.ip().is_loopback() && UdpSocket::bind((parent.ip(), 0)).is_err();
    match (own, parent) {
        _ if own.ip().is_loopback() && is_remote() => Err(format!(
            "its aggregator is at {parent}, and this server's, at {own}, reaches this machine alone: start this server with --gradients at an \
             address that the parent can reach, and with --trusted-network"
        )),
        // A socket for both receives from IPv4 hosts at mapped addresses.
        (SocketAddr::V6(_), SocketAddr::V4(at)) => Ok((at.ip().to_ipv6_mapped(), at.port()).into()),
        (SocketAddr::V4(own), SocketAddr::V6(at)) => {
            Err(format!("its aggregator is at {at}, and this server's, at {own}, has IPv4 alone"))
        }
        (_, at) => Ok(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rack_on_loopback_has_no_path_to_a_parent_on_another_machine() {
        let path = |own: &str, parent: &str| path(own.parse().unwrap(), parent.parse().unwrap());
        // Addresses of documentation, which no machine has.
        for (own, parent) in
            [("127.0.0.1:1", "198.51.100.1:2"), ("[::1]:1", "198.51.100.1:2"), ("[::1]:1", "[2001:db8::1]:2")]
        {
            let reason = path(own, parent).unwrap_err();
            assert!(reason.contains(own) && reason.contains(parent) && reason.contains("--gradients"), "{reason}");
        }
        assert_eq!(path("127.0.0.1:1", "127.0.0.2:2"), Ok("127.0.0.2:2".parse().unwrap()));
        assert_eq!(path("0.0.0.0:1", "198.51.100.1:2"), Ok("198.51.100.1:2".parse().unwrap()));
        assert_eq!(path("[::]:1", "198.51.100.1:2"), Ok("[::ffff:198.51.100.1]:2".parse().unwrap()));
        assert!(path("0.0.0.0:1", "[2001:db8::1]:2").unwrap_err().contains("IPv4 alone"));
    }
}

//! Aggregators of a server. One aggregator sums each job, so several threads give the same sums as one. A server with a parent joins it
//! once per job, over a connection of its own, which a thread holds while the job exists.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Instant;

use event_listener::{Event, EventListener};
use serde_json::{Value, json};

use crate::config::GradientsConfig;
use crate::error::{Error, Result};
use crate::worker::join_job;
use base::allocation::check_size;
use base::wait::{Wait, lock};
use gradients::{
    AggregatorCounters, AggregatorLimits, FrameCounters, JoinJob, ParentAggregator, RunningAggregator, Ticket,
    dpdk_aggregators, udp_aggregators,
};
use replay_client::ConnectOptions;
use replay_client::dialer::Dialer;
use replay_core::table::Attempt;
use replay_link::error::{Error as NetError, Result as NetResult, io_error};
use replay_server::config::ServerConfig;

/// The parent server.
pub struct ParentServer {
    /// Connects to the parent.
    pub dialer: Dialer,
    /// Index of this server at the parent.
    pub rack: u16,
    /// Number of servers below the parent.
    pub racks: u16,
    /// Workers below this server if they join its racks; 0 if workers join here.
    rack_workers: u32,
}

/// All aggregators of a server. Dropping stops them.
pub struct Aggregators {
    aggregators: Vec<RunningAggregator>,
    limits: AggregatorLimits,
    parent: Option<Arc<ParentServer>>,
    /// Set by `--gradients-only`: the server has no memory.
    pub only_sums: bool,
    /// Sessions at the parent, by job. Locked by every join and every change of a session. Valid after a panic: an entry is changed by one
    /// assignment.
    sessions: Mutex<HashMap<String, Weak<ParentSession>>>,
    changed: Event,
}

/// A job's session at the parent. Connections of workers that wait for the job, or have joined it, share it, and it ends with the last one.
pub struct ParentSession {
    /// Request of the first worker.
    request: JoinJob,
    state: Mutex<SessionState>,
}

/// Progress of a session at the parent.
enum SessionState {
    Joining,
    /// The job can be created.
    Joined(ParentAggregator),
    /// The job was created, with this session at the parent. Once the job is over, so is the session.
    InUse(u32),
    Failed(gradients::Error),
}

impl ParentSession {
    /// Whether its job is still to be created.
    fn is_pending(&self) -> bool {
        matches!(*lock(&self.state), SessionState::Joining | SessionState::Joined(_))
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

    /// Workers of a job below this server, which `request` is the first to join here.
    fn workers_here(&self, request: &JoinJob) -> Result<u32> {
        match (request.below, self.rack_workers) {
            (None, _) => Ok(request.workers.into()),
            (Some(_), 0) => Err(Error::config(format!(
                "rack {} joins the gradient job {:?} at a server that has a parent and does not know how many workers are below it: start it \
                 with --rack-workers",
                request.worker, request.job
            ))),
            (Some(_), workers) => Ok(workers),
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
        let parent = ParentServer::of(config, own)?.map(Arc::new);
        let limits = own.limits();
        let aggregators = match own.dpdk() {
            None => udp_aggregators(address, own.gradients_threads, limits),
            Some(dpdk) => dpdk_aggregators(&dpdk, limits),
        };
        let aggregators = aggregators.map_err(Error::from)?;
        Ok(Some(Aggregators {
            aggregators,
            limits,
            parent,
            only_sums: own.gradients_only,
            sessions: Mutex::default(),
            changed: Event::new(),
        }))
    }

    /// Address of the first aggregator.
    pub fn address(&self) -> SocketAddr {
        self.aggregators[0].address()
    }

    /// Adds a worker or a rack to a job. Blocked while the parent has not answered: join again after [`Aggregators::changed`]. The
    /// connection keeps `session`, the job's at the parent, until it ends.
    ///
    /// # Errors
    /// Errors of [`Aggregator::join`](gradients::Aggregator::join), and [`Error::Sum`] if the parent refuses.
    pub fn join(
        self: &Arc<Self>,
        request: &JoinJob,
        session: &mut Option<Arc<ParentSession>>,
    ) -> Result<Attempt<Ticket>> {
        request.check()?;
        let mut sessions = lock(&self.sessions);
        sessions.retain(|_, session| session.strong_count() > 0);
        let mut parent = None;
        let aggregator = match self.aggregators.iter().find(|one| one.aggregator().has(&request.job)) {
            Some(aggregator) => {
                *session = sessions.get(&request.job).and_then(Weak::upgrade);
                aggregator
            }
            None => {
                let aggregator = self.least_busy(&request.job, &sessions)?;
                if let Some(server) = &self.parent {
                    let here = server.workers_here(request)?;
                    if here != request.world {
                        match self.join_parent(&mut sessions, server, request, here, session)? {
                            Attempt::Ready(joined) => parent = Some(joined),
                            Attempt::Blocked(reason) => return Ok(Attempt::Blocked(reason)),
                        }
                    }
                }
                aggregator
            }
        };
        let deadline = match request.below {
            // Longer than the rack waits for its workers: see `job::deadline`.
            Some(_) => request.deadline * 9 / 8,
            None => request.deadline,
        };
        let at_parent = parent.as_ref().map(ParentAggregator::session);
        let ticket = aggregator.join(&JoinJob { deadline, ..request.clone() }, parent)?;
        if let (Some(number), Some(session)) = (at_parent, session) {
            *lock(&session.state) = SessionState::InUse(number);
        }
        Ok(Attempt::Ready(ticket))
    }

    /// Removes a member, whose connection has ended, from the aggregator at `address`.
    pub fn leave(&self, address: SocketAddr, session: u32) {
        if let Some(one) = self.aggregators.iter().find(|one| one.address() == address) {
            one.aggregator().leave(session);
        }
    }

    /// Listens for an answer of the parent.
    pub fn changed(&self) -> EventListener {
        self.changed.listen()
    }

    /// Counters and jobs, as one JSON object.
    pub fn stats(&self) -> Value {
        let mut total = AggregatorCounters::default();
        let mut frames: Option<FrameCounters> = None;
        let mut jobs = serde_json::Map::new();
        for aggregator in &self.aggregators {
            let aggregator = aggregator.aggregator();
            total += aggregator.counters();
            if let Some(own) = aggregator.frames {
                *frames.get_or_insert_default() += own;
            }
            for job in aggregator.status() {
                jobs.insert(job.name.clone(), json!(job));
            }
        }
        let mut stats = json!(total);
        if let Some(frames) = frames {
            stats["frames"] = json!(frames);
        }
        stats["address"] = json!(self.address().to_string());
        stats["threads"] = json!(self.aggregators.len());
        stats["max_bytes"] = json!(self.limits.bytes());
        stats["jobs"] = Value::Object(jobs);
        stats
    }

    /// The aggregator with the fewest jobs, for a new `job`. Jobs that wait for the parent count towards the limit.
    fn least_busy(&self, job: &str, sessions: &HashMap<String, Weak<ParentSession>>) -> Result<&RunningAggregator> {
        let waits = |session: &Weak<ParentSession>| session.upgrade().is_some_and(|session| session.is_pending());
        let waiting = sessions.iter().filter(|(name, session)| *name != job && waits(session)).count();
        let counts: Vec<usize> = self.aggregators.iter().map(|one| one.aggregator().jobs()).collect();
        check_size(
            "the number of gradient jobs",
            (counts.iter().sum::<usize>() + waiting) as u64 + 1,
            self.limits.jobs as u64,
            "wait for another job to end, or start the server with a larger --gradients-jobs",
        )
        .map_err(NetError::from)?;
        let fewest = counts.iter().zip(&self.aggregators).min_by_key(|(jobs, _)| **jobs);
        fewest
            .map(|(_, one)| one)
            .ok_or_else(|| NetError::Internal("a server sums gradients without a thread".into()).into())
    }

    /// Joins the parent for a new job. Blocked until the parent answers.
    fn join_parent(
        self: &Arc<Self>,
        sessions: &mut HashMap<String, Weak<ParentSession>>,
        parent: &Arc<ParentServer>,
        request: &JoinJob,
        below: u32,
        own: &mut Option<Arc<ParentSession>>,
    ) -> Result<Attempt<ParentAggregator>> {
        // A failed session is the error of the requests that waited for it. A later request opens a new one.
        let others = || sessions.get(&request.job)?.upgrade().filter(|session| session.is_pending());
        let mine = own.take().filter(|session| !matches!(*lock(&session.state), SessionState::InUse(_)));
        let session = match mine.or_else(others) {
            Some(session) => session,
            None => {
                let session = self.start_session(parent, request, below)?;
                sessions.insert(request.job.clone(), Arc::downgrade(&session));
                session
            }
        };
        request.check_same(&session.request)?;
        let attempt = match &*lock(&session.state) {
            SessionState::Joining | SessionState::InUse(_) => {
                let reason = format!("the parent at {} has not answered", parent.dialer.address);
                Attempt::Blocked(reason.into())
            }
            SessionState::Joined(parent) => Attempt::Ready(parent.clone()),
            SessionState::Failed(failure) => return Err(failure.clone().into()),
        };
        *own = Some(session);
        Ok(attempt)
    }

    fn start_session(
        self: &Arc<Self>,
        parent: &Arc<ParentServer>,
        request: &JoinJob,
        below: u32,
    ) -> Result<Arc<ParentSession>> {
        let session = Arc::new(ParentSession { request: request.clone(), state: Mutex::new(SessionState::Joining) });
        let own = self.address();
        let request = JoinJob {
            worker: parent.rack,
            workers: parent.racks,
            // The longest IPv6 address with a port has 47 bytes.
            name: format!("aggregator at {own}"),
            below: Some(below),
            ..request.clone()
        };
        let (parent, aggregators, held) = (parent.clone(), Arc::downgrade(self), Arc::downgrade(&session));
        thread::Builder::new()
            .name("innet-parent".into())
            .spawn(move || hold_session(&parent, &request, own, &aggregators, &held))
            .map_err(io_error("cannot start a thread for the parent's connection"))?;
        Ok(session)
    }

    /// Changes the state of a session, unless no connection has it any more.
    fn set_state(&self, session: &Weak<ParentSession>, state: SessionState) {
        // No join may create the job in between.
        let sessions = lock(&self.sessions);
        if let Some(session) = session.upgrade() {
            let before = std::mem::replace(&mut *lock(&session.state), state);
            if let SessionState::InUse(number) = before {
                self.aggregators.iter().for_each(|one| one.aggregator().lose_parent(number));
            }
        }
        drop(sessions);
        self.changed.notify(usize::MAX);
    }
}

/// Joins the parent, and keeps the connection until the `session` is over or the connection ends.
fn hold_session(
    parent: &ParentServer,
    request: &JoinJob,
    own: SocketAddr,
    aggregators: &Weak<Aggregators>,
    session: &Weak<ParentSession>,
) {
    let set_state = |state| {
        if let Some(aggregators) = aggregators.upgrade() {
            aggregators.set_state(session, state);
        }
    };
    let fail = |reason: String| {
        let address = &parent.dialer.address;
        set_state(SessionState::Failed(gradients::Error::Refused(format!("the parent at {address}: {reason}"))));
    };
    let stopped = || session.strong_count() == 0;
    let until = Instant::now() + request.deadline;
    let wait = Wait { interrupted: &stopped, ..Wait::until(Some(until)) };
    let mut joined = match join_job(&parent.dialer, request, until, &wait) {
        Ok(joined) => joined,
        Err(error) => return fail(error.to_string()),
    };
    joined.ticket.address = match path(own, joined.ticket.address) {
        Ok(address) => address,
        Err(reason) => return fail(reason),
    };
    let below = request.below.unwrap_or_default();
    set_state(SessionState::Joined(ParentAggregator::new(&joined.ticket, below)));
    let reason = joined.connection.ended(&Wait { interrupted: &stopped, ..Wait::forever() });
    if !stopped() {
        tracing::warn!(job = request.job, reason, "the connection to the parent ended");
        fail(reason);
    }
}

/// Address to which an aggregator at `own` sends the datagrams for its parent's aggregator, at `parent`; the error says why none arrive.
fn path(own: SocketAddr, parent: SocketAddr) -> Result<SocketAddr, String> {
    // An address that cannot be bound here belongs to another machine.
    let is_remote = || !parent.ip().is_loopback() && UdpSocket::bind((parent.ip(), 0)).is_err();
    match (own, parent) {
        _ if own.ip().is_loopback() && is_remote() => Err(format!(
            "its aggregator is at {parent}, and ours at {own} reaches this machine alone: start this server with --gradients at an \
             address that the parent can reach, and with --trusted-network"
        )),
        // A socket for both receives from IPv4 hosts at mapped addresses.
        (SocketAddr::V6(_), SocketAddr::V4(at)) => Ok((at.ip().to_ipv6_mapped(), at.port()).into()),
        (SocketAddr::V4(own), SocketAddr::V6(at)) => {
            Err(format!("its aggregator is at {at}, and ours at {own} has IPv4 alone"))
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

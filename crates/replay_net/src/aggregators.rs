//! The aggregators of a server: which of them sums which job, and the server above, where a job's sums go on.
//!
//! A job is one aggregator's alone, so its sums are as exact as with one. The connection to the parent is a job's own: a thread joins there,
//! then watches it for as long as the job is here.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use event_listener::{Event, EventListener};
use serde_json::{Value, json};

use crate::client::connection::{Connection, Dialer};
use crate::client::gradients::take_place;
use gradients::gathering::Gathering;
use gradients::plane::Plane;
use gradients::terms::{self, Terms};
use gradients::worker::Failure;
use gradients::{Counters, JoinJob, Limits, Ticket, Upstream};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// The server above this one.
pub struct Parent {
    /// How it is reached.
    pub dialer: Dialer,
    /// This server's number there.
    pub rack: u16,
    /// How many servers there are below it.
    pub racks: u16,
}

/// What a request to join came to.
pub enum Joined {
    /// A place, at the aggregator of this address.
    Place(SocketAddr, Ticket),
    /// The parent has not answered yet, or other racks have not come: ask again when something has [`changed`](Aggregators::changed).
    Waits {
        /// Who is waited for.
        waited_for: String,
    },
}

/// All aggregators of a server. Dropped, they end.
pub struct Aggregators(Arc<Shared>);

struct Shared {
    aggregators: Vec<Plane>,
    limits: Limits,
    parent: Option<Parent>,
    ways: Mutex<Ways>,
    changed: Event,
}

/// What there is of the way up, by the job's name.
#[derive(Default)]
struct Ways {
    lifts: HashMap<String, Lift>,
    gatherings: HashMap<String, Gathering>,
}

impl Ways {
    /// Jobs beside `job` that have not been made yet.
    fn pending(&self, job: &str) -> usize {
        let lifts = self.lifts.iter();
        let lifts = lifts.filter(|(_, lift)| !matches!(lift.state, LiftState::Used));
        let gatherings = self.gatherings.keys();
        let gatherings = gatherings.filter(|name| !self.lifts.contains_key(*name));
        let names = lifts.map(|(name, _)| name).chain(gatherings);
        names.filter(|name| *name != job).count()
    }
}

/// A job's connection to the parent, and the thread that has it.
struct Lift {
    state: LiftState,
    begun: Instant,
    terms: Terms,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

enum LiftState {
    Joining,
    /// The job can be made.
    Joined(Upstream),
    /// The job was made.
    Used,
    Failed(Failure),
}

impl Drop for Lift {
    fn drop(&mut self) {
        // Pairs with the loads in `hold`; nothing else is published with it. The thread looks about ten times a second, and is
        // waited for at the server's end alone.
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Aggregators {
    /// Those that run, of which there is at least one.
    pub fn new(aggregators: Vec<Plane>, limits: Limits, parent: Option<Parent>) -> Self {
        Aggregators(Arc::new(Shared {
            aggregators,
            limits,
            parent,
            ways: Mutex::default(),
            changed: Event::new(),
        }))
    }

    /// Where the first one is.
    pub fn address(&self) -> SocketAddr {
        self.0.aggregators[0].address()
    }

    /// Takes a worker into a job; or, with `below`, a server that has sums of so many.
    ///
    /// # Errors
    /// Those of [`Aggregator::join_rack`](gradients::Aggregator::join_rack), and [`Error::Gradients`] where the parent refuses.
    pub fn join(&self, request: &JoinJob, below: Option<u32>) -> Result<Joined> {
        terms::check(request)?;
        let asked = request;
        let mut request = request.clone();
        if below.is_some() {
            // Where one of its workers is missing, the server below knows it, and speaks first.
            request.deadline = request.deadline * 9 / 8;
        }
        let mut ways = self.0.ways();
        self.0.prune(&mut ways);
        let aggregator = self.0.aggregator_for(&request.job, &ways)?;
        let mut upstream = None;
        if let Some(parent) = &self.0.parent
            && !aggregator.has(&request.job)
        {
            let here = match below {
                None => request.workers.into(),
                Some(below) => match self.0.gather(&mut ways, &request, below)? {
                    Ok(here) => here,
                    Err(waited_for) => return Ok(Joined::Waits { waited_for }),
                },
            };
            if here != request.world {
                let terms = Terms::of(&request, below.is_some());
                match self.0.lift(&mut ways.lifts, parent, asked, terms, here)? {
                    Ok(joined) => upstream = Some(joined),
                    Err(waited_for) => return Ok(Joined::Waits { waited_for }),
                }
            }
        }
        let goes_up = upstream.is_some();
        let ticket = match below {
            None => aggregator.join(&request, upstream)?,
            Some(below) => aggregator.join_rack(&request, below, upstream)?,
        };
        ways.gatherings.remove(&request.job);
        if goes_up && let Some(lift) = ways.lifts.get_mut(&request.job) {
            lift.state = LiftState::Used;
        }
        Ok(Joined::Place(aggregator.address(), ticket))
    }

    /// The connection has ended of the worker that was given a place at the aggregator of this address.
    pub fn leave(&self, at: SocketAddr, session: u32) {
        let mut aggregators = self.0.aggregators.iter();
        if let Some(aggregator) = aggregators.find(|one| one.address() == at) {
            aggregator.leave(session);
        }
        self.0.prune(&mut self.0.ways());
    }

    /// Hears when the parent has answered.
    pub fn changed(&self) -> EventListener {
        self.0.changed.listen()
    }

    /// Counters and jobs, as one JSON object.
    pub fn stats(&self) -> Value {
        let mut total = Counters::default();
        let mut jobs = serde_json::Map::new();
        for aggregator in &self.0.aggregators {
            total += aggregator.counters();
            for job in aggregator.jobs() {
                jobs.insert(job.name.clone(), json!(job));
            }
        }
        let mut stats = json!(total);
        if let Some(frames) = self.0.aggregators.first().and_then(Plane::frames) {
            stats["frames"] = frames;
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
        let lifts = std::mem::take(&mut *self.0.ways()).lifts;
        let threads = lifts
            .into_values()
            .filter_map(|mut lift| lift.thread.take());
        for thread in threads.collect::<Vec<_>>() {
            if thread.join().is_err() {
                tracing::error!("a thread of the parent's connection panicked");
            }
        }
    }
}

impl Shared {
    /// A panic while it was held has left whole entries: each is changed by one assignment.
    fn ways(&self) -> MutexGuard<'_, Ways> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The aggregator that has the job, or the one with the fewest.
    fn aggregator_for(&self, job: &str, ways: &Ways) -> Result<&Plane> {
        if let Some(found) = self.aggregators.iter().find(|one| one.has(job)) {
            return Ok(found);
        }
        let counts: Vec<usize> = self
            .aggregators
            .iter()
            .map(|one| one.jobs().len())
            .collect();
        let jobs = counts.iter().sum::<usize>() + ways.pending(job);
        if jobs >= self.limits.jobs {
            return Err(Error::TooLarge {
                what: "the number of gradient jobs",
                size: jobs as u64 + 1,
                limit: self.limits.jobs as u64,
                advice: "wait for another job to end, or start the server with a larger --gradients-jobs",
            });
        }
        let fewest = counts
            .iter()
            .zip(&self.aggregators)
            .min_by_key(|(jobs, _)| **jobs);
        fewest
            .map(|(_, one)| one)
            .ok_or_else(|| Error::Internal("a server sums gradients without a thread".into()))
    }

    /// Lets go of connections whose job has ended, or was never made.
    fn prune(&self, ways: &mut Ways) {
        ways.gatherings
            .retain(|_, gathering| !gathering.is_over(Instant::now()));
        ways.lifts.retain(|job, lift| match lift.state {
            LiftState::Joining => true,
            LiftState::Joined(_) | LiftState::Failed(_) => {
                lift.begun.elapsed() < lift.terms.deadline
            }
            LiftState::Used => self.aggregators.iter().any(|one| one.has(job)),
        });
    }

    /// How many workers there are below this server; who is waited for where not all racks have said it.
    fn gather(
        &self,
        ways: &mut Ways,
        request: &JoinJob,
        below: u32,
    ) -> Result<std::result::Result<u32, String>> {
        let terms = Terms::of(request, true);
        let name = &request.job;
        ways.gatherings
            .retain(|of, gathering| of != name || !gathering.is_of_another(&terms));
        let fresh = || Gathering::new(terms, Instant::now());
        let gathering = ways.gatherings.entry(name.clone()).or_insert_with(fresh);
        let added = gathering.add(request, &terms, below);
        let total = gathering.total();
        let is_new = added.inspect_err(|_| {
            // Whoever is still there comes to another one.
            ways.gatherings.remove(name);
            self.changed.notify(usize::MAX);
        })?;
        Ok(match total {
            Ok(total) if total > request.world => {
                return Err(Error::Config(format!(
                    "the gradient job {:?} has {} workers in all, but the racks of this server {total}: give each worker the number of \
                     those at its server and in all",
                    request.job, request.world
                )));
            }
            Ok(total) => {
                if is_new {
                    // The others ask again.
                    self.changed.notify(usize::MAX);
                }
                Ok(total)
            }
            Err(absent) => {
                let absent: Vec<String> = absent.iter().map(u16::to_string).collect();
                let (absent, of) = (absent.join(", "), request.workers);
                Err(format!("of {of} racks these have not come: {absent}"))
            }
        })
    }

    /// The way up for a job that is about to be made; who is waited for where there is none yet.
    fn lift(
        self: &Arc<Self>,
        lifts: &mut HashMap<String, Lift>,
        parent: &Parent,
        request: &JoinJob,
        terms: Terms,
        below: u32,
    ) -> Result<std::result::Result<Upstream, String>> {
        let waits = || format!("the parent at {} has not answered", parent.dialer.address);
        let Some(lift) = lifts.get(&request.job) else {
            let lift = self.clone().begin_lift(parent, request, terms, below)?;
            lifts.insert(request.job.clone(), lift);
            return Ok(Err(waits()));
        };
        lift.terms.admit(request, &terms)?;
        match &lift.state {
            LiftState::Joining | LiftState::Used => Ok(Err(waits())),
            LiftState::Joined(upstream) => Ok(Ok(upstream.clone())),
            LiftState::Failed(failure) => {
                let failure = failure.clone();
                lifts.remove(&request.job);
                Err(failure.into())
            }
        }
    }

    fn begin_lift(
        self: Arc<Self>,
        parent: &Parent,
        request: &JoinJob,
        terms: Terms,
        below: u32,
    ) -> Result<Lift> {
        let up = JoinJob {
            worker: parent.rack,
            workers: parent.racks,
            name: format!("the aggregator at {}", self.aggregators[0].address()),
            ..request.clone()
        };
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new()
            .name("innet-parent".into())
            .spawn({
                let stop = stop.clone();
                move || self.hold(&up, below, &stop)
            })
            .map_err(|source| Error::Io {
                what: "cannot start a thread for the parent's connection".into(),
                source,
            })?;
        Ok(Lift {
            state: LiftState::Joining,
            begun: Instant::now(),
            terms,
            stop,
            thread: Some(thread),
        })
    }

    /// Joins the parent, and keeps the connection until the job is over or the parent goes.
    fn hold(&self, request: &JoinJob, below: u32, stop: &Arc<AtomicBool>) {
        let Some(parent) = &self.parent else { return };
        // Pairs with the store in `Lift::drop`.
        let stopped = || stop.load(Ordering::Relaxed);
        let until = Instant::now() + request.deadline;
        let wait = Wait {
            deadline: Some(until),
            interrupted: &stopped,
        };
        let joined = take_place(&parent.dialer, request, Some(below), until, &wait);
        let (state, connection) = match joined {
            Ok(place) => {
                let upstream = Upstream::new(place.aggregator, &place.ticket, below);
                let kept = (upstream.session, place.connection);
                (LiftState::Joined(upstream), Some(kept))
            }
            Err(error) => {
                let reason = format!("the parent at {}: {error}", parent.dialer.address);
                (LiftState::Failed(Failure::Refused(reason)), None)
            }
        };
        self.come_to(&request.job, stop, state);
        let Some((session, mut connection)) = connection else {
            return;
        };
        let reason = watch(&mut connection, &stopped);
        if stopped() {
            return;
        }
        tracing::warn!(
            job = request.job,
            reason,
            "the connection to the parent ended"
        );
        let mut aggregators = self.aggregators.iter();
        if let Some(aggregator) = aggregators.find(|one| one.has(&request.job)) {
            aggregator.lose_parent(session);
        }
        let gone = Failure::Refused(format!("the parent at {}: {reason}", parent.dialer.address));
        self.come_to(&request.job, stop, LiftState::Failed(gone));
    }

    /// Changes the state of a lift, if it is still the one that `stop` stops.
    fn come_to(&self, job: &str, stop: &Arc<AtomicBool>, state: LiftState) {
        let mut ways = self.ways();
        let lifts = &mut ways.lifts;
        if let Some(lift) = lifts.get_mut(job)
            && Arc::ptr_eq(&lift.stop, stop)
        {
            match lift.state {
                // A job that was made and has lost its parent is begun anew by whoever joins next.
                LiftState::Used => drop(lifts.remove(job)),
                _ => lift.state = state,
            }
        }
        drop(ways);
        self.changed.notify(usize::MAX);
    }
}

/// Waits until the connection ends, and says how.
fn watch(connection: &mut Connection, stopped: &(dyn Fn() -> bool + Sync)) -> String {
    let wait = Wait {
        deadline: None,
        interrupted: stopped,
    };
    let late = || Error::Interrupted;
    match connection.run(&wait, None, late, |link| link.reply()) {
        Ok(reply) => format!("an answer to no question ({})", reply.body.name()),
        Err(error) => error.to_string(),
    }
}

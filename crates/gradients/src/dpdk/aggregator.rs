//! Aggregators on DPDK's devices: one on each core, with a thread and a UDP port of its own.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_queue::{ArrayQueue, SegQueue};

use super::device::{BURST, PASSED, Pool};
use super::eal::Registered;
use super::station::{Datagram, Inbox, Outbox};
use super::{DpdkConfig, FrameCounters, Idle, Opened, cores};
use crate::job::JobStatus;
use crate::{Aggregator, Counters, JoinJob, Limits, Ticket, Transmit, Upstream};
use replay_core::error::{Error, Result};

/// A core looks for what is overdue at least so often, and at most every millisecond.
const LOOK_UP: Duration = Duration::from_millis(100);

/// The devices, and a thread for each core. Dropped, it ends, and its devices are unplugged.
pub struct DpdkPlane {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    cores: Vec<PerCore>,
    stop: AtomicBool,
    /// Of the packets in queues between cores: freed after them.
    _pool: Arc<Pool>,
}

/// What a core shares with others.
struct PerCore {
    address: SocketAddr,
    state: Mutex<State>,
    /// Its datagrams that other cores have received.
    passed: ArrayQueue<Datagram>,
    /// What other threads have it send.
    letters: SegQueue<(SocketAddr, Vec<u8>)>,
}

struct State {
    aggregator: Aggregator,
    frames: FrameCounters,
}

impl PerCore {
    /// A panic while it was held has left whole jobs or none: each is changed by one call.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What another thread than the core's sends: the core sends it.
struct Letters<'a>(&'a PerCore);

impl Transmit for Letters<'_> {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.0.letters.push((to, [head, body].concat()));
    }
}

impl DpdkPlane {
    /// Plugs the devices in, and starts a thread for each core.
    ///
    /// # Errors
    /// [`Error::Config`] for a configuration, a device or a core that cannot be used.
    pub fn start(config: &DpdkConfig, limits: Limits) -> Result<Arc<Self>> {
        let Opened {
            station,
            pool,
            devices,
            receivers,
        } = Opened::new(config)?;
        if let [first, second] = devices.as_slice() {
            first.hear_everything()?;
            second.hear_everything()?;
        }
        let per_core = |number| PerCore {
            address: station.at(number).into(),
            state: Mutex::new(State {
                aggregator: Aggregator::new(limits),
                frames: FrameCounters::default(),
            }),
            passed: ArrayQueue::new(PASSED),
            letters: SegQueue::new(),
        };
        let shared = Arc::new(Shared {
            cores: (0..station.ports).map(per_core).collect(),
            stop: AtomicBool::new(false),
            _pool: pool.clone(),
        });
        let mut plane = DpdkPlane {
            shared: shared.clone(),
            threads: Vec::new(),
        };
        let mut receivers: Vec<_> = receivers.into_iter().map(Vec::into_iter).collect();
        for number in 0..config.threads {
            let queues = receivers.iter_mut().map(Iterator::next).collect();
            let core = Core {
                number,
                place: config.cores.get(number).copied(),
                idle_sleep: config.idle_sleep,
                inbox: Inbox::new(station.clone(), number, queues, pool.clone()),
                out: Outbox::new(station.clone(), &devices, number, pool.clone()),
            };
            let shared = shared.clone();
            let thread = thread::Builder::new()
                .name(format!("innet-dpdk-{number}"))
                .spawn(move || core.run(&shared))
                .map_err(|source| Error::Io {
                    what: "cannot start a thread for gradients over DPDK".into(),
                    source,
                })?;
            plane.threads.push(thread);
        }
        if config.idle_sleep.is_zero() {
            tracing::warn!(
                threads = config.threads,
                cores = ?config.cores,
                "gradients over DPDK poll: each thread takes a whole core, busy or idle, unless it may sleep when idle"
            );
        }
        Ok(Arc::new(plane))
    }

    /// The aggregators, one for each core.
    pub fn aggregators(self: &Arc<Self>) -> Vec<DpdkAggregator> {
        let of = |core| DpdkAggregator {
            plane: self.clone(),
            core,
        };
        (0..self.shared.cores.len()).map(of).collect()
    }

    /// What has passed its ports.
    pub fn frames(&self) -> FrameCounters {
        let mut all = FrameCounters::default();
        let cores = self.shared.cores.iter();
        cores.for_each(|core| all += core.state().frames);
        all
    }
}

impl Drop for DpdkPlane {
    fn drop(&mut self) {
        // Pairs with the load in `run`; nothing else is published with it.
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of gradients over DPDK panicked");
            }
        }
    }
}

/// The aggregator of one core. When all of a plane are dropped, the plane ends.
pub struct DpdkAggregator {
    plane: Arc<DpdkPlane>,
    core: usize,
}

impl DpdkAggregator {
    /// Starts one with a plane of its own: see [`DpdkPlane::start`].
    ///
    /// # Errors
    /// Those of [`DpdkPlane::start`]; [`Error::Config`] for more than one thread.
    pub fn start(config: &DpdkConfig, limits: Limits) -> Result<Self> {
        let mut all = DpdkPlane::start(config, limits)?.aggregators();
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(one),
            _ => Err(Error::Config(format!(
                "one aggregator has one thread, not {}: start the plane and take all of its aggregators",
                config.threads
            ))),
        }
    }

    fn mine(&self) -> &PerCore {
        &self.plane.shared.cores[self.core]
    }

    /// The plane that it is on.
    pub fn plane(&self) -> &DpdkPlane {
        &self.plane
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.mine().address
    }

    /// What it has seen.
    pub fn counters(&self) -> Counters {
        self.mine().state().aggregator.counters()
    }

    /// Jobs there are.
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.mine().state().aggregator.status().collect()
    }

    /// Whether a worker that joins the job `name` finds it there.
    pub fn has(&self, name: &str) -> bool {
        self.mine().state().aggregator.has(name)
    }

    /// Takes a worker into a job: see [`Aggregator::join`].
    ///
    /// # Errors
    /// Those of [`Aggregator::join`].
    pub fn join(&self, request: &JoinJob, upstream: Option<Upstream>) -> Result<Ticket> {
        let now = Instant::now();
        let mut out = Letters(self.mine());
        let mut state = self.mine().state();
        state.aggregator.join(now, request, upstream, &mut out)
    }

    /// Takes a rack into a job: see [`Aggregator::join_rack`].
    ///
    /// # Errors
    /// Those of [`Aggregator::join_rack`].
    pub fn join_rack(
        &self,
        request: &JoinJob,
        below: u32,
        upstream: Option<Upstream>,
    ) -> Result<Ticket> {
        let now = Instant::now();
        let mut out = Letters(self.mine());
        let mut state = self.mine().state();
        let aggregator = &mut state.aggregator;
        aggregator.join_rack(now, request, below, upstream, &mut out)
    }

    /// A worker's connection has ended: what waits for it fails at once.
    pub fn leave(&self, session: u32) {
        let mut out = Letters(self.mine());
        self.mine().state().aggregator.leave(session, &mut out);
    }

    /// See [`Aggregator::lose_parent`].
    pub fn lose_parent(&self, session: u32) {
        let mut out = Letters(self.mine());
        let mut state = self.mine().state();
        state.aggregator.lose_parent(session, &mut out);
    }
}

/// A core's own.
struct Core {
    number: usize,
    /// The core of the machine.
    place: Option<usize>,
    idle_sleep: Duration,
    inbox: Inbox,
    out: Outbox,
}

impl Core {
    fn run(mut self, shared: &Shared) {
        if let Some(place) = self.place
            && let Err(error) = cores::pin(place)
        {
            tracing::warn!(%error, core = place, "a thread of gradients over DPDK stays on no core");
        }
        let _registered = Registered::new();
        let mut deadline = Instant::now();
        let mut idle = Idle::new(self.idle_sleep);
        // Pairs with the store in `drop`.
        while !shared.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            if self.turn(shared, now, &mut deadline) {
                idle.end();
            } else {
                idle.wait(LOOK_UP);
            }
        }
    }

    /// Takes what has come and sends what comes of it; whether anything had come.
    fn turn(&mut self, shared: &Shared, now: Instant, deadline: &mut Instant) -> bool {
        let Core {
            number, inbox, out, ..
        } = self;
        let mine = &shared.cores[*number];
        out.begin(now);
        let frames = inbox.fetch();
        let due = now >= *deadline;
        let busy = frames > 0 || !mine.passed.is_empty() || !mine.letters.is_empty();
        if busy || due {
            let mut state = mine.state();
            let aggregator = &mut state.aggregator;
            inbox.read(
                out,
                |from, datagram, out| aggregator.receive(now, from, datagram, out),
                |datagram, out| {
                    let owner = &shared.cores[usize::from(datagram.port)];
                    if owner.passed.push(datagram).is_err() {
                        out.overrun();
                    }
                },
            );
            let passed = std::iter::from_fn(|| mine.passed.pop());
            for datagram in passed.take(BURST) {
                aggregator.receive(now, datagram.from(), datagram.bytes(), out);
            }
            while let Some((to, letter)) = mine.letters.pop() {
                out.send(to, &[], &letter);
            }
            if due {
                state.aggregator.expire(now, out);
                let next = state.aggregator.next_deadline().unwrap_or(now + LOOK_UP);
                *deadline = next.clamp(now + Duration::from_millis(1), now + LOOK_UP);
                if *number == 0 {
                    out.review_neighbours();
                }
            }
            out.flush();
            state.frames = out.counters();
        }
        busy
    }
}

//! Aggregators on DPDK devices: one for each thread, with a UDP port of its own.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_queue::{ArrayQueue, SegQueue};

use super::eal::Registered;
use super::interface::{FrameReceiver, FrameSender, ReceivedDatagram};
use super::packets::{BURST, HANDOVER_QUEUE, PacketPool};
use super::{DpdkConfig, FrameCounters, IdleBackoff, OpenDevices, cores};
use crate::aggregator_transport::{AggregatorTransport, Datagrams};
use crate::threads::{StopFlag, Threads};
use crate::{Aggregator, AggregatorLimits, Result, Transmit};
use base::error::OsError;
use base::sync::lock;

/// Longest sleep of an idle thread, and so its latency for the stop flag.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// The aggregator of one thread. The threads end, and their devices are closed, when the last aggregator is dropped.
pub struct DpdkAggregator {
    /// Dropped by the last aggregator.
    _threads: Arc<Threads>,
    shared: Arc<SharedCores>,
    number: usize,
}

/// State that the threads share with each other and with callers.
struct SharedCores {
    cores: Vec<CoreState>,
    /// Pool of the packets in handover queues; dropped after them.
    _pool: Arc<PacketPool>,
}

struct CoreState {
    address: SocketAddr,
    aggregator: Mutex<Aggregator>,
    /// Written with the aggregator locked.
    frames: Mutex<FrameCounters>,
    /// Datagrams for this core that other cores have received.
    handed_over: ArrayQueue<ReceivedDatagram>,
    /// Datagrams of other threads that this core is to send.
    outgoing: SegQueue<(SocketAddr, Vec<u8>)>,
}

impl CoreState {
    /// Valid after a panic: every change of a job is one call.
    fn aggregator(&self) -> MutexGuard<'_, Aggregator> {
        lock(&self.aggregator)
    }

    fn frames(&self) -> MutexGuard<'_, FrameCounters> {
        lock(&self.frames)
    }
}

impl DpdkAggregator {
    /// Opens the devices and starts an aggregator for each thread.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a configuration, a device or a core that cannot be used.
    pub fn start_all(config: &DpdkConfig, limits: AggregatorLimits) -> Result<Vec<Self>> {
        let mut opened = OpenDevices::new(config)?;
        if let [first, second] = opened.devices.as_slice() {
            first.enable_promiscuous()?;
            second.enable_promiscuous()?;
        }
        let core = |number| CoreState {
            address: opened.interface.at(number).into(),
            aggregator: Mutex::new(Aggregator::new(limits)),
            frames: Mutex::default(),
            handed_over: ArrayQueue::new(HANDOVER_QUEUE),
            outgoing: SegQueue::new(),
        };
        let shared = Arc::new(SharedCores {
            cores: (0..opened.interface.ports).map(core).collect(),
            _pool: opened.pool.clone(),
        });
        let mut threads = Threads::default();
        for number in 0..config.threads {
            let core = Core {
                number,
                pinned_to: config.cores.get(number).copied(),
                idle_sleep: config.idle_sleep,
                receiver: FrameReceiver::new(&mut opened, number),
                sender: FrameSender::new(&opened, number),
            };
            let shared = shared.clone();
            threads
                .start(format!("innet-dpdk-{number}"), move |stop| core.run(&shared, &stop))
                .map_err(OsError::of("cannot start a thread for gradients over DPDK"))?;
        }
        if config.idle_sleep.is_zero() {
            tracing::warn!(
                threads = config.threads,
                cores = ?config.cores,
                "gradients over DPDK poll: each thread takes a whole core, busy or idle, unless it may sleep when idle"
            );
        }
        let threads = Arc::new(threads);
        let one = |number| DpdkAggregator { _threads: threads.clone(), shared: shared.clone(), number };
        Ok((0..config.threads).map(one).collect())
    }

    fn core(&self) -> &CoreState {
        &self.shared.cores[self.number]
    }
}

impl AggregatorTransport for DpdkAggregator {
    fn address(&self) -> SocketAddr {
        self.core().address
    }

    fn aggregator(&self) -> MutexGuard<'_, Aggregator> {
        self.core().aggregator()
    }

    fn send(&self, datagrams: Datagrams) {
        for datagram in datagrams.0 {
            self.core().outgoing.push(datagram);
        }
    }

    fn frames(&self) -> Option<FrameCounters> {
        let mut all = FrameCounters::default();
        for core in &self.shared.cores {
            // Waits for a poll in progress, which updates the counters at its end.
            let _polled = core.aggregator();
            all += *core.frames();
        }
        Some(all)
    }
}

struct Core {
    number: usize,
    /// Core of the machine that the thread is pinned to.
    pinned_to: Option<usize>,
    idle_sleep: Duration,
    receiver: FrameReceiver,
    sender: FrameSender,
}

impl Core {
    fn run(mut self, shared: &SharedCores, stop: &StopFlag) {
        if let Some(core) = self.pinned_to
            && let Err(error) = cores::pin(core)
        {
            tracing::warn!(%error, core, "cannot pin a thread of gradients over DPDK");
        }
        let _registered = Registered::new();
        let mut deadline = Instant::now();
        let mut idle = IdleBackoff::new(self.idle_sleep);
        while !stop.is_set() {
            let now = Instant::now();
            if self.poll(shared, now, &mut deadline) {
                idle.reset();
            } else {
                idle.wait(MAX_SLEEP);
            }
        }
    }

    /// Receives a burst of each device and sends the answers. `true` if anything had arrived.
    fn poll(&mut self, shared: &SharedCores, now: Instant, deadline: &mut Instant) -> bool {
        let Core { number, receiver, sender, .. } = self;
        let own = &shared.cores[*number];
        sender.begin(now);
        let frames = receiver.fetch();
        let due = now >= *deadline;
        let busy = frames > 0 || !own.handed_over.is_empty() || !own.outgoing.is_empty();
        if busy || due {
            let mut guard = own.aggregator();
            let aggregator = &mut *guard;
            receiver.read(
                sender,
                |from, datagram, out| aggregator.receive(now, from, datagram, out),
                |datagram, out| {
                    let owner = &shared.cores[usize::from(datagram.port)];
                    if owner.handed_over.push(datagram).is_err() {
                        out.count_overrun();
                    }
                },
            );
            let handed_over = std::iter::from_fn(|| own.handed_over.pop());
            for datagram in handed_over.take(BURST) {
                aggregator.receive(now, datagram.from(), datagram.bytes(), sender);
            }
            while let Some((to, datagram)) = own.outgoing.pop() {
                sender.send(to, &[], &datagram);
            }
            if due {
                *deadline = aggregator.expire(now, sender);
                if *number == 0 {
                    sender.refresh_neighbours();
                }
            }
            sender.flush();
            *own.frames() = sender.counters();
        }
        busy
    }
}

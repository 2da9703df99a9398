//! Aggregators on DPDK devices, one for each thread, with a UDP port of its own; the device of a worker, which a waiting call polls.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use base::system::OsError;
use base::wait::lock;

use super::eal::{self, Registered};
use super::interface::{FrameReceiver, FrameSender, ReceivedDatagram};
use super::packets::{BURST, HANDOVER_QUEUE, PacketPool};
use super::{DpdkConfig, IdleBackoff, OpenDevices};
use crate::transports::{StopFlag, Threads};
use crate::worker::Exchange;
use crate::worker_transport::WorkerTransport;
use crate::{Aggregator, AggregatorLimits, EXPIRE_EVERY, Error, Result, RunningAggregator, Transmit};

/// Datagrams that may wait for each core, received by other cores.
struct Handovers {
    queues: Vec<ArrayQueue<ReceivedDatagram>>,
    /// Pool of the packets in the queues; dropped after them.
    _pool: Arc<PacketPool>,
}

/// Opens the devices and starts an aggregator for each thread.
///
/// # Errors
/// [`crate::Error::Config`] for a configuration, a device or a core that cannot be used.
pub fn start_aggregators(config: &DpdkConfig, limits: AggregatorLimits) -> Result<Vec<RunningAggregator>> {
    let mut opened = OpenDevices::new(config)?;
    if let [first, second] = opened.devices.as_slice() {
        first.enable_promiscuous()?;
        second.enable_promiscuous()?;
    }
    let handovers = Arc::new(Handovers {
        queues: (0..config.threads).map(|_| ArrayQueue::new(HANDOVER_QUEUE)).collect(),
        _pool: opened.pool.clone(),
    });
    let mut threads = Threads::default();
    let mut aggregators = Vec::new();
    for number in 0..config.threads {
        let address = opened.interface.at(number as u16).into();
        let aggregator = Arc::new(Mutex::new(Aggregator::new(address, limits)));
        let core = Core {
            number,
            pinned_to: config.cores.get(number).copied(),
            idle_sleep: config.idle_sleep,
            aggregator: aggregator.clone(),
            handovers: handovers.clone(),
            receiver: FrameReceiver::new(&mut opened, number),
            sender: FrameSender::new(&opened, number),
        };
        threads
            .start(format!("innet-dpdk-{number}"), move |stop| core.run(&stop))
            .map_err(OsError::of("cannot start a thread for gradients over DPDK"))?;
        aggregators.push((address, aggregator));
    }
    if config.idle_sleep.is_zero() {
        tracing::warn!(
            threads = config.threads,
            cores = ?config.cores,
            "gradients over DPDK poll: each thread takes a whole core, busy or idle, unless it may sleep when idle"
        );
    }
    let threads = Arc::new(threads);
    let run = |(address, aggregator)| RunningAggregator { address, aggregator, _threads: threads.clone() };
    Ok(aggregators.into_iter().map(run).collect())
}

struct Core {
    number: usize,
    /// Core of the machine that the thread is pinned to.
    pinned_to: Option<usize>,
    idle_sleep: Duration,
    aggregator: Arc<Mutex<Aggregator>>,
    handovers: Arc<Handovers>,
    receiver: FrameReceiver,
    sender: FrameSender,
}

impl Core {
    fn run(mut self, stop: &StopFlag) {
        if let Some(core) = self.pinned_to
            && let Err(error) = eal::pin(core)
        {
            tracing::warn!(%error, core, "cannot pin a thread of gradients over DPDK");
        }
        let _registered = Registered::new();
        let mut due = Instant::now();
        let mut idle = IdleBackoff::new(self.idle_sleep);
        while !stop.is_set() {
            let now = Instant::now();
            if self.poll(now, &mut due) {
                idle.reset();
            } else {
                idle.wait(EXPIRE_EVERY);
            }
        }
    }

    /// Receives a burst of each device and sends the answers; at the time `due`, deadlines are checked. `true` if anything had arrived.
    fn poll(&mut self, now: Instant, due: &mut Instant) -> bool {
        let Core { number, receiver, sender, handovers, .. } = self;
        let own = &handovers.queues[*number];
        sender.begin(now);
        let frames = receiver.fetch();
        let busy = frames > 0 || !own.is_empty();
        if busy || now >= *due {
            let mut guard = lock(&self.aggregator);
            let aggregator = &mut *guard;
            receiver.read(
                sender,
                |from, datagram, out| aggregator.receive(now, from, datagram, out),
                |datagram, out| {
                    if handovers.queues[usize::from(datagram.parsed.port)].push(datagram).is_err() {
                        out.count_overrun();
                    }
                },
            );
            for datagram in std::iter::from_fn(|| own.pop()).take(BURST) {
                aggregator.receive(now, datagram.parsed.from.into(), datagram.bytes(), sender);
            }
            aggregator.flush(sender);
            if now >= *due {
                aggregator.expire(now, sender);
                *due = now + EXPIRE_EVERY;
            }
            sender.flush();
            aggregator.frames = Some(sender.counters());
        }
        busy
    }
}

/// Time between two attempts of a memif to connect to its peer.
const RECONNECT_EVERY: Duration = Duration::from_millis(500);

/// A worker's DPDK device.
pub struct DpdkTransport {
    receiver: FrameReceiver,
    sender: FrameSender,
    idle_sleep: Duration,
    next_reconnect: Instant,
}

impl DpdkTransport {
    /// Opens the device. `cores` is ignored, as the calling thread polls.
    ///
    /// # Errors
    /// [`Error::Config`] for a configuration or a device that cannot be used.
    pub fn open(config: &DpdkConfig) -> Result<Self> {
        if config.devices.len() != 1 || config.threads != 1 {
            return Err(Error::Config(format!(
                "gradients over DPDK: a worker has one device and one thread, not {:?} and {}",
                config.devices, config.threads
            )));
        }
        let mut opened = OpenDevices::new(config)?;
        Ok(DpdkTransport {
            receiver: FrameReceiver::new(&mut opened, 0),
            sender: FrameSender::new(&opened, 0),
            idle_sleep: config.idle_sleep,
            next_reconnect: Instant::now() + RECONNECT_EVERY,
        })
    }
}

impl Transmit for DpdkTransport {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.sender.send(to, head, body);
    }
}

impl WorkerTransport for DpdkTransport {
    fn wait(&mut self, time: Duration) -> io::Result<()> {
        let until = Instant::now() + time;
        let mut idle = IdleBackoff::new(self.idle_sleep);
        loop {
            let now = Instant::now();
            self.sender.begin(now);
            self.sender.flush();
            if self.receiver.fetch() > 0 || now >= until {
                return Ok(());
            }
            if now >= self.next_reconnect {
                self.receiver.reconnect_memifs();
                self.next_reconnect = now + RECONNECT_EVERY;
            }
            idle.wait(until - now);
        }
    }

    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E) {
        let receive = |from, datagram: &[u8], out: &mut FrameSender| {
            exchange.receive(now, from, datagram, out);
        };
        // A worker has one UDP port, so no datagram is for another core.
        self.receiver.read(&mut self.sender, receive, |_, _| {});
    }

    fn flush(&mut self) {
        self.sender.flush();
    }
}

//! Running aggregators and their threads, UDP transports of an aggregator and of a worker on sockets of the operating system, and the choice
//! between these and DPDK devices.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base::system::OsError;
use base::wait::lock;

use super::datagrams::{self, UdpReceiver, UdpSender};
use super::settings::DpdkConfig;
use super::worker::Exchange;
use super::worker_transport::WorkerTransport;
use super::{Aggregator, AggregatorLimits, EXPIRE_EVERY, JoinJob, ParentAggregator, Result, Ticket, Transmit};

#[cfg(feature = "dpdk")]
use super::dpdk;

/// An aggregator on a transport's thread. The threads of a transport end when its last aggregator is dropped.
pub struct RunningAggregator {
    pub(super) address: SocketAddr,
    pub(super) aggregator: Arc<Mutex<Aggregator>>,
    pub(super) _threads: Arc<Threads>,
}

impl RunningAggregator {
    /// UDP address of the aggregator.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The aggregator, locked. Its thread sends what a change causes within [`EXPIRE_EVERY`](super::EXPIRE_EVERY). Valid after a panic: every
    /// change of a job is one call.
    pub fn aggregator(&self) -> MutexGuard<'_, Aggregator> {
        lock(&self.aggregator)
    }

    /// [`Aggregator::join`], now.
    ///
    /// # Errors
    /// Errors of that call.
    pub fn join(&self, request: &JoinJob, parent: Option<ParentAggregator>) -> Result<Ticket> {
        self.aggregator().join(Instant::now(), request, parent)
    }
}

/// Aggregators on UDP sockets, one per thread, on consecutive ports from `address` on, or each on any free port if its port is 0.
///
/// # Errors
/// [`Error::Io`](super::Error::Io) for an address that cannot be bound.
pub fn udp_aggregators(
    address: SocketAddr,
    threads: usize,
    limits: AggregatorLimits,
) -> Result<Vec<RunningAggregator>> {
    udp_addresses(address, threads).map(|address| start(address, limits)).collect()
}

/// Addresses of [`udp_aggregators`]: consecutive ports from the port of `address`, or port 0 for each of them.
pub fn udp_addresses(address: SocketAddr, threads: usize) -> impl Iterator<Item = SocketAddr> {
    (0..threads).map(move |number| {
        let port = match address.port() {
            0 => 0,
            port => port.saturating_add(number as u16),
        };
        SocketAddr::new(address.ip(), port)
    })
}

/// Aggregators on DPDK devices, one for each thread.
///
/// # Errors
/// [`Error::Config`](super::Error::Config) for a configuration or a device that cannot be used, or a program that was built without the
/// feature `dpdk`.
#[cfg_attr(not(feature = "dpdk"), expect(unused_variables))]
pub fn dpdk_aggregators(config: &DpdkConfig, limits: AggregatorLimits) -> Result<Vec<RunningAggregator>> {
    #[cfg(feature = "dpdk")]
    return dpdk::start_aggregators(config, limits);
    #[cfg(not(feature = "dpdk"))]
    return Err(without_dpdk());
}

/// A worker's transport on a DPDK device.
///
/// # Errors
/// Errors of [`dpdk_aggregators`].
#[cfg_attr(not(feature = "dpdk"), expect(unused_variables))]
pub fn dpdk_transport(config: &DpdkConfig) -> Result<impl WorkerTransport + Send + 'static> {
    #[cfg(feature = "dpdk")]
    return dpdk::DpdkTransport::open(config);
    #[cfg(not(feature = "dpdk"))]
    return Err::<UdpTransport, _>(without_dpdk());
}

#[cfg(not(feature = "dpdk"))]
fn without_dpdk() -> super::Error {
    super::Error::Config(
        "this program was built without DPDK: install libdpdk (Debian: apt install libdpdk-dev) and build again with the cargo feature \
         `dpdk`, or name no device for gradients"
            .to_owned(),
    )
}

/// Threads that are stopped and joined on drop.
#[derive(Default)]
pub struct Threads {
    stop: StopFlag,
    handles: Vec<JoinHandle<()>>,
}

/// Stop request.
#[derive(Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    #[inline]
    pub fn is_set(&self) -> bool {
        // Pairs with the store in `Threads::drop`. Relaxed: the flag carries no data.
        self.0.load(Ordering::Relaxed)
    }
}

impl Threads {
    /// Starts a thread that runs `run`, which has to check the flag regularly.
    pub fn start(&mut self, name: impl Into<String>, run: impl FnOnce(StopFlag) + Send + 'static) -> io::Result<()> {
        let stop = self.stop.clone();
        let thread = thread::Builder::new().name(name.into());
        self.handles.push(thread.spawn(move || run(stop))?);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Pairs with the load in `StopFlag::is_set`. Relaxed: the flag carries no data.
        self.stop.0.store(true, Ordering::Relaxed);
        for thread in self.handles.drain(..) {
            let name = thread.thread().name().map(str::to_owned);
            if thread.join().is_err() {
                tracing::error!(name, "a thread for gradients panicked");
            }
        }
    }
}

/// Delay of deadlines while datagrams wait.
const GRACE: Duration = Duration::from_millis(100);

/// Starts an aggregator at `address`; port 0 is any free port.
///
/// # Errors
/// [`crate::Error::Io`] for an address that cannot be bound.
pub fn start(address: SocketAddr, limits: AggregatorLimits) -> Result<RunningAggregator> {
    let failed = || OsError::of(format!("cannot receive gradients at UDP address {address}"));
    let socket = datagrams::bind(address).map_err(failed())?;
    let bound = socket.local_addr().map_err(failed())?;
    let aggregator = Arc::new(Mutex::new(Aggregator::new(bound, limits)));
    let mut threads = Threads::default();
    let served = aggregator.clone();
    threads.start("innet-gradients", move |stop| serve(&served, &socket, &stop)).map_err(failed())?;
    Ok(RunningAggregator { address: bound, aggregator, _threads: threads.into() })
}

fn serve(aggregator: &Mutex<Aggregator>, socket: &Arc<UdpSocket>, stop: &StopFlag) {
    let mut receiver = UdpReceiver::new(socket.clone());
    let mut out = UdpSender::new(socket.clone());
    let mut due = Instant::now();
    while !stop.is_set() {
        if let Err(error) = receiver.wait(due.saturating_duration_since(Instant::now()), &mut out) {
            tracing::warn!(%error, "cannot receive gradients");
            thread::sleep(EXPIRE_EVERY);
            continue;
        }
        let now = Instant::now();
        let mut aggregator = lock(aggregator);
        for (from, datagram) in receiver.iter() {
            aggregator.receive(now, from, datagram, &mut out);
        }
        aggregator.flush(&mut out);
        if is_due(due, now, receiver.is_busy()) {
            aggregator.expire(now, &mut out);
            due = now + EXPIRE_EVERY;
        }
    }
}

/// Whether to fail overdue segments. While datagrams wait, the missing contributions may be among them, so they get [`GRACE`] more, and
/// no longer: a flood of datagrams must not keep a job from failing.
fn is_due(deadline: Instant, now: Instant, is_busy: bool) -> bool {
    let grace = if is_busy { GRACE } else { Duration::ZERO };
    now >= deadline + grace
}

/// A worker's UDP socket.
pub struct UdpTransport {
    receiver: UdpReceiver,
    sender: UdpSender,
}

impl UdpTransport {
    /// A socket at any free port, of the address family of `aggregator`.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if no socket can be bound.
    pub fn to(aggregator: SocketAddr) -> Result<Self> {
        let any: SocketAddr = match aggregator {
            SocketAddr::V4(_) => ([0; 4], 0).into(),
            SocketAddr::V6(_) => ([0; 16], 0).into(),
        };
        let socket = datagrams::bind(any).map_err(OsError::of("cannot bind a UDP socket for gradients"))?;
        Ok(UdpTransport { receiver: UdpReceiver::new(socket.clone()), sender: UdpSender::new(socket) })
    }

    pub(super) fn socket(&self) -> &Arc<UdpSocket> {
        self.sender.socket()
    }
}

impl Transmit for UdpTransport {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.sender.send(to, head, body);
    }
}

impl WorkerTransport for UdpTransport {
    fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.sender.flush();
        self.receiver.wait(time, &mut self.sender)
    }

    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E) {
        for (from, datagram) in self.receiver.iter() {
            exchange.receive(now, from, datagram, &mut self.sender);
        }
    }

    fn flush(&mut self) {
        self.sender.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_without_end_delay_a_deadline_by_a_bounded_time() {
        let deadline = Instant::now();
        let [early, late] = [1, 100].map(|ms| deadline + Duration::from_millis(ms));
        assert!(is_due(deadline, early, false));
        assert!(!is_due(deadline, early, true));
        assert!(is_due(deadline, late, true));
    }
}

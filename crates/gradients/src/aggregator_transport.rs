//! Aggregators on a transport: UDP sockets of the operating system, or DPDK devices.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::counters::FrameCounters;
use super::job::JobStatus;
use super::udp::UdpAggregator;
use super::{
    Aggregator, AggregatorCounters, AggregatorLimits, JoinJob, ParentAggregator, Result, Ticket,
    Transmit,
};

/// DPDK devices, and the IPv4 interface that they form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DpdkConfig {
    /// Arguments for DPDK's environment (EAL), the same for all devices of a process: `--no-huge`, `-m`, `256`.
    pub eal: Vec<String>,
    /// Devices, by name and arguments as `--vdev` takes them (`net_af_packet0,iface=eth0`), or by PCI address. At least one; an aggregator
    /// with two is a switch.
    pub devices: Vec<String>,
    /// IPv4 address of the interface, which the kernel must not have, and UDP port of the first thread.
    pub address: SocketAddrV4,
    /// Length of the network prefix in bits, at most 32.
    pub prefix: u8,
    /// Router to other networks.
    pub gateway: Option<Ipv4Addr>,
    /// Threads of an aggregator. Each uses one UDP port, counted from that of `address`, and a whole core unless `idle_sleep` is set.
    pub threads: usize,
    /// Core of each thread; empty to let the operating system choose.
    pub cores: Vec<usize>,
    /// Sleep of an idle thread between two polls; 0 polls without a pause.
    pub idle_sleep: Duration,
}

/// An aggregator that a transport's thread runs. Dropped, it ends.
pub trait AggregatorTransport: Send + Sync {
    /// UDP address of the aggregator.
    fn address(&self) -> SocketAddr;

    /// The aggregator, locked.
    fn aggregator(&self) -> MutexGuard<'_, Aggregator>;

    /// Sends datagrams of the aggregator.
    fn send(&self, datagrams: Datagrams);

    /// Frames of all its devices; `None` where the operating system has them.
    fn frames(&self) -> Option<FrameCounters> {
        None
    }

    /// Datagrams and sums so far.
    fn counters(&self) -> AggregatorCounters {
        self.aggregator().counters()
    }

    /// Its jobs.
    fn jobs(&self) -> Vec<JobStatus> {
        self.aggregator().status().collect()
    }

    /// Whether it has the job `name`.
    fn has(&self, name: &str) -> bool {
        self.aggregator().has(name)
    }

    /// Adds a worker to a job: see [`Aggregator::join`].
    ///
    /// # Errors
    /// Errors of [`Aggregator::join`].
    fn join(&self, request: &JoinJob, parent: Option<ParentAggregator>) -> Result<Ticket> {
        change(self, |aggregator, now, out| {
            aggregator.join(now, request, parent, out)
        })
    }

    /// Adds a rack to a job: see [`Aggregator::join_rack`].
    ///
    /// # Errors
    /// Errors of [`Aggregator::join_rack`].
    fn join_rack(
        &self,
        request: &JoinJob,
        below: u32,
        parent: Option<ParentAggregator>,
    ) -> Result<Ticket> {
        change(self, |aggregator, now, out| {
            aggregator.join_rack(now, request, below, parent, out)
        })
    }

    /// Removes the worker of `session`, whose connection has ended. Sums that wait for it fail at once.
    fn leave(&self, session: u32) {
        change(self, |aggregator, _, out| aggregator.leave(session, out));
    }

    /// See [`Aggregator::lose_parent`].
    fn lose_parent(&self, session: u32) {
        change(self, |aggregator, _, out| {
            aggregator.lose_parent(session, out)
        });
    }
}

/// Changes the aggregator, then sends its datagrams without the lock.
fn change<T>(
    transport: &(impl AggregatorTransport + ?Sized),
    change: impl FnOnce(&mut Aggregator, Instant, &mut Datagrams) -> T,
) -> T {
    let mut out = Datagrams::default();
    let changed = change(&mut transport.aggregator(), Instant::now(), &mut out);
    transport.send(out);
    changed
}

/// Datagrams that another thread than the transport's sends.
#[derive(Default)]
pub struct Datagrams(pub(super) Vec<(SocketAddr, Vec<u8>)>);

impl Transmit for Datagrams {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.0.push((to, [head, body].concat()));
    }
}

/// Aggregators on UDP sockets: the first at `address`, the others at the ports that follow, or at any free port if that is 0.
///
/// # Errors
/// [`Error::Io`](super::Error::Io) for an address that cannot be bound.
pub fn udp_aggregators(
    address: SocketAddr,
    threads: usize,
    limits: AggregatorLimits,
) -> Result<Vec<Box<dyn AggregatorTransport>>> {
    let start = |number| {
        let port = match address.port() {
            0 => 0,
            port => port.saturating_add(number as u16),
        };
        let aggregator = UdpAggregator::start(SocketAddr::new(address.ip(), port), limits)?;
        Ok(Box::new(aggregator) as Box<dyn AggregatorTransport>)
    };
    (0..threads).map(start).collect()
}

/// Aggregators on DPDK devices, one for each thread.
///
/// # Errors
/// [`Error::Config`](super::Error::Config) for a configuration or a device that cannot be used, or a program that was built without the
/// feature `dpdk`.
#[cfg(feature = "dpdk")]
pub fn dpdk_aggregators(
    config: &DpdkConfig,
    limits: AggregatorLimits,
) -> Result<Vec<Box<dyn AggregatorTransport>>> {
    let aggregators = super::dpdk::DpdkAggregator::start_all(config, limits)?.into_iter();
    Ok(aggregators.map(|one| Box::new(one) as Box<_>).collect())
}

/// Aggregators on DPDK devices, one for each thread.
///
/// # Errors
/// [`Error::Config`](super::Error::Config) for a configuration or a device that cannot be used, or a program that was built without the
/// feature `dpdk`.
#[cfg(not(feature = "dpdk"))]
pub fn dpdk_aggregators(
    _: &DpdkConfig,
    _: AggregatorLimits,
) -> Result<Vec<Box<dyn AggregatorTransport>>> {
    Err(without_dpdk())
}

#[cfg(not(feature = "dpdk"))]
pub(super) fn without_dpdk() -> super::Error {
    super::Error::Config(
        "this program was built without DPDK: install libdpdk (Debian: apt install libdpdk-dev) and build again with the cargo feature \
         `dpdk`, or name no device for gradients"
            .to_owned(),
    )
}

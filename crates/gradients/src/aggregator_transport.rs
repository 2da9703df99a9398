//! Aggregators on a transport: UDP sockets of the operating system, or DPDK devices.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::counters::FrameCounters;
use super::{Aggregator, AggregatorCounters, JoinJob, ParentAggregator, Result, Ticket, Transmit};

/// DPDK devices, and the IPv4 interface that they form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DpdkConfig {
    /// Arguments for DPDK's environment (EAL), the same for all devices of a process: `--no-huge`, `-m`, `256`.
    pub eal: Vec<String>,
    /// Devices, by name and arguments as `--vdev` takes them (`net_af_packet0,iface=eth0`), or by PCI address. At least one; an aggregator
    /// with two is a switch.
    pub devices: Vec<String>,
    /// IPv4 address of the interface, not assigned in the kernel, and UDP port of the first thread.
    pub address: SocketAddrV4,
    /// Length of the network prefix in bits, at most 32.
    pub prefix: u8,
    /// Router to other networks.
    pub gateway: Option<Ipv4Addr>,
    /// Threads of an aggregator. Each has a UDP port, from the port of `address` upwards, and takes a core unless `idle_sleep` is set.
    pub threads: usize,
    /// Core of each thread; empty to let the operating system choose.
    pub cores: Vec<usize>,
    /// Sleep of an idle thread between two polls; 0 means busy polling.
    pub idle_sleep: Duration,
}

/// An aggregator that runs on a transport's thread until it is dropped.
pub trait AggregatorTransport: Send + Sync {
    /// UDP address of the aggregator.
    fn address(&self) -> SocketAddr;

    /// The aggregator, locked.
    fn aggregator(&self) -> MutexGuard<'_, Aggregator>;

    /// Sends datagrams of the aggregator.
    fn send(&self, datagrams: Datagrams);

    /// Frame counters of all its devices; `None` for sockets of the operating system.
    fn frames(&self) -> Option<FrameCounters> {
        None
    }

    /// Datagrams and sums so far.
    fn counters(&self) -> AggregatorCounters {
        self.aggregator().counters()
    }

    /// Adds a worker or a rack to a job. Parameters and errors: see [`Aggregator::join`].
    fn join(&self, request: &JoinJob, rack: Option<u32>, parent: Option<ParentAggregator>) -> Result<Ticket> {
        change(self, |aggregator, now, out| aggregator.join(now, request, rack, parent, out))
    }

    /// Removes the worker of `session`, whose connection has ended. Sums that wait for it fail at once.
    fn leave(&self, session: u32) {
        change(self, |aggregator, _, out| aggregator.leave(session, out));
    }

    /// See [`Aggregator::lose_parent`].
    fn lose_parent(&self, session: u32) {
        change(self, |aggregator, _, out| aggregator.lose_parent(session, out));
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

/// Datagrams that originate outside of the transport's thread.
#[derive(Default)]
pub struct Datagrams(pub(super) Vec<(SocketAddr, Vec<u8>)>);

impl Transmit for Datagrams {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.0.push((to, [head, body].concat()));
    }
}

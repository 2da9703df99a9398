//! Running aggregators, and the choice between UDP sockets of the operating system and DPDK devices.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[cfg(feature = "dpdk")]
use super::dpdk;
use super::threads::Threads;
use super::udp;
use super::worker_transport::WorkerTransport;
use super::{Aggregator, AggregatorLimits, JoinJob, ParentAggregator, Result, Ticket};
use base::sync::lock;

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
    udp_addresses(address, threads).map(|address| udp::start(address, limits)).collect()
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
    return Err::<udp::UdpTransport, _>(without_dpdk());
}

#[cfg(not(feature = "dpdk"))]
fn without_dpdk() -> super::Error {
    super::Error::Config(
        "this program was built without DPDK: install libdpdk (Debian: apt install libdpdk-dev) and build again with the cargo feature \
         `dpdk`, or name no device for gradients"
            .to_owned(),
    )
}

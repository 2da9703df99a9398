//! Running aggregators, and the choice between UDP sockets of the operating system and DPDK devices.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

#[cfg(feature = "dpdk")]
use super::dpdk;
use super::settings::DpdkConfig;
use super::threads::Threads;
use super::udp;
use super::worker_transport::WorkerTransport;
use super::{Aggregator, AggregatorLimits, JoinJob, ParentAggregator, Result, Ticket};
use base::sync::lock;

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

//! Choice between UDP sockets of the operating system and DPDK devices.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::aggregator_transport::{AggregatorTransport, DpdkConfig};
#[cfg(feature = "dpdk")]
use super::dpdk::{DpdkAggregator, DpdkTransport};
use super::udp::{UdpAggregator, UdpTransport};
use super::worker::Exchange;
use super::worker_transport::WorkerTransport;
use super::{AggregatorLimits, Result, Transmit};

/// Aggregators on UDP sockets, one per thread, on consecutive ports from `address` on, or each on any free port if its port is 0.
///
/// # Errors
/// [`Error::Io`](super::Error::Io) for an address that cannot be bound.
pub fn udp_aggregators(
    address: SocketAddr,
    threads: usize,
    limits: AggregatorLimits,
) -> Result<Vec<Box<dyn AggregatorTransport>>> {
    let start = |address| {
        let aggregator = UdpAggregator::start(address, limits)?;
        Ok(Box::new(aggregator) as Box<dyn AggregatorTransport>)
    };
    udp_addresses(address, threads).map(start).collect()
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
pub fn dpdk_aggregators(config: &DpdkConfig, limits: AggregatorLimits) -> Result<Vec<Box<dyn AggregatorTransport>>> {
    #[cfg(feature = "dpdk")]
    return Ok(DpdkAggregator::start_all(config, limits)?.into_iter().map(|one| Box::new(one) as Box<_>).collect());
    #[cfg(not(feature = "dpdk"))]
    return Err(without_dpdk());
}

#[cfg(not(feature = "dpdk"))]
fn without_dpdk() -> super::Error {
    super::Error::Config(
        "this program was built without DPDK: install libdpdk (Debian: apt install libdpdk-dev) and build again with the cargo feature \
         `dpdk`, or name no device for gradients"
            .to_owned(),
    )
}

/// A worker's transport: UDP or DPDK.
pub enum AnyTransport {
    /// UDP sockets of the operating system.
    Udp(UdpTransport),
    /// A DPDK device.
    #[cfg(feature = "dpdk")]
    Dpdk(Box<DpdkTransport>),
}

impl AnyTransport {
    /// A DPDK device.
    ///
    /// # Errors
    /// [`Error::Config`](super::Error::Config) for a device that cannot be used, or a program that was built without the feature `dpdk`.
    #[cfg_attr(not(feature = "dpdk"), expect(unused_variables))]
    pub fn dpdk(config: &DpdkConfig) -> Result<Self> {
        #[cfg(feature = "dpdk")]
        return Ok(AnyTransport::Dpdk(DpdkTransport::open(config)?.into()));
        #[cfg(not(feature = "dpdk"))]
        return Err(without_dpdk());
    }
}

/// Calls either transport.
macro_rules! on_any {
    ($transport:expr, $one:ident => $call:expr) => {
        match $transport {
            AnyTransport::Udp($one) => $call,
            #[cfg(feature = "dpdk")]
            AnyTransport::Dpdk($one) => $call,
        }
    };
}

impl Transmit for AnyTransport {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        on_any!(self, one => one.send(to, head, body));
    }
}

impl WorkerTransport for AnyTransport {
    fn wait(&mut self, time: Duration) -> io::Result<()> {
        on_any!(self, one => one.wait(time))
    }

    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E) {
        on_any!(self, one => one.deliver(now, exchange));
    }

    fn flush(&mut self) {
        on_any!(self, one => one.flush());
    }
}

//! An aggregator, and a worker, whatever network they are on.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use super::job::JobStatus;
use super::kernel::{UdpAggregator, UdpWorker};
use super::worker::{Command, Failure};
use super::{Counters, JoinJob, Limits, Sum, Ticket, Upstream};
use replay_core::error::Result;
use replay_core::replay::Wait;

/// A station on DPDK's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DpdkConfig {
    /// Arguments for DPDK's environment, the same for all of a process: `--no-huge`, `-m`, `256`.
    pub eal: Vec<String>,
    /// Devices, by name and arguments as `--vdev` takes them (`net_af_packet0,iface=eth0`), or by PCI address. At least one; an aggregator
    /// with two is a switch.
    pub devices: Vec<String>,
    /// The station's address, which the kernel must not have, and the UDP port of its datagrams.
    pub address: SocketAddrV4,
    /// Bits of the network's part of the address, at most 32.
    pub prefix: u8,
    /// Where datagrams for other networks go.
    pub gateway: Option<Ipv4Addr>,
    /// Threads that an aggregator has, each at a UDP port of its own, from that of the address on. They take a core whole each, unless
    /// `idle_sleep` is set.
    pub threads: usize,
    /// The cores that they are kept on, as many as there are; none to let the system choose.
    pub cores: Vec<usize>,
    /// How long a thread sleeps when nothing comes; with 0 it looks again at once.
    pub idle_sleep: Duration,
}

/// An aggregator that runs.
pub enum Plane {
    /// On the kernel's UDP.
    Kernel(UdpAggregator),
    /// On DPDK's devices.
    #[cfg(feature = "dpdk")]
    Dpdk(super::dpdk::DpdkAggregator),
}

/// What a program says that was built without it.
#[cfg(not(feature = "dpdk"))]
pub fn without_dpdk() -> replay_core::Error {
    replay_core::Error::Config(
        "this program was built without DPDK: install libdpdk (Debian: apt install libdpdk-dev) and build again with the cargo feature \
         `dpdk`, or name no device for gradients"
            .to_owned(),
    )
}

/// The same on every plane.
macro_rules! on {
    ($plane:expr, $one:ident => $call:expr) => {
        match $plane {
            Plane::Kernel($one) => $call,
            #[cfg(feature = "dpdk")]
            Plane::Dpdk($one) => $call,
        }
    };
}

impl Plane {
    /// Aggregators on the kernel's UDP: the first at `address`, the others at the ports that follow, or at any where that is 0.
    ///
    /// # Errors
    /// [`Error::Io`](replay_core::Error::Io) for an address that cannot be bound.
    pub fn on_kernel(address: SocketAddr, threads: usize, limits: Limits) -> Result<Vec<Self>> {
        let at = |number: usize| match address.port() {
            0 => address,
            port => SocketAddr::new(address.ip(), port.saturating_add(number as u16)),
        };
        let start = |number| UdpAggregator::start(at(number), limits).map(Plane::Kernel);
        (0..threads).map(start).collect()
    }

    /// Aggregators on DPDK's devices.
    ///
    /// # Errors
    /// [`Error::Config`](replay_core::Error::Config) for what cannot be used; always in a program that was built without the feature `dpdk`.
    #[cfg(feature = "dpdk")]
    pub fn on_dpdk(config: &DpdkConfig, limits: Limits) -> Result<Vec<Self>> {
        let plane = super::dpdk::DpdkPlane::start(config, limits)?;
        Ok(plane.aggregators().into_iter().map(Plane::Dpdk).collect())
    }

    /// Aggregators on DPDK's devices.
    ///
    /// # Errors
    /// [`Error::Config`](replay_core::Error::Config) for what cannot be used; always in a program that was built without the feature `dpdk`.
    #[cfg(not(feature = "dpdk"))]
    pub fn on_dpdk(_: &DpdkConfig, _: Limits) -> Result<Vec<Self>> {
        Err(without_dpdk())
    }

    /// What has passed the devices of all of them, as a JSON object; `None` on the kernel's UDP.
    pub fn frames(&self) -> Option<serde_json::Value> {
        match self {
            Plane::Kernel(_) => None,
            #[cfg(feature = "dpdk")]
            Plane::Dpdk(one) => Some(serde_json::json!(one.plane().frames())),
        }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        on!(self, one => one.address())
    }

    /// What it has seen.
    pub fn counters(&self) -> Counters {
        on!(self, one => one.counters())
    }

    /// Jobs there are.
    pub fn jobs(&self) -> Vec<JobStatus> {
        on!(self, one => one.jobs())
    }

    /// Whether a worker that joins the job `name` finds it there.
    pub fn has(&self, name: &str) -> bool {
        on!(self, one => one.has(name))
    }

    /// See [`Aggregator::join`](super::Aggregator::join).
    ///
    /// # Errors
    /// Those of [`Aggregator::join`](super::Aggregator::join).
    pub fn join(&self, request: &JoinJob, upstream: Option<Upstream>) -> Result<Ticket> {
        on!(self, one => one.join(request, upstream))
    }

    /// See [`Aggregator::join_rack`](super::Aggregator::join_rack).
    ///
    /// # Errors
    /// Those of [`Aggregator::join_rack`](super::Aggregator::join_rack).
    pub fn join_rack(
        &self,
        request: &JoinJob,
        below: u32,
        upstream: Option<Upstream>,
    ) -> Result<Ticket> {
        on!(self, one => one.join_rack(request, below, upstream))
    }

    /// A worker's connection has ended: what waits for it fails at once.
    pub fn leave(&self, session: u32) {
        on!(self, one => one.leave(session));
    }

    /// See [`Aggregator::lose_parent`](super::Aggregator::lose_parent).
    pub fn lose_parent(&self, session: u32) {
        on!(self, one => one.lose_parent(session));
    }
}

/// A worker that the aggregator knows where to find.
pub enum PlaneWorker {
    /// On the kernel's UDP.
    Kernel(Box<UdpWorker>),
    /// On a DPDK device.
    #[cfg(feature = "dpdk")]
    Dpdk(Box<super::dpdk::DpdkWorker>),
}

/// The same on every plane.
macro_rules! with {
    ($worker:expr, $one:ident => $call:expr) => {
        match $worker {
            PlaneWorker::Kernel($one) => $call,
            #[cfg(feature = "dpdk")]
            PlaneWorker::Dpdk($one) => $call,
        }
    };
}

impl PlaneWorker {
    /// The number of the round that comes next.
    pub fn next_round(&self) -> u64 {
        with!(self, one => one.next_round())
    }

    /// See [`UdpWorker::sum`].
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn sum(
        &mut self,
        values: &mut [f32],
        mean: bool,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<Sum, Failure> {
        with!(self, one => one.sum(values, mean, deadline, wait))
    }

    /// See [`UdpWorker::call`].
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn call(
        &mut self,
        command: Command,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<(), Failure> {
        with!(self, one => one.call(command, deadline, wait))
    }
}

/// A worker's end of the network, before it has joined: a device is plugged in before a place in a job is taken, which would be lost if that
/// failed.
pub enum End {
    /// The kernel's UDP.
    Kernel,
    /// A DPDK device.
    #[cfg(feature = "dpdk")]
    Dpdk(Box<super::dpdk::DpdkEnd>),
}

impl End {
    /// On the device of `station`, or on the kernel's UDP.
    ///
    /// # Errors
    /// [`Error::Config`](replay_core::Error::Config) for a device that cannot be used, or a program that was built without DPDK.
    pub fn open(station: Option<&DpdkConfig>) -> Result<Self> {
        match station {
            None => Ok(End::Kernel),
            #[cfg(feature = "dpdk")]
            Some(station) => super::dpdk::DpdkEnd::open(station).map(|end| End::Dpdk(end.into())),
            #[cfg(not(feature = "dpdk"))]
            Some(_) => Err(without_dpdk()),
        }
    }

    /// The worker that joined the aggregator at `at` with `request` and was given `ticket`, see [`UdpWorker::new`].
    ///
    /// # Errors
    /// Those of [`UdpWorker::new`].
    pub fn work(
        self,
        at: SocketAddr,
        request: &JoinJob,
        ticket: &Ticket,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<PlaneWorker, Failure> {
        match self {
            End::Kernel => UdpWorker::new(at, request, ticket, deadline, wait)
                .map(|worker| PlaneWorker::Kernel(worker.into())),
            #[cfg(feature = "dpdk")]
            End::Dpdk(end) => {
                let worker =
                    super::dpdk::DpdkWorker::new(*end, at, request, ticket, deadline, wait);
                worker.map(|worker| PlaneWorker::Dpdk(worker.into()))
            }
        }
    }
}

//! Gradient all-reduce: an aggregator adds up the gradients of a job packet by packet, iSwitch (Li et al., ISCA 2019) in software.
//!
//! Workers cut a vector into segments and send each as a datagram. The aggregator adds contributions up as they arrive, and sends the sum
//! of a segment to every worker when the threshold H is reached. The protocol does no I/O and reads no clock: datagrams and the time are
//! arguments, and answers go to [`Transmit`]. Transports add sockets, devices and threads.
//!
//! | module | subject |
//! | --- | --- |
//! | [`packet`] | format of the datagrams |
//! | [`arithmetic`] | float32, and block-floating fixed point |
//! | `error` | errors |
//! | | **aggregator** |
//! | `aggregator` | jobs, sessions, joining and leaving |
//! | `settings` | settings that all members of a job share |
//! | `job` | one job: members, threshold, contributions, controls, deadlines, parent |
//! | `segments` | segments in flight, and complete sums |
//! | `sessions` | session table |
//! | `counters` | counters |
//! | | **worker** |
//! | `worker` | a worker's session, which its sums share, and its controls |
//! | `uplink` | path of a worker or a rack to its aggregator; the parent aggregator of a job |
//! | `flights` | contributions in flight; congestion window and retransmission timeout |
//! | `round` | one sum |
//! | `asynchronous_session` | session of an asynchronous worker |
//! | | **transports** |
//! | `datagrams` | UDP sockets: on Linux many datagrams for each system call |
//! | `dpdk` | DPDK transports of both (feature `dpdk`) |
//! | [`ethernet`] | Ethernet, IPv4, UDP and ARP headers, for DPDK |
//! | `worker_transport` | a worker on a transport; an asynchronous worker on UDP |
//! | `transports` | running aggregators and their threads; UDP transports of an aggregator and of a worker; the choice between UDP and DPDK |
//!
//! # Why sums are exact
//!
//! *Each contribution is counted once.* A segment in flight has a bitmap of the workers in it. A contribution whose bit is set is a duplicate.
//!
//! *Memory is bounded.* Segment `s` of a round uses entry `s mod window` of the window, which holds two segments: one in flight, and the sum
//! before it. A worker sends a segment only when it has the sum before it in the same entry. So when a contribution arrives, its sender has
//! that earlier sum; all workers are in it (H is all workers, unless it was lowered), so all have the sum before that one, and its
//! memory is free. A job needs `2 * window` segments, whatever the length of the vector.
//!
//! *Asynchronous jobs* keep the sums of S + 1 rounds of every segment of the vector instead: see [`AsynchronousSession`].
//!
//! *Resets.* Rounds are numbered, and a reset continues at a round that no contribution was ever sent for. Contributions from before the
//! reset are dropped, counted as `stale`, and answered with [`packet::Status::Reset`].
//!
//! *Waits end.* A segment that is not complete at the job's deadline fails the job, and every worker receives the names of the missing
//! ones. A worker has a deadline of its own, in case the aggregator is gone.

mod aggregator;
pub mod arithmetic;
mod asynchronous_session;
mod counters;
mod datagrams;
#[cfg(feature = "dpdk")]
pub mod dpdk;
mod error;
pub mod ethernet;
mod flights;
mod job;
pub mod packet;
mod round;
mod segments;
mod sessions;
mod settings;
mod transports;
mod uplink;
mod worker;
mod worker_transport;

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use aggregator::{Aggregator, AggregatorLimits, EXPIRE_EVERY};
pub use arithmetic::Arithmetic;
pub use asynchronous_session::AsynchronousSession;
pub use counters::{AggregatorCounters, Contributions, FrameCounters};
pub use datagrams::SOCKET_BUFFER;
pub use error::{Error, Result};
pub use job::JobStatus;
pub use round::{Round, Sum};
pub use settings::DpdkConfig;
pub use transports::{
    RunningAggregator, UdpTransport, dpdk_aggregators, dpdk_transport, udp_addresses, udp_aggregators,
};
pub use uplink::ParentAggregator;
pub use worker::{Control, ControlCall, Exchange, WorkerSession};
pub use worker_transport::{AsynchronousWorker, JobWorker, Worker, WorkerTransport};

/// Sends datagrams.
pub trait Transmit {
    /// Sends `head` followed by `body` as one datagram. Both are borrowed for this call alone.
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]);

    /// Sends a datagram to each of these addresses: its own head, then the common `body`.
    fn send_each<const HEAD: usize>(&mut self, to: impl Iterator<Item = (SocketAddr, [u8; HEAD])>, body: &[u8]) {
        to.for_each(|(to, head)| self.send(to, &head, body));
    }
}

/// Request to join a job, of a worker or of a rack: an aggregator with workers of its own. All members of a job pass identical settings,
/// except their number, name and workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinJob {
    /// Name of the job.
    pub job: String,
    /// Number of this member, from 0.
    pub worker: u16,
    /// Members of this aggregator, at most 64.
    pub workers: u16,
    /// Workers of the job: more than `workers` if aggregators have a parent.
    pub world: u32,
    /// Display name, for errors.
    pub name: String,
    /// Number format of the sums.
    pub arithmetic: Arithmetic,
    /// float32 values of a full segment, at most [`packet::MAX_SEGMENT_VALUES`].
    pub segment_values: u16,
    /// Longest time that a segment waits for a worker.
    #[serde(rename = "deadline_ms", with = "milliseconds")]
    pub deadline: Duration,
    /// Settings of an asynchronous job, in which workers do not wait for each other.
    pub asynchronous: Option<Asynchronous>,
    /// Workers below a rack; `None` for a worker.
    pub below: Option<u32>,
}

/// Settings of an asynchronous job: see [`AsynchronousSession`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asynchronous {
    /// Values of the vector.
    pub values: u32,
    /// Contributions that complete a sum (H).
    pub threshold: u16,
    /// Staleness bound: updates by which the weights of a contribution may be behind (S).
    pub staleness: u16,
}

impl Asynchronous {
    /// Segments of the vector.
    pub fn segments(&self, segment_values: u16) -> u32 {
        self.values.div_ceil(segment_values.max(1).into())
    }

    /// Rounds of each segment that an aggregator keeps: S + 1 sums, and the round in flight.
    pub fn depth(&self) -> usize {
        usize::from(self.staleness) + 2
    }
}

/// Membership of a worker in a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// UDP address of the aggregator; all zeros for the IP address mean the server's own address.
    pub address: SocketAddr,
    /// Session number, in the header of every datagram.
    pub session: u32,
    /// Secret, in the body of every control.
    pub key: packet::SessionKey,
    /// First round of the worker.
    pub round: u64,
    /// Most segments in flight.
    pub window: u32,
}

/// Serializes a duration as whole milliseconds in 32 bits, rounded up.
mod milliseconds {
    use super::{Deserialize, Duration};

    pub fn serialize<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        let milliseconds = duration.as_nanos().div_ceil(1_000_000);
        serializer.serialize_u32(u32::try_from(milliseconds).unwrap_or(u32::MAX))
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u32::deserialize(deserializer).map(|milliseconds| Duration::from_millis(milliseconds.into()))
    }
}

//! Sums of gradients between learners, packet by packet: iSwitch's service (Li et al., ISCA 2019) as software.
//!
//! Workers of a job cut a vector into segments and send each as a datagram. The aggregator adds a segment up as its contributions arrive and
//! sends the sum to every worker when the threshold H is reached. Nothing but [`datagrams`], [`kernel`], [`background`], [`aggregators`] and
//! `dpdk` does I/O or looks at a clock:
//! datagrams and the time are given in, and datagrams come out through [`Transmit`].
//!
//! | module | subject |
//! | --- | --- |
//! | [`packet`] | the datagrams |
//! | [`arithmetic`] | float32 and block-floating fixed point |
//! | [`slots`] | the segments under way, and the sums that are kept |
//! | [`terms`] | what the workers of a job agree on |
//! | [`job`] | workers, threshold, contributions and deadlines of one job |
//! | [`aggregator`] | whose datagrams are whose, joining and leaving |
//! | `sessions` | whose session is whose |
//! | `counters` | what it has seen |
//! | [`upstream`] | the aggregator above one |
//! | [`window`] | how much a worker has under way, and when it asks |
//! | [`worker`] | a worker's session, and its controls |
//! | [`round`] | one sum, as a worker sees it |
//! | [`updates`] | the sequence of sums of workers that do not wait for each other |
//! | [`link`] | what a worker needs of a network |
//! | [`datagrams`] | the kernel's UDP, many datagrams for each system call |
//! | [`kernel`] | an aggregator and a worker on it |
//! | [`background`] | an asynchronous worker on it |
//! | [`lossy`] | a path that loses datagrams |
//! | [`parameter_server`] | what both are measured against |
//! | `dpdk` | an aggregator and a worker on DPDK's devices, with that feature |
//! | [`plane`] | an aggregator, whatever network it is on |
//!
//! # Why sums are exact
//!
//! *Counted once.* A segment under way has a bitmap of the workers in it. A contribution whose bit is set is a duplicate.
//!
//! *Bounded memory.* Segment `s` of a round uses place `s mod window`, and each place holds two segments: the one under way and the one before it,
//! whose sum is kept. A worker sends a segment only when it has the sum of the one before it in that place. So when a contribution arrives for
//! a place, its sender has the sum before; that sum has everybody's contribution (H is all workers, unless it was set), so
//! everybody has the sum before that one, and its memory is free. A job needs `2 * window` segments, whatever the vector's length.
//!
//! *Asynchronous jobs* keep the vector's segments instead, the sums of S + 1 rounds of each: see [`updates`].
//!
//! *Rounds.* Rounds are numbered; a contribution of an earlier round is answered with the sum that is kept, or counted and dropped. A
//! reset begins at a round that no contribution was ever sent for.
//!
//! *Nobody hangs.* A segment that is not complete at the job's deadline fails the job: every worker is told who is missing. A
//! worker has a deadline of its own, for when the aggregator is gone.

pub mod aggregator;
pub mod arithmetic;
pub mod background;
mod counters;
pub mod datagrams;
#[cfg(feature = "dpdk")]
pub mod dpdk;
pub mod gathering;
pub mod job;
pub mod kernel;
pub mod link;
pub mod packet;
pub mod plane;
pub mod round;
mod sessions;
pub mod slots;
pub mod terms;
pub mod updates;
pub mod upstream;
pub mod window;
pub mod worker;

use std::net::SocketAddr;
use std::time::Duration;

pub use aggregator::{Aggregator, Limits};
pub use arithmetic::Arithmetic;
pub use background::UdpUpdates;
pub use counters::Counters;
pub use kernel::{UdpAggregator, UdpWorker};
pub use round::{Round, Sum};
pub use updates::{Contributions, Updates};
pub use upstream::Upstream;
pub use worker::{Call, Command, Exchange, Failure, Worker};

/// Where datagrams go.
pub trait Transmit {
    /// Sends `head` and `body`, one after the other, as one datagram. Both are borrowed for this call alone.
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]);

    /// Sends `body` to each of these places, behind a head of its own.
    fn send_each<const HEAD: usize>(
        &mut self,
        to: impl Iterator<Item = (SocketAddr, [u8; HEAD])>,
        body: &[u8],
    ) {
        to.for_each(|(to, head)| self.send(to, &head, body));
    }
}

/// How a worker asks to take part in a job. All workers of a job say the same, but for their number and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinJob {
    /// The job's name.
    pub job: String,
    /// This worker's number, from 0.
    pub worker: u16,
    /// Workers that send to this aggregator, at most 64.
    pub workers: u16,
    /// Workers of the job in all: more than `workers` where aggregators have a parent.
    pub world: u32,
    /// For people: it stands in errors.
    pub name: String,
    /// How the job adds up.
    pub arithmetic: Arithmetic,
    /// float32 values of a full segment, at most [`packet::MAX_SEGMENT_VALUES`].
    pub segment_values: u16,
    /// How long a segment may wait for a worker.
    pub deadline: Duration,
    /// Where workers do not wait for each other.
    pub asynchronous: Option<Asynchronous>,
}

/// How a job goes whose workers do not wait for each other: see [`updates`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asynchronous {
    /// Values of the vector.
    pub values: u32,
    /// Contributions that make a sum (H).
    pub threshold: u16,
    /// Updates by which the weights of a contribution may be behind (S).
    pub staleness: u16,
}

impl Asynchronous {
    /// Segments of the vector.
    pub fn segments(&self, segment_values: u16) -> u32 {
        self.values.div_ceil(segment_values.max(1).into())
    }

    /// Rounds of each segment that an aggregator keeps: the sums, and the one that is added up.
    pub fn depth(&self) -> usize {
        usize::from(self.staleness) + 2
    }
}

/// A place in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Stands in every datagram.
    pub session: u32,
    /// Stands in datagrams that could harm others.
    pub key: packet::Key,
    /// The first round that the worker takes part in.
    pub round: u64,
    /// Segments that may be under way.
    pub window: u32,
}

//! A worker of a gradient job: its place is its connection's, gradients and sums are datagrams.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer, deadline_ms};
use super::pipeline::unexpected;
use crate::stack::{Address, StackName};
use gradients::plane::{DpdkConfig, End, PlaneWorker};
use gradients::{Command, Failure, JoinJob, Sum, Ticket};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;
use replay_wire::{GradientsJoined, ReplyBody, RequestBody};

/// Longest deadline: the wire has 32 bits for its milliseconds.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// A worker's place in a gradient job, from [`Client::join_gradients`](super::Client::join_gradients). Dropped, it leaves.
///
/// No call takes longer than the job's deadline, or [`Wait::deadline`] where that is sooner.
pub struct GradientWorker {
    worker: PlaneWorker,
    /// Its end is the worker's.
    connection: Mutex<Connection>,
    server: Address,
    deadline: Duration,
}

/// A place at an aggregator, for as long as the connection is open.
pub struct Place {
    /// Its end is the worker's.
    pub connection: Connection,
    /// Where datagrams go.
    pub aggregator: SocketAddr,
    /// What stands in them.
    pub ticket: Ticket,
}

/// Asks a server for a place in a job, for a worker; or, with `below`, for a server that has sums of so many.
///
/// # Errors
/// [`Error::Deadline`] at `until`; those of connecting, and the server's.
pub fn take_place(
    dialer: &Dialer,
    request: &JoinJob,
    below: Option<u32>,
    until: Instant,
    wait: &Wait<'_>,
) -> Result<Place> {
    if dialer.address.stack() != StackName::Kernel {
        return Err(Error::Config(format!(
            "{} goes by F-Stack, gradients by the kernel's UDP: connect to an innet:// address of the server",
            dialer.address
        )));
    }
    let mut connection = dialer.dial_until(Some(until), wait)?;
    // The server, which knows who it waits for, gives up first.
    let left = until.saturating_duration_since(Instant::now());
    let deadline_ms = deadline_ms(Some(Instant::now() + left * 3 / 4));
    let body = RequestBody::JoinGradients {
        job: request.clone(),
        below,
    };
    let late = || Error::Deadline {
        waited_for: format!(
            "{} did not let worker {} into the gradient job {:?}",
            dialer.address, request.worker, request.job
        ),
    };
    let reply = connection.run(wait, Some(until), late, |link| link.call(deadline_ms, body))?;
    let ReplyBody::Gradients(GradientsJoined { address, ticket }) = reply else {
        return Err(unexpected(&reply));
    };
    Ok(Place {
        connection,
        aggregator: reach(&dialer.address, address)?,
        ticket,
    })
}

/// Where an aggregator is that says it is at `at`: at the server's own address where that is all zeros.
fn reach(server: &Address, at: SocketAddr) -> Result<SocketAddr> {
    if !at.ip().is_unspecified() {
        return Ok(at);
    }
    let Address::Tcp { host, .. } = server else {
        let here: IpAddr = match at {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        return Ok(SocketAddr::new(here, at.port()));
    };
    let unknown = |source| Error::Connect {
        address: format!("the aggregator of {server}"),
        source,
    };
    let mut found = (host.as_str(), at.port())
        .to_socket_addrs()
        .map_err(unknown)?;
    // A socket of IPv6 takes both.
    found
        .find(|found| at.is_ipv6() || found.is_ipv4())
        .ok_or_else(|| {
            Error::Config(format!(
                "the aggregator of {server} takes IPv4, and {host} has no such address: connect to the server's IPv4 address"
            ))
        })
}

/// A place in a job, before datagrams go there.
pub(super) struct Entry {
    pub place: Place,
    /// What was asked of the aggregator.
    pub asked: JoinJob,
    /// How long it may still take to begin.
    pub left: Duration,
}

/// Takes a place in a job.
pub(super) fn enter(dialer: &Dialer, request: &JoinJob, wait: &Wait<'_>) -> Result<Entry> {
    if request.deadline.is_zero() || request.deadline > LONGEST {
        return Err(Error::Config(format!(
            "the deadline of a gradient job is more than 0 and at most {} days, got {:?}",
            LONGEST.as_secs() / 86_400,
            request.deadline
        )));
    }
    let until = sooner(wait, request.deadline);
    let asked = JoinJob {
        // The aggregator knows who is missing, and its answer has to be here in time.
        deadline: request.deadline * 3 / 4,
        ..request.clone()
    };
    let place = take_place(dialer, &asked, None, until, wait)?;
    let left = until.saturating_duration_since(Instant::now());
    Ok(Entry { place, asked, left })
}

impl GradientWorker {
    /// Takes part in a job, on the kernel's UDP or on the DPDK device of `station`. Returns when the aggregator has proved that its
    /// datagrams arrive here.
    ///
    /// # Errors
    /// Those of [`Client::join_gradients`](super::Client::join_gradients).
    pub fn join(
        dialer: &Dialer,
        request: &JoinJob,
        via: Option<SocketAddr>,
        station: Option<&DpdkConfig>,
        wait: &Wait<'_>,
    ) -> Result<Self> {
        let end = End::open(station)?;
        let Entry { place, asked, left } = enter(dialer, request, wait)?;
        let to = via.unwrap_or(place.aggregator);
        let worker = end.work(to, &asked, &place.ticket, left, wait)?;
        Ok(GradientWorker {
            worker,
            connection: Mutex::new(place.connection),
            server: dialer.address.clone(),
            deadline: request.deadline,
        })
    }

    /// The number of the round that comes next.
    pub fn next_round(&self) -> u64 {
        self.worker.next_round()
    }

    /// Replaces `values` by their sum over all workers, or by their mean. Every worker sums as many values. After an error some are
    /// replaced and some are not.
    ///
    /// # Errors
    /// [`Error::Gradients`], see [`Failure`]; [`Error::Disconnected`] when the server has gone; [`Error::Interrupted`].
    pub fn sum(&mut self, values: &mut [f32], mean: bool, wait: &Wait<'_>) -> Result<Sum> {
        self.watched(wait, |worker, left, wait| {
            worker.sum(values, mean, left, wait)
        })
    }

    /// Sends a control and waits for its answer.
    ///
    /// # Errors
    /// Those of [`GradientWorker::sum`].
    pub fn call(&mut self, command: Command, wait: &Wait<'_>) -> Result<()> {
        self.watched(wait, |worker, left, wait| worker.call(command, left, wait))
    }

    /// Leaves the job, and returns when the server knows.
    ///
    /// # Errors
    /// [`Error::Deadline`], [`Error::Interrupted`]: the server then knows soon.
    pub fn leave(self, wait: &Wait<'_>) -> Result<()> {
        let mut connection = self
            .connection
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let late = || Error::Deadline {
            waited_for: format!("{} did not end the connection", self.server),
        };
        let until = sooner(wait, self.deadline);
        let left = connection.run(wait, Some(until), late, |link| link.finish());
        match left {
            Err(error @ (Error::Deadline { .. } | Error::Interrupted)) => Err(error),
            // A connection that broke has ended.
            _ => Ok(()),
        }
    }

    /// Does `work`, for as long as the server is there.
    fn watched<T>(
        &mut self,
        wait: &Wait<'_>,
        work: impl FnOnce(&mut PlaneWorker, Duration, &Wait<'_>) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let left = sooner(wait, self.deadline).saturating_duration_since(Instant::now());
        let connection = &self.connection;
        // Written and read by this thread: the closure has to be shareable, and is not shared.
        let gone = AtomicBool::new(false);
        let interrupted = || {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let ended = !connection.is_alive();
            gone.store(ended, Ordering::Relaxed);
            ended || (wait.interrupted)()
        };
        let watching = Wait {
            deadline: wait.deadline,
            interrupted: &interrupted,
        };
        match work(&mut self.worker, left, &watching) {
            Err(Failure::Interrupted) if gone.load(Ordering::Relaxed) => Err(Error::Disconnected {
                address: self.server.to_string(),
                reason: "it ended while gradients were summed; join again when the server is back"
                    .into(),
            }),
            done => Ok(done?),
        }
    }
}

/// The end of `wait`, or that of `longest` from now where that is sooner.
fn sooner(wait: &Wait<'_>, longest: Duration) -> Instant {
    let until = Instant::now() + longest;
    wait.deadline.map_or(until, |deadline| deadline.min(until))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_all_zeros_is_the_servers() {
        let reach = |server: &str, at: &str| {
            reach(&server.parse().unwrap(), at.parse().unwrap()).map(|at| at.to_string())
        };
        let server = "innet://127.0.0.7:7710";
        assert_eq!(reach(server, "127.0.0.1:9").unwrap(), "127.0.0.1:9");
        assert_eq!(reach(server, "0.0.0.0:9").unwrap(), "127.0.0.7:9");
        assert_eq!(reach(server, "[::]:9").unwrap(), "127.0.0.7:9");
        assert_eq!(reach("unix:///a", "0.0.0.0:9").unwrap(), "127.0.0.1:9");
        assert_eq!(reach("unix:///a", "[::]:9").unwrap(), "[::1]:9");
        let error = reach("innet://[::1]:7710", "0.0.0.0:9").unwrap_err();
        assert!(error.to_string().contains("IPv4 address"), "{error}");
    }
}

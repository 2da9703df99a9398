//! A worker of a gradient job: its membership ends with its TCP connection; gradients and sums are datagrams.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base::wait::{Wait, lock};
use gradients::{
    self, AsynchronousWorker, Control, DpdkConfig, JobWorker, JoinJob, Sum, Ticket, UdpTransport, Worker,
    WorkerTransport, dpdk_transport,
};
use replay_client::Client;
use replay_client::dialer::Dialer;
use replay_client::extension::ExtensionClient;
use replay_link::error::Error as NetError;
use replay_link::stack::Address;

use crate::error::{Error, Result};
use crate::message::{self, NAME};

/// Longest deadline: the wire has 32 bits for its milliseconds.
const MAX_DEADLINE: Duration = Duration::from_secs(30 * 86_400);

/// A worker of a gradient job. Dropping leaves the job.
///
/// Every call ends by the job's deadline or [`Wait::deadline`], whichever is sooner.
pub struct GradientWorker {
    worker: Box<dyn JobWorker>,
    connection: JobConnection,
}

/// Membership in a job, for as long as the connection is open.
pub struct JoinedJob {
    /// Membership ends with this connection.
    pub connection: ExtensionClient,
    /// Session at the aggregator, with its address.
    pub ticket: Ticket,
}

/// Joins a job on a server, as a worker or as a rack.
///
/// # Errors
/// [`NetError::Deadline`] at `until`; errors of connecting and of the server.
pub fn join_job(dialer: &Dialer, request: &JoinJob, until: Instant, wait: &Wait<'_>) -> Result<JoinedJob> {
    if let Some(stack) = dialer.address.stack().plugged() {
        return Err(Error::config(format!(
            "{} is an address of {}, but gradients need the kernel's UDP: connect to an innet:// address of the server",
            dialer.address,
            stack.title()
        )));
    }
    let mut connection = ExtensionClient::open(dialer, NAME, until, wait)?;
    // The server's deadline is earlier, so that its error, which names missing racks, arrives in time.
    let left = until.saturating_duration_since(Instant::now());
    let due = Instant::now() + left * 3 / 4;
    let message = message::write(request)?;
    let late = || {
        NetError::deadline(format!(
            "{} did not let worker {} into the gradient job {:?}",
            dialer.address, request.worker, request.job
        ))
    };
    let answer = connection.call(&message, due, until, wait, late)?;
    let mut ticket: Ticket = message::read(&answer)?;
    if ticket.window == 0 || ticket.round == 0 {
        let reason = "a ticket without a window or a round".to_owned();
        return Err(NetError::from(replay_wire::Error::Protocol(reason)).into());
    }
    ticket.address = reach(&dialer.address, connection.peer(), ticket.address)?;
    Ok(JoinedJob { connection, ticket })
}

/// UDP address of the aggregator. An unspecified IP address in `at` (all zeros) is replaced by the server's address: the one that its
/// connection has reached, `peer`, as a name may have several.
fn reach(server: &Address, peer: Option<SocketAddr>, at: SocketAddr) -> Result<SocketAddr> {
    if !at.ip().is_unspecified() {
        return Ok(at);
    }
    // The aggregator's IPv6 socket is dual-stack: it also receives IPv4.
    let takes = |peer: &SocketAddr| at.is_ipv6() || peer.is_ipv4();
    if let Some(mut peer) = peer.filter(takes) {
        peer.set_port(at.port());
        return Ok(peer);
    }
    let Address::Tcp { host, .. } = server else {
        let here: IpAddr = match at {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        return Ok(SocketAddr::new(here, at.port()));
    };
    let unknown = |source| NetError::Connect { address: format!("the aggregator of {server}"), source };
    let mut found = (host.as_str(), at.port()).to_socket_addrs().map_err(unknown)?;
    found
        .find(takes)
        .ok_or_else(|| {
            Error::config(format!(
                "the aggregator of {server} takes IPv4, and {host} has no such address: connect to the server's IPv4 address"
            ))
        })
}

/// Joins a job as a worker. `open` creates the transport. If `via` is set, datagrams go there instead of to the aggregator.
pub(crate) fn join_worker<T: WorkerTransport>(
    dialer: &Dialer,
    request: &JoinJob,
    via: Option<SocketAddr>,
    open: impl FnOnce(SocketAddr) -> gradients::Result<T>,
    wait: &Wait<'_>,
) -> Result<(Worker<T>, JobConnection)> {
    if request.deadline.is_zero() || request.deadline > MAX_DEADLINE {
        return Err(Error::config(format!(
            "the deadline of a gradient job is in seconds, more than 0 and at most {}, got {}",
            MAX_DEADLINE.as_secs(),
            request.deadline.as_secs_f64()
        )));
    }
    let until = sooner(wait, request.deadline);
    let shortened = JoinJob {
        // Leaves time for the aggregator's error, which names the missing workers: see `job::deadline`.
        deadline: request.deadline * 3 / 4,
        ..request.clone()
    };
    let mut job = join_job(dialer, &shortened, until, wait)?;
    let left = until.saturating_duration_since(Instant::now());
    job.ticket.address = via.unwrap_or(job.ticket.address);
    let worker = Worker::join(open(job.ticket.address)?, &shortened, &job.ticket, left, wait)?;
    let connection = JobConnection {
        client: Mutex::new(job.connection),
        server: dialer.address.clone(),
        deadline: request.deadline,
    };
    Ok((worker, connection))
}

/// TCP connection of a member.
pub(crate) struct JobConnection {
    client: Mutex<ExtensionClient>,
    server: Address,
    /// Longest time of a call.
    deadline: Duration,
}

impl JobConnection {
    /// Runs `work` with the time left, and interrupts it if the connection ends.
    ///
    /// # Errors
    /// [`NetError::Disconnected`] if the connection ended; errors of `work`.
    pub(crate) fn watch<T>(
        &self,
        wait: &Wait<'_>,
        work: impl FnOnce(Duration, &Wait<'_>) -> gradients::Result<T>,
    ) -> Result<T> {
        let left = sooner(wait, self.deadline).saturating_duration_since(Instant::now());
        // Relaxed: set and read by this thread. It is atomic only because the closure has to be `Sync`.
        let ended = AtomicBool::new(false);
        let interrupted = || {
            let alive = self.is_alive();
            ended.store(!alive, Ordering::Relaxed);
            !alive || (wait.interrupted)()
        };
        let watching = Wait { interrupted: &interrupted, ..*wait };
        match work(left, &watching) {
            Err(gradients::Error::Interrupted) if ended.load(Ordering::Relaxed) => Err(self.disconnected()),
            done => Ok(done?),
        }
    }

    /// # Errors
    /// [`NetError::Disconnected`] if the connection has ended.
    pub(crate) fn check(&self) -> Result<()> {
        match self.is_alive() {
            true => Ok(()),
            false => Err(self.disconnected()),
        }
    }

    fn is_alive(&self) -> bool {
        lock(&self.client).check().is_ok()
    }

    fn disconnected(&self) -> Error {
        Error::Net(NetError::Disconnected {
            address: self.server.to_string(),
            reason: "it ended while gradients were summed; join again when the server is back".into(),
        })
    }
}

impl GradientWorker {
    /// Joins a job over a new connection to the client's server. Datagrams use UDP, or the DPDK device of `dpdk`. If `via` is set (a
    /// relay, or an address before NAT), they go there instead of to the aggregator. Returns once the aggregator has validated the
    /// worker's UDP address. Fails at the job's deadline or [`Wait::deadline`], whichever is sooner.
    ///
    /// # Errors
    /// Errors of connecting; [`NetError::Config`] for a request that differs from the other workers', a server that sums no gradients, a device
    /// that cannot be used, or a program that was built without DPDK; [`Error::Sum`] if datagrams are lost.
    pub fn join(
        client: &Client,
        request: &JoinJob,
        via: Option<SocketAddr>,
        dpdk: Option<&DpdkConfig>,
        wait: &Wait<'_>,
    ) -> Result<Self> {
        let (worker, connection): (Box<dyn JobWorker>, _) = match dpdk {
            None => {
                let (worker, connection) = join_worker(client.dialer(), request, via, UdpTransport::to, wait)?;
                (Box::new(worker), connection)
            }
            Some(dpdk) => {
                // Opened before the join: a device that fails must not cost the job a member.
                let device = dpdk_transport(dpdk)?;
                let (worker, connection) = join_worker(client.dialer(), request, via, |_| Ok(device), wait)?;
                (Box::new(worker), connection)
            }
        };
        Ok(GradientWorker { worker, connection })
    }

    /// Number of the next round.
    pub fn next_round(&self) -> u64 {
        self.worker.next_round()
    }

    /// Replaces `values` by their sum, or their mean, over all workers. All workers must pass equally many values. After an error, only
    /// some values may be replaced.
    ///
    /// # Errors
    /// [`Error::Sum`], [`NetError::Interrupted`], see [`gradients::Error`]; [`NetError::Disconnected`] if the server is gone.
    pub fn sum(&mut self, values: &mut [f32], mean: bool, wait: &Wait<'_>) -> Result<Sum> {
        let worker = &mut self.worker;
        self.connection.watch(wait, |left, wait| worker.sum(values, mean, left, wait))
    }

    /// Sends a control and waits for its answer.
    ///
    /// # Errors
    /// Errors of [`GradientWorker::sum`].
    pub fn call(&mut self, control: Control, wait: &Wait<'_>) -> Result<()> {
        let worker = &mut self.worker;
        self.connection.watch(wait, |left, wait| worker.call(control, left, wait))
    }

    /// Leaves the job, and returns when the server has closed the connection.
    ///
    /// # Errors
    /// [`NetError::Deadline`], [`NetError::Interrupted`]: the server still closes the connection.
    pub fn leave(self, wait: &Wait<'_>) -> Result<()> {
        let JobConnection { client, deadline, .. } = self.connection;
        let client = client.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(client.end(sooner(wait, deadline), wait)?)
    }
}

/// The deadline of `wait`, or `longest` from now if that is sooner.
fn sooner(wait: &Wait<'_>, longest: Duration) -> Instant {
    let until = Instant::now() + longest;
    wait.deadline.map_or(until, |deadline| deadline.min(until))
}

/// A worker of an asynchronous job. Dropping leaves the job.
pub struct GradientUpdates {
    /// The worker, which offers gradients and takes means.
    pub worker: AsynchronousWorker,
    connection: JobConnection,
}

impl GradientUpdates {
    /// Joins a job with the weights of update 0, over a new connection to the client's server. Update `last` is the last one.
    ///
    /// # Errors
    /// Errors of [`GradientWorker::join`](crate::GradientWorker::join).
    pub fn join(client: &Client, request: &JoinJob, last: u64, wait: &Wait<'_>) -> Result<Self> {
        let Some(settings) = request.asynchronous else {
            return Err(Error::config(format!(
                "the gradient job {:?} is synchronous: take part in it with join_gradients",
                request.job
            )));
        };
        let (worker, connection) = join_worker(client.dialer(), request, None, UdpTransport::to, wait)?;
        let worker = AsynchronousWorker::start(worker, request.worker, settings, last, request.deadline)?;
        Ok(GradientUpdates { worker, connection })
    }

    /// Waits for a mean to take or, with `for_gradient`, until the worker can accept a gradient. `false` at the job's deadline, or
    /// at [`Wait::deadline`] if that is sooner.
    ///
    /// # Errors
    /// [`Error::Sum`] after a failure; [`Error::Net`] after an interrupt or if the server is gone.
    pub fn wait(&self, for_gradient: bool, wait: &Wait<'_>) -> Result<bool> {
        let worker = &self.worker;
        let signalled = self.connection.watch(wait, |left, wait| worker.wait(for_gradient, left, wait))?;
        if !signalled {
            self.connection.check()?;
        }
        Ok(signalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_all_zeros_is_the_servers() {
        let reach = |server: &str, peer: &str, at: &str| {
            let server = server.parse().unwrap();
            reach(&server, peer.parse().ok(), at.parse().unwrap()).map(|at| at.to_string())
        };
        let (server, peer) = ("innet://localhost:7710", "127.0.0.7:7710");
        assert_eq!(reach(server, peer, "127.0.0.1:9").unwrap(), "127.0.0.1:9");
        assert_eq!(reach(server, peer, "0.0.0.0:9").unwrap(), "127.0.0.7:9");
        assert_eq!(reach(server, peer, "[::]:9").unwrap(), "127.0.0.7:9");
        assert_eq!(reach(server, "[fe80::1%3]:7710", "[::]:9").unwrap(), "[fe80::1%3]:9");
        // The connection was by IPv6, the aggregator takes IPv4 alone.
        assert_eq!(reach(server, "[::1]:7710", "0.0.0.0:9").unwrap(), "127.0.0.1:9");
        assert_eq!(reach("unix:///a", "", "0.0.0.0:9").unwrap(), "127.0.0.1:9");
        assert_eq!(reach("unix:///a", "", "[::]:9").unwrap(), "[::1]:9");
        let error = reach("innet://[::1]:7710", "[::1]:7710", "0.0.0.0:9").unwrap_err();
        assert!(error.to_string().contains("IPv4 address"), "{error}");
    }
}

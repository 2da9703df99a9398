//! UDP transports of an aggregator and of a worker, on sockets of the operating system.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::datagrams::{self, UdpReceiver, UdpSender};
use super::threads::{StopFlag, Threads};
use super::transports::RunningAggregator;
use super::worker::Exchange;
use super::worker_transport::WorkerTransport;
use super::{Aggregator, AggregatorLimits, EXPIRE_EVERY, Result, Transmit};
use base::error::OsError;
use base::sync::lock;

/// Delay of deadlines while datagrams wait.
const GRACE: Duration = Duration::from_millis(100);

/// Starts an aggregator at `address`; port 0 is any free port.
///
/// # Errors
/// [`crate::Error::Io`] for an address that cannot be bound.
pub fn start(address: SocketAddr, limits: AggregatorLimits) -> Result<RunningAggregator> {
    let failed = || OsError::of(format!("cannot receive gradients at UDP address {address}"));
    let socket = datagrams::bind(address).map_err(failed())?;
    let bound = socket.local_addr().map_err(failed())?;
    let aggregator = Arc::new(Mutex::new(Aggregator::new(bound, limits)));
    let mut threads = Threads::default();
    let served = aggregator.clone();
    threads.start("innet-gradients", move |stop| serve(&served, &socket, &stop)).map_err(failed())?;
    Ok(RunningAggregator { address: bound, aggregator, _threads: threads.into() })
}

fn serve(aggregator: &Mutex<Aggregator>, socket: &Arc<UdpSocket>, stop: &StopFlag) {
    let mut receiver = UdpReceiver::new(socket.clone());
    let mut out = UdpSender::new(socket.clone());
    let mut due = Instant::now();
    while !stop.is_set() {
        if let Err(error) = receiver.wait(due.saturating_duration_since(Instant::now()), &mut out) {
            tracing::warn!(%error, "cannot receive gradients");
            thread::sleep(EXPIRE_EVERY);
            continue;
        }
        let now = Instant::now();
        let mut aggregator = lock(aggregator);
        for (from, datagram) in receiver.iter() {
            aggregator.receive(now, from, datagram, &mut out);
        }
        aggregator.flush(&mut out);
        if is_due(due, now, receiver.is_busy()) {
            aggregator.expire(now, &mut out);
            due = now + EXPIRE_EVERY;
        }
    }
}

/// Whether to fail overdue segments. While datagrams wait, the missing contributions may be among them, so they get [`GRACE`] more, and
/// no longer: a flood of datagrams must not keep a job from failing.
fn is_due(deadline: Instant, now: Instant, is_busy: bool) -> bool {
    let grace = if is_busy { GRACE } else { Duration::ZERO };
    now >= deadline + grace
}

/// A worker's UDP socket.
pub struct UdpTransport {
    receiver: UdpReceiver,
    sender: UdpSender,
}

impl UdpTransport {
    /// A socket at any free port, of the address family of `aggregator`.
    ///
    /// # Errors
    /// [`crate::Error::Io`] if no socket can be bound.
    pub fn to(aggregator: SocketAddr) -> Result<Self> {
        let any: SocketAddr = match aggregator {
            SocketAddr::V4(_) => ([0; 4], 0).into(),
            SocketAddr::V6(_) => ([0; 16], 0).into(),
        };
        let socket = datagrams::bind(any).map_err(OsError::of("cannot bind a UDP socket for gradients"))?;
        Ok(UdpTransport { receiver: UdpReceiver::new(socket.clone()), sender: UdpSender::new(socket) })
    }

    pub(super) fn socket(&self) -> &Arc<UdpSocket> {
        self.sender.socket()
    }
}

impl Transmit for UdpTransport {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.sender.send(to, head, body);
    }
}

impl WorkerTransport for UdpTransport {
    fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.sender.flush();
        self.receiver.wait(time, &mut self.sender)
    }

    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E) {
        for (from, datagram) in self.receiver.iter() {
            exchange.receive(now, from, datagram, &mut self.sender);
        }
    }

    fn flush(&mut self) {
        self.sender.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_without_end_delay_a_deadline_by_a_bounded_time() {
        let deadline = Instant::now();
        let [early, late] = [1, 100].map(|ms| deadline + Duration::from_millis(ms));
        assert!(is_due(deadline, early, false));
        assert!(!is_due(deadline, early, true));
        assert!(is_due(deadline, late, true));
    }
}

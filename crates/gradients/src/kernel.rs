//! The kernel's UDP sockets under the aggregator and under a worker.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::datagrams::{self, Inbox, Outbox};
use super::job::JobStatus;
use super::link::{self, Link};
use super::worker::{Command, Exchange, Failure, Worker};
use super::{Aggregator, Counters, JoinJob, Limits, Round, Sum, Ticket, Upstream};
use replay_core::error::{self, Error};
use replay_core::replay::Wait;

/// How often the aggregator's thread looks whether it should end.
const LOOK_UP: Duration = Duration::from_millis(100);

struct Shared {
    aggregator: Mutex<Aggregator>,
    stop: AtomicBool,
    socket: Arc<UdpSocket>,
}

impl Shared {
    /// A panic while it was held has left whole jobs or none: each is changed by one call.
    fn aggregator(&self) -> MutexGuard<'_, Aggregator> {
        self.aggregator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// An aggregator on a UDP socket, with a thread of its own. Dropped, it ends.
pub struct UdpAggregator {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl UdpAggregator {
    /// Starts one at `address`; port 0 lets the system choose.
    ///
    /// # Errors
    /// [`Error::Io`] for an address that cannot be bound.
    pub fn start(address: SocketAddr, limits: Limits) -> error::Result<Self> {
        let failed = |source| Error::Io {
            what: format!("cannot take gradients at udp {address}"),
            source,
        };
        let socket = datagrams::bind(address).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            aggregator: Mutex::new(Aggregator::new(limits)),
            stop: AtomicBool::new(false),
            socket,
        });
        let thread = thread::Builder::new()
            .name("innet-gradients".into())
            .spawn({
                let shared = shared.clone();
                move || serve(&shared)
            })
            .map_err(failed)?;
        Ok(UdpAggregator {
            shared,
            address,
            thread: Some(thread),
        })
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it has seen.
    pub fn counters(&self) -> Counters {
        self.shared.aggregator().counters()
    }

    /// Jobs there are.
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.shared.aggregator().status().collect()
    }

    /// Whether a worker that joins the job `name` finds it there.
    pub fn has(&self, name: &str) -> bool {
        self.shared.aggregator().has(name)
    }

    /// Takes a worker into a job: see [`Aggregator::join`].
    ///
    /// # Errors
    /// Those of [`Aggregator::join`].
    pub fn join(&self, request: &JoinJob, upstream: Option<Upstream>) -> error::Result<Ticket> {
        let now = Instant::now();
        self.change(|aggregator, out| aggregator.join(now, request, upstream, out))
    }

    /// Takes a rack into a job: see [`Aggregator::join_rack`].
    ///
    /// # Errors
    /// Those of [`Aggregator::join_rack`].
    pub fn join_rack(
        &self,
        request: &JoinJob,
        below: u32,
        upstream: Option<Upstream>,
    ) -> error::Result<Ticket> {
        let now = Instant::now();
        self.change(|aggregator, out| aggregator.join_rack(now, request, below, upstream, out))
    }

    /// A worker's connection has ended: what waits for it fails at once.
    pub fn leave(&self, session: u32) {
        self.change(|aggregator, out| aggregator.leave(session, out));
    }

    /// See [`Aggregator::lose_parent`].
    pub fn lose_parent(&self, session: u32) {
        self.change(|aggregator, out| aggregator.lose_parent(session, out));
    }

    fn change<T>(&self, change: impl FnOnce(&mut Aggregator, &mut Outbox) -> T) -> T {
        let mut out = Outbox::new(self.shared.socket.clone());
        let changed = change(&mut self.shared.aggregator(), &mut out);
        out.flush();
        changed
    }
}

impl Drop for UdpAggregator {
    fn drop(&mut self) {
        // Pairs with the load in `serve`; nothing else is published with it.
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the aggregator's thread panicked");
        }
    }
}

/// Whether to look for what has waited too long. What it waits for may be among the datagrams that there is no room for yet; but where these
/// never end, as strangers can see to, that is no reason to wait for ever.
fn is_due(deadline: Instant, now: Instant, more_is_there: bool) -> bool {
    let most = if more_is_there {
        LOOK_UP
    } else {
        Duration::ZERO
    };
    now >= deadline + most
}

fn serve(shared: &Shared) {
    let mut inbox = Inbox::new(shared.socket.clone());
    let mut out = Outbox::new(shared.socket.clone());
    let mut deadline = Instant::now();
    // Pairs with the store in `drop`.
    while !shared.stop.load(Ordering::Relaxed) {
        let time = deadline.saturating_duration_since(Instant::now());
        if let Err(error) = inbox.wait(time.min(LOOK_UP)) {
            tracing::warn!(%error, "receiving gradients failed");
            thread::sleep(LOOK_UP);
            continue;
        }
        let now = Instant::now();
        let mut aggregator = shared.aggregator();
        for (from, datagram) in inbox.iter() {
            aggregator.receive(now, from, datagram, &mut out);
        }
        if is_due(deadline, now, inbox.is_full()) {
            aggregator.expire(now, &mut out);
            let next = aggregator.next_deadline().unwrap_or(now + LOOK_UP);
            deadline = next.clamp(now + Duration::from_millis(1), now + LOOK_UP);
        }
        drop(aggregator);
        out.flush();
    }
}

/// A worker on a UDP socket. Calls block until they are done, their deadline, or an interrupt.
pub struct UdpWorker {
    worker: Worker,
    inbox: Inbox,
    out: Outbox,
    socket: Arc<UdpSocket>,
}

impl UdpWorker {
    /// The worker that joined the aggregator at `aggregator` with `request` and was given `ticket`. Returns when the aggregator
    /// knows where it is.
    ///
    /// # Errors
    /// [`Failure::Silent`] when it does not answer within `deadline`, [`Failure::Io`].
    pub fn new(
        aggregator: SocketAddr,
        request: &JoinJob,
        ticket: &Ticket,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> Result<Self, Failure> {
        let any: SocketAddr = match aggregator {
            SocketAddr::V4(_) => ([0; 4], 0).into(),
            SocketAddr::V6(_) => ([0; 16], 0).into(),
        };
        let socket = datagrams::bind(any).map_err(|error| Failure::Io(error.to_string()))?;
        let mut worker = UdpWorker {
            worker: Worker::new(aggregator, request, ticket),
            inbox: Inbox::new(socket.clone()),
            out: Outbox::new(socket.clone()),
            socket,
        };
        worker.call(Command::Join, deadline, wait)?;
        Ok(worker)
    }

    /// The number of the round that comes next.
    pub fn next_round(&self) -> u64 {
        self.worker.next_round()
    }

    /// Replaces `values` by their sum over all workers, or by their mean. After a failure some are replaced and some not.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn sum(
        &mut self,
        values: &mut [f32],
        mean: bool,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> Result<Sum, Failure> {
        let now = Instant::now();
        let round = Round::new(&mut self.worker, values, mean, now, now + deadline);
        drive(round, &mut self.inbox, &mut self.out, wait)
    }

    /// Sends a control and waits for its answer.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn call(
        &mut self,
        command: Command,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> Result<(), Failure> {
        let now = Instant::now();
        let call = self.worker.call(command, now, now + deadline);
        drive(call, &mut self.inbox, &mut self.out, wait)
    }

    pub(super) fn into_parts(self) -> (Worker, Inbox, Outbox, Arc<UdpSocket>) {
        (self.worker, self.inbox, self.out, self.socket)
    }
}

fn drive<E: Exchange>(
    exchange: E,
    inbox: &mut Inbox,
    out: &mut Outbox,
    wait: &Wait<'_>,
) -> Result<E::Output, Failure> {
    link::drive(exchange, &mut Socket { inbox, out }, wait)
}

struct Socket<'a> {
    inbox: &'a mut Inbox,
    out: &'a mut Outbox,
}

impl Link for Socket<'_> {
    type Out = Outbox;

    fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.out.flush();
        self.inbox.wait(time)
    }

    fn receive(&mut self, mut take: impl FnMut(SocketAddr, &[u8], &mut Outbox)) {
        for (from, datagram) in self.inbox.iter() {
            take(from, datagram, self.out);
        }
    }

    fn out(&mut self) -> &mut Outbox {
        self.out
    }

    fn flush(&mut self) {
        self.out.flush();
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

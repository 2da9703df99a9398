//! A worker on a transport: blocking sums and controls, over UDP sockets or a DPDK device; or asynchronous, on UDP, with a thread that
//! receives means and sends gradients while the owner computes.

use std::net::UdpSocket;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{io, thread};

use base::allocation;
use base::system::OsError;
use base::wait::{Wait, lock};

use super::datagrams::UdpSender;
use super::transports::{StopFlag, Threads, UdpTransport};
use super::worker::{Control, Exchange, WorkerSession};
use super::{Asynchronous, AsynchronousSession, Error, JoinJob, Result, Round, Sum, Ticket, Transmit};

/// Network access of one worker: it sends by [`Transmit`], which may queue datagrams until [`flush`](WorkerTransport::flush).
pub trait WorkerTransport: Transmit {
    /// Sends queued datagrams, waits up to `time` for others to arrive, and receives them.
    ///
    /// # Errors
    /// Errors of the operating system. A signal ends the wait without an error.
    fn wait(&mut self, time: Duration) -> io::Result<()>;

    /// Passes the datagrams of the last [`wait`](WorkerTransport::wait) to `exchange`, once.
    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E);

    /// Sends queued datagrams.
    fn flush(&mut self);
}

/// A worker of a synchronous job, on any transport.
pub trait JobWorker: Send {
    /// Number of the next round.
    fn next_round(&self) -> u64;

    /// Replaces `values` by their sum over all workers, or by their mean. After an error some values are replaced and some are not.
    ///
    /// # Errors
    /// The failure of the sum; [`Error::Receive`], [`Error::Interrupted`].
    fn sum(&mut self, values: &mut [f32], mean: bool, deadline: Duration, wait: &Wait<'_>) -> Result<Sum>;

    /// Sends a control and waits for its answer.
    ///
    /// # Errors
    /// The answer of the aggregator, or [`Error::Silent`]; [`Error::Receive`], [`Error::Interrupted`].
    fn call(&mut self, control: Control, deadline: Duration, wait: &Wait<'_>) -> Result<()>;
}

/// A worker of a job, on a transport. Calls block until they are done, their deadline passes, or an interrupt arrives.
pub struct Worker<T> {
    session: WorkerSession,
    transport: T,
}

impl<T: WorkerTransport> Worker<T> {
    /// The worker that joined with `request` and was given `ticket`. Returns once the aggregator has
    /// validated the worker's UDP address.
    ///
    /// # Errors
    /// [`Error::Silent`] without an answer within `deadline`; [`Error::Receive`], [`Error::Interrupted`].
    pub fn join(transport: T, request: &JoinJob, ticket: &Ticket, deadline: Duration, wait: &Wait<'_>) -> Result<Self> {
        let session = WorkerSession::new(request, ticket);
        let mut worker = Worker { session, transport };
        let now = Instant::now();
        let call = worker.session.call(Control::Join, now, now + deadline);
        run(call, &mut worker.transport, wait)?;
        Ok(worker)
    }

    pub(super) fn into_parts(self) -> (WorkerSession, T) {
        (self.session, self.transport)
    }
}

impl<T: WorkerTransport + Send> JobWorker for Worker<T> {
    fn next_round(&self) -> u64 {
        self.session.next_round()
    }

    fn sum(&mut self, values: &mut [f32], mean: bool, deadline: Duration, wait: &Wait<'_>) -> Result<Sum> {
        let now = Instant::now();
        let round = Round::new(&mut self.session, values, mean, now, now + deadline);
        run(round, &mut self.transport, wait)
    }

    fn call(&mut self, control: Control, deadline: Duration, wait: &Wait<'_>) -> Result<()> {
        let now = Instant::now();
        let call = self.session.call(control, now, now + deadline);
        run(call, &mut self.transport, wait)
    }
}

/// Runs an exchange to its end.
fn run<E: Exchange, T: WorkerTransport>(mut exchange: E, transport: &mut T, wait: &Wait<'_>) -> Result<E::Output> {
    let mut slices = wait.slices(None);
    loop {
        let now = Instant::now();
        if let Some(result) = exchange.poll(now, transport) {
            transport.flush();
            return result;
        }
        wait.report(now, Wait::REPORT_AFTER, || exchange.waits_for(now));
        let wake = exchange.next_wake().min(slices.next_wake(now)?);
        transport.wait(wake.saturating_duration_since(now)).map_err(|error| Error::Receive(error.into()))?;
        transport.deliver(Instant::now(), &mut exchange);
    }
}

/// Longest sleep of the thread: its latency for an offered gradient and for the stop flag.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// A worker of an asynchronous job. Dropped, its thread ends.
pub struct AsynchronousWorker {
    shared: Arc<SessionThread>,
    _threads: Threads,
}

struct SessionThread {
    session: Mutex<AsynchronousSession>,
    /// Signalled on a new mean, on free space for a gradient, and on failure.
    changed: Condvar,
    socket: Arc<UdpSocket>,
}

impl AsynchronousWorker {
    /// Continues a `worker`, by its number, that joined a job with these settings: see [`AsynchronousSession::new`].
    ///
    /// # Errors
    /// [`Error::Io`](super::Error::Io) if the thread cannot be started, [`Error::OutOfMemory`](super::Error::OutOfMemory).
    pub fn start(
        worker: Worker<UdpTransport>,
        number: u16,
        settings: Asynchronous,
        last: u64,
        deadline: Duration,
    ) -> Result<Self> {
        // The gradient, and a mean for each update within the bound.
        let vectors = u64::from(settings.staleness) + 2;
        allocation::check("an asynchronous gradient worker", vectors * 4 * u64::from(settings.values))?;
        let (session, transport) = worker.into_parts();
        let session = AsynchronousSession::new(session, number, settings, last, deadline, Instant::now());
        let shared = Arc::new(SessionThread {
            session: Mutex::new(session),
            changed: Condvar::new(),
            socket: transport.socket().clone(),
        });
        let mut threads = Threads::default();
        let session = shared.clone();
        threads
            .start("innet-updates", move |stop| run_updates(&session, transport, &stop))
            .map_err(OsError::of("cannot start a thread for gradients"))?;
        Ok(AsynchronousWorker { shared, _threads: threads })
    }

    /// Locks the session. While it is locked, its thread sends and receives nothing.
    pub fn session(&self) -> MutexGuard<'_, AsynchronousSession> {
        lock(&self.shared.session)
    }

    /// [`AsynchronousSession::offer`], and sends the segments that may leave now, without waiting for the thread.
    ///
    /// # Errors
    /// Errors of that call.
    pub fn offer(&self, gradient: &[f32], index: u64) -> Result<bool> {
        let mut out = UdpSender::new(self.shared.socket.clone());
        let mut session = self.session();
        let taken = session.offer(gradient, index)?;
        if taken {
            // The thread reports a failure.
            let _ = session.poll(Instant::now(), &mut out);
        }
        drop(session);
        out.flush();
        Ok(taken)
    }

    /// Waits up to `time` for a mean to take or, with `for_gradient`, for space for a gradient. `false` if the time passed before.
    ///
    /// # Errors
    /// The job's failure, or [`Error::Interrupted`](super::Error::Interrupted).
    pub fn wait(&self, for_gradient: bool, time: Duration, wait: &Wait<'_>) -> Result<bool> {
        let end = Instant::now() + time;
        let mut slices = wait.slices(Some(end));
        loop {
            let now = Instant::now();
            let wake = slices.next_wake(now)?;
            let session = self.session();
            if session.has_mean() || (for_gradient && !session.is_busy()) {
                return Ok(true);
            }
            if let Some(failure) = session.failure() {
                return Err(failure.clone());
            }
            if now >= end {
                return Ok(false);
            }
            let changed = &self.shared.changed;
            drop(changed.wait_timeout(session, wake.saturating_duration_since(now)));
            let reason = || self.session().waits_for(now);
            wait.report(now, Wait::REPORT_AFTER, reason);
        }
    }
}

fn run_updates(shared: &SessionThread, mut transport: UdpTransport, stop: &StopFlag) {
    let mut wake = Instant::now();
    while !stop.is_set() {
        let time = wake.saturating_duration_since(Instant::now());
        if let Err(error) = transport.wait(time.min(MAX_SLEEP)) {
            tracing::warn!(%error, "cannot receive sums of gradients");
            thread::sleep(MAX_SLEEP);
            continue;
        }
        let now = Instant::now();
        let mut session = lock(&shared.session);
        transport.deliver(now, &mut *session);
        let failed = session.poll(now, &mut transport).is_some();
        // After a failure nothing is due until a restart.
        wake = match failed {
            true => now + MAX_SLEEP,
            false => session.next_wake(),
        };
        let changed = failed || session.has_mean() || !session.is_busy();
        drop(session);
        transport.flush();
        if changed {
            shared.changed.notify_all();
        }
    }
}

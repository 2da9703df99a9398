//! An asynchronous worker on UDP. Its thread receives means and sends gradients while the owner computes.

use std::net::UdpSocket;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::datagrams::UdpSender;
use super::threads::{StopFlag, Threads};
use super::udp::UdpTransport;
use super::worker::Exchange;
use super::worker_transport::{Worker, WorkerTransport};
use super::{AsynchronousSession, Contributions, Error, JoinJob, Result};
use base::allocation;
use base::error::OsError;
use base::sync::lock;
use base::wait::Wait;

/// Longest sleep of the thread: its latency for an offered gradient and for the stop flag.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// A worker of an asynchronous job. Dropped, its thread ends.
pub struct AsynchronousWorker {
    shared: Arc<SessionThread>,
    /// Values of a gradient.
    values: usize,
    _threads: Threads,
}

struct SessionThread {
    /// Valid after a panic: only checks of arguments panic, before any change.
    session: Mutex<AsynchronousSession>,
    /// Signalled on a new mean, on free space for a gradient, and on failure.
    changed: Condvar,
    socket: Arc<UdpSocket>,
}

impl AsynchronousWorker {
    /// Continues `worker`, which joined with `request`: see [`AsynchronousSession::new`].
    ///
    /// # Errors
    /// [`Error::Config`] for a synchronous job, [`Error::Io`] if the thread cannot be started, [`Error::OutOfMemory`].
    pub fn start(
        worker: Worker<UdpTransport>,
        request: &JoinJob,
        index: u64,
        last: u64,
        deadline: Duration,
    ) -> Result<Self> {
        let Some(settings) = request.asynchronous else {
            return Err(Error::Config(format!(
                "the gradient job {:?} is synchronous: join it with a staleness bound",
                request.job
            )));
        };
        // The gradient, and a mean for each update within the bound.
        let vectors = u64::from(settings.staleness) + 2;
        allocation::check("an asynchronous gradient worker", vectors * 4 * u64::from(settings.values))?;
        let (session, transport) = worker.into_parts();
        let now = Instant::now();
        let session = AsynchronousSession::new(session, request, index, last, deadline, now);
        let shared = Arc::new(SessionThread {
            session: Mutex::new(session),
            changed: Condvar::new(),
            socket: transport.socket().clone(),
        });
        let mut threads = Threads::default();
        let session = shared.clone();
        threads
            .start("innet-updates", move |stop| run(&session, transport, &stop))
            .map_err(OsError::of("cannot start a thread for gradients"))?;
        Ok(AsynchronousWorker { shared, values: settings.values as usize, _threads: threads })
    }

    fn check_length(&self, length: usize) -> Result<()> {
        if length == self.values {
            return Ok(());
        }
        Err(Error::Config(format!("{length} values, but the job's gradients have {}", self.values)))
    }

    /// See [`AsynchronousSession::offer`].
    ///
    /// # Errors
    /// [`Error::Config`] for a gradient of another length, or an index beyond the last update taken.
    pub fn offer(&self, gradient: &[f32], index: u64) -> Result<bool> {
        self.check_length(gradient.len())?;
        let mut out = UdpSender::new(self.shared.socket.clone());
        let mut session = lock(&self.shared.session);
        let newest = session.index();
        if index > newest {
            return Err(Error::Config(format!("index {index} is no update taken so far: the last one is {newest}")));
        }
        let taken = session.offer(gradient, index);
        if taken {
            // Sends the segments that may leave now, without waiting for the thread, which also reports failures.
            let _ = session.poll(Instant::now(), &mut out);
        }
        drop(session);
        out.flush();
        Ok(taken)
    }

    /// See [`AsynchronousSession::take`].
    ///
    /// # Errors
    /// The job's failure, once the means that arrived before it are taken; [`Error::Config`] for a slice of another length.
    pub fn take(&self, into: &mut [f32]) -> Result<Option<u64>> {
        self.check_length(into.len())?;
        let mut session = lock(&self.shared.session);
        match session.take(into) {
            None => session.failure().map_or(Ok(None), |f| Err(f.clone())),
            taken => Ok(taken),
        }
    }

    /// Waits up to `time` for a mean to take or, with `for_gradient`, for space for a gradient. `false` if the time passed before.
    ///
    /// # Errors
    /// The job's failure, or [`Error::Interrupted`].
    pub fn wait(&self, for_gradient: bool, time: Duration, wait: &Wait<'_>) -> Result<bool> {
        let end = Instant::now() + time;
        let mut slices = wait.slices(Some(end));
        loop {
            let now = Instant::now();
            let wake = slices.next_wake(now)?;
            let session = lock(&self.shared.session);
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
            let reason = || lock(&self.shared.session).waits_for(now);
            wait.report(now, Wait::REPORT_AFTER, reason);
        }
    }

    /// See [`AsynchronousSession::restart`].
    pub fn restart(&self, index: u64) {
        lock(&self.shared.session).restart(index, Instant::now());
    }

    /// See [`AsynchronousSession::index`].
    pub fn index(&self) -> u64 {
        lock(&self.shared.session).index()
    }

    /// See [`AsynchronousSession::contributions`].
    pub fn contributions(&self) -> Contributions {
        lock(&self.shared.session).contributions()
    }
}

fn run(shared: &SessionThread, mut transport: UdpTransport, stop: &StopFlag) {
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

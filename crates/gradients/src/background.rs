//! An asynchronous worker on UDP, with a thread of its own: means arrive and gradients leave while its owner computes.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::datagrams::UdpSender;
use super::kernel::UdpTransport;
use super::link::{Worker, WorkerTransport};
use super::worker::Exchange;
use super::{AsynchronousSession, Contributions, Error, JoinJob, Result};
use replay_core::replay::Wait;

/// Longest sleep of the thread: so late it sees an offered gradient, or that it should end.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// A worker of an asynchronous job. Dropped, its thread ends.
pub struct AsynchronousWorker {
    shared: Arc<SessionThread>,
    thread: Option<JoinHandle<()>>,
}

struct SessionThread {
    session: Mutex<AsynchronousSession>,
    /// Signalled on a new mean, on free room for a gradient, and on failure.
    changed: Condvar,
    stop: AtomicBool,
    socket: Arc<UdpSocket>,
}

impl SessionThread {
    /// A panic changes nothing: it comes from a wrong argument, which is checked first.
    fn session(&self) -> MutexGuard<'_, AsynchronousSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsynchronousWorker {
    /// Continues `worker`, which joined with `request`: see [`AsynchronousSession::new`].
    ///
    /// # Errors
    /// [`Error::Config`] for a synchronous job, [`Error::Io`] if the system has no thread for it.
    pub fn start(
        worker: Worker<UdpTransport>,
        request: &JoinJob,
        index: u64,
        last: u64,
        deadline: Duration,
    ) -> Result<Self> {
        if request.asynchronous.is_none() {
            return Err(Error::Config(format!(
                "the gradient job {:?} is synchronous: join it with a staleness bound",
                request.job
            )));
        }
        let (session, transport) = worker.into_parts();
        let now = Instant::now();
        let session = AsynchronousSession::new(session, request, index, last, deadline, now);
        let shared = Arc::new(SessionThread {
            session: Mutex::new(session),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            socket: transport.socket().clone(),
        });
        let thread = thread::Builder::new()
            .name("innet-updates".into())
            .spawn({
                let shared = shared.clone();
                move || run(&shared, transport)
            })
            .map_err(Error::io("cannot start a thread for gradients"))?;
        Ok(AsynchronousWorker {
            shared,
            thread: Some(thread),
        })
    }

    /// See [`AsynchronousSession::offer`].
    pub fn offer(&self, gradient: &[f32], index: u64) -> bool {
        let mut out = UdpSender::new(self.shared.socket.clone());
        let mut session = self.shared.session();
        let taken = session.offer(gradient, index);
        if taken {
            // Sends what may leave now, without waiting for the thread, which also reports failures.
            let _ = session.poll(Instant::now(), &mut out);
        }
        drop(session);
        out.flush();
        taken
    }

    /// See [`AsynchronousSession::take`].
    ///
    /// # Errors
    /// The job's failure, once the means that arrived before it are taken.
    pub fn take(&self, into: &mut [f32]) -> Result<Option<u64>> {
        let mut session = self.shared.session();
        match session.take(into) {
            None => session.failure().map_or(Ok(None), |f| Err(f.clone())),
            taken => Ok(taken),
        }
    }

    /// Waits up to `time` for a mean to take or, with `for_room`, for room for a gradient. `false` if neither came.
    ///
    /// # Errors
    /// The job's failure, or [`Error::Interrupted`].
    pub fn wait(&self, for_room: bool, time: Duration, wait: &Wait<'_>) -> Result<bool> {
        let end = Instant::now() + time;
        let mut slices = wait.slices(Some(end));
        loop {
            let now = Instant::now();
            let wake = slices.next_wake(now)?;
            let session = self.shared.session();
            if session.has_mean() || (for_room && !session.is_busy()) {
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
        }
    }

    /// See [`AsynchronousSession::restart`].
    pub fn restart(&self, index: u64) {
        self.shared.session().restart(index, Instant::now());
    }

    /// See [`AsynchronousSession::index`].
    pub fn index(&self) -> u64 {
        self.shared.session().index()
    }

    /// See [`AsynchronousSession::contributions`].
    pub fn contributions(&self) -> Contributions {
        self.shared.session().contributions()
    }
}

impl Drop for AsynchronousWorker {
    fn drop(&mut self) {
        // Pairs with the load in `run`. Relaxed: the flag carries no data.
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an asynchronous worker panicked");
        }
    }
}

fn run(shared: &SessionThread, mut transport: UdpTransport) {
    let mut wake = Instant::now();
    // Pairs with the store in `drop`. Relaxed: the flag carries no data.
    while !shared.stop.load(Ordering::Relaxed) {
        let time = wake.saturating_duration_since(Instant::now());
        if let Err(error) = transport.wait(time.min(MAX_SLEEP)) {
            tracing::warn!(%error, "cannot receive sums of gradients");
            thread::sleep(MAX_SLEEP);
            continue;
        }
        let now = Instant::now();
        let mut session = shared.session();
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

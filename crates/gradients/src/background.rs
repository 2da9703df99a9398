//! An asynchronous worker on the kernel's UDP, with a thread of its own: sums arrive and contributions leave while its owner computes.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::datagrams::{Inbox, Outbox};
use super::worker::{Exchange, Failure};
use super::{Contributions, JoinJob, UdpWorker, Updates};
use replay_core::error::{self, Error};
use replay_core::replay::Wait;

/// How often the thread looks whether it should end, and what was offered.
const LOOK_UP: Duration = Duration::from_millis(20);

struct Shared {
    updates: Mutex<Updates>,
    /// A mean has come, a gradient has gone, or nothing goes on.
    changed: Condvar,
    stop: AtomicBool,
    socket: Arc<UdpSocket>,
}

impl Shared {
    /// A panic while it was held is one of a wrong argument, before anything was changed.
    fn updates(&self) -> MutexGuard<'_, Updates> {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The worker. Dropped, its thread ends.
pub struct UdpUpdates {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl UdpUpdates {
    /// Goes on with `worker`, which joined with `request`: see [`Updates::new`].
    ///
    /// # Errors
    /// [`Error::Config`] for a synchronous job, [`Error::Io`] when there is no thread for it.
    pub fn start(
        worker: UdpWorker,
        request: &JoinJob,
        index: u64,
        last: u64,
        deadline: Duration,
    ) -> error::Result<Self> {
        if request.asynchronous.is_none() {
            return Err(Error::Config(format!(
                "the gradient job {:?} is synchronous: join it with a staleness bound",
                request.job
            )));
        }
        let (worker, inbox, out, socket) = worker.into_parts();
        let now = Instant::now();
        let shared = Arc::new(Shared {
            updates: Mutex::new(Updates::new(worker, request, index, last, deadline, now)),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            socket,
        });
        let thread = thread::Builder::new()
            .name("innet-updates".into())
            .spawn({
                let shared = shared.clone();
                move || run(&shared, inbox, out)
            })
            .map_err(|source| Error::Io {
                what: "cannot start a thread for gradients".into(),
                source,
            })?;
        Ok(UdpUpdates {
            shared,
            thread: Some(thread),
        })
    }

    /// See [`Updates::offer`].
    pub fn offer(&self, gradient: &[f32], index: u64) -> bool {
        let mut out = Outbox::new(self.shared.socket.clone());
        let mut updates = self.shared.updates();
        let taken = updates.offer(gradient, index);
        if taken {
            // What leaves at once need not wait for the thread to look. A failure is the thread's to tell.
            let _ = updates.poll(Instant::now(), &mut out);
        }
        drop(updates);
        out.flush();
        taken
    }

    /// See [`Updates::take`].
    ///
    /// # Errors
    /// Why nothing goes on, once the means that arrived before are taken.
    pub fn take(&self, into: &mut [f32]) -> Result<Option<u64>, Failure> {
        let mut updates = self.shared.updates();
        match updates.take(into) {
            None => updates.failure().map_or(Ok(None), |f| Err(f.clone())),
            taken => Ok(taken),
        }
    }

    /// Waits until there is a mean to take, or room for a gradient where that is waited `for_room`; for at most `time`. Returns whether
    /// it came to that.
    ///
    /// # Errors
    /// Why nothing goes on, or [`Failure::Interrupted`].
    pub fn wait(&self, for_room: bool, time: Duration, wait: &Wait<'_>) -> Result<bool, Failure> {
        let end = Instant::now() + time;
        let mut updates = self.shared.updates();
        loop {
            if updates.has_mean() || (for_room && !updates.is_busy()) {
                return Ok(true);
            }
            if let Some(failure) = updates.failure() {
                return Err(failure.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let changed = &self.shared.changed;
            updates = changed
                .wait_timeout(updates, left.min(Wait::CHECK_EVERY))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            drop(updates);
            wait.check().map_err(|_| Failure::Interrupted)?;
            updates = self.shared.updates();
        }
    }

    /// See [`Updates::restart`].
    pub fn restart(&self, index: u64) {
        self.shared.updates().restart(index, Instant::now());
    }

    /// See [`Updates::index`].
    pub fn index(&self) -> u64 {
        self.shared.updates().index()
    }

    /// See [`Updates::contributions`].
    pub fn contributions(&self) -> Contributions {
        self.shared.updates().contributions()
    }
}

impl Drop for UdpUpdates {
    fn drop(&mut self) {
        // Pairs with the load in `run`; nothing else is published with it.
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an asynchronous worker panicked");
        }
    }
}

fn run(shared: &Shared, mut inbox: Inbox, mut out: Outbox) {
    let mut wake = Instant::now();
    // Pairs with the store in `drop`.
    while !shared.stop.load(Ordering::Relaxed) {
        let time = wake.saturating_duration_since(Instant::now()).min(LOOK_UP);
        if let Err(error) = inbox.wait(time) {
            tracing::warn!(%error, "receiving sums of gradients failed");
            thread::sleep(LOOK_UP);
            continue;
        }
        let now = Instant::now();
        let mut updates = shared.updates();
        for (from, datagram) in inbox.iter() {
            updates.receive(now, from, datagram, &mut out);
        }
        let failed = updates.poll(now, &mut out).is_some();
        // After a failure nothing is due until a restart.
        wake = if failed {
            now + LOOK_UP
        } else {
            updates.next_wake()
        };
        let changed = failed || updates.has_mean() || !updates.is_busy();
        drop(updates);
        out.flush();
        if changed {
            shared.changed.notify_all();
        }
    }
}

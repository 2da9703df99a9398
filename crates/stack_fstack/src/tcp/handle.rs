//! Calls to the reactor from other threads. The reactor reads its queue of submissions in every turn and wakes the
//! submitting thread when the work is done. The reactor itself needs no wake-up: it polls.
//!
//! # Invariant
//!
//! F-Stack is called only on the reactor's thread. Work from another thread has ended before its call returns. No
//! panic unwinds into C.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;

use super::reactor::{Fstack, Submission};
use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_link::stack::ServerWait;
use replay_link::stack::plugged::StackFuture;

/// Handle to the reactor thread.
#[derive(Clone)]
pub struct ReactorHandle(pub(super) mpsc::Sender<Submission>);

impl ReactorHandle {
    /// Calls `start` on the reactor thread and runs the future it returns there.
    ///
    /// # Errors
    /// [`Error::Closed`] when the reactor has ended.
    pub fn spawn<F: Future<Output = ()> + 'static>(
        &self,
        start: impl FnOnce(Fstack) -> F + Send + 'static,
    ) -> Result<()> {
        self.submit(Box::new(move |reactor| reactor.spawn(start(Fstack(())))))
    }

    pub(super) fn submit(&self, submission: Submission) -> Result<()> {
        self.0.send(submission).map_err(|_| Error::Closed("F-Stack"))
    }

    /// Asks the reactor to drop its tasks, send the bytes in their sockets' buffers, and end.
    pub fn stop(&self) {
        // An error means that it has ended.
        let _ = self.submit(Box::new(|reactor| reactor.close()));
    }

    /// [`StackClient::run`](replay_link::stack::plugged::StackClient::run). Interrupts are checked on this thread.
    ///
    /// # Errors
    /// Errors of the check, and [`Error::Closed`] when the reactor has ended.
    pub(super) fn run_blocking(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        server: &ServerWait,
        work: StackFuture<'_, ()>,
    ) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        let cancel = Arc::new(Cancel::default());
        let task: StackFuture<'_, ()> = Box::pin(ScopedTask { work: Some(work), cancel: cancel.clone(), sender });
        // SAFETY: only the lifetime changes, and the future is not used after this function. `guard` makes the function
        // return, or unwind, only once `receiver` has seen a message or the end of `sender`, and `ScopedTask` drops `work`
        // before both: in `poll`, or by the order of its fields when the task is dropped, be it by the reactor, with the
        // reactor, or inside a submission that never ran.
        let task: StackFuture<'static, ()> = unsafe { std::mem::transmute(task) };
        let guard = WaitGuard { receiver, cancel: &cancel, dropped: Cell::new(false) };
        self.submit(Box::new(move |reactor| reactor.spawn(task)))?;
        let mut slices = wait.slices(until);
        loop {
            let now = Instant::now();
            let wake = slices.next_wake(now)?;
            if let Some(done) = guard.wait(wake.saturating_duration_since(now)) {
                return done;
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                guard.cancel();
                return Ok(());
            }
            server.report(wait, now);
        }
    }
}

/// Work on the reactor that borrows from the thread waiting for it.
struct ScopedTask<'a> {
    // Drop order of the fields matters: the end of `sender` tells the waiting thread that `work` is gone.
    work: Option<StackFuture<'a, ()>>,
    cancel: Arc<Cancel>,
    sender: mpsc::Sender<()>,
}

impl Future for ScopedTask<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.cancel.waker.register(context.waker());
        let Some(work) = &mut self.work else {
            return Poll::Ready(());
        };
        match work.as_mut().poll(context) {
            Poll::Ready(()) => {
                // Dropped before the send, after which the waiting thread returns.
                self.work = None;
                let _ = self.sender.send(());
                Poll::Ready(())
            }
            // Acquire: synchronizes with the release store in `Cancel::request`.
            Poll::Pending if self.cancel.requested.load(Ordering::Acquire) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// The waiting thread's request to drop the work.
#[derive(Default)]
struct Cancel {
    requested: AtomicBool,
    waker: AtomicWaker,
}

impl Cancel {
    fn request(&self) {
        // Release: synchronizes with the acquire load in `ScopedTask::poll`.
        self.requested.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The waiting thread's side of a [`ScopedTask`]. Dropping cancels the work and waits until the work is dropped.
struct WaitGuard<'a> {
    receiver: mpsc::Receiver<()>,
    cancel: &'a Cancel,
    /// Whether the work is known to be dropped.
    dropped: Cell<bool>,
}

impl WaitGuard<'_> {
    /// Waits for the end of the work; `None` after `duration`.
    fn wait(&self, duration: Duration) -> Option<Result<()>> {
        let done = match self.receiver.recv_timeout(duration) {
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err(Error::Closed("F-Stack")),
            Ok(()) => Ok(()),
        };
        self.dropped.set(true);
        Some(done)
    }

    /// Cancels the work and waits until it is dropped.
    fn cancel(&self) {
        self.cancel.request();
        // An error means that the work was dropped before it was done.
        let _ = self.receiver.recv();
        self.dropped.set(true);
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        if !self.dropped.get() {
            self.cancel();
        }
    }
}

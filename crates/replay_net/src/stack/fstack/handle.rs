//! Work for the reactor from other threads. The reactor looks at its queue in every turn, and whoever waits for the
//! work is woken when it is done; nothing wakes the reactor, which never sleeps for long.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;

use super::Fstack;
use super::reactor::Job;
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// The way to the reactor thread.
#[derive(Clone)]
pub struct Handle {
    jobs: mpsc::Sender<Job>,
    stop: Arc<AtomicBool>,
}

impl Handle {
    pub(super) fn new(jobs: mpsc::Sender<Job>, stop: Arc<AtomicBool>) -> Self {
        Handle { jobs, stop }
    }

    /// Runs on the reactor what `start` makes there.
    ///
    /// # Errors
    /// [`Error::Closed`] when the reactor has ended.
    pub fn spawn<F: Future<Output = ()> + 'static>(
        &self,
        start: impl FnOnce(Fstack) -> F + Send + 'static,
    ) -> Result<()> {
        self.hand_over(Box::new(move |reactor| reactor.spawn(start(Fstack(())))))
    }

    pub(super) fn hand_over(&self, job: Job) -> Result<()> {
        self.jobs.send(job).map_err(|_| Error::Closed("F-Stack"))
    }

    /// Asks the reactor to drop its tasks, send what their sockets still hold, and end.
    pub fn stop(&self) {
        // Release: synchronizes with the acquire load in `Reactor::turn`.
        self.stop.store(true, Ordering::Release);
    }

    /// Carries `work` out on the reactor while this thread waits; `work` is polled at least once, and is gone when this
    /// returns. `until` and `late` end it as they do a blocking call of the client; interrupts are checked on this thread.
    ///
    /// # Errors
    /// Those of `work`, `late` and the check, and [`Error::Closed`] when the reactor has ended.
    pub fn carry_out<T: Send>(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let (give, take) = mpsc::channel();
        let cancel = Arc::new(Cancel::default());
        let lent: Pin<Box<dyn Future<Output = ()> + Send + '_>> = Box::pin(Lent {
            work: Some(Box::pin(work)),
            cancel: cancel.clone(),
            give,
        });
        // SAFETY: only the lifetime changes, and nothing of the future is used after this function: it returns, or
        // unwinds, only when `take` has seen `give` go, which is dropped after `work` (see `Lent`), be it with the
        // task, with the reactor, or with a job that was never taken.
        let lent: Pin<Box<dyn Future<Output = ()> + Send>> = unsafe { std::mem::transmute(lent) };
        let back = GivenBack {
            take,
            cancel: &cancel,
            gone: Cell::new(false),
        };
        self.hand_over(Box::new(move |reactor| reactor.spawn(lent)))?;
        let mut slices = wait.slices(until);
        loop {
            let now = Instant::now();
            let wake = slices.next_wake(now)?;
            if let Some(done) = back.wait(wake.saturating_duration_since(now)) {
                return done;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                // It may have been done meanwhile.
                return back.cancel().unwrap_or_else(|| Err(late()));
            }
        }
    }
}

/// Work that belongs to a thread which waits for it.
struct Lent<'a, T> {
    // The order of the fields is that of their end: `give` tells the owner that `work` is gone.
    work: Option<Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>>,
    cancel: Arc<Cancel>,
    give: mpsc::Sender<Result<T>>,
}

impl<T> Future for Lent<'_, T> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.cancel.waker.register(context.waker());
        let Some(work) = &mut self.work else {
            return Poll::Ready(());
        };
        match work.as_mut().poll(context) {
            Poll::Ready(done) => {
                // First, for the owner goes on with the result.
                self.work = None;
                let _ = self.give.send(done);
                Poll::Ready(())
            }
            // Acquire: synchronizes with the release store in `Cancel::ask`.
            Poll::Pending if self.cancel.asked.load(Ordering::Acquire) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// The owner's wish to have its work back.
#[derive(Default)]
struct Cancel {
    asked: AtomicBool,
    waker: AtomicWaker,
}

impl Cancel {
    fn ask(&self) {
        // Release: synchronizes with the acquire load in `Lent::poll`.
        self.asked.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The owner's end. Dropped, it waits until the work is gone.
struct GivenBack<'a, T> {
    take: mpsc::Receiver<Result<T>>,
    cancel: &'a Cancel,
    gone: Cell<bool>,
}

impl<T> GivenBack<'_, T> {
    /// The result, if it comes within `duration`.
    fn wait(&self, duration: Duration) -> Option<Result<T>> {
        match self.take.recv_timeout(duration) {
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.gone.set(true);
                Some(Err(Error::Closed("F-Stack")))
            }
            Ok(done) => {
                self.gone.set(true);
                Some(done)
            }
        }
    }

    /// Ends the work; its result, if it was done before.
    fn cancel(&self) -> Option<Result<T>> {
        self.cancel.ask();
        let done = self.take.recv().ok();
        self.gone.set(true);
        done
    }
}

impl<T> Drop for GivenBack<'_, T> {
    fn drop(&mut self) {
        if !self.gone.get() {
            self.cancel();
        }
    }
}

//! An open connection to a server. Its futures run in a tokio runtime without a thread of its own, which runs only inside blocking calls, or on
//! the thread of a plugged-in stack, which runs each call while the caller waits.

use std::fmt::Display;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result, io_error};
use replay_link::stack::plugged::StackClient;
use replay_link::stack::{ByteStream, ServerWait, kernel};
use replay_wire::{Reply, ReplyBody, RequestBody};

use super::pipeline::{RequestPipeline, unexpected};

type Pipeline = RequestPipeline<Box<dyn ByteStream>>;

/// An open connection.
pub struct Connection {
    /// The server's incarnation, which changes with a restart.
    pub incarnation: u64,
    /// The one of the server's addresses that was reached, over the kernel's TCP.
    pub peer: Option<SocketAddr>,
    pub(super) process: u32,
    pub(super) tls: bool,
    /// Taken only when it is dropped in a forked child, which leaks the connection.
    pub(super) open: Option<(Pipeline, Driver)>,
}

impl Connection {
    fn parts(&mut self) -> (&mut Pipeline, &Driver) {
        let (pipeline, driver) = self.open.as_mut().expect("it is taken only when it is dropped");
        (pipeline, driver)
    }

    /// Its requests and replies.
    pub fn pipeline(&mut self) -> &mut Pipeline {
        self.parts().0
    }

    /// Runs `work` on the pipeline until it is done, `until` passes (then the error is `late`) or the call is interrupted.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; errors of `late` and `work`.
    pub fn run<'a, F, T>(
        &'a mut self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        work: impl FnOnce(&'a mut Pipeline) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'a,
        T: Send,
    {
        let (pipeline, driver) = self.parts();
        let server = pipeline.server.clone();
        driver.drive(wait, until, late, &server, work(pipeline))
    }

    /// The next reply, if one has arrived already.
    pub fn arrived(&mut self, wait: &Wait<'_>) -> Result<Option<Reply>> {
        let late = || Error::Internal("a wait without a deadline reached one".into());
        self.run(wait, None, late, RequestPipeline::arrived)
    }

    /// Writes queued requests for at most one slice of a wait. The next call handles errors and unwritten requests.
    pub fn try_flush(&mut self) {
        let until = system::now() + Wait::CHECK_EVERY;
        let late = || Error::Interrupted;
        if let Err(error) = self.run(&Wait::forever(), Some(until), late, RequestPipeline::flush) {
            tracing::trace!(%error, "requests are left to the next call");
        }
    }

    /// Sends one request and waits for its reply, for `grace` beyond the deadline.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the server does not answer; errors of [`RequestPipeline::call`].
    pub fn call(
        &mut self,
        grace: Duration,
        wait: &Wait<'_>,
        table: Option<&str>,
        body: RequestBody,
    ) -> Result<ReplyBody> {
        let until = wait.deadline.map(|deadline| deadline + grace);
        let server = self.pipeline().server.clone();
        let late = || no_answer(&server.peer);
        let deadline_ms = deadline_ms(wait.deadline);
        self.run(wait, until, late, |pipeline| pipeline.call(deadline_ms, table, body))
    }

    /// Sends TLS's close_notify if possible at once. Without it the server cannot tell the end from a truncation attack.
    fn close_tls(&mut self) {
        // A runtime cannot run inside another one, or while the thread ends.
        let free = tokio::runtime::Handle::try_current();
        if free.is_err_and(|error| error.is_missing_context()) {
            let now = Some(system::now());
            let late = || Error::Interrupted;
            let _ = self.run(&Wait::forever(), now, late, |pipeline| async {
                pipeline.close().await;
                Ok(())
            });
        }
    }

    /// Checks that an idle connection is still open.
    ///
    /// # Errors
    /// The reason why it is not.
    pub fn check(&mut self) -> Result<()> {
        match self.arrived(&Wait::forever())? {
            None => Ok(()),
            Some(reply) => Err(unexpected(&reply.body)),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Parent and child share the epoll set: a regular drop would remove the parent's sockets from it.
            std::mem::forget(self.open.take());
        } else if self.tls {
            self.close_tls();
        }
    }
}

/// The error for a server that does not answer in time.
pub fn no_answer(server: impl Display) -> Error {
    Error::deadline(format!("{server} did not answer"))
}

/// Milliseconds to a deadline, rounded up, for a request.
pub fn deadline_ms(deadline: Option<Instant>) -> u32 {
    let Some(deadline) = deadline else {
        return u32::MAX;
    };
    let left = deadline.saturating_duration_since(system::now());
    left.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(u32::MAX)
}

/// Runs a connection's futures.
pub enum Driver {
    /// On the calling thread.
    Runtime(ClientRuntime),
    /// On the thread of a plugged-in stack, while the calling thread waits.
    Plugged(Arc<dyn StackClient>),
}

/// A runtime whose drop does not block. A log call inside another runtime may run Python code that garbage-collects a client, and blocking
/// is not allowed there. `None` once dropped.
pub struct ClientRuntime(Option<Runtime>);

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Driver {
    /// A driver on the calling thread. It polls without sleeping if it is to `spin`.
    pub fn runtime(spin: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(io_error("starting a connection's runtime"))?;
        if spin {
            runtime.spawn(kernel::spin());
        }
        Ok(Driver::Runtime(ClientRuntime(Some(runtime))))
    }

    /// Runs `work` until it is done, `until` passes (then the error is `late`) or the call is interrupted. Polls it at
    /// least once. A long wait for `server` is logged.
    pub fn drive<T: Send>(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        server: &ServerWait,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        match self {
            Driver::Plugged(stack) => {
                let mut done = None;
                let work = Box::pin(async { done = Some(work.await) });
                stack.run(wait, until, server, work)?;
                done.unwrap_or_else(|| Err(server.explain(late())))
            }
            Driver::Runtime(ClientRuntime(None)) => Err(Error::Internal("the connection's runtime is gone".into())),
            Driver::Runtime(ClientRuntime(Some(runtime))) => {
                let mut work = pin!(work);
                let mut slices = wait.slices(until);
                loop {
                    // The interrupt check and the log may run any Python code, which may drop another connection or make a call. So they
                    // run outside the runtime.
                    let wake = slices.next_wake(system::now())?;
                    let done = runtime.block_on(async {
                        tokio::select! {
                            biased;
                            done = &mut work => Some(done),
                            () = tokio::time::sleep_until(wake.into()) => None,
                        }
                    });
                    if let Some(done) = done {
                        return done;
                    }
                    let now = system::now();
                    if until.is_some_and(|until| now >= until) {
                        return Err(server.explain(late()));
                    }
                    server.report(wait, now);
                }
            }
        }
    }
}

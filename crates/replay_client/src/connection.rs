//! An open connection to a server.

use std::fmt::Display;
use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::pipeline::{RequestPipeline, unexpected};
use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_link::stack::ByteStream;
use replay_wire::{Reply, ReplyBody, RequestBody};

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
        let late = || no_answer(server.peer());
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

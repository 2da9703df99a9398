//! A worker of an asynchronous gradient job. Its membership ends with its TCP connection. A dedicated thread sends and receives
//! datagrams.

use crate::error::{Error, Result};
use crate::worker::{JobConnection, join_worker};
use base::wait::Wait;
use gradients::{AsynchronousWorker, JoinJob, UdpTransport};
use replay_client::Client;

/// A worker of an asynchronous job. Dropping leaves the job.
pub struct GradientUpdates {
    /// The worker, which offers gradients and takes means.
    pub worker: AsynchronousWorker,
    connection: JobConnection,
}

impl GradientUpdates {
    /// Joins a job with the weights of update 0, over a new connection to the client's server. Update `last` is the last one.
    ///
    /// # Errors
    /// Errors of [`GradientWorker::join`](crate::GradientWorker::join).
    pub fn join(client: &Client, request: &JoinJob, last: u64, wait: &Wait<'_>) -> Result<Self> {
        let Some(settings) = request.asynchronous else {
            return Err(Error::config(format!(
                "the gradient job {:?} is synchronous: take part in it with join_gradients",
                request.job
            )));
        };
        let (worker, connection) = join_worker(client.dialer(), request, None, UdpTransport::to, wait)?;
        let worker = AsynchronousWorker::start(worker, request.worker, settings, last, request.deadline)?;
        Ok(GradientUpdates { worker, connection })
    }

    /// Waits for a mean to take or, with `for_gradient`, until the worker can accept a gradient. `false` at the job's deadline, or
    /// at [`Wait::deadline`] if that is sooner.
    ///
    /// # Errors
    /// [`Error::Sum`] after a failure; [`Error::Net`] after an interrupt or if the server is gone.
    pub fn wait(&self, for_gradient: bool, wait: &Wait<'_>) -> Result<bool> {
        let worker = &self.worker;
        let signalled = self.connection.watch(wait, |left, wait| worker.wait(for_gradient, left, wait))?;
        if !signalled {
            self.connection.check()?;
        }
        Ok(signalled)
    }
}

//! A worker of an asynchronous gradient job. Its membership ends with its TCP connection. A dedicated thread sends and receives
//! datagrams.

use crate::error::{Error, Result};
use crate::worker::{JobConnection, join_worker};
use base::wait::Wait;
use gradients::{AsynchronousWorker, Contributions, JoinJob, UdpTransport};
use replay_client::Client;
#[cfg(doc)]
use replay_link::error::Error as NetError;

/// A worker of an asynchronous job. Dropping leaves the job.
pub struct GradientUpdates {
    worker: AsynchronousWorker,
    /// Number of values in a gradient.
    values: usize,
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
        Ok(GradientUpdates {
            worker: AsynchronousWorker::start(worker, request, 0, last, request.deadline)?,
            values: settings.values as usize,
            connection,
        })
    }

    /// Last update taken, or restarted from.
    pub fn index(&self) -> u64 {
        self.worker.index()
    }

    /// Counts of its gradients.
    pub fn contributions(&self) -> Contributions {
        self.worker.contributions()
    }

    /// Contributes a gradient of the weights of update `index`; `false` while the worker is busy with the previous one.
    ///
    /// # Errors
    /// [`NetError::Config`] for a gradient of another length, or an index beyond the last update taken.
    pub fn offer(&self, gradient: &[f32], index: u64) -> Result<bool> {
        self.check_length(gradient.len())?;
        let newest = self.index();
        if index > newest {
            return Err(Error::config(format!("index {index} is no update taken so far: the last one is {newest}")));
        }
        Ok(self.worker.offer(gradient, index))
    }

    /// Copies the mean of the next update and returns that update's number; `None` while it is not complete.
    ///
    /// # Errors
    /// [`Error::Sum`] after a failure, [`NetError::Config`] for a slice of another length.
    pub fn take(&self, into: &mut [f32]) -> Result<Option<u64>> {
        self.check_length(into.len())?;
        Ok(self.worker.take(into)?)
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

    /// Continues from the weights of update `index`. A gradient in progress is dropped.
    pub fn restart(&self, index: u64) {
        self.worker.restart(index);
    }

    fn check_length(&self, length: usize) -> Result<()> {
        if length == self.values {
            return Ok(());
        }
        Err(Error::config(format!("{length} values, but the job's gradients have {}", self.values)))
    }
}

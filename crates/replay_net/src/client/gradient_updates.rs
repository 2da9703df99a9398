//! A worker of an asynchronous gradient job: its place is its connection's, and a thread of its own sends and receives.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer};
use super::gradients::{Entry, enter};
use crate::stack::Address;
use gradients::{Contributions, JoinJob, UdpUpdates, UdpWorker};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// A worker's place in an asynchronous job, from [`Client::follow_gradients`](super::Client::follow_gradients). Dropped, it leaves.
pub struct GradientUpdates {
    updates: UdpUpdates,
    /// Values of a gradient.
    values: usize,
    /// Its end is the worker's.
    connection: Mutex<Connection>,
    server: Address,
    deadline: Duration,
}

impl GradientUpdates {
    /// Takes part in a job, with the weights of update 0, until update `last`.
    ///
    /// # Errors
    /// Those of [`Client::follow_gradients`](super::Client::follow_gradients).
    pub fn join(dialer: &Dialer, request: &JoinJob, last: u64, wait: &Wait<'_>) -> Result<Self> {
        let Some(terms) = request.asynchronous else {
            return Err(Error::Config(format!(
                "the gradient job {:?} is synchronous: join_gradients takes part in it",
                request.job
            )));
        };
        let Entry { place, asked, left } = enter(dialer, request, wait)?;
        let worker = UdpWorker::new(place.aggregator, &asked, &place.ticket, left, wait)?;
        Ok(GradientUpdates {
            updates: UdpUpdates::start(worker, &asked, 0, last, request.deadline)?,
            values: terms.values as usize,
            connection: Mutex::new(place.connection),
            server: dialer.address.clone(),
            deadline: request.deadline,
        })
    }

    /// The update that was taken last, or restarted from.
    pub fn index(&self) -> u64 {
        self.updates.index()
    }

    /// What became of the gradients.
    pub fn contributions(&self) -> Contributions {
        self.updates.contributions()
    }

    /// Contributes a gradient of the weights of update `index`; `false` while the one before is on its way.
    ///
    /// # Errors
    /// [`Error::Config`] for a gradient of another length, or of an update to come.
    pub fn offer(&self, gradient: &[f32], index: u64) -> Result<bool> {
        self.check_length(gradient.len())?;
        let newest = self.index();
        if index > newest {
            return Err(Error::Config(format!(
                "a gradient of the weights of update {index}, but the last one taken is {newest}"
            )));
        }
        Ok(self.updates.offer(gradient, index))
    }

    /// Copies the mean of the next update, if it is there, and returns that update's number.
    ///
    /// # Errors
    /// [`Error::Gradients`] once nothing goes on, [`Error::Config`] for room of another length.
    pub fn take(&self, into: &mut [f32]) -> Result<Option<u64>> {
        self.check_length(into.len())?;
        Ok(self.updates.take(into)?)
    }

    /// Waits until there is a mean to take, or room for a gradient where that is waited `for_room`; `false` where it did not come to that
    /// before the job's deadline, or [`Wait::deadline`] where that is sooner.
    ///
    /// # Errors
    /// [`Error::Gradients`] once nothing goes on; [`Error::Disconnected`] when the server has gone; [`Error::Interrupted`].
    pub fn wait(&self, for_room: bool, wait: &Wait<'_>) -> Result<bool> {
        let mut until = Instant::now() + self.deadline;
        until = wait.deadline.map_or(until, |deadline| deadline.min(until));
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self
                .updates
                .wait(for_room, left.min(Wait::CHECK_EVERY), wait)?
            {
                return Ok(true);
            }
            self.check_server()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Goes on from the weights of update `index`. A gradient under way is dropped.
    pub fn restart(&self, index: u64) {
        self.updates.restart(index);
    }

    fn check_length(&self, length: usize) -> Result<()> {
        if length == self.values {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{length} values, but the job's gradients have {}",
            self.values
        )))
    }

    fn check_server(&self) -> Result<()> {
        let mut connection = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if connection.is_alive() {
            return Ok(());
        }
        Err(Error::Disconnected {
            address: self.server.to_string(),
            reason: "it ended while gradients were summed; join again when the server is back"
                .into(),
        })
    }
}

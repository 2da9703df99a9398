//! Connections across calls: idle ones are kept for the next call, broken ones are replaced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer};
use super::pipeline::is_broken;
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// Retries after a broken connection: at once, then after pauses that double up to a second.
pub struct Retry<'a> {
    wait: &'a Wait<'a>,
    until: Instant,
    pause: Duration,
}

impl<'a> Retry<'a> {
    /// Retries until the caller's deadline or for [`ConnectOptions::reconnect_for`](super::ConnectOptions), whichever ends
    /// first.
    pub fn new(dialer: &Dialer, wait: &'a Wait<'a>) -> Self {
        let until = Instant::now() + dialer.options.reconnect_for;
        Retry {
            wait,
            until: wait.deadline.map_or(until, |d| until.min(d)),
            pause: Duration::ZERO,
        }
    }

    /// Returns when the next try is due after `error`.
    ///
    /// # Errors
    /// `error` itself when a new connection would not help or the time is up; [`Error::Interrupted`].
    pub fn after(&mut self, error: Error) -> Result<()> {
        let next = Instant::now() + self.pause;
        if !is_broken(&error) || next >= self.until {
            return Err(error);
        }
        tracing::debug!(%error, pause = ?self.pause, "connecting again");
        self.wait.check()?;
        let mut slices = self.wait.slices(Some(next));
        loop {
            let now = Instant::now();
            if now >= next {
                break;
            }
            std::thread::sleep(slices.next_wake(now)?.saturating_duration_since(now));
        }
        self.pause = (2 * self.pause).clamp(Duration::from_millis(20), Duration::from_secs(1));
        Ok(())
    }
}

/// Idle connections for the next blocking calls.
#[derive(Default)]
pub struct ConnectionPool(Mutex<Vec<Connection>>);

impl ConnectionPool {
    /// Idle connections that are kept; more are closed.
    const MAX_IDLE: usize = 8;

    /// An idle connection, or a new one.
    ///
    /// # Errors
    /// Errors of [`Dialer::dial`].
    pub fn take(&self, dialer: &Arc<Dialer>, wait: &Wait<'_>) -> Result<Connection> {
        dialer.check_process()?;
        loop {
            let idle = self.lock().pop();
            let Some(mut connection) = idle else {
                return dialer.dial(wait);
            };
            if connection.is_alive() {
                return Ok(connection);
            }
        }
    }

    /// Keeps a connection for the next call.
    pub fn give(&self, connection: Connection) {
        let mut idle = self.lock();
        if idle.len() < Self::MAX_IDLE {
            idle.push(connection);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

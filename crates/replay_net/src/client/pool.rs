//! Connections across calls: idle ones are kept for the next call, broken ones are replaced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer};
use super::pipeline::is_broken;
use replay_core::error::Result;
use replay_core::replay::Wait;

/// Calls `attempt` again after a broken connection: at once, then after pauses that double up to a second, until the caller's
/// deadline or for [`ConnectOptions::reconnect_for`](super::ConnectOptions), whichever ends first.
///
/// # Errors
/// Error of the last attempt or of an interrupt.
pub fn retry<T>(
    dialer: &Dialer,
    wait: &Wait<'_>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let until = Instant::now() + dialer.options.reconnect_for;
    let until = wait.deadline.map_or(until, |d| until.min(d));
    let mut pause = Duration::ZERO;
    loop {
        let error = match attempt() {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let next = Instant::now() + pause;
        if !is_broken(&error) || next >= until {
            return Err(error);
        }
        tracing::debug!(%error, ?pause, "connecting again");
        wait.check()?;
        let mut slices = wait.slices(Some(next));
        loop {
            let now = Instant::now();
            if now >= next {
                break;
            }
            std::thread::sleep(slices.next_wake(now)?.saturating_duration_since(now));
        }
        pause = (2 * pause).clamp(Duration::from_millis(20), Duration::from_secs(1));
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

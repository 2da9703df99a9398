//! Connections across calls: idle ones are kept for the next call, broken ones are replaced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer};
use super::pipeline::{is_broken, is_closed};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// Calls `attempt` again after a broken connection: at once, then after pauses that double up to a second, until the caller's
/// deadline or [`ConnectOptions::reconnect_for`](super::ConnectOptions) after the break, whichever is first. After the first
/// pause the log names the server. A server that was closed for good is not waited for.
///
/// # Errors
/// Error of the last attempt or of an interrupt.
pub fn retry<T>(dialer: &Dialer, wait: &Wait<'_>, attempt: impl FnMut() -> Result<T>) -> Result<T> {
    retry_since(&mut None, dialer, wait, attempt)
}

/// [`retry`] for the calls of one channel: `broken_since` is the time of the break, which an earlier call may have met.
///
/// # Errors
/// Errors of [`retry`].
pub fn retry_since<T>(
    broken_since: &mut Option<Instant>,
    dialer: &Dialer,
    wait: &Wait<'_>,
    attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let longest = dialer.options.reconnect_for;
    retry_for(longest, is_broken, broken_since, dialer, wait, attempt)
}

/// [`retry_since`] for `longest`, after errors that `helps` accepts.
///
/// # Errors
/// Errors of [`retry`].
pub fn retry_for<T>(
    longest: Duration,
    helps: impl Fn(&Error) -> bool,
    broken_since: &mut Option<Instant>,
    dialer: &Dialer,
    wait: &Wait<'_>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut pause = Duration::ZERO;
    loop {
        let (begun, connections) = (Instant::now(), dialer.outage.connections());
        let error = match attempt() {
            Ok(done) => {
                *broken_since = None;
                return Ok(done);
            }
            Err(error) => error,
        };
        if is_closed(&error) {
            dialer.outage.close();
        }
        let now = Instant::now();
        // A new connection that held for longer than the pause ends one outage, and its break begins the next. One that breaks
        // sooner, again and again, does not.
        let held = dialer.outage.connections() != connections && now - begun > pause;
        if held || !helps(&error) {
            *broken_since = None;
        }
        if !helps(&error) {
            return Err(error);
        }
        let next = now + pause;
        let until = broken_since.get_or_insert(now).checked_add(longest);
        let until = [until, wait.deadline].into_iter().flatten().min();
        if until.is_some_and(|until| next >= until) {
            return Err(error);
        }
        dialer.outage.check(&dialer.address)?;
        if !pause.is_zero() {
            dialer.outage.begin(&error, longest);
        }
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
            match connection.check() {
                Ok(()) => {
                    dialer.outage.used();
                    return Ok(connection);
                }
                Err(error) if is_closed(&error) => dialer.outage.close(),
                Err(_) => {}
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

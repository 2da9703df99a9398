//! What a client knows of a server that does not answer: since when, and whether it was closed for good.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::stack::Address;
use replay_core::error::{Error, ErrorCode, Result};

/// Absence of a server, shared by all calls of a client, so that the log names it once.
#[derive(Default)]
pub struct Outage(Mutex<OutageState>);

#[derive(Default)]
struct OutageState {
    /// Time of the log line.
    since: Option<Instant>,
    /// Connections opened so far.
    connections: u64,
    closed: bool,
}

impl Outage {
    /// Logs `error`, unless the log names this outage already. `longest` is the time for which the call tries again.
    pub fn begin(&self, error: &Error, longest: Duration) {
        let mut state = self.lock();
        if state.since.is_some() {
            return;
        }
        state.since = Some(Instant::now());
        // Logging may wait for Python's interpreter lock, whose holder may be in `begin`.
        drop(state);
        tracing::warn!("waiting up to {longest:?} for a server: {error}");
    }

    /// The server was closed for good.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// A connection is open.
    pub fn end(&self, address: &Address) {
        let mut state = self.lock();
        let since = state.since.take();
        state.connections += 1;
        state.closed = false;
        drop(state);
        if let Some(since) = since {
            let seconds = since.elapsed().as_secs();
            tracing::warn!("{address} answers again after {seconds} s");
        }
    }

    /// Connections opened so far, by all calls.
    pub fn connections(&self) -> u64 {
        self.lock().connections
    }

    /// # Errors
    /// [`ErrorCode::Closed`] for a server that was closed for good.
    pub fn check(&self, address: &Address) -> Result<()> {
        match self.lock().closed {
            true => Err(Error::Remote {
                code: ErrorCode::Closed,
                message: format!("the server at {address} is closed"),
            }),
            false => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

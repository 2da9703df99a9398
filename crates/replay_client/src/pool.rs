//! Idle connections, for later calls.

use std::sync::{Arc, Mutex};

use super::connection::Connection;
use super::dialer::Dialer;
use super::pipeline::is_closed;
use base::sync::lock;
use base::wait::Wait;
use replay_link::error::Result;

/// Idle connections for later calls.
#[derive(Default)]
pub struct ConnectionPool(Mutex<Vec<Connection>>);

impl ConnectionPool {
    /// Limit of idle connections; further ones are closed.
    const MAX_IDLE: usize = 8;

    /// An idle connection, or a new one.
    pub fn take(&self, dialer: &Arc<Dialer>, wait: &Wait<'_>) -> Result<Connection> {
        dialer.check_process()?;
        loop {
            let idle = lock(&self.0).pop();
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
        let mut idle = lock(&self.0);
        if idle.len() < Self::MAX_IDLE {
            idle.push(connection);
        }
    }
}

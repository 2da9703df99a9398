//! Client of a server's extension, with a connection of its own.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;

use super::connection::{Connection, deadline_ms};
use super::dialer::Dialer;
use super::outage::first_connection;
use super::pipeline::unexpected;
use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_wire::{Extension, ReplyBody, RequestBody};

/// A client. Dropping closes its connection.
pub struct ExtensionClient {
    connection: Connection,
    extension: &'static str,
    server: Address,
}

impl ExtensionClient {
    /// Connects, at most until `until`.
    pub fn open(dialer: &Dialer, extension: &'static str, until: Instant, wait: &Wait<'_>) -> Result<Self> {
        Ok(ExtensionClient {
            connection: first_connection(dialer, &dialer.options, Some(until), wait)?,
            extension,
            server: dialer.address.clone(),
        })
    }

    /// The one of the server's addresses that was reached; `None` for a Unix socket.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.connection.peer
    }

    /// Sends a message and waits for its answer until `until`; the server gives up at `due`.
    ///
    /// # Errors
    /// `late` without an answer; the server's error.
    pub fn call(
        &mut self,
        message: &Bytes,
        due: Instant,
        until: Instant,
        wait: &Wait<'_>,
        late: impl FnOnce() -> Error,
    ) -> Result<Bytes> {
        let request = Extension { name: self.extension.to_owned(), message: message.clone() };
        let request = RequestBody::CallExtension(request);
        let deadline_ms = deadline_ms(Some(due));
        let reply = self.connection.run(wait, Some(until), late, |link| link.call(deadline_ms, None, request));
        match reply? {
            ReplyBody::Extension(answer) if answer.name == self.extension => Ok(answer.message),
            other => Err(unexpected(&other)),
        }
    }

    /// Checks that the connection is still open.
    ///
    /// # Errors
    /// The reason of its end.
    pub fn check(&mut self) -> Result<()> {
        self.connection.check()
    }

    /// Waits for the end of the connection, and returns its reason.
    pub fn ended(&mut self, wait: &Wait<'_>) -> String {
        let late = || Error::Interrupted;
        let end = self.connection.run(wait, None, late, |link| link.reply());
        match end {
            Ok(reply) => {
                format!("it sent {} without a request; install the same release at both ends", reply.body.name())
            }
            Err(error) => error.to_string(),
        }
    }

    /// Closes the connection, and waits until the server has closed the connection.
    ///
    /// # Errors
    /// [`Error::Deadline`] at `until`, [`Error::Interrupted`]: the server still closes the connection.
    pub fn end(mut self, until: Instant, wait: &Wait<'_>) -> Result<()> {
        let server = &self.server;
        let late = || Error::deadline(format!("{server} did not end the connection"));
        let ended = self.connection.run(wait, Some(until), late, |link| link.finish());
        match ended {
            Err(error @ (Error::Deadline { .. } | Error::Interrupted)) => Err(error),
            // A broken connection has ended, too.
            _ => Ok(()),
        }
    }
}

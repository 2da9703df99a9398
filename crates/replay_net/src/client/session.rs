//! A session with an extension of a server: a connection of its own, whose end is the session's.

use std::time::Instant;

use bytes::Bytes;

use super::connection::{Connection, Dialer, deadline_ms};
use super::establish::first_connection;
use super::pipeline::{expect_reply, is_renewal};
use crate::error::{Error, Result};
use crate::stack::Address;
use base::wait::Wait;
use replay_wire::{Extension, ReplyBody};

/// A session. Dropped, it ends.
pub struct ExtensionSession {
    connection: Connection,
    extension: &'static str,
    server: Address,
}

impl ExtensionSession {
    /// Connects, at most until `until`.
    ///
    /// # Errors
    /// Errors of [`Client::connect`](super::Client::connect).
    pub fn open(
        dialer: &Dialer,
        extension: &'static str,
        until: Instant,
        wait: &Wait<'_>,
    ) -> Result<Self> {
        Ok(ExtensionSession {
            connection: first_connection(dialer, Some(until), wait)?,
            extension,
            server: dialer.address.clone(),
        })
    }

    /// Sends a message and waits for its answer until `until`; the server gives up at `due`.
    ///
    /// # Errors
    /// `late` without an answer, and the server's.
    pub fn call(
        &mut self,
        message: &Bytes,
        due: Instant,
        until: Instant,
        wait: &Wait<'_>,
        late: impl Fn() -> Error,
    ) -> Result<Bytes> {
        let mut ask = || {
            let request = Extension {
                name: self.extension.to_owned(),
                message: message.clone(),
            };
            let deadline_ms = deadline_ms(Some(due));
            self.connection.run(wait, Some(until), &late, |link| {
                link.call(deadline_ms, request.into())
            })
        };
        let mut reply = ask();
        while reply.as_ref().is_err_and(is_renewal) {
            reply = ask();
        }
        expect_reply!(reply?, ReplyBody::Extension(answer) => answer.message)
    }

    /// Checks that the session goes on.
    ///
    /// # Errors
    /// The reason of its end.
    pub fn check(&mut self) -> Result<()> {
        self.connection.check()
    }

    /// Waits for the end of the session, and returns its reason.
    pub fn ended(&mut self, wait: &Wait<'_>) -> String {
        let late = || Error::Interrupted;
        let end = self.connection.run(wait, None, late, |link| link.reply());
        match end {
            Ok(reply) => format!(
                "it sent {} without a request; install the same release on both servers",
                reply.body.name()
            ),
            Err(error) => error.to_string(),
        }
    }

    /// Ends the session, and returns when the server knows it.
    ///
    /// # Errors
    /// [`Error::Deadline`] at `until`, [`Error::Interrupted`]: the server will know it soon.
    pub fn end(mut self, until: Instant, wait: &Wait<'_>) -> Result<()> {
        let server = &self.server;
        let late = || Error::deadline(format!("{server} did not end the connection"));
        let ended = self
            .connection
            .run(wait, Some(until), late, |link| link.finish());
        match ended {
            Err(error @ (Error::Deadline { .. } | Error::Interrupted)) => Err(error),
            // A broken connection has ended, too.
            _ => Ok(()),
        }
    }
}

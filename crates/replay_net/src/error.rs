//! The error of servers and clients: of connections, and of everything below.

use std::io;
use std::path::PathBuf;

use base::error::{OsError, TooLarge};
use base::wait::Interrupted;
use replay_wire::ErrorCode;

/// An error of a server or a client. What they share with the memory is one variant, wherever it comes from.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields whose names say it have none")]
pub enum Error {
    /// An error of the memory.
    #[error(transparent)]
    Memory(replay_core::Error),
    /// An error of the protocol.
    #[error(transparent)]
    Wire(replay_wire::Error),
    /// A sum of gradients, or a control of its job, came to nothing.
    #[error("gradients: {0}")]
    Gradients(gradients::Error),
    /// A fault of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
    /// An invalid configuration or argument.
    #[error("{0}")]
    Config(String),
    /// A size over a limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// An error of the operating system.
    #[error(transparent)]
    Io(#[from] OsError),
    /// A deadline that passed.
    #[error("{DEADLINE_PASSED}{waited_for}")]
    Deadline {
        /// Condition that the call waited for, and its distance from it.
        waited_for: String,
    },
    /// A signal during a wait.
    #[error("interrupted")]
    Interrupted,
    /// A closed server, client or writer.
    #[error("{0} is closed")]
    Closed(&'static str),
    /// A file that is not a snapshot of this release, or damaged.
    #[error("the snapshot {} cannot be used: {reason}; nothing was restored", path.display())]
    Snapshot { path: PathBuf, reason: String },
    /// A request that waits longer than a server holds it. Clients send it again.
    #[error(
        "{waited_for}; the server holds a request for {held_ms} ms (max_wait_ms): send it again"
    )]
    Renew {
        held_ms: u64,
        /// Condition that the request waited for.
        waited_for: String,
    },
    /// An address without a server.
    #[error("cannot connect to {address}: {source}; is `innet-replay serve` running there?")]
    Connect { address: String, source: io::Error },
    /// A server at its limit of connections. Clients try again.
    #[error("the server takes no other connection now: {0}")]
    Busy(String),
    /// A broken connection.
    #[error("the connection to {address} broke: {reason}")]
    Disconnected {
        address: String,
        /// The cause as far as it is known.
        reason: String,
    },
    /// An error reply of a server.
    #[error("{message}")]
    Remote {
        code: ErrorCode,
        /// The server's message, complete.
        message: String,
    },
}

/// Start of every message of [`Error::Deadline`].
const DEADLINE_PASSED: &str = "the deadline passed: ";

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Kind of the error, as it crosses the wire.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Memory(error) => error.into(),
            Error::Wire(error) => error.code(),
            Error::Gradients(_) => ErrorCode::Gradients,
            Error::Internal(_) => ErrorCode::Internal,
            Error::Config(_) => ErrorCode::Config,
            Error::TooLarge(_) => ErrorCode::TooLarge,
            Error::Io(_) => ErrorCode::Io,
            Error::Deadline { .. } => ErrorCode::Deadline,
            Error::Interrupted => ErrorCode::Interrupted,
            Error::Closed(_) => ErrorCode::Closed,
            Error::Snapshot { .. } => ErrorCode::Corrupt,
            Error::Renew { .. } => ErrorCode::Renew,
            Error::Connect { .. } | Error::Busy(_) => ErrorCode::Connect,
            Error::Disconnected { .. } => ErrorCode::Disconnected,
            Error::Remote { code, .. } => *code,
        }
    }

    /// A peer that breaks the protocol.
    pub(crate) fn protocol(reason: impl Into<String>) -> Self {
        Error::Wire(replay_wire::Error::Protocol(reason.into()))
    }

    /// A missing or wrong token, or a failed TLS handshake.
    pub(crate) fn authentication(reason: impl Into<String>) -> Self {
        Error::Wire(replay_wire::Error::Authentication(reason.into()))
    }

    /// Condition that a call waited for at its deadline, in this process or on a server; `None` for any other error.
    pub fn into_waited_for(self) -> Option<String> {
        match self {
            Error::Deadline { waited_for } => Some(waited_for),
            Error::Remote {
                code: ErrorCode::Deadline,
                message,
            } => Some(match message.strip_prefix(DEADLINE_PASSED) {
                Some(waited_for) => waited_for.to_owned(),
                None => message,
            }),
            _ => None,
        }
    }
}

impl From<replay_core::Error> for Error {
    fn from(error: replay_core::Error) -> Self {
        use replay_core::Error as Memory;
        match error {
            Memory::Internal(reason) => Error::Internal(reason),
            Memory::Config(reason) => Error::Config(reason),
            Memory::TooLarge(error) => Error::TooLarge(error),
            Memory::Io(error) => Error::Io(error),
            Memory::Deadline { waited_for } => Error::Deadline { waited_for },
            Memory::Interrupted => Error::Interrupted,
            Memory::Closed(what) => Error::Closed(what),
            error => Error::Memory(error),
        }
    }
}

impl From<replay_wire::Error> for Error {
    fn from(error: replay_wire::Error) -> Self {
        use replay_wire::Error as Wire;
        match error {
            Wire::Memory(error) => error.into(),
            Wire::TooLarge(error) => Error::TooLarge(error),
            Wire::Io(error) => Error::Io(error),
            error => Error::Wire(error),
        }
    }
}

impl From<gradients::Error> for Error {
    fn from(error: gradients::Error) -> Self {
        use gradients::Error as Sum;
        match error {
            Sum::Internal(reason) => Error::Internal(reason),
            Sum::Config(reason) => Error::Config(reason),
            Sum::TooLarge(error) => Error::TooLarge(error),
            Sum::Io(error) => Error::Io(error),
            Sum::Interrupted => Error::Interrupted,
            failure => Error::Gradients(failure),
        }
    }
}

impl From<Interrupted> for Error {
    fn from(Interrupted: Interrupted) -> Self {
        Error::Interrupted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_deadline_is_reported_once() {
        let deadline = |waited_for: &str| Error::Deadline {
            waited_for: waited_for.into(),
        };
        let local = deadline("more items");
        let remote = Error::Remote {
            code: local.code(),
            message: local.to_string(),
        };
        for error in [local, remote] {
            let again = deadline(&error.into_waited_for().unwrap()).to_string();
            assert_eq!(again, "the deadline passed: more items");
        }
        assert_eq!(Error::Interrupted.into_waited_for(), None);
    }
}

//! The error of servers and clients: of connections, and of everything below.

use std::io;
use std::path::PathBuf;

use base::allocation::{OutOfMemory, TooLarge};
use base::notation::shortened;
use base::system::OsError;
use base::wait::Interrupted;
use replay_core::error::WaitReason;
use replay_wire::{ErrorCode, ReplyBody};

/// An error of a server or a client. Errors that the memory also has (deadline, size, system) have one variant for both sources.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields whose names say it have none")]
pub enum Error {
    /// An error of the memory.
    #[error(transparent)]
    Memory(replay_core::Error),
    /// An error of the protocol.
    #[error(transparent)]
    Wire(replay_wire::Error),
    /// A failure of an extension, which its message names.
    #[error("{0}")]
    Extension(String),
    /// A fault of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
    /// An invalid configuration or argument.
    #[error("{0}")]
    Config(String),
    /// A size over a limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A size for which the process has no memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// An error of the operating system.
    #[error(transparent)]
    Io(#[from] OsError),
    /// A deadline that passed.
    #[error("the deadline passed: {waited_for}")]
    Deadline {
        /// Condition that the call waited for, and its distance from it.
        waited_for: Box<WaitReason>,
    },
    /// A deadline that passed at the server: its reply, after which the request is no longer in flight.
    #[error("the deadline passed: {waited_for}")]
    RemoteDeadline {
        /// Condition that the request waited for.
        waited_for: Box<WaitReason>,
    },
    /// A wait for writers while none has been connected for as long as the caller allows.
    #[error("{0}")]
    NoWriters(String),
    /// A signal during a wait.
    #[error("interrupted")]
    Interrupted,
    /// A closed server, client or writer.
    #[error("{0} is closed")]
    Closed(&'static str),
    /// A file that is damaged, or not a snapshot of this format.
    #[error("the snapshot {} cannot be used: {reason}; nothing was restored", path.display())]
    Snapshot {
        path: PathBuf,
        reason: String,
        /// Whether a later release has saved it.
        newer: bool,
    },
    /// No server listens at the address.
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
    /// Two servers of one client with the same memory. Calls wait for the right server, as after a broken connection.
    #[error(
        "{other} and {address} have the same memory: they are one server, which is to be named once, or were started from copies \
         of one snapshot; start one of them with an empty folder (--snapshot)"
    )]
    CopiedMemory { address: String, other: String },
    /// An error reply of a server.
    #[error("{message}")]
    Remote {
        code: ErrorCode,
        /// The server's message, complete.
        message: String,
    },
}

/// Longest message of an error reply in bytes; a message may quote the client's data.
const MAX_MESSAGE: usize = 4096;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Error code on the wire.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Memory(error) => error.into(),
            Error::Wire(error) => error.code(),
            Error::Extension(_) => ErrorCode::Extension,
            Error::Internal(_) => ErrorCode::Internal,
            Error::Config(_) => ErrorCode::Config,
            Error::TooLarge(_) => ErrorCode::TooLarge,
            Error::OutOfMemory(_) => ErrorCode::OutOfMemory,
            Error::Io(_) => ErrorCode::Io,
            Error::Deadline { .. } | Error::RemoteDeadline { .. } | Error::NoWriters(_) => ErrorCode::Deadline,
            Error::Interrupted => ErrorCode::Interrupted,
            Error::Closed(_) => ErrorCode::Closed,
            Error::Snapshot { .. } => ErrorCode::Corrupt,
            Error::Connect { .. } | Error::Busy(_) => ErrorCode::Connect,
            Error::Disconnected { .. } | Error::CopiedMemory { .. } => ErrorCode::Disconnected,
            Error::Remote { code, .. } => *code,
        }
    }

    /// A peer that breaks the protocol.
    pub fn protocol(reason: impl Into<String>) -> Self {
        Error::Wire(replay_wire::Error::Protocol(reason.into()))
    }

    /// A missing or wrong token, or a failed TLS handshake.
    pub fn authentication(reason: impl Into<String>) -> Self {
        Error::Wire(replay_wire::Error::Authentication(reason.into()))
    }

    /// The error of a deadline that passed during a wait for `waited_for`.
    pub fn deadline(waited_for: impl Into<WaitReason>) -> Self {
        Error::Deadline { waited_for: Box::new(waited_for.into()) }
    }

    /// Condition that a call waited for when its wait ended; `None` for an error of another cause.
    pub fn waited_for(&self) -> Option<&WaitReason> {
        match self {
            Error::Deadline { waited_for } | Error::RemoteDeadline { waited_for } => Some(waited_for),
            _ => None,
        }
    }
}

impl From<&Error> for ReplyBody {
    fn from(error: &Error) -> Self {
        let waited_for = error.waited_for();
        ReplyBody::Error {
            code: error.code(),
            message: match waited_for {
                Some(_) => String::new(),
                None => shortened(error.to_string(), MAX_MESSAGE).into_owned(),
            },
            waited_for: waited_for.cloned().map(Box::new),
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
            Memory::OutOfMemory(error) => Error::OutOfMemory(error),
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
            Wire::OutOfMemory(error) => Error::OutOfMemory(error),
            error => Error::Wire(error),
        }
    }
}

impl From<Interrupted> for Error {
    fn from(Interrupted: Interrupted) -> Self {
        Error::Interrupted
    }
}

/// Conversion of an error of the operating system; `what` names the failed operation.
pub fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    |source| OsError::of(what)(source).into()
}

/// # Errors
/// [`Error::Config`], always.
pub fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Config(reason.into()))
}

//! Errors of the protocol, and the codes by which errors cross the wire.

use base::allocation::{OutOfMemory, TooLarge};

pub use crate::innet_capnp::ErrorCode;

/// A message that cannot be read or sent, or a peer that is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields whose names say it have none")]
pub enum Error {
    /// An error of the memory.
    #[error(transparent)]
    Memory(#[from] replay_core::Error),
    /// A size over a limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A size for which the process has no memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A peer that breaks the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// A peer with another version of the protocol.
    #[error(
        "the server speaks protocol {server} (release {server_release}), this client {client} (release {client_release}); install the same release at both ends"
    )]
    Version { server: u32, server_release: String, client: u32, client_release: String },
    /// A missing or wrong token, or a failed TLS handshake.
    #[error("authentication failed: {0}")]
    Authentication(String),
    /// A request that the role of the client's token does not allow.
    #[error("a connection with the {role} token may not {request}: connect with {allowed_by}")]
    Forbidden {
        role: &'static str,
        request: &'static str,
        /// The tokens that allow it, with the server's settings for them.
        allowed_by: &'static str,
    },
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<capnp::Error> for Error {
    fn from(error: capnp::Error) -> Self {
        Error::Protocol(format!("a malformed message: {error}"))
    }
}

impl From<capnp::NotInSchema> for Error {
    fn from(error: capnp::NotInSchema) -> Self {
        Error::Protocol(format!("a message with a variant that this release does not know: {error}"))
    }
}

impl Error {
    /// Kind of the error.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Memory(error) => error.into(),
            Error::TooLarge(_) => ErrorCode::TooLarge,
            Error::OutOfMemory(_) => ErrorCode::OutOfMemory,
            Error::Protocol(_) => ErrorCode::Protocol,
            Error::Version { .. } => ErrorCode::Version,
            Error::Authentication(_) => ErrorCode::Authentication,
            Error::Forbidden { .. } => ErrorCode::Forbidden,
        }
    }
}

impl From<&replay_core::Error> for ErrorCode {
    fn from(error: &replay_core::Error) -> Self {
        use replay_core::Error;
        match error {
            Error::Internal(_) => ErrorCode::Internal,
            Error::Priority { .. } => ErrorCode::Priority,
            Error::NoMass { .. } | Error::NothingSet { .. } => ErrorCode::NoMass,
            Error::UnknownTable { .. } => ErrorCode::UnknownTable,
            Error::TableDiffers { .. } => ErrorCode::TableDiffers,
            Error::Table { .. } => ErrorCode::Table,
            Error::Schema { .. } => ErrorCode::Schema,
            Error::OutOfMemory(_) => ErrorCode::OutOfMemory,
            Error::TooLarge(_) | Error::Streams { .. } => ErrorCode::TooLarge,
            Error::Deadline { .. } => ErrorCode::Deadline,
            Error::View { .. } => ErrorCode::View,
            Error::Fenced { .. } => ErrorCode::Fenced,
            Error::Expired { .. } => ErrorCode::Expired,
            Error::Lease { .. } => ErrorCode::Lease,
            Error::Misuse(_) => ErrorCode::Protocol,
            Error::Corrupt(_) | Error::Snapshot { .. } => ErrorCode::Corrupt,
            Error::NotEmpty { .. } | Error::Config(_) => ErrorCode::Config,
            Error::Parameters { .. } => ErrorCode::Parameters,
            Error::Closed(_) => ErrorCode::Closed,
            Error::Io(_) => ErrorCode::Io,
            Error::Interrupted => ErrorCode::Interrupted,
        }
    }
}

//! The error of workers: of the server's connection, and of sums.

use replay_link::error::Error as NetError;
use replay_wire::ErrorCode;

/// Failure of a join, a sum or a control.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of the connection, or the server's answer.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A failure of sums.
    #[error("gradients: {0}")]
    Sum(gradients::Error),
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An invalid argument.
    pub(crate) fn config(reason: String) -> Self {
        Error::Net(NetError::Config(reason))
    }

    /// Error code on the wire.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Net(error) => error.code(),
            Error::Sum(_) => ErrorCode::Extension,
        }
    }
}

impl From<gradients::Error> for Error {
    fn from(error: gradients::Error) -> Self {
        use gradients::Error as Sum;
        Error::Net(match error {
            Sum::Internal(reason) => NetError::Internal(reason),
            Sum::Config(reason) => NetError::Config(reason),
            Sum::TooLarge(error) => NetError::TooLarge(error),
            Sum::OutOfMemory(error) => NetError::OutOfMemory(error),
            Sum::Io(error) => NetError::Io(error),
            Sum::Interrupted => NetError::Interrupted,
            failure => return Error::Sum(failure),
        })
    }
}

/// The answer of a server to a request that failed.
impl From<Error> for NetError {
    fn from(error: Error) -> Self {
        match error {
            Error::Net(error) => error,
            failure => NetError::Extension(failure.to_string()),
        }
    }
}

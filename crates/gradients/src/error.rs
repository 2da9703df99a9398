//! Errors of this crate.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use base::allocation::{OutOfMemory, TooLarge};
use base::system::OsError;
use base::wait::Interrupted;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a sum or a control failed, a job was refused, or a transport did not start.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Workers are missing.
    #[error(
        "{reason}; reset the job when all workers are there, or start a new job, with fewer workers or an asynchronous one"
    )]
    Missing {
        /// Numbers of the missing workers; empty if unknown.
        workers: Vec<u16>,
        /// Names of the missing workers, and the time waited.
        reason: String,
    },
    /// The aggregator does not answer.
    #[error(
        "the aggregator at {address} did not answer within {waited_ms} ms; check that it runs and that its UDP datagrams reach this machine"
    )]
    Silent {
        /// Address of the aggregator.
        address: SocketAddr,
        /// Time without an answer, in ms.
        waited_ms: u128,
    },
    /// The job is suspended.
    #[error("{0}; nothing is added up until a reset")]
    Halted(String),
    /// The job was reset in the middle of a round.
    #[error("{0}: this sum is lost; sum again, all workers together")]
    Reset(String),
    /// The worker missed a sum that the aggregator has discarded.
    #[error("this worker is too far behind: the sum of round {round} is no longer kept; pull the weights again")]
    Behind {
        /// Round of the missed sum.
        round: u64,
    },
    /// The aggregator, or its parent, refused a request.
    #[error("the aggregator refused: {0}")]
    Refused(String),
    /// An earlier sum of this worker failed.
    #[error("an earlier sum of this worker failed: reset the job, or join again")]
    Broken,
    /// Receiving failed.
    #[error("cannot receive datagrams of gradients: {0}")]
    Receive(#[source] Arc<io::Error>),
    /// The operating system refused a socket, a thread or random numbers.
    #[error(transparent)]
    Io(#[from] OsError),
    /// A job, a device or an address that cannot be used.
    #[error("{0}")]
    Config(String),
    /// A job that needs more than the aggregator may allocate.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A job that needs more memory than the process has.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A signal arrived while waiting.
    #[error("interrupted")]
    Interrupted,
    /// A fault of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

impl From<Interrupted> for Error {
    fn from(_: Interrupted) -> Self {
        Error::Interrupted
    }
}

//! Error types shared by the other crates.

use std::io;
use std::sync::Arc;

/// A size over a limit.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what} of {size} is over the limit of {limit}; {advice}")]
pub struct TooLarge {
    /// The sized thing, with its unit.
    pub what: &'static str,
    /// Its size.
    pub size: u64,
    /// The largest size allowed.
    pub limit: u64,
    /// How to get below the limit.
    pub advice: &'static str,
}

/// Checks a size (`what`, with its unit) against its limit; `advice` is how to get below it.
pub fn check_size(what: &'static str, size: u64, limit: u64, advice: &'static str) -> Result<(), TooLarge> {
    if size <= limit {
        return Ok(());
    }
    Err(TooLarge { what, size, limit, advice })
}

/// An error of the operating system.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}: {source}")]
pub struct OsError {
    /// The failed operation.
    pub what: String,
    /// The operating system's reason.
    pub source: Arc<io::Error>,
}

impl OsError {
    /// Converter of the operating system's reason, for `map_err`; `what` names the failed operation.
    pub fn of(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| OsError { what, source: source.into() }
    }
}

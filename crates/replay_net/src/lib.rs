//! Everything that touches a network: the server and the client of a replay memory, their network stacks, and the
//! commands of `innet-replay`.
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | [`stack`] | the `Stack` trait: `kernel`, and stacks that are plugged in |
//! | [`error`] | the error enum |
//! | [`framing`] | frames of `replay_wire`, read from and written to a stream |
//! | [`receive`] | memory for receive buffers within the byte limit |
//! | [`reply_budget`] | memory for replies that clients have not read |
//! | [`service`] | a request in, a reply out, without sockets |
//! | [`connection`] | one coroutine per connection |
//! | [`server`] | listeners, I/O threads, shutdown, statistics over HTTP |
//! | [`aggregators`] | gradient jobs of a server, and its parent |
//! | [`client`] | `Replay` over a connection, and a worker of a gradient job |
//! | [`tls`] | certificates and keys for rustls |
//! | [`snapshots`] | snapshots of a server's memory: restored, saved, kept |
//! | [`config`] | the server's configuration |
//! | [`process_memory`] | memory that this process may have |
//! | [`cli`] | the commands of `innet-replay` |

pub mod aggregators;
pub mod cli;
pub mod client;
pub mod config;
pub mod connection;
pub mod error;
pub mod framing;
pub mod process_memory;
pub mod receive;
pub mod reply_budget;
pub mod server;
pub mod service;
pub mod snapshots;
pub mod stack;
pub mod tls;

use crate::error::{Error, Result};
use base::error::OsError;

/// Crates whose events belong to this program, for filters of logs.
pub fn log_targets() -> impl Iterator<Item = &'static str> {
    let own = [
        "replay_net",
        "replay_wire",
        "replay_core",
        "gradients",
        "base",
    ];
    let plugged = stack::plugged::plugged_in();
    own.into_iter()
        .chain(plugged.into_iter().map(|stack| stack.log_target()))
}

/// Conversion of an error of the operating system; `what` names the failed operation.
pub fn io_error(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    |source| OsError::of(what)(source).into()
}

/// # Errors
/// [`Error::Config`], always.
pub fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Config(reason.into()))
}

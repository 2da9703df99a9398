//! Server and client of a replay memory, their network stacks, and the commands of `innet-replay`.
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | [`stack`] | the `Stack` trait: `kernel`, and stacks that are plugged in |
//! | [`error`] | the error enum |
//! | [`framing`] | frames of `replay_wire`, read from and written to a stream |
//! | [`receive`] | budget for receive buffers |
//! | [`reply_budget`] | budget for unread replies |
//! | [`service`] | a request in, a reply out, without sockets |
//! | [`command`] | requests without a result, in process and on servers |
//! | [`connection`] | one coroutine per connection |
//! | [`server`] | listeners, I/O threads, shutdown, statistics over HTTP |
//! | [`plugin`] | what other crates add: network stacks, services beside the memory |
//! | [`findings`] | what `doctor` finds |
//! | [`client`] | `Replay` over a connection, and sessions with extensions |
//! | [`tls`] | certificates and keys for rustls |
//! | [`snapshots`] | saves and restores snapshots of a server's memory |
//! | [`config`] | the server's configuration |
//! | [`process_memory`] | memory limit of this process |
//! | [`background_log`] | log lines that hold nobody up |
//! | [`cli`] | the commands of `innet-replay` |

pub mod background_log;
pub mod cli;
pub mod client;
pub mod command;
pub mod config;
pub mod connection;
pub mod error;
pub mod findings;
pub mod framing;
pub mod plugin;
pub mod process_memory;
pub mod receive;
pub mod reply_budget;
pub mod server;
pub mod service;
pub mod snapshots;
pub mod stack;
pub mod tls;

/// Crates that log at the configured level. All other crates log warnings and errors only.
pub fn log_targets() -> impl Iterator<Item = &'static str> {
    let own = ["replay_net", "replay_wire", "replay_core", "base"];
    own.into_iter().chain(plugin::plugged_in().into_iter().flat_map(|plugin| plugin.log_targets()).copied())
}

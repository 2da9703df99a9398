//! The server of a replay memory.
//!
//! | module | subject |
//! | --- | --- |
//! | [`config`] | the configuration |
//! | [`server`] | listeners, I/O threads, shutdown, statistics over HTTP |
//! | [`connection`] | one coroutine per connection |
//! | [`service`] | a request in, a reply out, without sockets |
//! | [`receive`] | budget for receive buffers |
//! | [`reply_budget`] | budget for unread replies |
//! | [`snapshots`] | saves and restores snapshots of the memory |
//! | [`plugin`] | what other crates add: network stacks, and extensions beside the memory; what checks of the machine find |
//! | [`process_memory`] | memory limit of this process |

pub mod config;
pub mod connection;
pub mod plugin;
pub mod process_memory;
pub mod receive;
pub mod reply_budget;
pub mod server;
pub mod service;
pub mod snapshots;

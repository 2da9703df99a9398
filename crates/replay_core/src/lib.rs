//! Prioritized replay, parameters and gradients as a service, in process or in the network.
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | [`error`] | the one error enum and the codes that cross the wire |
//! | [`schema`] | columns and the configuration of a table |
//! | [`replay`] | requests, replies and the `Replay` trait |
//! | [`wait`] | deadlines and interrupts of blocking calls |
//! | [`sync`] | atomics, from std or from loom |
//! | [`sum_tree`] | lock-free prioritized draws and updates |
//! | [`power`] | powers of many numbers |
//! | [`priority_index`] | a sum tree for who keeps the items: indexes and priorities |
//! | [`huge_pages`] | fewer page-table walks for large memory |
//! | [`slab`] | chunks that can be pinned against eviction |
//! | [`difference`] | what changed from one value to another |
//! | [`chunk`] | the packed steps of one stream, checked at the door |
//! | [`table`] | streams, items, eviction, draws of one table |
//! | [`budget`] | the byte limit that tables, parameters and receive buffers share |
//! | [`limiter`] | samples per insert |
//! | [`parameters`] | the versioned parameter store |
//! | [`memory`] | all tables and parameters of a process, and their byte limit |
//! | [`snapshot`] | all tables in a file, and back |
//! | [`local`] | the `Replay` of this process |
//! | [`window`] | which windows a stream of steps completes, and their priorities at birth |
//! | [`writer`] | packs steps into chunks and items |
//! | [`view`] | arrays from drawn windows: `NStep`, `Sequence`, raw |

pub mod budget;
pub mod chunk;
pub mod difference;
pub mod error;
pub mod huge_pages;
pub mod limiter;
pub mod local;
pub mod memory;
pub mod parameters;
pub mod power;
pub mod priority_index;
pub mod replay;
pub mod schema;
pub mod slab;
pub mod snapshot;
pub mod sum_tree;
pub mod sync;
pub mod table;
pub mod view;
pub mod wait;
pub mod window;
pub mod writer;

pub use error::{Error, ErrorCode, Result};
pub use replay::Replay;
pub use schema::TableConfig;

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
//! | [`memory_hints`] | prefetching, huge pages |
//! | [`slab`] | chunks that can be pinned against eviction |
//! | [`codec`], [`difference`] | how a value is packed: by itself, or as what changed |
//! | [`row_layout`] | where the parts of a packed row lie |
//! | [`chunk`] | the packed steps of one stream, checked |
//! | [`table`] | streams, items, eviction, draws of one table |
//! | [`budget`] | the byte limit that tables, parameters and receive buffers share |
//! | [`limiter`] | samples per insert |
//! | [`parameters`] | the versioned parameter store |
//! | [`memory`] | all tables and parameters of a process, and their byte limit |
//! | [`snapshot`] | all tables in a file, and back |
//! | [`local`] | the `Replay` of this process |
//! | [`view_spec`] | the views `NStep`, `Sequence` and `Window`: which arrays, and how wide a window they need |
//! | [`episode_windows`] | which items of a stream are complete, and their priorities at birth |
//! | [`writer`] | packs steps into chunks and items |
//! | [`importance`] | importance weights |
//! | [`view`] | the arrays of drawn windows |

pub mod budget;
pub mod chunk;
pub mod codec;
pub mod difference;
pub mod episode_windows;
pub mod error;
pub mod importance;
pub mod limiter;
pub mod local;
pub mod memory;
pub mod memory_hints;
pub mod parameters;
pub mod power;
pub mod priority_index;
pub mod replay;
pub mod row_layout;
pub mod schema;
pub mod slab;
pub mod snapshot;
pub mod sum_tree;
pub mod sync;
pub mod table;
pub mod view;
pub mod view_spec;
pub mod wait;
pub mod writer;

pub use error::{Error, ErrorCode, Result};
pub use replay::Replay;
pub use schema::TableConfig;

//! The replay memory: prioritized sampling, eviction, parameters and snapshots, in this process and without a network.
//! `examples/fill_sample_update.rs` uses it as a library.
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | | **interface** |
//! | [`schema`], `column` | the definition of a table; its columns |
//! | [`replay`] | the `Replay` trait, its requests and replies |
//! | [`error`] | the error enum; the reason of a wait |
//! | | **memory** |
//! | [`memory`] | tables and parameters of a process, and `Replay` on them |
//! | [`table`] | one table: streams, items, sampling, eviction |
//! | [`limiter`] | rate limiter: samples per insert |
//! | [`budget`] | byte limit of tables, parameters and receive buffers |
//! | [`parameters`] | versioned parameter store |
//! | [`snapshot`] | tables to bytes, and back |
//! | `snapshot_records` | the format of these bytes |
//! | | **lock-free parts** |
//! | [`sum_tree`] | prioritized sampling and updates |
//! | [`priority_index`] | prioritized sampling of indices when another buffer holds the data |
//! | [`slab`] | chunks, pinned against eviction; free slots of chunks and items |
//! | [`sync`] | atomics of std, or of loom (feature `loom`), or of shuttle (feature `shuttle`) |
//! | | **from steps to chunks** |
//! | [`writer`] | steps to chunks and items |
//! | [`episode_windows`] | complete windows of a stream, and their initial priorities |
//! | [`codec`], [`difference`] | element types; packing of a value: by itself, or as a difference |
//! | [`chunk`] | layout of a packed row; rows of one stream, checked |
//! | | **from windows to arrays** |
//! | [`view_spec`] | definitions of the views `NStep`, `Sequences`, `Trajectory` and `Window`; the parts of an observation |
//! | [`view`] | arrays of sampled windows, with importance weights |
//! | [`mix`] | one batch from several tables |
//! | [`episodes`] | all episodes of a table |
//! | | **processor** |
//! | [`processor`] | powers of many numbers, vectorised; prefetching, huge pages |

#![allow(missing_docs, reason = "a name that says it has no comment")]

pub mod budget;
pub mod chunk;
pub mod codec;
mod column;
pub mod difference;
pub mod episode_windows;
pub mod episodes;
pub mod error;
pub mod limiter;
pub mod memory;
pub mod mix;
pub mod parameters;
pub mod priority_index;
pub mod processor;
pub mod replay;
pub mod schema;
pub mod slab;
pub mod snapshot;
mod snapshot_records;
pub mod sum_tree;
pub mod sync;
pub mod table;
pub mod view;
pub mod view_spec;
pub mod writer;

pub use error::{Error, Result};
pub use replay::Replay;
pub use schema::TableConfig;

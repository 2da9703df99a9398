//! Gradient all-reduce as an extension of a replay server. Workers join a job over a connection to the server, and membership ends with
//! the connection. Gradients and sums are datagrams: see the crate `gradients`.
//!
//! | module | subject |
//! | --- | --- |
//! | [`extension`] | implementation of the server's extension interface; statistics for Prometheus |
//! | [`config`] | its settings |
//! | [`aggregators`] | a server's jobs, and its parent |
//! | `doctor` | checks of the machine for `innet-replay doctor` |
//! | [`message`] | requests to join, and their answers |
//! | [`worker`] | a worker of a job, synchronous or not |
//! | [`error`] | errors of workers |

pub mod aggregators;
pub mod config;
mod doctor;
pub mod error;
pub mod extension;
pub mod message;
pub mod worker;

pub use config::GradientsConfig;
pub use extension::plug_in;
pub use message::NAME;
pub use worker::{GradientUpdates, GradientWorker};

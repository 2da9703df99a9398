//! Gradient all-reduce as an extension of a replay server. Workers join a job over a connection to the server, and membership ends with
//! the connection. Gradients and sums are datagrams: see the crate `gradients`.
//!
//! | module | subject |
//! | --- | --- |
//! | [`extension`] | implementation of the server's extension interface |
//! | [`config`] | its settings |
//! | [`aggregators`] | a server's jobs, and its parent |
//! | `metrics` | its statistics for Prometheus |
//! | `doctor` | checks of the machine for `innet-replay doctor` |
//! | [`message`] | requests to join, and their answers |
//! | [`worker`] | a worker of a job |
//! | [`updates`] | a worker of an asynchronous job |
//! | [`error`] | errors of workers |

pub mod aggregators;
pub mod config;
mod doctor;
pub mod error;
pub mod extension;
pub mod message;
mod metrics;
pub mod updates;
pub mod worker;

pub use config::GradientsConfig;
pub use extension::plug_in;
pub use message::NAME;
pub use updates::GradientUpdates;
pub use worker::GradientWorker;

//! Sums of gradients as a service beside a replay memory: workers join a job over a connection to the server, and the connection's end is
//! the end of their membership. Gradients and sums are datagrams, see the crate `gradients`.
//!
//! | module | subject |
//! | --- | --- |
//! | [`extension`] | the service of a server, as `replay_net` calls it |
//! | [`config`] | its settings |
//! | [`aggregators`] | its jobs, and its parent |
//! | `metrics` | its statistics for Prometheus |
//! | `doctor` | parts of a machine that it needs |
//! | [`message`] | requests to join, and their answers |
//! | [`worker`] | a worker of a job |
//! | [`updates`] | a worker of an asynchronous one |
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
pub use extension::{NAME, plug_in};
pub use updates::GradientUpdates;
pub use worker::GradientWorker;

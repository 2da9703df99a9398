//! Targets for fuzzing, each a function of one input that panics on a fault. `tests/targets.rs` runs them: on the committed inputs, on
//! random ones, and with `make fuzz` on inputs that reach new branches.
//!
//! | module | inputs |
//! | --- | --- |
//! | [`allocations`] | bytes that a call allocates, for their limits |
//! | [`calls`] | requests to a server's memory, whose samples are compared with what was pushed |
//! | [`frames`] | bytes of a peer: frames, requests, replies |
//! | [`connections`] | bytes to a server, and bytes to a client |
//! | [`files`] | snapshots, parameters, addresses, configurations |
//! | [`packets`] | datagrams to an aggregator of gradients |

pub mod allocations;
pub mod calls;
pub mod connections;
pub mod files;
pub mod frames;
pub mod packets;

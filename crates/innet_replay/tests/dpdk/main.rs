//! The command on DPDK's devices: over memif, and over veth pairs by af_packet. `make dpdk-test`.

#![allow(clippy::print_stdout, reason = "what was skipped")]

mod command;
#[path = "../../../gradients/tests/dpdk/setup.rs"]
#[allow(dead_code)]
mod setup;

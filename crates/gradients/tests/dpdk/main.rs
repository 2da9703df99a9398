//! Gradients over DPDK's devices: memif within this process, and af_packet on veth pairs, whose other end is the kernel's. DPDK starts once
//! in a process and its devices are plugged in by each test, so all tests share a process.

#![allow(clippy::print_stdout, reason = "what was skipped")]

mod memif;
mod refusals;
mod setup;
mod switch;
mod veth;

//! Shared utilities without I/O of their own, at the bottom of the workspace's dependency graph.
//!
//! | module | subject |
//! | --- | --- |
//! | [`allocation`] | limits of sizes; fallible allocations, compared with the memory that the process may have |
//! | [`wait`] | locks; deadlines, interrupts and log lines of blocking calls |
//! | [`fork`] | sockets and locked files that forked children do not keep |
//! | [`system`] | time, pauses, threads, random bytes and errors of the machine, or of a simulated world |
//! | [`planted`](mod@planted) | mistakes that tests plant |
//! | [`notation`] | values in messages, in the notation of Python and TOML |
//! | [`histogram`] | histograms for statistics |

pub mod allocation;
pub mod fork;
pub mod histogram;
pub mod notation;
pub mod planted;
pub mod system;
pub mod wait;

//! Sums of gradients by the command: real processes, TCP and UDP.

mod access;
mod bounds;
mod faults;
mod hierarchy;
mod sums;
mod support;

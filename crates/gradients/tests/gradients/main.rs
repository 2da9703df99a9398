//! Gradient sums over a network in memory, with a clock of the test's own.

mod asynchronous;
mod control;
mod faults;
mod hierarchy;
mod network;
mod racks;
mod sums;
mod udp;

//! The server: its suite on a simulated network and over the kernel's sockets (`suite`, which `stack_fstack` runs over
//! F-Stack), what only a simulated network shows (`simulated`), every kind of kernel socket with the client that users
//! have (`kernel`), its connections that break, wait and come in a burst (`connecting`), and as a command (`command`); numbers of
//! its configuration (`bounds`).

mod bounds;
mod command;
mod connecting;
mod extension;
mod kernel;
mod relay;
mod simulated;
mod suite;
#[path = "../support/mod.rs"]
mod support;

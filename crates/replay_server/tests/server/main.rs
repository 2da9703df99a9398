//! The server: its suite on a simulated network and over the kernel's sockets (`suite`, which `innet_replay` runs over
//! F-Stack), what only a simulated network shows (`simulated`), every kind of kernel socket with the client that users
//! have (`kernel`), its connections that break, wait and come in a burst (`connecting`); numbers of its configuration (`bounds`).

mod bounds;
mod connecting;
mod extension;
mod kernel;
mod relay;
mod simulated;
mod suite;
#[path = "../support/mod.rs"]
mod support;

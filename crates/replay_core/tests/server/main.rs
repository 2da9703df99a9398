//! The server: over the simulated network with a clock of its own (`protocol`, `room`, `handshake`,
//! `faults`, `shutdown`), over kernel sockets (`kernel`), and as a command (`command`).

mod command;
mod faults;
mod handshake;
mod kernel;
mod protocol;
mod room;
mod shutdown;
mod support;

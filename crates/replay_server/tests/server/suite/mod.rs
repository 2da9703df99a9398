//! What a server does on any network: requests, handshakes, broken connections, room, its end. Each test runs on the
//! simulated network and over the kernel's sockets here, and over F-Stack from `tests/fstack` of `stack_fstack`.

mod client;
mod fairness;
mod faults;
mod handshake;
mod messages;
mod protocol;
mod receive_budget;
mod replies;
mod roles;
mod shutdown;
mod slow_readers;
pub mod world;

pub use client::{CLOGGABLE, CLOGGING, LARGE, TestClient, transcript};
pub use messages::*;
pub use world::{World, config};

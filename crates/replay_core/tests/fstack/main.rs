//! Client and server over F-Stack. `links` runs the other modules in child processes, for F-Stack starts once in a
//! process: the suites of the client, which know whose TCP is between both ends from their environment, and the tests
//! of this folder, which are ignored elsewhere.
//!
//! | link | F-Stack | the other end |
//! | --- | --- | --- |
//! | veth by af_packet | serves | the kernel |
//! | veth by af_packet | dials | the kernel |
//! | memif | dials | F-Stack, in `innet-replay serve` |

#![allow(
    clippy::print_stdout,
    reason = "what was skipped, and what a link came to"
)]
#![allow(
    clippy::duplicate_mod,
    reason = "the suites of the client are tests by themselves, too"
)]

#[path = "../client.rs"]
mod client;
#[path = "../client_faults.rs"]
mod client_faults;
mod command;
mod links;
mod memif;
mod setup;
#[path = "../support/mod.rs"]
mod support;
mod traffic;
mod wire;
#[allow(dead_code, reason = "what the tests of the server need beside it")]
#[path = "../server/support.rs"]
mod wire_client;

//! Client and server over F-Stack. `links` runs the other modules in child processes, for F-Stack starts once in a
//! process: the suites of client and server, which know whose TCP is between both ends from their environment, and the
//! tests of this folder, which are ignored elsewhere.
//!
//! | link | F-Stack | the other end | suites |
//! | --- | --- | --- | --- |
//! | veth by af_packet | serves | the kernel | the server's, the client's, much at a time |
//! | veth by af_packet | dials | the kernel | the client's, much at a time |
//! | veth by AF_XDP | serves | the kernel | the server's, the client's calls, much at a time |
//! | memif | dials | F-Stack, in `innet-replay serve` | of its own |

#![allow(clippy::print_stdout, reason = "what was skipped, and what a link came to")]
#![allow(clippy::duplicate_mod, reason = "the suites of client and server are tests by themselves, too")]

#[path = "../../../replay_server/tests/client.rs"]
mod client;
#[path = "../../../replay_server/tests/client_faults.rs"]
mod client_faults;
mod command;
mod links;
mod memif;
#[path = "../../../replay_server/tests/server/suite/mod.rs"]
mod server;
mod setup;
#[path = "../../../replay_server/tests/support/mod.rs"]
mod support;
mod traffic;

/// Plugs F-Stack in before any test, whichever of them reads an address first.
extern "C" fn plug_in() {
    stack_fstack::plug_in();
}

// SAFETY: the loader calls the functions of this section once, before `main`. This one takes no arguments, and needs only memory
// and a lock, which need no preparation.
#[used]
#[unsafe(link_section = ".init_array")]
static PLUG_IN: extern "C" fn() = plug_in;

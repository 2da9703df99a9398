//! The command `innet-replay`: the replay server with all extensions and network stacks. The Python module registers the same ones.

use std::ffi::OsString;

pub use stack_fstack::release as fstack_release;

/// Plugs in what the memory's server does not know itself, before addresses and settings are read.
pub fn plug_in() {
    stack_fstack::plug_in();
    gradients_net::plug_in();
}

/// [`replay_net::cli::run`] with everything plugged in.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    plug_in();
    replay_net::process_memory::guard_allocations();
    replay_net::process_memory::spare_addresses();
    replay_net::cli::run(arguments)
}

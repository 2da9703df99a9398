//! The command `innet-replay`: command line, log, and the list of what is plugged into the server. The Python module plugs the same in.

pub mod cli;
pub mod log;

use std::ffi::OsString;

pub use stack_fstack::release as fstack_release;

/// Plugs in what the memory's server does not know itself, before addresses and settings are read.
pub fn plug_in() {
    stack_fstack::plug_in();
    gradients_net::plug_in();
}

/// Crates that log at the configured level. All other crates log warnings and errors only.
pub fn log_targets() -> impl Iterator<Item = &'static str> {
    let own = ["innet_replay", "replay_server", "replay_client", "replay_link", "replay_wire", "replay_core", "base"];
    let plugins = replay_server::plugin::plugged_in().into_iter();
    own.into_iter().chain(plugins.flat_map(|plugin| plugin.log_targets()).copied())
}

/// [`cli::run`] with everything plugged in.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    plug_in();
    replay_server::process_memory::guard_allocations();
    replay_server::process_memory::spare_addresses();
    cli::run(arguments)
}

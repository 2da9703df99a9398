//! The commands of `innet-replay` with F-Stack alone plugged in.

use std::process::ExitCode;

fn main() -> ExitCode {
    stack_fstack::plug_in();
    ExitCode::from(replay_net::cli::run(std::env::args_os()))
}

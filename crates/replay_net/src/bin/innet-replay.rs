//! The `innet-replay` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(replay_net::cli::run(std::env::args_os()))
}

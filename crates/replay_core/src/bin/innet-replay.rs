//! The `innet-replay` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(replay_core::cli::run(std::env::args_os()))
}

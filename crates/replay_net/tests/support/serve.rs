//! The commands of `innet-replay` with nothing plugged in.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(replay_net::cli::run(std::env::args_os()))
}

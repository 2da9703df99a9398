//! The `innet-replay` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(innet_replay::run(std::env::args_os()))
}

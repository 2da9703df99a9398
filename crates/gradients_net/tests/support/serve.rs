//! The commands of `innet-replay` with sums of gradients plugged in.

use std::process::ExitCode;

fn main() -> ExitCode {
    gradients_net::plug_in();
    ExitCode::from(replay_net::cli::run(std::env::args_os()))
}

//! The command line: `innet-replay serve`, `stats`, `tables`, `empty`, `drop`, `snapshot` and `doctor`. The binary and the Python
//! wheel both call [`run`].

pub mod doctor;
mod serve;
mod server_flags;
mod stats;
mod tables;

use std::ffi::OsString;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use replay_link::error::Error;
use replay_server::config::add_flags;

/// Prioritized replay and parameters as a service in the network.
#[derive(Parser)]
#[command(
    name = "innet-replay",
    version,
    propagate_version = true,
    after_help = "The Python package adds the commands export and import: the content of a table to a data set, and back."
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<serve::ServeFlags>),
    Stats(stats::StatsFlags),
    Tables(tables::TablesFlags),
    /// Remove the steps and items of a table, and reset its rate limiter; its writers continue.
    Empty(tables::TableFlags),
    /// Remove a table with its steps and items, and free its memory.
    Drop(tables::TableFlags),
    Snapshot(tables::SnapshotFlags),
    Doctor(Box<doctor::DoctorFlags>),
}

/// Runs a command line, program name first, and returns its exit code: 0 for success, 2 for an invalid command line or
/// configuration and for all that `serve --check` finds, 1 for any other error and for a missing part that `doctor` finds.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let parsed = CommandLine::command()
        // `--version` of a subcommand prints the name of the program.
        .mut_subcommands(|command| command.display_name("innet-replay"))
        .mut_subcommand("serve", add_flags)
        .mut_subcommand("doctor", add_flags)
        .try_get_matches_from(arguments)
        .and_then(|matches| Ok((CommandLine::from_arg_matches(&matches)?, matches)));
    let (command_line, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            // Also prints help and version. An error of printing is ignored.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let given = matches.subcommand().map_or(&matches, |(_, given)| given);
    let done = match command_line.command {
        Command::Serve(flags) => serve::run(&flags, given),
        Command::Stats(flags) => stats::run(&flags).map(|()| 0),
        Command::Tables(flags) => tables::list(&flags).map(|()| 0),
        Command::Empty(flags) => tables::empty_table(&flags).map(|()| 0),
        Command::Drop(flags) => tables::drop_table(&flags).map(|()| 0),
        Command::Snapshot(flags) => tables::snapshot(&flags).map(|()| 0),
        Command::Doctor(flags) => doctor::run(&flags, given),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            crate::log::print(&format!("innet-replay: {error}"));
            match error {
                Error::Config(_)
                | Error::Memory(replay_core::Error::Table { .. } | replay_core::Error::TableDiffers { .. }) => 2,
                _ => 1,
            }
        }
    }
}

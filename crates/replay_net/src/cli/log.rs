//! The log of the command line: one line for each event on standard error, with the time in UTC.

use std::io::{self, IsTerminal};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::config::LogLevel;

/// Starts logging unless the process already has a logger.
pub fn start(level: LogLevel) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false);
    // Libraries log only warnings and errors.
    let targets = Targets::new()
        .with_targets(crate::log_targets().map(|target| (target, level)))
        .with_default(level.min(LevelFilter::WARN));
    let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
}

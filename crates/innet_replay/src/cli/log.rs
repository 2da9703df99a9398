//! The log of the command line: one line for each event on standard error, with the time in UTC. Nothing waits for a pipe that
//! nobody reads.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::background_log::BackgroundLog;
use replay_server::config::LogLevel;

static LOG: LazyLock<BackgroundLog<Vec<u8>>> = LazyLock::new(|| {
    // An error has nowhere to go.
    let deliver = |line: Vec<u8>| drop(io::stderr().write_all(&line));
    BackgroundLog::new(deliver, |lost| {
        format!("{lost} lines of the log are lost: standard error was not read\n").into()
    })
});

/// Takes each event as one write.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LOG.push(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints a line on standard error, after those before it. Waits for them, but not for ever.
pub fn print(line: &str) {
    LOG.push(format!("{line}\n").into());
    flush();
}

/// Waits until the log is written, at most for a second.
pub fn flush() {
    LOG.flush();
}

/// Starts logging unless the process already has a logger.
pub fn start(level: LogLevel) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let lines =
        tracing_subscriber::fmt::layer().with_writer(|| Lines).with_ansi(io::stderr().is_terminal()).with_target(false);
    // Libraries log only warnings and errors.
    let targets = Targets::new()
        .with_targets(crate::log_targets().map(|target| (target, level)))
        .with_default(level.min(LevelFilter::WARN));
    let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
}

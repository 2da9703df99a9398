//! Log lines that never hold up the thread that logs: another thread delivers them, to a pipe or a handler that may block.
//! Lines are lost, and counted, while too many wait. The log of the command line has a line for each event on standard error, in UTC.
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use replay_server::config::LogLevel;

/// Most lines that wait.
const MOST_LINES: usize = 8192;
/// Longest wait for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Lines on their way. A thread delivers them, and ends when there are none.
pub struct BackgroundLog<L> {
    lines: ArrayQueue<L>,
    lost: AtomicU64,
    /// Id of the process whose thread delivers, 0 without one. A forked process inherits the number, but no thread.
    delivering: AtomicU32,
    deliver: fn(L),
    lost_lines: fn(u64) -> L,
}

impl<L: Send + 'static> BackgroundLog<L> {
    /// A log that passes its lines to `deliver`, which may block. `lost_lines` makes the line that reports a number of lost lines.
    pub fn new(deliver: fn(L), lost_lines: fn(u64) -> L) -> Self {
        BackgroundLog {
            lines: ArrayQueue::new(MOST_LINES),
            lost: AtomicU64::new(0),
            delivering: AtomicU32::new(0),
            deliver,
            lost_lines,
        }
    }

    /// Adds a line, without blocking.
    pub fn push(&'static self, line: L) {
        if self.lines.push(line).is_err() {
            // Relaxed, as where it is read: the count publishes nothing.
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        if !self.begin() {
            return;
        }
        let started = thread::Builder::new().name("innet-log".to_owned()).spawn(|| self.deliver_all());
        if started.is_err() {
            // The next line tries again. Release: pairs with the acquire in `begin`.
            self.delivering.store(0, Ordering::Release);
        }
    }

    /// Whether no other thread delivers: this one has to.
    fn begin(&self) -> bool {
        let process = std::process::id();
        // Acquire and release: pairs with the same swap of other threads and with the one in `deliver_all`. A line was added
        // before the swap, so the delivering thread finds it after its own, later swap.
        self.delivering.swap(process, Ordering::AcqRel) != process
    }

    fn deliver_all(&self) {
        loop {
            while let Some(line) = self.lines.pop() {
                (self.deliver)(line);
                let lost = self.lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    (self.deliver)((self.lost_lines)(lost));
                }
            }
            // Acquire and release: pairs with the swap in `begin`.
            self.delivering.swap(0, Ordering::AcqRel);
            if self.lines.is_empty() || !self.begin() {
                return;
            }
        }
    }

    /// Waits until all lines are delivered, at most for a second.
    pub fn flush(&self) {
        let until = Instant::now() + LAST_LINES;
        // Acquire: pairs with the swap in `deliver_all`.
        while self.delivering.load(Ordering::Acquire) == std::process::id() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

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

#[cfg(test)]
mod tests {
    use std::sync::{LazyLock, Mutex};

    use base::wait::lock;

    use super::*;

    static DELIVERED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    static LOG: LazyLock<BackgroundLog<String>> =
        LazyLock::new(|| BackgroundLog::new(|line| lock(&DELIVERED).push(line), |lost| format!("{lost} lost")));

    #[test]
    fn lines_that_find_no_room_are_counted() {
        let blocked = lock(&DELIVERED);
        // One more than the queue holds is in the hands of the thread that delivers.
        LOG.push("first".to_owned());
        while !LOG.lines.is_empty() {
            thread::yield_now();
        }
        for number in 0..MOST_LINES + 3 {
            LOG.push(number.to_string());
        }
        LOG.flush();
        drop(blocked);
        while lock(&DELIVERED).len() < MOST_LINES + 2 {
            LOG.flush();
        }
        let delivered = lock(&DELIVERED);
        assert_eq!(delivered[..3], ["first", "3 lost", "0"]);
        assert_eq!(delivered[MOST_LINES + 1], (MOST_LINES - 1).to_string());
        assert_eq!(delivered.len(), MOST_LINES + 2);
    }
}

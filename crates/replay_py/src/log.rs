//! Forwards the core's log events to Python's logger `innet_drl`. Threads of Python log themselves; those of the core leave it to
//! another thread, as a handler may block, for example on a pipe that nobody reads.

use std::fmt::{self, Write};
use std::sync::{LazyLock, Once};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use innet_replay::log::BackgroundLog;

use crate::{error, interpreter};

/// Level and text of the events of the core's threads.
static LOG: LazyLock<BackgroundLog<(u8, String)>> = LazyLock::new(|| {
    let lost = |lost| (30, format!("{lost} lines of the log are lost: a handler of logging took too long"));
    BackgroundLog::new(|(level, text)| deliver(level, &text), lost)
});

/// Waits until the events of the core's threads are logged, at most for a second. To be called without the interpreter lock.
pub fn flush() {
    LOG.flush();
}

/// Starts forwarding, once in a process. Not at import, since the command line has a log of its own.
pub fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        // INFO at most: an event takes the interpreter lock, and single requests log at DEBUG.
        let targets = Targets::new()
            .with_targets(innet_replay::log_targets().map(|target| (target, LevelFilter::INFO)))
            .with_target(env!("CARGO_CRATE_NAME"), LevelFilter::INFO)
            .with_default(LevelFilter::WARN);
        // A program with a subscriber of its own keeps it.
        let _ = tracing_subscriber::registry().with(PythonLogging.with_filter(targets)).try_init();
    });
}

/// Targets of the events of a server's connections.
const CONNECTIONS: [&str; 2] = ["replay_server::server", "replay_server::connection"];

struct PythonLogging;

impl<S: Subscriber> Layer<S> for PythonLogging {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            // DEBUG for connections of a server: its program logs its own progress at INFO.
            Level::INFO if CONNECTIONS.contains(&event.metadata().target()) => 10,
            Level::INFO => 20,
            _ => 10,
        };
        let mut line = Line::default();
        event.record(&mut line);
        let text = line.message + &line.fields;
        if interpreter::is_python_thread() {
            deliver(level, &text);
        } else {
            LOG.push((level, text));
        }
    }
}

fn deliver(level: u8, text: &str) {
    // The thread that finalizes may log after its modules are gone.
    if interpreter::is_ending() {
        return;
    }
    interpreter::try_attach(|py| {
        if let Err(error) = log(py, level, text) {
            // A logger's exception must not stop the core; a signal handler's exception must end the call.
            if !error.is_instance_of::<PyException>(py) {
                error::keep_raised(error);
            }
        }
    });
}

fn log(py: Python<'_>, level: u8, text: &str) -> PyResult<()> {
    py.import("logging")?.call_method1("getLogger", ("innet_drl",))?.call_method1("log", (level, "%s", text)).map(drop)
}

/// The message of an event, and its fields as ` name=value`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

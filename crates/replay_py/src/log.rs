//! The core's log in Python's: events go to the logger `innet_drl` of the module `logging`, where the program
//! decides what becomes of them.

use std::fmt::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Starts forwarding, once in a process. Not at import: the command line has a log of its own.
///
/// # Errors
/// What `atexit.register` raises.
pub fn start(py: Python<'_>) -> PyResult<()> {
    static START: Once = Once::new();
    if START.is_completed() {
        return Ok(());
    }
    let process = std::process::id();
    let stop = PyCFunction::new_closure(py, None, None, move |arguments, _| {
        // A forked child has none of the threads.
        if process == std::process::id() {
            stop(arguments.py());
        }
    })?;
    py.import("atexit")?.call_method1("register", (stop,))?;
    START.call_once(|| {
        // Every event takes the interpreter lock, so those of single requests stay away.
        let targets = Targets::new()
            .with_target("replay_core", LevelFilter::INFO)
            .with_target("_core", LevelFilter::INFO)
            .with_default(LevelFilter::WARN);
        // A program with a subscriber of its own keeps it.
        let _ = tracing_subscriber::registry()
            .with(PythonLogging.with_filter(targets))
            .try_init();
    });
    Ok(())
}

/// Threads of the core that are in the interpreter, and whether others may still enter it.
///
/// A thread that asks for the interpreter while it shuts down never comes back, and whoever joins it waits for
/// ever. So forwarding ends before: in an `atexit` handler.
struct Forwarding {
    stopped: bool,
    under_way: usize,
}

static FORWARDING: Mutex<Forwarding> = Mutex::new(Forwarding {
    stopped: false,
    under_way: 0,
});
static DONE: Condvar = Condvar::new();

fn forwarding() -> MutexGuard<'static, Forwarding> {
    FORWARDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends forwarding, and waits for events that are on their way.
fn stop(py: Python<'_>) {
    py.detach(|| {
        let mut state = forwarding();
        state.stopped = true;
        while state.under_way > 0 {
            state = DONE.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    });
}

struct PythonLogging;

impl<S: Subscriber> Layer<S> for PythonLogging {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        let mut line = Line::default();
        event.record(&mut line);
        let text = line.message + &line.fields;
        {
            let mut state = forwarding();
            if state.stopped {
                return;
            }
            state.under_way += 1;
        }
        // A logger that raises must not stop the core.
        let _ = Python::try_attach(|py| log(py, level, &text));
        forwarding().under_way -= 1;
        DONE.notify_all();
    }
}

fn log(py: Python<'_>, level: u8, text: &str) -> PyResult<()> {
    py.import("logging")?
        .call_method1("getLogger", ("innet_drl",))?
        .call_method1("log", (level, "%s", text))
        .map(drop)
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

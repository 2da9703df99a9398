//! Blocking calls without the interpreter lock, ended by their deadline, by Ctrl-C, or when the object is closed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use base::notation::Number;
use base::sync::lock;
use base::wait::Wait;
use base::wait::{Advice, WaitNotice};
use gradients_net::error::Error as WorkerError;
use replay_link::error::{Error, Result};

use crate::awaited_writers::AwaitedWriters;
use crate::error;
use crate::interpreter;
use crate::process_local::Closing;

/// Default timeout of a call, in seconds.
pub const TIMEOUT: Option<f64> = Some(60.0);

/// Longest duration of an argument in seconds: 31 years, which any clock can add to its time.
pub const MAX_SECONDS: f64 = 1e9;

/// Deadline of a call with `timeout` in seconds; `None` without a timeout, or for infinity.
///
/// # Errors
/// `ConfigError` for a timeout out of range.
pub fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    Ok(limit(py, "timeout", timeout)?.map(|limit| Instant::now() + limit))
}

/// Longest wait, from an argument in seconds; `None` without a limit, or for infinity.
///
/// # Errors
/// `ConfigError` that names the argument and its range.
pub fn limit(py: Python<'_>, argument: &str, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    let limited = timeout.filter(|&seconds| seconds != f64::INFINITY);
    limited.map(|seconds| within(py, argument, seconds, ", or None to wait without limit")).transpose()
}

/// A duration from an argument in seconds.
///
/// # Errors
/// `ConfigError` that names the argument and its range.
pub fn seconds(py: Python<'_>, argument: &str, seconds: f64) -> PyResult<Duration> {
    within(py, argument, seconds, "")
}

fn within(py: Python<'_>, argument: &str, seconds: f64, without: &str) -> PyResult<Duration> {
    match (0.0..=MAX_SECONDS).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => {
            let reason = format!("{argument} is in seconds, 0 to 1e9{without}; got {}", Number(seconds));
            Err(error::config(py, reason))
        }
    }
}

/// Runs signal handlers.
///
/// # Errors
/// Exception of a handler, now or earlier within a log call.
fn check_signals(py: Python<'_>) -> PyResult<()> {
    match error::take_raised() {
        Some(error) => Err(error),
        None => py.check_signals(),
    }
}

/// Runs `work` without the interpreter lock, and raises its error.
pub fn unlocked<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    interpreter::detach(py, work).map_err(|error| error::to_python(py, error))
}

/// Runs `work` without the interpreter lock, and raises its error, the exception of a signal handler, or `ClosedError` once
/// `closing` ends the call. A long wait is logged.
pub fn blocking<T: Send, E: Into<WorkerError> + Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    closing: Option<&Closing>,
    work: impl FnOnce(&Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    blocking_advised(py, deadline, closing, &|_| None, work)
}

/// [`blocking`] for a call that may wait for writers. Their state is appended to the reason of the wait, in the log and in the deadline
/// error. If they are gone, the call ends with [`Error::NoWriters`].
pub fn blocking_for_writers<T: Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    closing: Option<&Closing>,
    awaited: &AwaitedWriters<'_>,
    work: impl FnOnce(&Wait<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    blocking_advised(py, deadline, closing, &|table| awaited.advice(table), |wait| {
        let interrupted = || (wait.interrupted)() || awaited.are_gone(wait);
        work(&Wait { interrupted: &interrupted, ..*wait }).map_err(|error| awaited.explain(error))
    })
}

/// [`blocking`] with advice that is appended to the reason of a wait for writers, in the log and in the deadline error.
fn blocking_advised<T: Send, E: Into<WorkerError> + Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    closing: Option<&Closing>,
    advice: &Advice<'_>,
    work: impl FnOnce(&Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let begun = closing.map(|closing| (closing, closing.begin()));
    let ended = || begun.and_then(|(closing, begun)| closing.ended(begun));
    let result = interpreter::detach(py, || {
        let interrupted = || {
            if ended().is_some() || interpreter::ends_calls() {
                return true;
            }
            match interpreter::try_attach(check_signals) {
                Some(Ok(())) => false,
                Some(Err(error)) => {
                    *lock(&raised) = Some(error);
                    true
                }
                // The interpreter ends.
                None => true,
            }
        };
        work(&Wait { deadline, interrupted: &interrupted, notice: Some(&WaitNotice::advised(advice)) })
    });
    if let Some(raised) = lock(&raised).take().or_else(error::take_raised) {
        return Err(raised);
    }
    result.map_err(|error| match (error.into(), ended()) {
        (WorkerError::Sum(failure), _) => error::of_sum(py, &failure),
        (WorkerError::Net(Error::Interrupted), Some(what)) => Closing::exception(py, what),
        (WorkerError::Net(error), _) => error::to_python(py, advised(error, advice)),
    })
}

/// The error, with the advice if its call waited for writers.
fn advised(error: Error, advice: &Advice<'_>) -> Error {
    let reason = error.waited_for().and_then(|reason| Some(reason.to_string() + &advice(reason.awaited_table()?)?));
    match reason {
        Some(reason) => Error::deadline(reason),
        None => error,
    }
}

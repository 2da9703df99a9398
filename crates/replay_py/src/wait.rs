//! Blocking calls without the interpreter lock, ended by their deadline or by Ctrl-C.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use replay_core::error::Result;
use replay_core::replay::Wait;

use crate::error;

/// The instant after `timeout` seconds; `None` for no timeout.
///
/// # Errors
/// `ConfigError` for a negative timeout or NaN.
pub fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else {
        return Ok(None);
    };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(error::config(
            py,
            format!("timeout is in seconds, 0 or more, or None to wait for ever; got {seconds}"),
        ));
    }
    // A timeout beyond the range of an Instant is the same as none.
    Ok(Duration::try_from_secs_f64(seconds)
        .ok()
        .and_then(|duration| Instant::now().checked_add(duration)))
}

/// Runs `work` without the interpreter lock, and raises its error or the exception of a signal handler.
pub fn blocking<T: Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    work: impl FnOnce(&Wait<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let result = py.detach(|| {
        let interrupted = || {
            Python::attach(|py| match py.check_signals() {
                Ok(()) => false,
                Err(error) => {
                    *raised.lock().unwrap_or_else(|poison| poison.into_inner()) = Some(error);
                    true
                }
            })
        };
        work(&Wait {
            deadline,
            interrupted: &interrupted,
        })
    });
    let raised = raised
        .into_inner()
        .unwrap_or_else(|poison| poison.into_inner());
    match (result, raised) {
        (_, Some(raised)) => Err(raised),
        (Err(error), None) => Err(error::to_python(py, error)),
        (Ok(value), None) => Ok(value),
    }
}

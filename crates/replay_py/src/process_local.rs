//! A value that `close` drops and that a forked child must not use: the inside of `Replay`, `Writer`, `Batches` and `Server`.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;

use crate::error;
use crate::turns::lock;

/// A value for the process that made it, until it is closed.
///
/// A forked child has a copy of the memory but no threads, and shares the sockets: using or dropping the value there would
/// hang or corrupt a connection.
pub struct ProcessLocal<T: Send> {
    value: Mutex<Option<T>>,
    process: u32,
    what: &'static str,
}

impl<T: Send> ProcessLocal<T> {
    /// `value`, which errors call `what`.
    pub fn new(what: &'static str, value: T) -> Self {
        ProcessLocal {
            value: Mutex::new(Some(value)),
            process: std::process::id(),
            what,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        lock(&self.value)
    }

    /// `closed` once the value is closed, before that nothing: the end of a `repr`.
    pub fn mark(&self, closed: &'static str) -> &'static str {
        if self.lock().is_none() { closed } else { "" }
    }

    /// # Errors
    /// `ForkError` in a forked child.
    pub fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(error::raise(
            py,
            "ForkError",
            format!(
                "this {} was made before the process forked, and threads and connections do not survive a \
                 fork; make it in the child, or start processes with multiprocessing's \"spawn\" method",
                self.what
            ),
        ))
    }

    /// A copy of the value.
    ///
    /// # Errors
    /// `ForkError` in a forked child, `ClosedError` after `close`.
    pub fn get(&self, py: Python<'_>) -> PyResult<T>
    where
        T: Clone,
    {
        self.check_process(py)?;
        self.lock()
            .clone()
            .ok_or_else(|| error::raise(py, "ClosedError", format!("this {} is closed", self.what)))
    }

    /// Takes the value out; `None` if it was closed before.
    ///
    /// # Errors
    /// `ForkError` in a forked child.
    pub fn close(&self, py: Python<'_>) -> PyResult<Option<T>> {
        self.check_process(py)?;
        Ok(self.lock().take())
    }
}

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        let value = self.lock().take();
        if self.process != std::process::id() {
            std::mem::forget(value);
            return;
        }
        // Without the interpreter lock, because dropping may join threads and end connections. During the interpreter's
        // shutdown there are no other Python threads.
        Python::try_attach(|py| py.detach(|| drop(value)));
    }
}

//! Conversion of Rust's errors to Python exceptions, here and nowhere else: each [`ErrorCode`] is a class of
//! `innet_drl.errors`.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use replay_link::error::Error;
use replay_wire::ErrorCode;

use crate::interpreter::Call;

/// Exception class for a code: the name of the code and `Error`, with the exceptions below.
fn class_name(code: ErrorCode) -> String {
    match code {
        ErrorCode::NoMass => "EmptyError".into(),
        ErrorCode::Io => "StorageError".into(),
        // Gradient sums are the only extension.
        ErrorCode::Extension => "GradientError".into(),
        // `wait::blocking` raises the pending KeyboardInterrupt instead of Interrupted.
        ErrorCode::Interrupted => "InternalError".into(),
        code => format!("{code:?}Error"),
    }
}

/// The exception class for a failed sum of gradients.
fn gradient_class_name(failure: &gradients::Error) -> &'static str {
    match failure {
        gradients::Error::Missing { .. } => "MissingWorkerError",
        gradients::Error::Silent { .. } => "SilentAggregatorError",
        gradients::Error::Halted(_) => "HaltedError",
        gradients::Error::Reset(_) => "ResetError",
        gradients::Error::Behind { .. } => "BehindError",
        _ => "GradientError",
    }
}

/// An exception of the class `name` in `innet_drl.errors`.
pub fn raise(py: Python<'_>, name: &str, message: String) -> PyErr {
    let _call = Call::begin(py);
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let class = MODULE
        .get_or_try_init(py, || py.import("innet_drl.errors").map(Bound::unbind))
        .and_then(|module| module.bind(py).getattr(name))
        .and_then(|class| Ok(class.cast_into::<PyType>()?));
    match class {
        Ok(class) => PyErr::from_type(class, message),
        Err(error) => error,
    }
}

/// The exception for an error.
pub fn to_python(py: Python<'_>, error: impl Into<Error>) -> PyErr {
    let _call = Call::begin(py);
    let error = error.into();
    let class = match error {
        // No server raises it, so it has no code.
        Error::NoWriters(_) => "NoWritersError".into(),
        _ => class_name(error.code()),
    };
    let raised = raise(py, &class, error.to_string());
    if let Error::Io(failed) = &error
        && let Some(errno) = failed.source.raw_os_error()
    {
        // A `StorageError` is an `OSError`, and programs read its `errno`.
        return with(py, raised, "errno", errno);
    }
    raised
}

/// The exception for a failed sum of gradients.
pub fn of_sum(py: Python<'_>, failure: &gradients::Error) -> PyErr {
    let _call = Call::begin(py);
    let raised = raise(py, gradient_class_name(failure), failure.to_string());
    match failure {
        gradients::Error::Missing { workers, .. } => with(py, raised, "missing", workers.clone()),
        _ => raised,
    }
}

/// The exception with an attribute.
fn with<'py>(py: Python<'py>, raised: PyErr, name: &str, value: impl IntoPyObject<'py>) -> PyErr {
    match raised.value(py).setattr(name, value) {
        Ok(()) => raised,
        Err(failed) => failed,
    }
}

/// The exception for an invalid argument.
pub fn config(py: Python<'_>, message: impl Into<String>) -> PyErr {
    raise(py, "ConfigError", message.into())
}

/// The exception for data that does not fit the columns of `table`.
pub fn schema(py: Python<'_>, table: &str, reason: impl Into<String>) -> PyErr {
    to_python(py, replay_core::Error::Schema { table: table.to_owned(), reason: reason.into() })
}

thread_local! {
    /// Exception of a signal's handler that ran within Python code that the core called.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Keeps an exception that this thread's current blocking call raises, or its next one.
pub fn keep_raised(error: PyErr) {
    RAISED.set(Some(error));
}

/// The kept exception of this thread, which then has none.
pub fn take_raised() -> Option<PyErr> {
    RAISED.take()
}

//! torch tensors, made by `innet_drl.batches`: the core itself needs NumPy alone.

use pyo3::call::PyCallArgs;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

/// The `torch.device` of an argument `device`.
///
/// # Errors
/// `MissingExtraError` without torch, `ConfigError` for a device that this machine does not have.
pub fn device<'py>(py: Python<'py>, name: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    call(intern!(py, "torch_device"), (name,))
}

/// Calls a function or class of `innet_drl.batches`. An interned name is found without a new string for each batch.
///
/// # Errors
/// Its exceptions.
pub fn call<'py>(name: &Bound<'py, PyString>, arguments: impl PyCallArgs<'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = name.py();
    // An import takes as long as a tensor.
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("innet_drl.batches").map(Bound::unbind))?;
    module.bind(py).getattr(name)?.call1(arguments)
}

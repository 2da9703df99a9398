//! torch tensors, made by `innet_drl.batches`: the core itself needs NumPy alone.

use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The `torch.device` of an argument `device`.
///
/// # Errors
/// `MissingExtraError` without torch, `ConfigError` for a device that this machine does not have.
pub fn device<'py>(py: Python<'py>, name: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    call(py, "torch_device", (name,))
}

/// Calls a function or class of `innet_drl.batches`.
///
/// # Errors
/// Its exceptions.
pub fn call<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    // An import takes as long as a tensor.
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module =
        MODULE.get_or_try_init(py, || py.import("innet_drl.batches").map(Bound::unbind))?;
    module.bind(py).getattr(name)?.call1(arguments)
}

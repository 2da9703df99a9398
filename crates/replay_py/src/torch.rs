//! torch tensors, made by `innet_drl.batches`: the core itself needs NumPy alone.

use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyModuleNotFoundError;
use pyo3::prelude::*;

use crate::error;

/// The `torch.device` of an argument `device`.
///
/// # Errors
/// `ConfigError` without torch, or for a device that this machine does not have.
pub fn device<'py>(py: Python<'py>, name: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let found = call(py, "torch_device", (name,));
    found.map_err(
        |raised| match raised.is_instance_of::<PyModuleNotFoundError>(py) {
            true => error::config(
                py,
                format!(
                    "device asks for torch tensors ({raised}): install torch, or leave device out"
                ),
            ),
            false => raised,
        },
    )
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
    py.import("innet_drl.batches")?
        .getattr(name)?
        .call1(arguments)
}

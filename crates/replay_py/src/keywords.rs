//! Unknown keyword arguments. PyO3's `TypeError` names only the argument; here it also suggests the closest one, as CPython does. Usage:
//! `signature = (..., **unknown)`, and [`refuse`] at the start of the function.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::interpreter::Call;

/// Refuses the arguments that `callable` does not have.
///
/// # Errors
/// `TypeError` that names the first one, and the closest known argument, or else all arguments.
pub fn refuse<'py>(
    unknown: Option<&Bound<'py, PyDict>>,
    callable: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let Some(name) = unknown.and_then(|unknown| unknown.keys().iter().next()) else {
        return Ok(());
    };
    let py = name.py();
    let _call = Call::begin(py);
    let callable = callable()?;
    let signature = py.import("inspect")?.call_method1("signature", (&callable,))?;
    let known = signature.getattr("parameters")?;
    let near = py.import("difflib")?.call_method1("get_close_matches", (&name, &known, 1))?;
    let hint = match near.get_item(0) {
        Ok(near) => format!("Did you mean {}?", near.repr()?),
        Err(_) => {
            let names = known.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            let names = names.iter().map(|name| name.to_string());
            let names: Vec<_> = names.filter(|name| name != "self").collect();
            format!("Its arguments: {}", names.join(", "))
        }
    };
    Err(PyTypeError::new_err(format!(
        "{}() got an unexpected keyword argument {}. {hint}",
        callable.getattr("__qualname__")?,
        name.repr()?
    )))
}

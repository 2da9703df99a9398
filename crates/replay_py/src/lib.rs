//! The Python module `innet_drl._core`.
use pyo3::prelude::*;
/// The compiled core of innet_drl.
#[pymodule]
fn _core(_m: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}

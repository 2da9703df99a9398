//! Text as a column of bytes: UTF-8, filled up with zeros. Missions of MiniGrid are text.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};

use base::allocation;
use replay_core::schema::{Column, Dtype};

use crate::error;

/// Texts of one step or of a block as a uint8 array with the bytes in the last dimension; `None` for any other value or column.
/// `refuse` makes the exception for a text that is too long.
pub fn to_bytes<'py>(
    column: &Column,
    value: &Bound<'py, PyAny>,
    refuse: impl FnOnce(String) -> PyErr,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Dtype::Uint8, &[width]) = (column.dtype, &column.shape[..]) else {
        return Ok(None);
    };
    let may_be_text = match value.cast::<PyUntypedArray>() {
        Ok(array) => holds_text(array),
        Err(_) => {
            value.is_instance_of::<PyString>() || value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>()
        }
    };
    if !may_be_text {
        return Ok(None);
    }
    let py = value.py();
    let numpy = py.import("numpy")?;
    // A ragged list is no array; the caller's own conversion raises the error.
    let Ok(array) = numpy.call_method1("atleast_1d", (value,)) else {
        return Ok(None);
    };
    let array = array.cast_into::<PyUntypedArray>()?;
    if !holds_text(&array) {
        return Ok(None);
    }
    let texts = array.call_method0("ravel")?.call_method0("tolist")?;
    let Ok(texts) = texts.extract::<Vec<String>>() else {
        return Ok(None);
    };
    let width = width as usize;
    let bytes = allocation::zeros("an array of texts", texts.len().saturating_mul(width));
    let mut bytes = bytes.map_err(|error| error::to_python(py, error))?;
    for (text, slot) in texts.iter().zip(bytes.chunks_exact_mut(width)) {
        let Some(slot) = slot.get_mut(..text.len()) else {
            return Err(refuse(format!(
                "a text has {} bytes and the column {width}: give the table a wider one, columns={{{:?}: (\"uint8\", {})}}",
                text.len(),
                column.name,
                text.len().next_power_of_two()
            )));
        };
        slot.copy_from_slice(text.as_bytes());
    }
    let mut shape = array.shape().to_vec();
    shape.push(width);
    let flat = numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), "uint8"))?;
    flat.call_method1("reshape", (shape,)).map(Some)
}

/// Whether an array has text or objects, which may be text.
fn holds_text(array: &Bound<'_, PyUntypedArray>) -> bool {
    matches!(array.dtype().kind(), b'U' | b'O')
}

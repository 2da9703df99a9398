//! Text as a column of bytes: UTF-8, filled up with zeros. Missions of MiniGrid are text.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};

use replay_core::schema::{Column, Dtype};

/// Texts, of each environment or of a block of steps, as an array uint8 with a last dimension of the column's bytes; `None` for any other value or column. `refuse` makes the
/// exception for a text that is too long.
pub fn to_bytes<'py>(
    column: &Column,
    value: &Bound<'py, PyAny>,
    refuse: impl FnOnce(String) -> PyErr,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Dtype::Uint8, &[width]) = (column.dtype, &column.shape[..]) else {
        return Ok(None);
    };
    let py = value.py();
    let numpy = py.import("numpy")?;
    // An array of numbers is no text, and is not looked into.
    let is_array = value.cast::<PyUntypedArray>();
    if is_array.is_ok_and(|array| !matches!(array.dtype().kind(), b'U' | b'O')) {
        return Ok(None);
    }
    let Ok(array) = numpy.call_method1("atleast_1d", (value,)) else {
        // Whoever reads the value says what is wrong with it.
        return Ok(None);
    };
    let texts = array.call_method0("ravel")?.call_method0("tolist")?;
    let Some(texts) = texts
        .extract::<Vec<String>>()
        .ok()
        .filter(|texts| !texts.is_empty())
    else {
        return Ok(None);
    };
    let width = width as usize;
    let mut bytes = vec![0; texts.len() * width];
    for (text, place) in texts.iter().zip(bytes.chunks_exact_mut(width)) {
        let Some(place) = place.get_mut(..text.len()) else {
            return Err(refuse(format!(
                "a text has {} bytes and the column {width}: give the table a wider one, columns={{{:?}: (\"uint8\", {})}}",
                text.len(),
                column.name,
                text.len().next_power_of_two()
            )));
        };
        place.copy_from_slice(text.as_bytes());
    }
    let mut shape: Vec<usize> = array.getattr("shape")?.extract()?;
    shape.push(width);
    let flat = numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), "uint8"))?;
    flat.call_method1("reshape", (shape,)).map(Some)
}

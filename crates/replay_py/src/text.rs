//! Text as a column of bytes: UTF-8, filled up with zeros. Missions of MiniGrid are text.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};

use replay_core::schema::{Column, Dtype};

/// The texts of each environment as an array uint8 `[environments, bytes]`; `None` for any other value or column. `refuse` makes the
/// exception for a text that is too long.
pub fn to_bytes<'py>(
    column: &Column,
    value: &Bound<'py, PyAny>,
    refuse: impl FnOnce(String) -> PyErr,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Dtype::Uint8, &[width]) = (column.dtype, &column.shape[..]) else {
        return Ok(None);
    };
    let Some(texts) = texts(value)? else {
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
    let py = value.py();
    let flat = py
        .import("numpy")?
        .call_method1("frombuffer", (PyBytes::new(py, &bytes), "uint8"))?;
    flat.call_method1("reshape", (texts.len(), width)).map(Some)
}

fn texts(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<String>>> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Some(vec![text.extract()?]));
    }
    let list = match value.cast::<PyUntypedArray>() {
        // Arrays of `str`, or of objects.
        Ok(array) if matches!(array.dtype().kind(), b'U' | b'O') => value.call_method0("tolist")?,
        Ok(_) => return Ok(None),
        Err(_) => value.clone(),
    };
    let is_list = list.is_instance_of::<PyList>() || list.is_instance_of::<PyTuple>();
    Ok(list
        .extract::<Vec<String>>()
        .ok()
        .filter(|texts| is_list && !texts.is_empty()))
}

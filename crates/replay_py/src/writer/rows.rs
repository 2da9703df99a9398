//! Arguments of `append` and `extend`: arrays of the table's columns, one row for each stream.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use replay_core::schema::{Column, Dtype};
use replay_core::writer::Values;

use super::PyWriter;
use crate::array::{self, Expected, Input};
use crate::error;

/// The values of a column; of a ragged one also the offset of each row in them.
pub(super) struct ColumnInput<'py> {
    column: String,
    values: Input<'py>,
    offsets: Option<Vec<i64>>,
}

pub(super) fn by_column<'a>(inputs: &'a [ColumnInput<'_>]) -> Vec<(&'a str, Values<'a>)> {
    let of = |input: &'a ColumnInput<'_>| Values { offsets: input.offsets.as_deref(), ..values(&input.values) };
    inputs.iter().map(|input| (input.column.as_str(), of(input))).collect()
}

pub(super) fn values<'a>(input: &'a Input<'_>) -> Values<'a> {
    Values::new(input.dtype, &input.shape, input.bytes())
}

impl PyWriter {
    /// Shape of an argument of `append`, or of a block of steps; `row` is the shape of one row.
    fn shape(&self, steps: Option<usize>, row: &[u32]) -> Vec<usize> {
        let rows = steps.into_iter().chain([self.num_envs]);
        rows.chain(row.iter().map(|&n| n as usize)).collect()
    }

    /// Reads one argument.
    pub(super) fn read<'py>(
        &self,
        steps: Option<usize>,
        name: &str,
        value: &Bound<'py, PyAny>,
        dtype: Dtype,
        row: &[u32],
    ) -> PyResult<Input<'py>> {
        let shape = self.shape(steps, row);
        let expected = Expected { dtype, shape: &shape };
        array::read(value, Some(expected), |reason| {
            let reason = format!("{name:?} has to be {}{shape:?}: {reason}", dtype.name());
            error::schema(value.py(), &self.config.name, reason)
        })
    }

    /// Reads an argument with one element for each environment, of a dtype in `allowed`. Literals are converted to the last one, the widest.
    pub(super) fn elements<'py>(
        &self,
        steps: Option<usize>,
        name: &str,
        value: &Bound<'py, PyAny>,
        allowed: &[Dtype],
        expected: &str,
    ) -> PyResult<Input<'py>> {
        let input = self.read(steps, name, value, allowed[allowed.len() - 1], &[])?;
        let shape = self.shape(steps, &[]);
        if allowed.contains(&input.dtype) && input.shape == shape {
            return Ok(input);
        }
        let axes = if steps.is_some() { "steps, environments" } else { "environments" };
        let got = format!("{}{:?}", input.dtype.name(), input.shape);
        let reason = format!("{name:?} has to be {expected}{shape:?} ({axes}), got {got}");
        Err(error::schema(value.py(), &self.config.name, reason))
    }

    pub(super) fn flags(
        &self,
        steps: Option<usize>,
        name: &str,
        value: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Vec<bool>>> {
        let Some(value) = value else { return Ok(None) };
        let input = self.elements(steps, name, value, &[Dtype::Bool], "bool")?;
        // Converted, because a byte of a NumPy bool may be greater than 1.
        Ok(Some(input.bytes().iter().map(|&byte| byte != 0).collect()))
    }

    fn column<'py>(
        &self,
        steps: Option<usize>,
        name: &str,
        column: &str,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<ColumnInput<'py>> {
        match self.config.columns.iter().find(|known| known.name == column) {
            Some(column) if column.is_ragged() => self.ragged(steps, name, column, value),
            Some(column) => {
                let refuse = |reason| error::schema(value.py(), &self.config.name, format!("{name:?}: {reason}"));
                let text = array::text_to_bytes(column, value, refuse)?;
                let value = text.as_ref().unwrap_or(value);
                let values = self.read(steps, name, value, column.dtype, &column.shape)?;
                Ok(ColumnInput { column: column.name.clone(), values, offsets: None })
            }
            None => {
                let reason = format!("the table has no column {column:?}; it has {}", self.config.column_names());
                Err(error::schema(value.py(), &self.config.name, reason))
            }
        }
    }

    /// Reads the rows of a ragged column, which Python puts one after the other.
    fn ragged<'py>(
        &self,
        steps: Option<usize>,
        name: &str,
        column: &Column,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<ColumnInput<'py>> {
        let py = value.py();
        let refuse = |reason| error::schema(py, &self.config.name, format!("{name:?} {reason}"));
        let (dtype, inner) = (array::to_numpy(py, column.dtype), PyTuple::new(py, column.inner_shape())?);
        let arguments = (value, dtype, inner, steps, self.num_envs);
        let rows = py.import("innet_drl.ragged")?.call_method1("_read_rows", arguments);
        let rows = rows.map_err(|error| match error.is_instance_of::<PyValueError>(py) {
            true => refuse(error.value(py).to_string()),
            false => error,
        })?;
        let (values, offsets): (Bound<'py, PyAny>, Bound<'py, PyAny>) = rows.extract()?;
        let offsets = array::read(&offsets, None, refuse)?.to_i64(py)?;
        let values = array::read(&values, None, refuse)?;
        Ok(ColumnInput { column: column.name.clone(), values, offsets: Some(offsets) })
    }

    /// Reads the argument `name`, with the column or the parts of `column`.
    pub(super) fn columns<'py>(
        &self,
        steps: Option<usize>,
        name: &str,
        column: &str,
        value: &Bound<'py, PyAny>,
        inputs: &mut Vec<ColumnInput<'py>>,
    ) -> PyResult<()> {
        let refuse = |reason| error::schema(value.py(), &self.config.name, reason);
        let mut add = |path: &str, column: String, value: &Bound<'py, PyAny>| {
            let input = self.column(steps, path, &column, value)?;
            if column.contains('/') && inputs.iter().any(|known| known.column == column) {
                return Err(refuse(format!("column {column:?} is given twice")));
            }
            inputs.push(input);
            Ok(())
        };
        match self.structure.get(column).filter(|structure| !structure.is_array()) {
            None => add(name, column.to_owned(), value),
            Some(parts) => parts.read(name, value, &refuse, &mut |path, value| {
                add(path, format!("{column}{}", &path[name.len()..]), value)
            }),
        }
    }
}

//! `Column` and `Table`: the definition of a table, as plain values.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PySequence, PyTuple, PyType};

use replay_core::schema::{Codec, Column, TableConfig};
use replay_core::view::{ACTION, REWARD, ViewSpec};

use crate::class::{attributes, value_class};
use crate::interpreter::Call;
use crate::view;
use crate::{dtype, error, integer, keywords};

#[doc = stub_doc!("Column")]
#[pyclass(name = "Column", module = "innet_drl", frozen, eq, from_py_object)]
#[derive(Clone, PartialEq)]
pub struct PyColumn {
    /// Without its name, which the table gives.
    column: Column,
}

#[pymethods]
impl PyColumn {
    #[new]
    #[pyo3(
        signature = (dtype, shape = Vec::new(), codec = None, finite = true),
        text_signature = "(dtype, shape=(), codec=None, finite=True)"
    )]
    fn new(
        py: Python<'_>,
        dtype: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = shape)] shape: Vec<u32>,
        codec: Option<&str>,
        finite: bool,
    ) -> PyResult<Self> {
        let _call = Call::begin(py);
        let descr = PyArrayDescr::new(py, dtype.clone());
        let known = descr.ok().and_then(|descr| dtype::from_numpy(&descr));
        let element = known.ok_or_else(|| {
            error::config(
                py,
                format!("a column's dtype is bool, an integer or a float of this machine's byte order; got {dtype}"),
            )
        })?;
        let mut column = Column::new("", element, shape);
        column.finite = finite;
        if let Some(name) = codec {
            column.codec =
                Codec::from_name(name).map_err(|error| error::config(py, format!("a column's codec: {error}")))?;
        }
        Ok(PyColumn { column })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let finite = if self.column.finite { "" } else { ", finite=False" };
        Ok(format!(
            "Column({:?}, shape={}, codec={:?}{finite})",
            self.column.dtype.name(),
            self.shape(py)?.repr()?,
            self.column.codec.name()
        ))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let py = slf.py();
        let this = slf.get();
        let column = &this.column;
        let arguments = (column.dtype.name(), this.shape(py)?, column.codec.name(), column.finite);
        Ok((slf.get_type().into_any(), arguments.into_pyobject(py)?))
    }
}

attributes! { PyColumn as "Column", |column, py|
    dtype: Bound<'py, PyArrayDescr> = dtype::to_numpy(py, column.column.dtype);
    shape: PyResult<Bound<'py, PyTuple>> = PyTuple::new(py, &column.column.shape);
    codec: &'static str = column.column.codec.name();
    finite: bool = column.column.finite;
}

/// Reads the shape of a value: one number, or a sequence of them.
fn shape(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let _call = Call::begin(value.py());
    if let Ok(one) = value.extract() {
        return Ok(vec![one]);
    }
    value
        .extract()
        .map_err(|_| error::config(value.py(), format!("a shape is a tuple of positive integers, got {value}")))
}

#[doc = stub_doc!("Table")]
#[pyclass(name = "Table", module = "innet_drl", frozen, eq, from_py_object)]
#[derive(Clone, PartialEq)]
pub struct PyTable {
    /// Validated.
    pub config: TableConfig,
}

#[pymethods]
impl PyTable {
    #[new]
    #[pyo3(
        signature = (
            name, columns, capacity, *, capacity_bytes = 0, sampler = "prioritized",
            priority_exponent = 0.6, priority_unit_log2 = -19, live_max_priority = false, max_times_sampled = 0,
            min_size = 1, samples_per_insert = 0.0, slack = 0.0, max_version_lag = 0, view = None, **unknown
        ),
        text_signature = "(name, columns, capacity, *, capacity_bytes=0, sampler='prioritized', \
                          priority_exponent=0.6, priority_unit_log2=-19, live_max_priority=False, \
                          max_times_sampled=0, min_size=1, samples_per_insert=0.0, slack=0.0, max_version_lag=0, \
                          view=None)"
    )]
    fn new(
        py: Python<'_>,
        name: String,
        columns: &Bound<'_, PyMapping>,
        #[pyo3(from_py_with = integer::capacity)] capacity: u64,
        #[pyo3(from_py_with = integer::capacity_bytes)] capacity_bytes: u64,
        sampler: &str,
        priority_exponent: f64,
        #[pyo3(from_py_with = integer::priority_unit_log2)] priority_unit_log2: i32,
        live_max_priority: bool,
        #[pyo3(from_py_with = integer::max_times_sampled)] max_times_sampled: u32,
        #[pyo3(from_py_with = integer::min_size)] min_size: u64,
        samples_per_insert: f64,
        slack: f64,
        #[pyo3(from_py_with = integer::max_version_lag)] max_version_lag: u32,
        #[pyo3(from_py_with = view::read)] view: Option<ViewSpec>,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let _call = Call::begin(py);
        keywords::refuse(unknown, || Ok(py.get_type::<PyTable>().into_any()))?;
        let columns = columns
            .items()?
            .iter()
            .map(|item| {
                let (name, definition): (String, Bound<'_, PyAny>) = item.extract()?;
                to_column(name, &definition)
            })
            .collect::<PyResult<Vec<_>>>()?;
        let config = TableConfig {
            name,
            columns,
            capacity,
            capacity_bytes,
            sampler: sampler.parse().map_err(|reason| error::config(py, format!("sampler: {reason}")))?,
            priority_exponent,
            priority_unit_log2,
            live_max_priority,
            max_times_sampled,
            min_size,
            samples_per_insert,
            slack,
            max_version_lag,
            view,
        };
        config.validate().map_err(|error| error::to_python(py, error))?;
        Ok(PyTable { config })
    }

    #[doc = stub_doc!("Table.from_spaces")]
    #[classmethod]
    #[pyo3(signature = (name, observation_space, action_space, capacity, *, columns = None, **settings))]
    fn from_spaces<'py>(
        class: &Bound<'py, PyType>,
        name: &str,
        observation_space: &Bound<'py, PyAny>,
        action_space: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = integer::capacity)] capacity: u64,
        columns: Option<&Bound<'py, PyMapping>>,
        settings: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::begin(class.py());
        let all = PyDict::new(class.py());
        space_columns("observation", observation_space, &all)?;
        space_columns(ACTION, action_space, &all)?;
        all.set_item(REWARD, "float32")?;
        if let Some(columns) = columns {
            all.update(columns)?;
        }
        class.call((name, all, capacity), settings)
    }
}

value_class! { PyTable as "Table", |table, py|
    name: &str = &table.config.name;
    columns: PyResult<Bound<'py, PyDict>> = columns(py, &table.config);
    capacity: u64 = table.config.capacity;
    capacity_bytes: u64 = table.config.capacity_bytes;
    sampler: String = table.config.sampler.to_string();
    priority_exponent: f64 = table.config.priority_exponent;
    priority_unit_log2: i32 = table.config.priority_unit_log2;
    live_max_priority: bool = table.config.live_max_priority;
    max_times_sampled: u32 = table.config.max_times_sampled;
    min_size: u64 = table.config.min_size;
    samples_per_insert: f64 = table.config.samples_per_insert;
    slack: f64 = table.config.slack;
    max_version_lag: u32 = table.config.max_version_lag;
    view: PyResult<Option<Bound<'py, PyAny>>> = table.config.view.as_ref().map(|spec| view::to_python(py, spec)).transpose();
}

fn columns<'py>(py: Python<'py>, config: &TableConfig) -> PyResult<Bound<'py, PyDict>> {
    let columns = PyDict::new(py);
    for column in &config.columns {
        let value = PyColumn { column: Column { name: String::new(), ..column.clone() } };
        columns.set_item(&column.name, Bound::new(py, value)?)?;
    }
    Ok(columns)
}

/// A column from a `Column`, a `(dtype, shape)` pair or a dtype.
fn to_column(name: String, definition: &Bound<'_, PyAny>) -> PyResult<Column> {
    let py = definition.py();
    let value = if let Ok(column) = definition.cast::<PyColumn>() {
        column.get().clone()
    } else if let Ok((dtype, shape)) = definition.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() {
        PyColumn::new(py, &dtype, self::shape(&shape)?, None, true)?
    } else {
        PyColumn::new(py, definition, Vec::new(), None, true)?
    };
    Ok(Column { name, ..value.column })
}

/// Bytes of a text without a limit of its own.
const TEXT_BYTES: usize = 256;

/// Adds a column of the space's dtype and shape, or one for each part of a space of several parts.
///
/// # Errors
/// `ConfigError` for a space whose values have no fixed size.
fn space_columns<'py>(name: &str, space: &Bound<'py, PyAny>, columns: &Bound<'py, PyDict>) -> PyResult<()> {
    let py = space.py();
    let attribute = |name| {
        let found = space.getattr_opt(name);
        found.map(|found| found.filter(|found| !found.is_none()))
    };
    let refuse = |reason: String| Err(error::config(py, format!("the space of {name:?} {reason}")));
    if let Some(parts) = attribute("spaces")? {
        if parts.len().is_ok_and(|parts| parts == 0) {
            return refuse("has no parts".into());
        }
        if let Ok(parts) = parts.cast::<PyMapping>() {
            for part in parts.items()?.iter() {
                let (part, space): (Bound<'_, PyAny>, Bound<'_, PyAny>) = part.extract()?;
                match part.extract::<String>() {
                    Ok(part) if !part.contains('/') && part.parse::<u64>().is_err() && !part.is_empty() => {
                        space_columns(&format!("{name}/{part}"), &space, columns)?;
                    }
                    _ => {
                        return refuse(format!(
                            "has a part {}: a part's name is a text without slashes, and no number; rename it",
                            part.repr()?
                        ));
                    }
                }
            }
            return Ok(());
        }
        // A Tuple is a sequence of its parts; a OneOf is not.
        if space.cast::<PySequence>().is_ok() {
            for (part, space) in parts.try_iter()?.enumerate() {
                space_columns(&format!("{name}/{part}"), &space?, columns)?;
            }
            return Ok(());
        }
    }
    let is_text = |dtype: &Bound<'py, PyAny>| {
        let dtype = PyArrayDescr::new(py, dtype.clone());
        dtype.is_ok_and(|dtype| dtype.kind() == b'U')
    };
    match (attribute("dtype")?, attribute("shape")?) {
        (Some(dtype), _) if is_text(&dtype) => {
            let limit = attribute("max_length")?.map(|limit| limit.extract::<usize>());
            // A character has up to four bytes.
            let limit = limit.transpose()?;
            let bytes = limit.map_or(TEXT_BYTES, |limit| limit.saturating_mul(4));
            return columns.set_item(name, ("uint8", (bytes,)));
        }
        (Some(dtype), Some(shape)) => return columns.set_item(name, (dtype, shape)),
        _ => {}
    }
    refuse(format!(
        "is of type {}, whose values have no fixed dtype and shape: wrap the environment, so that it returns arrays of one shape (padded, \
         with their length)",
        space.get_type().name()?
    ))
}

/// Reads tables to make: one, or several.
pub fn tables(value: &Bound<'_, PyAny>) -> PyResult<Vec<PyTable>> {
    let _call = Call::begin(value.py());
    let refused = || PyTypeError::new_err(format!("tables is a Table or a sequence of them, got {}", value.get_type()));
    match value.extract() {
        Ok(table) => Ok(vec![table]),
        Err(_) => value.extract().map_err(|_| refused()),
    }
}

//! `Mix`: tables and their shares of a batch, and the argument of calls that take a table or a mix.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyMapping};

use replay_core::mix;

use crate::class::value_class;
use crate::error;
use crate::interpreter::Call;

#[doc = stub_doc!("Mix")]
#[pyclass(name = "Mix", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PyMix(Vec<(String, f64)>);

#[pymethods]
impl PyMix {
    #[new]
    fn new(py: Python<'_>, shares: &Bound<'_, PyAny>) -> PyResult<Self> {
        let _call = Call::begin(py);
        let Ok(shares) = shares.cast::<PyMapping>() else {
            return Err(PyTypeError::new_err(format!(
                "a mix has a share for each table, as Mix({{\"online\": 0.5, \"demonstrations\": 0.5}}), got {shares}"
            )));
        };
        let tables: Vec<(String, f64)> = shares.items()?.extract()?;
        let shares: Vec<f64> = tables.iter().map(|(_, share)| *share).collect();
        mix::check_shares(&shares).map_err(|error| error::to_python(py, error))?;
        Ok(PyMix(tables))
    }
}

value_class! { PyMix as "Mix", |mix, py|
    shares: PyResult<Bound<'py, PyDict>> = mix.0.clone().into_py_dict(py);
}

/// Tables with their shares of a batch: one table with the share 1, or the tables of a mix.
#[derive(Clone)]
pub struct TablesArgument {
    tables: Vec<(String, f64)>,
    /// Whether they are of a mix.
    pub mixed: bool,
}

impl TablesArgument {
    /// Names of the tables.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.iter().map(|(name, _)| name.as_str())
    }

    /// Shares of the tables.
    pub fn shares(&self) -> Vec<f64> {
        self.tables.iter().map(|(_, share)| *share).collect()
    }

    /// The tables in errors and descriptions.
    pub fn describe(&self) -> String {
        let names: Vec<_> = self.names().map(|name| format!("{name:?}")).collect();
        match &names[..] {
            [one] => format!("table {one}"),
            several => format!("tables {}", several.join(", ")),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for TablesArgument {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let _call = Call::begin(value.py());
        if let Ok(mix) = value.cast::<PyMix>() {
            return Ok(TablesArgument { tables: mix.get().0.clone(), mixed: true });
        }
        match value.extract() {
            Ok(name) => Ok(TablesArgument { tables: vec![(name, 1.0)], mixed: false }),
            Err(_) => Err(PyTypeError::new_err(format!(
                "table is the name of a table or a Mix, got a {}",
                value.get_type().name()?
            ))),
        }
    }
}

//! `StoredTable`: a table of a replay, from `replay["name"]`.

use pyo3::prelude::*;

use super::PyReplay;
use crate::class::attributes;
use crate::interpreter::Call;
use crate::wait;

#[doc = stub_doc!("StoredTable")]
#[pyclass(name = "StoredTable", module = "innet_drl", frozen)]
pub struct PyStoredTable {
    replay: Py<PyReplay>,
    name: String,
}

#[pymethods]
impl PyReplay {
    fn __getitem__(slf: &Bound<'_, Self>, name: String) -> PyResult<PyStoredTable> {
        slf.get().call(slf.py(), wait::TIMEOUT, |replay, wait| replay.table_config(&name, wait))?;
        Ok(PyStoredTable { replay: slf.clone().unbind(), name })
    }

    fn __contains__(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        let tables = self.call(py, wait::TIMEOUT, |replay, wait| replay.list(wait))?.tables;
        Ok(tables.iter().any(|table| table.name == name))
    }
}

attributes! { PyStoredTable as "StoredTable", |table, py|
    name: &str = &table.name;
    definition: PyResult<Bound<'py, PyAny>> = table.replay.get().table(py, &table.name, wait::TIMEOUT);
}

#[pymethods]
impl PyStoredTable {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let _call = Call::begin(py);
        let stats = (self.replay.get()).call(py, wait::TIMEOUT, |replay, wait| replay.stats(wait))?;
        let items = stats["tables"][&self.name]["items"].as_u64();
        match items {
            Some(items) => Ok(items as usize),
            // It was dropped: the error of an unknown table.
            None => self.definition(py).map(|_| 0),
        }
    }

    fn __repr__(&self) -> String {
        let location = &self.replay.get().location;
        format!("<StoredTable {:?} {location}>", self.name)
    }
}

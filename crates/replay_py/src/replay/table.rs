//! `StoredTable`: a table of a replay, from `replay["name"]`; `Episodes`: an iterator over all episodes of a table.

use pyo3::prelude::*;

use replay_core::episodes::EpisodeReader;

use super::PyReplay;
use super::sample::unpacking_threads;
use crate::batch::PyBatch;
use crate::class::attributes;
use crate::interpreter::Call;
use crate::wait::{self, Exclusive};

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

#[doc = stub_doc!("Episodes")]
#[pyclass(name = "Episodes", module = "innet_drl", frozen)]
pub struct PyEpisodes {
    replay: Py<PyReplay>,
    table: String,
    reader: Exclusive<EpisodeReader>,
    timeout: Option<f64>,
}

#[pymethods]
impl PyReplay {
    #[doc = stub_doc!("Replay.episodes")]
    #[pyo3(signature = (table, timeout = 60.0))]
    fn episodes(slf: &Bound<'_, Self>, table: String, timeout: Option<f64>) -> PyResult<PyEpisodes> {
        let py = slf.py();
        let _call = Call::begin(py);
        let writers = &slf.get().writers;
        let reader = slf.get().call(py, timeout, |replay, wait| {
            let config = replay.table_config(&table, wait)?;
            writers.flush(Some(&table), wait)?;
            Ok(EpisodeReader::new(&config, unpacking_threads())?)
        })?;
        Ok(PyEpisodes {
            replay: slf.clone().unbind(),
            table,
            reader: Exclusive::new("iterator of episodes", reader),
            timeout,
        })
    }
}

#[pymethods]
impl PyEpisodes {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyBatch>> {
        let _call = Call::begin(py);
        let replay = self.replay.get();
        let next = replay.call(py, self.timeout, |replay, wait| self.reader.take(wait)?.next(replay, wait))?;
        Ok(next.map(|arrays| PyBatch::new(arrays[0].shape[0], arrays)))
    }

    fn __repr__(&self) -> String {
        let location = &self.replay.get().location;
        format!("<Episodes of table {:?} {location}>", self.table)
    }
}

//! `Episodes`: an iterator over all episodes of a table.

use pyo3::prelude::*;

use replay_core::episodes::EpisodeReader;

use super::PyReplay;
use super::sample::unpacking_threads;
use crate::batch::PyBatch;
use crate::exclusive::Exclusive;
use crate::interpreter::Call;

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
        Ok(next.map(PyBatch::of_steps))
    }

    fn __repr__(&self) -> String {
        let location = &self.replay.get().location;
        format!("<Episodes of table {:?} {location}>", self.table)
    }
}

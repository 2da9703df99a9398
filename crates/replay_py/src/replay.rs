//! `Replay`: a replay memory in this process or on a server, behind one interface. This file has its tables, parameters and
//! statistics.
//!
//! | module | subject |
//! | --- | --- |
//! | `sample` | writers, samples, updates of priorities |
//! | `gradients` | gradient jobs of a server |
//! | `local` | snapshots and serving of a memory in this process |

mod gradients;
mod local;
mod sample;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use replay_core::error::Result;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, Wait};
use replay_core::schema::TableConfig;
use replay_net::client::Client;

use crate::class::context_manager;
use crate::log;
use crate::parameters::{self, PyParameters};
use crate::process_local::ProcessLocal;
use crate::table::{PyTable, Tables};
pub use sample::PyUpdateReceipt;

/// A replay memory: in this process, or the connection to one on a server (`connect`).
#[pyclass(name = "Replay", module = "innet_drl", frozen)]
pub struct PyReplay {
    backend: ProcessLocal<Backend>,
    /// "in this process" or "at ADDRESS".
    location: String,
    decoders: Mutex<sample::Decoders>,
}

#[derive(Clone)]
struct Backend {
    replay: Arc<dyn Replay>,
    /// The memory, if it is in this process.
    memory: Option<Arc<Memory>>,
    /// The client, if the memory is on a server.
    client: Option<Arc<Client>>,
}

impl PyReplay {
    fn over(backend: Backend, location: String) -> Self {
        PyReplay {
            backend: ProcessLocal::new("replay", backend),
            location,
            decoders: Mutex::default(),
        }
    }

    /// The memory of a server.
    pub fn remote(client: Arc<Client>, address: &str) -> Self {
        let backend = Backend {
            replay: client.clone(),
            memory: None,
            client: Some(client),
        };
        Self::over(backend, format!("at {address}"))
    }

    pub fn make_tables(
        &self,
        py: Python<'_>,
        tables: Tables<'_>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        for table in tables.0 {
            self.create_table(py, &table, timeout)?;
        }
        Ok(())
    }

    fn replay(&self, py: Python<'_>) -> PyResult<Arc<dyn Replay>> {
        Ok(self.backend.get(py)?.replay)
    }

    /// Runs a blocking call of the memory, at most for `timeout` seconds.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl FnOnce(&dyn Replay, &Wait<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.backend.call(py, timeout, |backend, wait| {
            work(backend.replay.as_ref(), wait)
        })
    }
}

context_manager!(PyReplay, |replay, py, _failed| replay.close(py));

#[pymethods]
impl PyReplay {
    #[new]
    #[pyo3(
        signature = (tables = Tables(Vec::new()), *, max_bytes = None, seed = None),
        text_signature = "(tables=(), *, max_bytes=None, seed=None)"
    )]
    fn new(
        py: Python<'_>,
        tables: Tables<'_>,
        max_bytes: Option<u64>,
        seed: Option<u64>,
    ) -> PyResult<Self> {
        log::start(py)?;
        let mut limits = MemoryLimits::default();
        if let Some(max_bytes) = max_bytes {
            limits.max_bytes = max_bytes.saturating_add(limits.receive_bytes);
        }
        limits.seed = seed;
        let memory = Memory::new(limits);
        let backend = Backend {
            replay: memory.clone(),
            memory: Some(memory),
            client: None,
        };
        let replay = Self::over(backend, "in this process".into());
        replay.make_tables(py, tables, None)?;
        Ok(replay)
    }

    /// Makes a table, unless it exists with the same definition.
    #[pyo3(signature = (table, timeout = None))]
    fn create_table(&self, py: Python<'_>, table: &PyTable, timeout: Option<f64>) -> PyResult<()> {
        self.forget_decoders(&table.config.name);
        self.call(py, timeout, |replay, wait| {
            replay.create_table(&table.config, wait)
        })
    }

    /// The definition of a table.
    #[pyo3(signature = (name, timeout = None))]
    fn table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<PyTable> {
        let config = self.call(py, timeout, |replay, wait| replay.table_config(name, wait))?;
        Ok(PyTable {
            config: TableConfig::clone(&config),
        })
    }

    /// Removes every step and item of a table; its writers stay open.
    #[pyo3(signature = (name, timeout = None))]
    fn empty_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        self.call(py, timeout, |replay, wait| replay.empty_table(name, wait))
    }

    /// Removes a table.
    #[pyo3(signature = (name, timeout = None))]
    fn drop_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        self.forget_decoders(name);
        self.call(py, timeout, |replay, wait| replay.drop_table(name, wait))
    }

    /// Stores a new version of named parameters, and returns its number: 1, 2, 3, ...
    #[pyo3(signature = (name, tensors, *, dtype = None, timeout = None))]
    fn put_parameters(
        &self,
        py: Python<'_>,
        name: &str,
        tensors: &Bound<'_, PyMapping>,
        dtype: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let tensors = parameters::collect(py, name, tensors, dtype)?;
        let views = parameters::views(&tensors);
        self.call(py, timeout, |replay, wait| {
            replay.put_parameters(name, parameters::write(name, &views)?, wait)
        })
    }

    /// The newest version of named parameters, or `None` when it is not newer than `newer_than`.
    #[pyo3(signature = (name, newer_than = 0, timeout = None))]
    fn get_parameters(
        &self,
        py: Python<'_>,
        name: &str,
        newer_than: u64,
        timeout: Option<f64>,
    ) -> PyResult<Option<PyParameters>> {
        let found = self.call(py, timeout, |replay, wait| {
            let Some(found) = replay.get_parameters(name, newer_than, wait)? else {
                return Ok(None);
            };
            parameters::read(name, found.bytes).map(|tensors| Some((found.version, tensors)))
        })?;
        found
            .map(|(version, tensors)| PyParameters::new(py, version, tensors))
            .transpose()
    }

    /// All tables, by name.
    #[pyo3(signature = (timeout = None))]
    fn tables(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<BTreeMap<String, PyTable>> {
        let tables = self
            .call(py, timeout, |replay, wait| replay.list(wait))?
            .tables;
        let named = tables
            .into_iter()
            .map(|config| (config.name.clone(), PyTable { config }));
        Ok(named.collect())
    }

    /// The newest version of all parameters, by name.
    #[pyo3(signature = (timeout = None))]
    fn parameters(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<BTreeMap<String, u64>> {
        let parameters = self
            .call(py, timeout, |replay, wait| replay.list(wait))?
            .parameters;
        let versions = parameters
            .into_iter()
            .map(|listed| (listed.name, listed.version));
        Ok(versions.collect())
    }

    /// Counters and gauges of the memory: tables, bytes, writers, parameters.
    #[pyo3(signature = (timeout = None))]
    fn stats<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.call(py, timeout, |replay, wait| replay.stats(wait))?;
        py.import("json")?
            .call_method1("loads", (stats.to_string(),))
    }

    /// Ends the connection, or releases the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let backend = self.backend.close(py)?;
        py.detach(|| drop(backend));
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = self.backend.mark(", closed");
        format!("<Replay {}{closed}>", self.location)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(format!(
            "a Replay {} cannot be pickled: pass its address to the other process, which calls \
             innet_drl.connect",
            self.location
        )))
    }
}

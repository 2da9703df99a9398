//! `Memory`: a replay memory in this process, which can be saved, restored and served.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::snapshot;
use replay_net::config::ServerConfig;
use replay_wire::auth::Secret;

use super::PyReplay;
use crate::server::{self, PyServer};
use crate::table::Tables;
use crate::{integer, log, wait};

/// A replay memory in this process, which can be saved, restored and served.
#[pyclass(name = "Memory", module = "innet_drl", frozen, extends = PyReplay)]
pub struct PyMemory;

impl PyMemory {
    /// The memory, unless it is closed.
    fn memory(slf: &Bound<'_, Self>) -> PyResult<Arc<Memory>> {
        let backend = slf.as_super().get().backend.get(slf.py())?;
        Ok(backend.memory.expect("a Memory is made with its memory"))
    }
}

#[pymethods]
impl PyMemory {
    #[new]
    #[pyo3(
        signature = (tables = Tables(Vec::new()), *, max_bytes = None, seed = None),
        text_signature = "(tables=(), *, max_bytes=None, seed=None)"
    )]
    fn new(
        py: Python<'_>,
        tables: Tables<'_>,
        #[pyo3(from_py_with = integer::max_bytes)] max_bytes: Option<u64>,
        #[pyo3(from_py_with = integer::seed)] seed: Option<u64>,
    ) -> PyResult<PyClassInitializer<Self>> {
        log::start(py)?;
        let mut limits = MemoryLimits::default();
        if let Some(max_bytes) = max_bytes {
            limits.max_bytes = max_bytes.saturating_add(limits.receive_bytes);
        }
        limits.seed = seed;
        let replay = PyReplay::local(Memory::new(limits));
        replay.make_tables(py, tables, None)?;
        Ok(PyClassInitializer::from(replay).add_subclass(PyMemory))
    }

    /// Writes all tables to a file, while they are in use.
    fn save(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<()> {
        let memory = Self::memory(slf)?;
        wait::unlocked(slf.py(), || snapshot::save(&memory, &path))
    }

    /// Restores the tables of a file that `save` wrote.
    fn restore(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<()> {
        let memory = Self::memory(slf)?;
        let decode_table = replay_wire::decode_table;
        let restored = wait::unlocked(slf.py(), || {
            snapshot::restore_any(&memory, &path, decode_table)
        });
        // Restoring may have made tables.
        slf.as_super().get().decoders().clear();
        restored
    }

    /// Serves this memory to clients.
    #[pyo3(signature = (
        addresses, *, token = None, learner_token = None, actor_token = None, tls_cert = None, tls_key = None,
        trusted_network = false, io_threads = 0, spin = false, gradients = None, http = None
    ))]
    fn serve(
        slf: &Bound<'_, Self>,
        addresses: server::Addresses,
        token: Option<String>,
        learner_token: Option<String>,
        actor_token: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        trusted_network: bool,
        #[pyo3(from_py_with = integer::io_threads)] io_threads: usize,
        spin: bool,
        gradients: Option<&str>,
        http: Option<&str>,
    ) -> PyResult<PyServer> {
        let py = slf.py();
        let memory = Self::memory(slf)?;
        let config = ServerConfig {
            listen: addresses.parse(py)?,
            token: token.map(Secret),
            learner_token: learner_token.map(Secret),
            actor_token: actor_token.map(Secret),
            tls_cert,
            tls_key,
            trusted_network,
            io_threads,
            spin,
            gradients: gradients.map(|at| server::udp(py, at)).transpose()?,
            http: http.map(|at| server::http(py, at)).transpose()?,
            ..ServerConfig::default()
        };
        PyServer::start(py, memory, &config)
    }
}

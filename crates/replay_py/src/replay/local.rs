//! `Replay`'s methods for a memory in this process: snapshots, and a server in front of it.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use replay_core::memory::Memory;
use replay_core::snapshot;
use replay_net::config::ServerConfig;
use replay_wire::auth::Secret;

use super::PyReplay;
use crate::server::{self, PyServer};
use crate::{error, integer, wait};

impl PyReplay {
    /// The memory in this process.
    ///
    /// # Errors
    /// `ConfigError` for a memory on a server.
    fn memory(&self, py: Python<'_>, method: &str) -> PyResult<Arc<Memory>> {
        self.backend.get(py)?.memory.ok_or_else(|| {
            error::config(
                py,
                format!(
                    "{method} is for a replay in this process; this one is a client of a server: call it in the process \
                     that made the replay"
                ),
            )
        })
    }
}

#[pymethods]
impl PyReplay {
    /// Writes all tables to a file, while they are in use.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let memory = self.memory(py, "save")?;
        wait::unlocked(py, || snapshot::save(&memory, &path))
    }

    /// Restores the tables of a file that `save` wrote.
    fn restore(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let memory = self.memory(py, "restore")?;
        let decode_table = replay_wire::decode_table;
        let restored = wait::unlocked(py, || snapshot::restore_any(&memory, &path, decode_table));
        // Restoring may have made tables.
        self.decoders().clear();
        restored
    }

    /// Serves this memory to clients.
    #[pyo3(signature = (
        addresses, *, token = None, tls_cert = None, tls_key = None, trusted_network = false, io_threads = 0,
        spin = false, gradients = None
    ))]
    fn serve(
        &self,
        py: Python<'_>,
        addresses: server::Addresses,
        token: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        trusted_network: bool,
        #[pyo3(from_py_with = integer::io_threads)] io_threads: usize,
        spin: bool,
        gradients: Option<&str>,
    ) -> PyResult<PyServer> {
        let memory = self.memory(py, "serve")?;
        let config = ServerConfig {
            listen: addresses.parse(py)?,
            token: token.map(Secret),
            tls_cert,
            tls_key,
            trusted_network,
            io_threads,
            spin,
            gradients: gradients.map(|at| server::udp(py, at)).transpose()?,
            ..ServerConfig::default()
        };
        PyServer::start(py, memory, &config)
    }
}

//! `Memory`: a replay memory in this process, which can be saved, restored and served; `Server`: network access to it.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use gradients_net::GradientsConfig;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::schema::TableConfig;
use replay_link::error::Result;
use replay_link::stack::Address;
use replay_server::config::{HttpAddress, ServerConfig};
use replay_server::plugin::PluginSettings;
use replay_server::process_memory;
use replay_server::server::{RunningServer, Server};
use replay_server::snapshots::file;
use replay_wire::auth::Secret;

use super::PyReplay;
use crate::class::{attributes, context_manager};
use crate::gradients::UDP_ADDRESS;
use crate::interpreter::Call;
use crate::wait::{self, Closing, ProcessLocal};
use crate::{arguments, error, log};

/// Default of `max_bytes` (tables and parameters), in percent of the memory that the process may use.
const SHARE_PERCENT: u8 = 80;

#[doc = stub_doc!("Memory")]
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
        signature = (tables = Vec::new(), *, max_bytes = None, seed = None),
        text_signature = "(tables=(), *, max_bytes=None, seed=None)"
    )]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::tables)] tables: Vec<TableConfig>,
        #[pyo3(from_py_with = arguments::max_bytes)] max_bytes: Option<u64>,
        #[pyo3(from_py_with = arguments::seed)] seed: Option<u64>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let _call = Call::begin(py);
        log::start();
        // If it is served.
        let received = 2 * ServerConfig::default().effective_max_frame_bytes();
        let mut limits = MemoryLimits { receive_bytes: received, ..MemoryLimits::default() };
        if max_bytes.is_none() {
            limits.share = process_memory::share(SHARE_PERCENT);
        }
        if let Some(kept) = max_bytes.or(limits.share.map(|share| share.bytes())) {
            limits.max_bytes = kept.saturating_add(limits.receive_bytes);
        }
        limits.seed = seed;
        let memory = Memory::new(limits);
        let replay = PyReplay::new(memory.clone(), Some(memory), None, None, "in this process".into());
        replay.make_tables(py, &tables, None)?;
        Ok(PyClassInitializer::from(replay).add_subclass(PyMemory))
    }

    #[doc = stub_doc!("Memory.save")]
    fn save(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<()> {
        let memory = Self::memory(slf)?;
        let replay = slf.as_super().get();
        replay.call(slf.py(), None, |_, wait| replay.writers.flush(None, wait))?;
        wait::unlocked(slf.py(), || file::save(&memory, &path))
    }

    #[doc = stub_doc!("Memory.restore")]
    fn restore(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<()> {
        let memory = Self::memory(slf)?;
        let restored = wait::unlocked(slf.py(), || file::restore(&file::LocalDisk, &memory, &path));
        // Restoring may have created tables.
        slf.as_super().get().decoders().clear();
        restored
    }

    #[doc = stub_doc!("Memory.serve")]
    #[pyo3(signature = (
        addresses, *, token = None, learner_token = None, actor_token = None, tls_cert = None, tls_key = None,
        trusted_network = false, io_threads = 0, spin = false, gradients = None, http = None, snapshot = None,
        snapshot_every = None
    ))]
    fn serve(
        slf: &Bound<'_, Self>,
        #[pyo3(from_py_with = addresses)] addresses: Vec<Address>,
        token: Option<String>,
        learner_token: Option<String>,
        actor_token: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        trusted_network: bool,
        #[pyo3(from_py_with = arguments::io_threads)] io_threads: usize,
        spin: bool,
        gradients: Option<&str>,
        http: Option<&str>,
        snapshot: Option<PathBuf>,
        snapshot_every: Option<f64>,
    ) -> PyResult<PyServer> {
        let py = slf.py();
        let _call = Call::begin(py);
        let memory = Self::memory(slf)?;
        let config = ServerConfig {
            listen: addresses,
            token: token.map(Secret),
            learner_token: learner_token.map(Secret),
            actor_token: actor_token.map(Secret),
            tls_cert,
            tls_key,
            trusted_network,
            io_threads,
            spin,
            plugins: plugins(py, gradients)?,
            http: http.map(str::parse).transpose().map_err(|error| error::to_python(py, error))?,
            snapshot,
            snapshot_every: snapshot_every.map(|every| wait::seconds(py, "snapshot_every", every)).transpose()?,
            ..ServerConfig::default()
        };
        let closing = slf.as_super().get().backend.closing().clone();
        PyServer::start(py, memory, closing, &config)
    }
}

#[doc = stub_doc!("Server")]
#[pyclass(name = "Server", module = "innet_drl", frozen)]
pub struct PyServer {
    server: ProcessLocal<RunningServer>,
    addresses: Vec<String>,
    gradients: Option<String>,
    http: Option<String>,
}

/// Reads one address or several.
pub fn addresses(value: &Bound<'_, PyAny>) -> PyResult<Vec<Address>> {
    let _call = Call::begin(value.py());
    let texts = match value.extract() {
        Ok(one) => vec![one],
        Err(_) => value.extract::<Vec<String>>()?,
    };
    let addresses = texts.iter().map(|text| text.parse().map_err(|error| error::to_python(value.py(), error)));
    addresses.collect()
}

/// Settings of the server's plug-ins: gradient sums at a UDP address.
pub fn plugins(py: Python<'_>, gradients: Option<&str>) -> PyResult<PluginSettings> {
    let gradients = gradients.map(|at| arguments::parse(py, "gradients", at, UDP_ADDRESS)).transpose()?;
    let config = GradientsConfig { gradients, ..GradientsConfig::default() };
    config.settings().map_err(|error| error::to_python(py, error))
}

impl PyServer {
    /// A server of the memory of `replay`. It serves without the returned object, until the replay is closed or gone.
    pub fn start(py: Python<'_>, memory: Arc<Memory>, replay: Closing, config: &ServerConfig) -> PyResult<Self> {
        let server = wait::unlocked(py, || Server::start(config, memory))?;
        let addresses = server.addresses().iter().map(Address::to_string).collect();
        let extensions = server.server().service().extensions.iter();
        let mut gradients = extensions.filter(|one| one.name() == gradients_net::NAME);
        let gradients = gradients.next().and_then(|one| one.address());
        let http = server.http().map(HttpAddress::to_string);
        let server = ProcessLocal::within(py, replay, "server", server, end)?.keep();
        Ok(PyServer { server, addresses, gradients, http })
    }
}

/// Closes a server, and waits until it has ended.
fn end(server: RunningServer) -> Result<()> {
    server.server().close();
    server.wait()
}

attributes! { PyServer as "Server", |server, py|
    addresses: Vec<String> = server.addresses.clone();
    gradients: Option<&str> = server.gradients.as_deref();
    http: Option<&str> = server.http.as_deref();
}

context_manager!(PyServer, |server, py, _failed| server.close(py));

#[pymethods]
impl PyServer {
    #[doc = stub_doc!("Server.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(server) = self.server.close(py)? {
            wait::unlocked(py, || end(server))?;
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = self.server.mark(", closed");
        format!("<Server at {}{closed}>", self.addresses.join(", "))
    }
}

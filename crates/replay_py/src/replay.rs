//! `Replay`: a replay memory in this process or on a server, behind one interface. This file has `connect`, tables, parameters and
//! statistics.
//!
//! | module | subject |
//! | --- | --- |
//! | `sample` | writers, samples, updates of priorities |
//! | `table` | a table by its name, for its length; all its episodes |
//! | `memory` | `Memory`: its snapshots; `Server`, in front of it |

mod memory;
mod sample;
mod table;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use base::wait::Wait;
use replay_client::shards::{ShardedClient, parse_addresses};
use replay_client::{Client, ConnectOptions, Namespace};
use replay_core::memory::Memory;
use replay_core::replay::{Replay, UpdateChannel, UpdateReceipt};
use replay_core::schema::TableConfig;
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_wire::RequestBody;
use replay_wire::auth::{self, Secret};

use crate::class::context_manager;
use crate::interpreter::Call;
use crate::open_writers::OpenWriters;
use crate::parameters::{self, PyParameters};
use crate::wait::{self, Exclusive, ProcessLocal};
use crate::writer::PyWriter;
use crate::{arguments, array, error, log};

pub use memory::{PyMemory, PyServer};
pub use sample::PyUpdateReceipt;
pub use table::{PyEpisodes, PyStoredTable};

#[doc = stub_doc!("Replay")]
#[pyclass(name = "Replay", module = "innet_drl", frozen, subclass)]
pub struct PyReplay {
    backend: ProcessLocal<Backend>,
    /// "in this process" or "at ADDRESS".
    location: String,
    decoders: Mutex<sample::Decoders>,
    writers: Arc<OpenWriters>,
    /// A warning about positions in place of ids was logged. Relaxed: the flag publishes nothing else.
    positions_named: AtomicBool,
    /// A warning about unknown parameters was logged. Relaxed: the flag publishes nothing else.
    unknown_parameters_named: AtomicBool,
}

#[derive(Clone)]
struct Backend {
    replay: Arc<dyn Commands>,
    /// The memory, if it is in this process.
    memory: Option<Arc<Memory>>,
    /// The client, if the memory is on a server; with several servers, the client of the first, for extensions.
    client: Option<Arc<Client>>,
    /// Namespace of `replay`, for the names of gradient jobs.
    namespace: Option<Namespace>,
    /// Channel for priority updates without waiting; `None` before the first one, and if updates apply within the call.
    updates: Arc<Exclusive<Option<Box<dyn UpdateChannel<Error>>>>>,
}

/// Longest wait of `close` for the answers to updates of priorities.
const CLOSE_WITHIN: Duration = Duration::from_millis(250);

impl Backend {
    /// Updates a table's priorities, without waiting for the answer unless `applied`.
    fn update(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        applied: bool,
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        if !applied && self.client.is_some() {
            let mut updates = self.updates.take(wait)?;
            if updates.is_none() {
                *updates = self.replay.updates()?;
            }
            if let Some(channel) = &mut *updates {
                return channel.send(table, ids, priorities, wait);
            }
        }
        let earlier = self.flush_updates(wait)?;
        let receipt = self.replay.update_priorities(table, ids, priorities, wait)?;
        Ok(UpdateReceipt { applied: earlier.applied + receipt.applied, stale: earlier.stale + receipt.stale })
    }

    /// Waits for outstanding updates, and returns the counts since the last call.
    fn flush_updates(&self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        match &mut *self.updates.take(wait)? {
            Some(updates) => updates.flush(wait),
            None => Ok(UpdateReceipt::default()),
        }
    }
}

impl PyReplay {
    /// The memory of this process; or of one server or several, or its part in a namespace. Extensions are asked over
    /// `client`.
    fn new(
        replay: Arc<dyn Commands>,
        memory: Option<Arc<Memory>>,
        client: Option<Arc<Client>>,
        namespace: Option<Namespace>,
        location: String,
    ) -> Self {
        let updates = Arc::new(Exclusive::new("replay for updates of priorities", None));
        let backend = Backend { replay, memory, client, namespace, updates };
        PyReplay {
            backend: ProcessLocal::new("replay", backend),
            location,
            decoders: Mutex::default(),
            writers: Arc::default(),
            positions_named: AtomicBool::new(false),
            unknown_parameters_named: AtomicBool::new(false),
        }
    }

    pub fn make_tables(&self, py: Python<'_>, tables: &[TableConfig], timeout: Option<f64>) -> PyResult<()> {
        tables.iter().try_for_each(|table| {
            self.forget_decoders(&table.name);
            self.call(py, timeout, |replay, wait| replay.create_table(table, wait))
        })
    }

    /// Logs once that there are no parameters of this name, if there are some of other names.
    fn name_unknown_parameters(&self, name: &str, replay: &dyn Replay<Error>, wait: &Wait<'_>) {
        // An error is ignored, since the call itself has succeeded.
        let Ok(listing) = replay.list(wait) else {
            return;
        };
        let names = listing.parameters.iter();
        let others: Vec<_> = names.map(|other| other.name.as_str()).collect();
        if !others.is_empty()
            // Stored since the call.
            && !others.contains(&name)
            && !self.unknown_parameters_named.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("get_parameters has found no parameters {name:?} yet, only {others:?}");
        }
    }

    /// Runs a blocking call of the memory, at most for `timeout` seconds.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl FnOnce(&dyn Replay<Error>, &Wait<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.backend.call(py, timeout, |backend, wait| work(backend.replay.as_ref(), wait))
    }

    /// The client of the server that sums gradients, and the namespace of the job.
    pub fn gradient_client(&self, py: Python<'_>) -> PyResult<(Arc<Client>, Option<Namespace>)> {
        let backend = self.backend.get(py)?;
        let client = backend.client.ok_or_else(|| {
            error::config(py, "gradient jobs need a server that sums gradients: innet_drl.connect(...)")
        })?;
        Ok((client, backend.namespace))
    }

    fn command(&self, py: Python<'_>, timeout: Option<f64>, command: RequestBody) -> PyResult<()> {
        self.backend.call(py, timeout, |backend, wait| backend.replay.command(command, wait))
    }
}

context_manager!(PyReplay, |replay, py, _failed| replay.close(py));

#[pymethods]
impl PyReplay {
    #[doc = stub_doc!("Replay.create_table")]
    #[pyo3(signature = (table, timeout = 60.0))]
    fn create_table(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::table)] table: TableConfig,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.make_tables(py, &[table], timeout)
    }

    #[doc = stub_doc!("Replay.table")]
    #[pyo3(signature = (name, timeout = 60.0))]
    fn table<'py>(&self, py: Python<'py>, name: &str, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let config = self.call(py, timeout, |replay, wait| replay.table_config(name, wait))?;
        arguments::table_to_python(py, &config)
    }

    #[doc = stub_doc!("Replay.empty_table")]
    #[pyo3(signature = (name, timeout = 60.0))]
    fn empty_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        self.command(py, timeout, RequestBody::EmptyTable(name.into()))
    }

    #[doc = stub_doc!("Replay.drop_table")]
    #[pyo3(signature = (name, timeout = 60.0))]
    fn drop_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        self.forget_decoders(name);
        self.call(py, timeout, |replay, wait| replay.drop_table(name, wait))
    }

    #[doc = stub_doc!("Replay.put_parameters")]
    #[pyo3(signature = (name, tensors, *, dtype = None, timeout = 60.0))]
    fn put_parameters(
        &self,
        py: Python<'_>,
        name: &str,
        tensors: &Bound<'_, PyAny>,
        dtype: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let _call = Call::begin(py);
        let tensors = parameters::collect(py, name, tensors, dtype)?;
        let views = parameters::views(&tensors);
        self.call(py, timeout, |replay, wait| replay.put_parameters(name, parameters::write(name, &views)?, wait))
    }

    #[doc = stub_doc!("Replay.drop_parameters")]
    #[pyo3(signature = (name, timeout = 60.0))]
    fn drop_parameters(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        self.command(py, timeout, RequestBody::DropParameters(name.into()))
    }

    #[doc = stub_doc!("Replay.get_parameters")]
    #[pyo3(signature = (name, newer_than = 0, timeout = 60.0, *, device = None, writer = None))]
    fn get_parameters(
        &self,
        py: Python<'_>,
        name: &str,
        #[pyo3(from_py_with = arguments::newer_than)] newer_than: u64,
        timeout: Option<f64>,
        device: Option<&Bound<'_, PyAny>>,
        writer: Option<PyRef<'_, PyWriter>>,
    ) -> PyResult<Option<PyParameters>> {
        let _call = Call::begin(py);
        let device = device.map(|name| array::torch_device(py, name)).transpose()?;
        let id = writer.as_ref().map(|writer| &writer.id);
        let found = self.call(py, timeout, |replay, wait| {
            let Some(found) = replay.get_parameters(name, newer_than, id, wait)? else {
                if newer_than == 0 && !self.unknown_parameters_named.load(Ordering::Relaxed) {
                    self.name_unknown_parameters(name, replay, wait);
                }
                return Ok(None);
            };
            let tensors = parameters::read(name, found.bytes)?;
            Ok(Some((found.version, tensors)))
        })?;
        if let Some(writer) = &writer {
            writer.has_parameters(name, found.as_ref().map_or(newer_than, |(version, _)| *version));
        }
        found.map(|(version, tensors)| PyParameters::new(py, version, tensors, device.as_ref())).transpose()
    }

    #[doc = stub_doc!("Replay.tables")]
    #[pyo3(signature = (timeout = 60.0))]
    fn tables<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<BTreeMap<String, Bound<'py, PyAny>>> {
        let _call = Call::begin(py);
        let tables = self.call(py, timeout, |replay, wait| replay.list(wait))?.tables;
        tables.into_iter().map(|table| Ok((table.name.clone(), arguments::table_to_python(py, &table)?))).collect()
    }

    #[doc = stub_doc!("Replay.parameters")]
    #[pyo3(signature = (timeout = 60.0))]
    fn parameters(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<BTreeMap<String, u64>> {
        let _call = Call::begin(py);
        let parameters = self.call(py, timeout, |replay, wait| replay.list(wait))?.parameters;
        let versions = parameters.into_iter().map(|listed| (listed.name, listed.version));
        Ok(versions.collect())
    }

    #[doc = stub_doc!("Replay.stats")]
    #[pyo3(signature = (timeout = 60.0))]
    fn stats<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::begin(py);
        let stats = self.call(py, timeout, |replay, wait| replay.stats(wait))?;
        py.import("json")?.call_method1("loads", (stats.to_string(),))
    }

    #[doc = stub_doc!("Replay.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let backend = self.backend.close(py)?;
        let deadline = Some(Instant::now() + CLOSE_WITHIN);
        let closing = self.backend.closing();
        wait::blocking(py, deadline, None, move |wait| {
            if let Some(backend) = backend
                && let Err(error) = backend.flush_updates(wait)
            {
                tracing::warn!(%error, "updates of priorities may be lost");
            }
            closing.end_dependents()
        })
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let replay = slf.get();
        let closed = replay.backend.mark(", closed");
        let class = slf.get_type().name()?;
        Ok(format!("<{class} {}{closed}>", replay.location))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(format!(
            "a replay {} cannot be pickled: pass its address to the other process, which calls \
             innet_drl.connect",
            self.location
        )))
    }
}

/// Connect timeout for `timeout=None`, longer than any network stack tries.
const LONGEST_CONNECT: Duration = Duration::from_secs(24 * 60 * 60);

#[doc = stub_doc!("connect")]
#[pyfunction]
#[pyo3(
    signature = (
        url, *, token = None, tables = Vec::new(), timeout = 10.0, tls_ca = None, spin = false, config = None, grace = 5.0,
        reconnect_for = 60.0, namespace = None
    ),
    text_signature = "(url, *, token=None, tables=(), timeout=10.0, tls_ca=None, spin=False, config=None, grace=5.0, \
                      reconnect_for=60.0, namespace=None)"
)]
pub fn connect(
    py: Python<'_>,
    url: &str,
    token: Option<String>,
    #[pyo3(from_py_with = arguments::tables)] tables: Vec<TableConfig>,
    timeout: Option<f64>,
    tls_ca: Option<PathBuf>,
    spin: bool,
    config: Option<PathBuf>,
    grace: f64,
    reconnect_for: f64,
    namespace: Option<&str>,
) -> PyResult<PyReplay> {
    let _call = Call::begin(py);
    log::start();
    let grace = wait::seconds(py, "grace", grace)?;
    let reconnect_for = wait::seconds(py, "reconnect_for", reconnect_for)?;
    let namespace = namespace.map(str::parse::<Namespace>).transpose();
    let namespace = namespace.map_err(|error| error::to_python(py, error))?;
    let addresses = parse_addresses(url).map_err(|error| error::to_python(py, error))?;
    let deadline = wait::deadline(py, timeout)?;
    // An empty argument means no token, even if the environment has one.
    let token = match token {
        Some(token) => Some(token.trim().to_owned()).filter(|token| !token.is_empty()),
        None => auth::environment_token(),
    };
    let longest = deadline.map_or(LONGEST_CONNECT, |deadline| deadline.saturating_duration_since(Instant::now()));
    let options = ConnectOptions {
        token: token.map(Secret),
        tls_ca,
        spin,
        stack_config: config,
        connect_timeout: longest,
        await_server: longest,
        reconnect_for,
        grace,
        namespace: namespace.clone(),
        ..ConnectOptions::default()
    };
    let (replay, client, at): (Arc<dyn Commands>, _, _) = if let [address] = &addresses[..] {
        let client = Arc::new(wait::blocking(py, deadline, None, |wait| Client::connect(address, options, wait))?);
        (client.clone(), client, address.to_string())
    } else {
        let client = wait::blocking(py, deadline, None, |wait| ShardedClient::connect(&addresses, &options, wait))?;
        let (first, names) = (client.first().clone(), client.names());
        (Arc::new(client), first, names)
    };
    let inside = namespace.as_ref().map(|name| format!(", namespace {name}"));
    let location = format!("at {at}{}", inside.unwrap_or_default());
    let replay = PyReplay::new(replay, None, Some(client), namespace, location);
    replay.make_tables(py, &tables, timeout)?;
    Ok(replay)
}

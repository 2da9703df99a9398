//! `Replay`: a replay memory in this process or on a server, behind one interface.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use gradients::Asynchronous;
use replay_core::error::{Error, ErrorCode};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Listing, Replay, SampleRequest};
use replay_core::schema::{Dtype, TableConfig};
use replay_core::snapshot;
use replay_core::view::{DecodeOptions, Decoder, Normalization, ViewSpec};
use replay_core::writer::WriterOptions;
use replay_net::client::Client;

use crate::batch::PyBatch;
use crate::batches::{Beta, PyBatches};
use crate::context::context_manager;
use crate::draw::Draw;
use crate::gradient_updates::PyGradientUpdates;
use crate::gradients::{JoinArguments, PyGradientWorker};
use crate::handle::Handle;
use crate::parameters::{self, PyParameters};
use crate::server::{self, PyServer, ServeOptions};
use crate::station::PyStation;
use crate::table::PyTable;
use crate::view::ViewArgument;
use crate::writer::PyWriter;
use crate::{array, error, log, wait};

/// A replay memory: in this process, or the connection to one on a server (`connect`).
#[pyclass(name = "Replay", module = "innet_drl", frozen)]
pub struct PyReplay {
    backend: Handle<Backend>,
    location: String,
    decoders: Mutex<Decoders>,
}

#[derive(Clone)]
struct Backend {
    replay: Arc<dyn Replay>,
    /// Where the memory is in this process: a server can be put in front of it.
    memory: Option<Arc<Memory>>,
    /// Where it is on a server.
    client: Option<Arc<Client>>,
}

/// Decoders keep the buffers of finished batches, so the next draw with the same view finds them.
type Decoders = HashMap<String, Vec<(DecoderKey, Arc<Decoder>)>>;

/// How draws become arrays.
#[derive(Clone, PartialEq)]
struct DecoderKey {
    view: ViewSpec,
    options: DecodeOptions,
}

/// Decoders of one table that are kept.
const DECODERS_PER_TABLE: usize = 8;

/// Keys may come back from torch, which prefers signed integers.
const KEYS: [Dtype; 2] = [Dtype::Uint64, Dtype::Int64];
const PRIORITIES: [Dtype; 4] = [Dtype::Float32, Dtype::Float64, Dtype::Float16, Dtype::Int64];

impl PyReplay {
    fn gradient_client(&self, py: Python<'_>) -> PyResult<Arc<Client>> {
        self.backend.get(py)?.client.ok_or_else(|| {
            error::config(
                py,
                "gradient jobs are for the client of a server that sums gradients: innet_drl.connect(...)",
            )
        })
    }

    /// The client of a server.
    pub fn remote(client: Arc<Client>, address: String) -> Self {
        PyReplay {
            backend: Handle::new(
                "replay",
                Backend {
                    replay: client.clone(),
                    memory: None,
                    client: Some(client),
                },
            ),
            location: format!("at {address}"),
            decoders: Mutex::default(),
        }
    }

    pub fn make_tables(
        &self,
        py: Python<'_>,
        tables: Vec<PyRef<'_, PyTable>>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        for table in tables {
            self.create_table(py, &table, timeout)?;
        }
        Ok(())
    }

    fn replay(&self, py: Python<'_>) -> PyResult<Arc<dyn Replay>> {
        Ok(self.backend.get(py)?.replay)
    }

    fn list(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Listing> {
        let replay = self.replay(py)?;
        let deadline = wait::deadline(py, timeout)?;
        wait::blocking(py, deadline, |wait| replay.list(wait))
    }

    /// The memory itself, for what its clients cannot do.
    fn memory(&self, py: Python<'_>, method: &str) -> PyResult<Arc<Memory>> {
        self.backend.get(py)?.memory.ok_or_else(|| {
            error::config(
                py,
                format!(
                    "{method} is for a replay in this process; this one is the client of a server: call it in the \
                     process that made the replay"
                ),
            )
        })
    }

    fn decoders(&self) -> MutexGuard<'_, Decoders> {
        self.decoders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_decoders(&self, table: &str) {
        self.decoders().remove(table);
    }

    fn decoder(
        &self,
        py: Python<'_>,
        replay: &Arc<dyn Replay>,
        table: &str,
        reading: DecoderKey,
        deadline: Option<Instant>,
    ) -> PyResult<Arc<Decoder>> {
        let known = |views: &Vec<(DecoderKey, Arc<Decoder>)>| {
            let found = views.iter().find(|(known, _)| *known == reading);
            found.map(|(_, decoder)| decoder.clone())
        };
        if let Some(decoder) = self.decoders().get(table).and_then(known) {
            return Ok(decoder);
        }
        let decoder = wait::blocking(py, deadline, |wait| {
            let config = replay.table_config(table, wait)?;
            Decoder::new(&config, &reading.view, reading.options).map(Arc::new)
        })?;
        let mut decoders = self.decoders();
        let kept = decoders.entry(table.to_owned()).or_default();
        if kept.len() == DECODERS_PER_TABLE {
            kept.remove(0);
        }
        kept.push((reading, decoder.clone()));
        Ok(decoder)
    }

    #[expect(clippy::too_many_arguments, reason = "what sample and batches share")]
    fn draw(
        &self,
        py: Python<'_>,
        table: &str,
        count: u32,
        view: ViewSpec,
        normalize: &str,
        allow_short: bool,
        threads: usize,
        deadline: Option<Instant>,
    ) -> PyResult<Draw> {
        let replay = self.replay(py)?;
        let normalization = match normalize {
            "batch" => Normalization::Batch,
            "memory" => Normalization::Memory,
            other => {
                return Err(error::config(
                    py,
                    format!("normalize is \"batch\" or \"memory\", got {other:?}"),
                ));
            }
        };
        let request = SampleRequest {
            table: table.to_owned(),
            count,
            before: view.before(),
            after: view.after(),
            allow_short,
            min_probability: normalization == Normalization::Memory,
        };
        let options = DecodeOptions {
            normalization,
            threads,
        };
        let decoder = self.decoder(py, &replay, table, DecoderKey { view, options }, deadline)?;
        Ok(Draw {
            replay,
            decoder,
            request,
        })
    }
}

context_manager!(PyReplay, |replay, py, _failed| replay.close(py));

#[pymethods]
impl PyReplay {
    #[new]
    #[pyo3(
        signature = (tables = Vec::new(), *, max_bytes = None, seed = None),
        text_signature = "(tables=(), *, max_bytes=None, seed=None)"
    )]
    fn new(
        py: Python<'_>,
        tables: Vec<PyRef<'_, PyTable>>,
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
        let replay = PyReplay {
            backend: Handle::new(
                "replay",
                Backend {
                    replay: memory.clone(),
                    memory: Some(memory),
                    client: None,
                },
            ),
            location: "in this process".into(),
            decoders: Mutex::default(),
        };
        replay.make_tables(py, tables, None)?;
        Ok(replay)
    }

    /// Makes a table; the same definition again is fine.
    #[pyo3(signature = (table, timeout = None))]
    fn create_table(&self, py: Python<'_>, table: &PyTable, timeout: Option<f64>) -> PyResult<()> {
        let replay = self.replay(py)?;
        self.forget_decoders(&table.config.name);
        let deadline = wait::deadline(py, timeout)?;
        wait::blocking(py, deadline, |wait| {
            replay.create_table(&table.config, wait)
        })
    }

    /// The definition of a table.
    #[pyo3(signature = (name, timeout = None))]
    fn table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<PyTable> {
        let replay = self.replay(py)?;
        let deadline = wait::deadline(py, timeout)?;
        let config = wait::blocking(py, deadline, |wait| replay.table_config(name, wait))?;
        Ok(PyTable {
            config: TableConfig::clone(&config),
        })
    }

    /// Removes every step and item of a table; its writers go on.
    #[pyo3(signature = (name, timeout = None))]
    fn empty_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        let replay = self.replay(py)?;
        let deadline = wait::deadline(py, timeout)?;
        wait::blocking(py, deadline, |wait| replay.empty_table(name, wait))
    }

    /// Removes a table.
    #[pyo3(signature = (name, timeout = None))]
    fn drop_table(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<()> {
        let replay = self.replay(py)?;
        self.forget_decoders(name);
        let deadline = wait::deadline(py, timeout)?;
        wait::blocking(py, deadline, |wait| replay.drop_table(name, wait))
    }

    /// Opens a writer for `streams` environments.
    #[pyo3(signature = (table, streams, view, *, name = "", chunk_steps = 50, timeout = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn writer(
        &self,
        py: Python<'_>,
        table: &str,
        streams: u32,
        view: ViewArgument,
        name: &str,
        chunk_steps: u32,
        timeout: Option<f64>,
    ) -> PyResult<PyWriter> {
        let replay = self.replay(py)?;
        let options = WriterOptions {
            name: name.to_owned(),
            chunk_steps,
        };
        let deadline = wait::deadline(py, timeout)?;
        PyWriter::open(
            py,
            replay.as_ref(),
            table,
            streams,
            &view.0,
            options,
            deadline,
        )
    }

    /// Draws `count` items.
    #[pyo3(signature = (
        table, count, view, *, beta = 0.4, normalize = "batch", allow_short = false, timeout = None, threads = 1
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn sample(
        &self,
        py: Python<'_>,
        table: &str,
        count: u32,
        view: ViewArgument,
        beta: f64,
        normalize: &str,
        allow_short: bool,
        timeout: Option<f64>,
        threads: usize,
    ) -> PyResult<PyBatch> {
        let deadline = wait::deadline(py, timeout)?;
        let draw = self.draw(
            py,
            table,
            count,
            view.0,
            normalize,
            allow_short,
            threads,
            deadline,
        )?;
        let drawn = wait::blocking(py, deadline, |wait| {
            let drawn = draw.next(
                wait,
                || beta,
                |wait| draw.replay.sample(&draw.request, wait),
            );
            // Another client may have made a table of this name anew, with other columns.
            let code = drawn.as_ref().err().map(Error::code);
            if matches!(code, Some(ErrorCode::UnknownTable | ErrorCode::Corrupt)) {
                self.forget_decoders(table);
            }
            drawn
        })?;
        PyBatch::new(py, drawn.delivered())
    }

    /// Draws again and again, decoding ahead of the reader.
    #[pyo3(
        signature = (
            table, count, view, *, beta = Beta::Number(0.4), prefetch = 4, device = None,
            normalize = "batch", timeout = None, threads = 1
        ),
        text_signature = "($self, table, count, view, *, beta=0.4, prefetch=4, device=None, \
                          normalize='batch', timeout=None, threads=1)"
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn batches<'py>(
        &self,
        py: Python<'py>,
        table: &str,
        count: u32,
        view: ViewArgument,
        beta: Beta,
        prefetch: usize,
        device: Option<&Bound<'py, PyAny>>,
        normalize: &str,
        timeout: Option<f64>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let deadline = wait::deadline(py, timeout)?;
        let draw = self.draw(
            py, table, count, view.0, normalize, false, threads, deadline,
        )?;
        let description = format!("{count} items of table {table:?} {}", self.location);
        let batches = PyBatches::new(py, draw, beta, prefetch, timeout, description)?;
        let batches = Bound::new(py, batches)?.into_any();
        match device {
            None => Ok(batches),
            Some(device) => py
                .import("innet_drl.batches")?
                .getattr("TorchBatches")?
                .call1((batches, device)),
        }
    }

    /// Sets the priorities of drawn items.
    #[pyo3(signature = (table, key, priority, timeout = None))]
    fn update_priorities(
        &self,
        py: Python<'_>,
        table: &str,
        key: &Bound<'_, PyAny>,
        priority: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<PyUpdateReceipt> {
        let replay = self.replay(py)?;
        let keys = array::numbers(key, "key", &KEYS)?;
        let priorities = array::numbers(priority, "priority", &PRIORITIES)?;
        let deadline = wait::deadline(py, timeout)?;
        let receipt = wait::blocking(py, deadline, |wait| {
            replay.update_priorities(table, &keys.to_bits(), &priorities.to_f64(), wait)
        })?;
        Ok(PyUpdateReceipt {
            applied: receipt.applied,
            stale: receipt.stale,
        })
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
        let replay = self.replay(py)?;
        let tensors = parameters::collect(py, name, tensors, dtype)?;
        let deadline = wait::deadline(py, timeout)?;
        wait::blocking(py, deadline, |wait| {
            replay.put_parameters(name, parameters::write(name, &tensors)?, wait)
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
        let replay = self.replay(py)?;
        let deadline = wait::deadline(py, timeout)?;
        let found = wait::blocking(py, deadline, |wait| {
            let Some(found) = replay.get_parameters(name, newer_than, wait)? else {
                return Ok(None);
            };
            parameters::read(name, found.bytes).map(|tensors| Some((found.version, tensors)))
        })?;
        found
            .map(|(version, tensors)| PyParameters::new(py, version, tensors))
            .transpose()
    }

    /// The tables there are, by name.
    #[pyo3(signature = (timeout = None))]
    fn tables(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<BTreeMap<String, PyTable>> {
        let tables = self.list(py, timeout)?.tables;
        let named = tables
            .into_iter()
            .map(|config| (config.name.clone(), PyTable { config }));
        Ok(named.collect())
    }

    /// The parameters there are: the newest version of each name.
    #[pyo3(signature = (timeout = None))]
    fn parameters(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<BTreeMap<String, u64>> {
        let parameters = self.list(py, timeout)?.parameters;
        Ok(parameters
            .into_iter()
            .map(|listed| (listed.name, listed.version))
            .collect())
    }

    /// Counters and gauges of the memory: tables, bytes, writers, parameters.
    #[pyo3(signature = (timeout = None))]
    fn stats<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let replay = self.replay(py)?;
        let deadline = wait::deadline(py, timeout)?;
        let stats = wait::blocking(py, deadline, |wait| replay.stats(wait))?;
        py.import("json")?
            .call_method1("loads", (stats.to_string(),))
    }

    /// Takes part in a job that sums arrays over its workers, in the aggregator of this server.
    #[pyo3(
        signature = (
            job, worker, workers, *, world = None, name = "", arithmetic = "float32", segment_values = 360, deadline = 30.0,
            via = None, station = None
        )
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn join_gradients(
        &self,
        py: Python<'_>,
        job: &str,
        worker: u16,
        workers: u16,
        world: Option<u32>,
        name: &str,
        arithmetic: &str,
        segment_values: u16,
        deadline: f64,
        via: Option<&str>,
        station: Option<PyRef<'_, PyStation>>,
    ) -> PyResult<PyGradientWorker> {
        let client = self.gradient_client(py)?;
        let arguments = JoinArguments {
            job,
            worker,
            workers,
            world,
            name,
            arithmetic,
            segment_values,
            deadline,
            asynchronous: None,
        };
        PyGradientWorker::join(
            py,
            &client,
            &arguments.request(py)?,
            via,
            station.as_deref(),
        )
    }

    /// Takes part in an asynchronous job, whose workers do not wait for each other.
    #[pyo3(
        signature = (
            job, worker, workers, *, values, threshold, staleness = 3, updates = None, name = "", segment_values = 360,
            deadline = 30.0
        )
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn follow_gradients(
        &self,
        py: Python<'_>,
        job: &str,
        worker: u16,
        workers: u16,
        values: u32,
        threshold: u16,
        staleness: u16,
        updates: Option<u64>,
        name: &str,
        segment_values: u16,
        deadline: f64,
    ) -> PyResult<PyGradientUpdates> {
        let client = self.gradient_client(py)?;
        let arguments = JoinArguments {
            job,
            worker,
            workers,
            world: None,
            name,
            arithmetic: "float32",
            segment_values,
            deadline,
            asynchronous: Some(Asynchronous {
                values,
                threshold,
                staleness,
            }),
        };
        PyGradientUpdates::join(py, &client, &arguments.request(py)?, updates)
    }

    /// Writes all tables to a file, while they are in use.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let memory = self.memory(py, "save")?;
        py.detach(|| snapshot::save(&memory, &path))
            .map_err(|error| error::to_python(py, error))
    }

    /// Puts back the tables of a file that `save` wrote.
    fn restore(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let memory = self.memory(py, "restore")?;
        let restored =
            py.detach(|| snapshot::restore_any(&memory, &path, replay_wire::decode_table));
        // It may have made tables.
        self.decoders().clear();
        restored.map_err(|error| error::to_python(py, error))
    }

    /// Puts a server in front of this memory.
    #[pyo3(signature = (
        addresses, *, token = None, tls_cert = None, tls_key = None, trusted_network = false, io_threads = 0,
        spin = false, gradients = None
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn serve(
        &self,
        py: Python<'_>,
        addresses: server::Addresses,
        token: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        trusted_network: bool,
        io_threads: usize,
        spin: bool,
        gradients: Option<&str>,
    ) -> PyResult<PyServer> {
        let memory = self.memory(py, "serve")?;
        let options = ServeOptions {
            token,
            tls_cert,
            tls_key,
            trusted_network,
            io_threads,
            spin,
            gradients: gradients.map(|at| server::udp(py, at)).transpose()?,
        };
        server::start(py, memory, addresses, options)
    }

    /// Ends the connection, or lets go of the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let backend = self.backend.close(py)?;
        py.detach(|| drop(backend));
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = if self.backend.is_closed() {
            ", closed"
        } else {
            ""
        };
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

/// What an update of priorities did.
#[pyclass(name = "UpdateReceipt", module = "innet_drl", frozen, get_all, eq)]
#[derive(PartialEq)]
pub struct PyUpdateReceipt {
    /// Keys whose item now has the new priority.
    applied: u32,
    /// Keys that no longer name an item: counted and ignored.
    stale: u32,
}

#[pymethods]
impl PyUpdateReceipt {
    fn __repr__(&self) -> String {
        format!(
            "UpdateReceipt(applied={}, stale={})",
            self.applied, self.stale
        )
    }
}

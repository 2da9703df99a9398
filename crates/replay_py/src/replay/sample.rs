//! `Replay`'s experience: writers, samples and updates of priorities.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::Instant;

use pyo3::intern;
use pyo3::prelude::*;

use base::wait::lock;
use replay_core::mix;
use replay_core::replay::check_priorities;
use replay_core::replay::{SampleRequest, UpdateReceipt};
use replay_core::schema::{Dtype, TableConfig};
use replay_core::sum_tree::check_samples;
use replay_core::table::ids::IdSpace;
use replay_core::view::{self, DecodeOptions, Normalization, ViewSpec};
use replay_core::writer::{Writer, WriterOptions};
use replay_wire::ErrorCode;

use super::PyReplay;
use crate::arguments::{self, TablesArgument};
use crate::batches::{Beta, PyBatches};
use crate::decoded_sample::{SampleSource, TableDecoder, TableShare};
use crate::interpreter::Call;
use crate::open_writers::AwaitedWriters;
use crate::writer::PyWriter;
use crate::{array, error, wait};

/// Decoders by table, kept because a decoder reuses the buffers of finished batches.
pub(super) type Decoders = HashMap<String, Vec<Arc<TableDecoder>>>;

/// Number of decoders kept for each table.
const DECODERS_PER_TABLE: usize = 8;

/// Dtypes of ids. torch returns them as signed integers.
const IDS: [Dtype; 2] = [Dtype::Uint64, Dtype::Int64];

/// Default number of threads that unpack a batch: one for each core available at the first sample. Cached, because the standard library
/// reads the cgroup files each time.
pub(super) fn unpacking_threads() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    let most = usize::from(arguments::MAX_THREADS);
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get().min(most)))
}

/// Arguments that `sample` and `batches` share.
struct SampleArguments<'a, 'py> {
    tables: &'a TablesArgument,
    batch_size: u32,
    view: Option<ViewSpec>,
    normalize: &'a str,
    allow_short: bool,
    lease_ms: u32,
    threads: Option<usize>,
    device: Option<&'a Bound<'py, PyAny>>,
    deadline: Option<Instant>,
}

impl PyReplay {
    pub(super) fn decoders(&self) -> MutexGuard<'_, Decoders> {
        lock(&self.decoders)
    }

    /// Drops a table's decoders, since a new table of this name may have other columns.
    pub(super) fn forget_decoders(&self, table: &str) {
        self.decoders().remove(table);
    }

    /// Decoder for samples of a table, cached by view, options and whether memory is lent.
    fn decoder(
        &self,
        py: Python<'_>,
        table: &str,
        view: Option<&ViewSpec>,
        options: DecodeOptions,
        lend: Option<&Bound<'_, PyAny>>,
        deadline: Option<Instant>,
    ) -> PyResult<Arc<TableDecoder>> {
        let fits = |decoder: &&Arc<TableDecoder>| decoder.fits(view, options, lend.is_some());
        let known = self.decoders().get(table).and_then(|kept| kept.iter().find(fits).cloned());
        if let Some(decoder) = known {
            return Ok(decoder);
        }
        let lender = lend.map(|lend| array::lender(lend.clone().unbind()));
        let decoder = self.backend.call_until(py, deadline, move |backend, wait| {
            let config = backend.replay.table_config(table, wait)?;
            TableDecoder::new(config, view.cloned(), options, lender).map(Arc::new)
        })?;
        let mut decoders = self.decoders();
        let kept = decoders.entry(table.to_owned()).or_default();
        kept.retain(|decoder| !decoder.is_outdated());
        if kept.len() == DECODERS_PER_TABLE {
            kept.remove(0);
        }
        kept.push(decoder.clone());
        Ok(decoder)
    }

    /// Ids and priorities by table. In a mix, an id goes to the tables that sampled ids with its table number, or else to all.
    fn routed(
        &self,
        tables: &TablesArgument,
        ids: Vec<u64>,
        priorities: Vec<f64>,
    ) -> Vec<(String, Vec<u64>, Vec<f64>)> {
        let first = tables.names().next().expect("a mix has tables").to_owned();
        // Without ids the call waits for earlier ones, and any table refuses unequal numbers of ids and priorities.
        if tables.names().count() == 1 || ids.is_empty() || ids.len() != priorities.len() {
            return vec![(first, ids, priorities)];
        }
        let decoders = self.decoders();
        let numbers = |name| -> Vec<u16> {
            let kept = decoders.get(name).into_iter().flatten();
            kept.flat_map(|decoder| decoder.table_numbers()).collect()
        };
        let known: Vec<_> = tables.names().map(|name| (name, numbers(name))).collect();
        let routed = known.iter().map(|(name, own)| {
            let belongs = |id: u64| {
                let number = IdSpace::number_of(id);
                own.contains(&number) || !known.iter().any(|(_, numbers)| numbers.contains(&number))
            };
            let pairs = ids.iter().copied().zip(priorities.iter().copied());
            let (ids, priorities): (Vec<u64>, Vec<f64>) = pairs.filter(|(id, _)| belongs(*id)).unzip();
            ((*name).to_owned(), ids, priorities)
        });
        routed.filter(|(_, ids, _)| !ids.is_empty()).collect()
    }

    fn sample_source(&self, py: Python<'_>, asked: &SampleArguments<'_, '_>) -> PyResult<SampleSource> {
        let &SampleArguments { tables, batch_size, ref view, normalize, allow_short, lease_ms, deadline, .. } = asked;
        let choices = [("batch", Normalization::Batch), ("memory", Normalization::Memory)];
        let normalization = arguments::choice(py, "normalize", normalize, choices)?;
        check_samples(batch_size).map_err(|error| error::to_python(py, error))?;
        let options = DecodeOptions { normalization, threads: asked.threads.unwrap_or_else(unpacking_threads) };
        let counts = mix::divide(&tables.shares(), batch_size).map_err(|error| error::to_python(py, error))?;
        let lend = asked.device.map(|device| array::torch_call(intern!(py, "lender"), (device,))).transpose()?;
        let lend = lend.filter(|lend| !lend.is_none());
        let mut shares: Vec<TableShare> = Vec::new();
        for (table, count) in tables.names().zip(counts) {
            let decoder = self.decoder(py, table, view.as_ref(), options, lend.as_ref(), deadline)?;
            if tables.mixed {
                decoder.check_mixed().map_err(|error| error::to_python(py, error))?;
            }
            if let Some(first) = shares.first() {
                let same = first.decoder.check_same_arrays(&decoder);
                same.map_err(|error| error::to_python(py, error))?;
            }
            let request = SampleRequest {
                allow_short,
                min_probability: normalization == Normalization::Memory,
                lease_ms,
                ..SampleRequest::new(count, &decoder.view)
            };
            shares.push(TableShare::new(table, request, decoder));
        }
        let backend = self.backend.get(py)?;
        let local = backend.client.is_none();
        Ok(SampleSource { replay: backend.replay, local, shares, mixed: tables.mixed, copy: None })
    }
}

#[pymethods]
impl PyReplay {
    #[doc = stub_doc!("Replay.writer")]
    #[pyo3(signature = (table, num_envs, view = None, *, name = "", server = None, chunk_steps = 50, timeout = 60.0))]
    fn writer(
        &self,
        py: Python<'_>,
        table: &str,
        #[pyo3(from_py_with = arguments::num_envs)] num_envs: u32,
        #[pyo3(from_py_with = arguments::view)] view: Option<ViewSpec>,
        name: &str,
        #[pyo3(from_py_with = arguments::server)] server: Option<u32>,
        #[pyo3(from_py_with = arguments::chunk_steps)] chunk_steps: u32,
        timeout: Option<f64>,
    ) -> PyResult<PyWriter> {
        let _call = Call::begin(py);
        let options = WriterOptions { name: name.to_owned(), server, chunk_steps };
        let closing = self.backend.closing().clone();
        let opened = options.name.clone();
        let (config, view, writer) = self.call(py, timeout, |replay, wait| {
            let config = replay.table_config(table, wait)?;
            let view = config.view_or_own(view)?;
            let writer = Writer::over_channel(config.clone(), num_envs, &view, options, |open| {
                replay.open_writer(table, open, wait)
            })?;
            Ok((config, view, writer))
        })?;
        PyWriter::new(py, config, writer, opened, num_envs, &view, closing, &self.writers)
    }

    #[doc = stub_doc!("Replay.sample")]
    #[pyo3(signature = (
        table, batch_size, view = None, *, beta = 0.4, device = None, normalize = "batch", allow_short = false,
        timeout = 60.0, writers_timeout = 60.0, threads = None
    ))]
    fn sample<'py>(
        &self,
        py: Python<'py>,
        table: TablesArgument,
        #[pyo3(from_py_with = arguments::batch_size)] batch_size: u32,
        #[pyo3(from_py_with = arguments::view)] view: Option<ViewSpec>,
        beta: f64,
        device: Option<&Bound<'py, PyAny>>,
        normalize: &str,
        allow_short: bool,
        timeout: Option<f64>,
        writers_timeout: Option<f64>,
        #[pyo3(from_py_with = arguments::threads)] threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::begin(py);
        let device = device.map(|name| array::torch_device(py, name)).transpose()?;
        let deadline = wait::deadline(py, timeout)?;
        view::check_beta(beta).map_err(|error| error::to_python(py, error))?;
        let closing = self.backend.closing();
        let writers = &self.writers;
        // A short batch ends with its deadline.
        let longest = wait::limit(py, "writers_timeout", writers_timeout)?.filter(|_| !allow_short);
        let begun = Instant::now();
        let (tables, device) = (&table, device.as_ref());
        let asked = SampleArguments {
            tables,
            batch_size,
            view,
            normalize,
            allow_short,
            lease_ms: 0,
            threads,
            device,
            deadline,
        };
        let mut read_again = false;
        let sampled = loop {
            let samples = self.sample_source(py, &asked)?;
            let awaited = AwaitedWriters::new(writers, Arc::downgrade(&samples.replay), longest, begun, deadline);
            let sampled = awaited.blocking(py, closing, move |wait| {
                // Dropped here, without the interpreter lock: it may have the last reference to the memory.
                let mut samples = samples;
                let replay = samples.replay.clone();
                let sampled = samples.next(
                    wait,
                    || beta,
                    |_, table, request, wait| {
                        writers.awaiting(table, allow_short, wait, |wait| replay.sample(table, request, wait))
                    },
                );
                match sampled {
                    // Another client has replaced the table: the next iteration reads its definition again.
                    Err(error) if error.code() == ErrorCode::TableDiffers && !read_again => Ok(None),
                    sampled => sampled.map(Some),
                }
            })?;
            if let Some(sampled) = sampled {
                break sampled;
            }
            read_again = true;
        };
        let batch = Bound::new(py, sampled.delivered())?.into_any();
        match device {
            None => Ok(batch),
            Some(device) => array::torch_call(intern!(py, "to_device"), (batch, device)),
        }
    }

    #[doc = stub_doc!("Replay.batches")]
    #[pyo3(
        signature = (
            table, batch_size, view = None, *, beta = Beta::Number(0.4), prefetch = 4, device = None,
            normalize = "batch", allow_short = false, acknowledge = false, lease = None, timeout = 60.0,
            writers_timeout = 60.0, threads = None
        ),
        text_signature = "($self, table, batch_size, view=None, *, beta=0.4, prefetch=4, device=None, \
                          normalize='batch', allow_short=False, acknowledge=False, lease=None, timeout=60.0, \
                          writers_timeout=60.0, threads=None)"
    )]
    fn batches<'py>(
        &self,
        py: Python<'py>,
        table: TablesArgument,
        #[pyo3(from_py_with = arguments::batch_size)] batch_size: u32,
        #[pyo3(from_py_with = arguments::view)] view: Option<ViewSpec>,
        beta: Beta,
        #[pyo3(from_py_with = arguments::prefetch)] prefetch: usize,
        device: Option<&Bound<'py, PyAny>>,
        normalize: &str,
        allow_short: bool,
        acknowledge: bool,
        lease: Option<f64>,
        timeout: Option<f64>,
        writers_timeout: Option<f64>,
        #[pyo3(from_py_with = arguments::threads)] threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::begin(py);
        let device = device.map(|name| array::torch_device(py, name)).transpose()?;
        let deadline = wait::deadline(py, timeout)?;
        if table.mixed && acknowledge {
            return Err(error::config(py, "acknowledge=True is for batches of one table, not of a mix"));
        }
        let lease = wait::limit(py, "lease", lease)?;
        let lease_ms = match (acknowledge, lease) {
            (false, None) => 0,
            (true, None) => SampleRequest::NO_END,
            (true, Some(lease)) if !lease.is_zero() => {
                lease.as_millis().clamp(1, (SampleRequest::NO_END - 1).into()) as u32
            }
            _ => return Err(error::config(py, "lease is above 0 seconds, and for acknowledge=True")),
        };
        let (tables, device) = (&table, device.as_ref());
        let asked =
            SampleArguments { tables, batch_size, view, normalize, allow_short, lease_ms, threads, device, deadline };
        let mut samples = self.sample_source(py, &asked)?;
        let upload = device.map(|device| array::torch_call(intern!(py, "upload_to"), (device,))).transpose()?;
        samples.copy = upload.clone().filter(|upload| !upload.is_none()).map(Bound::unbind);
        let tables = table.describe();
        let description = format!("{batch_size} items of {tables} {}", self.location);
        let closing = self.backend.closing().clone();
        let writers = self.writers.clone();
        let longest = wait::limit(py, "writers_timeout", writers_timeout)?;
        let batches = PyBatches::new(py, samples, beta, prefetch, (timeout, longest), description, closing, writers)?;
        let batches = Bound::new(py, batches)?.into_any();
        match device {
            None => Ok(batches),
            Some(device) => array::torch_call(intern!(py, "TorchBatches"), (batches, device, upload)),
        }
    }

    #[doc = stub_doc!("Replay.update_priorities")]
    #[pyo3(signature = (table, ids, priorities, timeout = 60.0, *, wait = true))]
    fn update_priorities(
        &self,
        py: Python<'_>,
        table: TablesArgument,
        ids: &Bound<'_, PyAny>,
        priorities: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        wait: bool,
    ) -> PyResult<PyUpdateReceipt> {
        let _call = Call::begin(py);
        let ids = array::numbers(ids, "ids", &IDS)?;
        let priorities = array::numbers(priorities, "priorities", array::PRIORITIES)?;
        let (ids, priorities) = (ids.to_bits(py)?, priorities.to_f64(py)?);
        let wanted = ids.len();
        if table.names().count() > 1 {
            // One table would be changed before the next one refuses.
            check_priorities(&priorities).map_err(|error| error::to_python(py, error))?;
        }
        let routed = self.routed(&table, ids, priorities);
        let sent: usize = routed.iter().map(|(_, ids, _)| ids.len()).sum();
        let mut receipt = self.backend.call(py, timeout, |backend, waiting| {
            let mut total = UpdateReceipt::default();
            for (table, ids, priorities) in &routed {
                let receipt = backend.update(table, ids, priorities, wait, waiting)?;
                total.applied += receipt.applied;
                total.stale += receipt.stale;
            }
            Ok(total)
        })?;
        if wait {
            // An id that went to several tables is stale in all but one.
            receipt.stale = receipt.stale.saturating_sub((sent - wanted) as u32);
        }
        if receipt.applied == 0
            && receipt.stale > 0
            && let [(table, ids, _)] = &routed[..]
            // An id of a table is as small only if its table number and slot are both 0.
            && ids.iter().all(|&id| id < TableConfig::MAX_CAPACITY)
            && !self.positions_named.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "update_priorities of table {table:?} changed nothing: its {} ids look like positions in a buffer; use \
                 batch.ids",
                ids.len()
            );
        }
        Ok(PyUpdateReceipt { applied: receipt.applied, stale: receipt.stale })
    }
}

#[doc = stub_doc!("UpdateReceipt")]
#[pyclass(name = "UpdateReceipt", module = "innet_drl", frozen, get_all, eq)]
#[derive(PartialEq)]
pub struct PyUpdateReceipt {
    #[doc = stub_doc!("UpdateReceipt.applied")]
    applied: u32,
    #[doc = stub_doc!("UpdateReceipt.stale")]
    stale: u32,
}

#[pymethods]
impl PyUpdateReceipt {
    fn __repr__(&self) -> String {
        format!("UpdateReceipt(applied={}, stale={})", self.applied, self.stale)
    }
}

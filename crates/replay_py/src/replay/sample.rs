//! `Replay`'s experience: writers, samples and updates of priorities.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use pyo3::prelude::*;

use replay_core::error::{Error, ErrorCode};
use replay_core::importance;
use replay_core::replay::SampleRequest;
use replay_core::schema::Dtype;
use replay_core::view::{DecodeOptions, Decoder, Normalization, ViewSpec};
use replay_core::writer::{Writer, WriterOptions};

use super::PyReplay;
use crate::batch::PyBatch;
use crate::batches::{Beta, PyBatches};
use crate::decoded_sample::DecodedSampler;
use crate::turns::lock;
use crate::view::ViewArgument;
use crate::writer::PyWriter;
use crate::{array, class, error, wait};

/// Decoders by table, kept because a decoder reuses the buffers of finished batches.
pub(super) type Decoders = HashMap<String, Vec<(DecoderKey, Arc<Decoder>)>>;

/// View and options of a decoder.
#[derive(Clone, PartialEq)]
pub(super) struct DecoderKey {
    view: ViewSpec,
    options: DecodeOptions,
}

/// Number of decoders kept for each table.
const DECODERS_PER_TABLE: usize = 8;

/// Dtypes of keys. torch returns them as signed integers.
const KEYS: [Dtype; 2] = [Dtype::Uint64, Dtype::Int64];

impl PyReplay {
    pub(super) fn decoders(&self) -> MutexGuard<'_, Decoders> {
        lock(&self.decoders)
    }

    /// Drops a table's decoders, since a new table of this name may have other columns.
    pub(super) fn forget_decoders(&self, table: &str) {
        self.decoders().remove(table);
    }

    fn decoder(
        &self,
        py: Python<'_>,
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
        let decoder = self.backend.call_until(py, deadline, |backend, wait| {
            let config = backend.replay.table_config(table, wait)?;
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

    fn sampler(
        &self,
        py: Python<'_>,
        table: &str,
        count: u32,
        view: ViewSpec,
        normalize: &str,
        allow_short: bool,
        threads: usize,
        deadline: Option<Instant>,
    ) -> PyResult<DecodedSampler> {
        let choices = [
            ("batch", Normalization::Batch),
            ("memory", Normalization::Memory),
        ];
        let normalization = error::choice(py, "normalize", normalize, choices)?;
        let request = SampleRequest {
            allow_short,
            min_probability: normalization == Normalization::Memory,
            ..SampleRequest::new(table, count, &view)
        };
        let options = DecodeOptions {
            normalization,
            threads,
        };
        let decoder = self.decoder(py, table, DecoderKey { view, options }, deadline)?;
        Ok(DecodedSampler {
            replay: self.replay(py)?,
            decoder,
            request,
        })
    }
}

#[pymethods]
impl PyReplay {
    /// Opens a writer for `streams` environments.
    #[pyo3(signature = (table, streams, view, *, name = "", chunk_steps = 50, timeout = None))]
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
        let options = WriterOptions {
            name: name.to_owned(),
            chunk_steps,
        };
        let closing = self.backend.closing().clone();
        let opened = options.name.clone();
        let (config, writer) = self.call(py, timeout, |replay, wait| {
            let config = replay.table_config(table, wait)?;
            let writer = Writer::over_channel(config.clone(), streams, &view.0, options, |open| {
                replay.open_writer(open, wait)
            })?;
            Ok((config, writer))
        })?;
        Ok(PyWriter::new(
            config, writer, opened, streams, &view.0, closing,
        ))
    }

    /// Samples `count` items.
    #[pyo3(signature = (
        table, count, view, *, beta = 0.4, normalize = "batch", allow_short = false, timeout = None, threads = 1
    ))]
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
        importance::check_beta(beta).map_err(|error| error::to_python(py, error))?;
        let sampler = self.sampler(
            py,
            table,
            count,
            view.0,
            normalize,
            allow_short,
            threads,
            deadline,
        )?;
        let closing = self.backend.closing();
        let sampled = wait::blocking(py, deadline, Some(closing), move |wait| {
            // Dropped here, without the interpreter lock: it may have the last reference to the memory.
            let sampler = sampler;
            let sampled = sampler.next(
                wait,
                || beta,
                |wait| sampler.replay.sample(&sampler.request, wait),
            );
            // Another client may have replaced the table by one with other columns.
            let code = sampled.as_ref().err().map(Error::code);
            if matches!(code, Some(ErrorCode::UnknownTable | ErrorCode::Corrupt)) {
                self.forget_decoders(table);
            }
            sampled
        })?;
        PyBatch::new(py, sampled.delivered())
    }

    /// Samples batches repeatedly, decoding ahead of the reader.
    #[pyo3(
        signature = (
            table, count, view, *, beta = Beta::Number(0.4), prefetch = 4, device = None,
            normalize = "batch", timeout = None, threads = 1
        ),
        text_signature = "($self, table, count, view, *, beta=0.4, prefetch=4, device=None, \
                          normalize='batch', timeout=None, threads=1)"
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
        let sampler = self.sampler(
            py, table, count, view.0, normalize, false, threads, deadline,
        )?;
        let description = format!("{count} items of table {table:?} {}", self.location);
        let closing = self.backend.closing().clone();
        let batches = PyBatches::new(py, sampler, beta, prefetch, timeout, description, closing)?;
        let batches = Bound::new(py, batches)?.into_any();
        match device {
            None => Ok(batches),
            Some(device) => py
                .import("innet_drl.batches")?
                .getattr("TorchBatches")?
                .call1((batches, device)),
        }
    }

    /// Sets the priorities of sampled items.
    #[pyo3(signature = (table, key, priority, timeout = None))]
    fn update_priorities(
        &self,
        py: Python<'_>,
        table: &str,
        key: &Bound<'_, PyAny>,
        priority: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<PyUpdateReceipt> {
        let keys = array::numbers(key, "key", &KEYS)?;
        let priorities = array::numbers(priority, "priority", &array::PRIORITIES)?;
        let (keys, priorities) = (keys.to_bits(), priorities.to_f64());
        let receipt = self.call(py, timeout, |replay, wait| {
            replay.update_priorities(table, &keys, &priorities, wait)
        })?;
        Ok(PyUpdateReceipt {
            applied: receipt.applied,
            stale: receipt.stale,
        })
    }
}

/// Result of an update of priorities.
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
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        class::call(slf, &["applied", "stale"])
    }
}

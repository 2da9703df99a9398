//! One sampled batch, from the request to arrays, shared by `Replay.sample` and `Replay.batches`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use base::wait::{Wait, lock};
use replay_core::mix;
use replay_core::replay::{Replay, SampleCredit, SampleRequest, Sampled};
use replay_core::schema::{Column, TableConfig};
use replay_core::table::ids::IdSpace;
use replay_core::view::{Batch, DecodeOptions, Decoder, Lender, TABLES, ViewSpec};
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::batch::PyBatch;
use crate::interpreter;

/// Timeout of the request to remove an item that cannot be decoded.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// How to read samples of a table: its definition, and a decoder for it.
pub struct TableDecoder {
    config: Arc<TableConfig>,
    pub view: ViewSpec,
    /// View and options that the call named, and whether its device lends memory.
    asked: (Option<ViewSpec>, DecodeOptions, bool),
    /// [`TableConfig::checksum`] of what the decoder relies on.
    checksum: u32,
    decoder: Decoder,
    /// Table numbers in the ids of samples for a mix, newest last. Each server's table has its own number.
    tables: Mutex<Vec<u16>>,
    /// The table was dropped, or recreated with another definition. Relaxed: the flag publishes nothing else.
    outdated: AtomicBool,
}

impl TableDecoder {
    /// Most table numbers kept.
    const MOST_TABLES: usize = 64;

    /// Reads with `view`, or by default with the table's own view, into memory of `lender`, or by default of the core.
    ///
    /// # Errors
    /// Errors of [`TableConfig::view_or_own`] and [`Decoder::new`].
    pub fn new(
        config: Arc<TableConfig>,
        view: Option<ViewSpec>,
        options: DecodeOptions,
        lender: Option<Box<Lender>>,
    ) -> Result<Self> {
        let checksum = config.checksum(view.is_none());
        let asked = (view.clone(), options, lender.is_some());
        let view = config.view_or_own(view)?;
        Ok(TableDecoder {
            decoder: Decoder::new(&config, &view, options)?.lent_by(lender),
            config,
            view,
            asked,
            checksum,
            tables: Mutex::default(),
            outdated: AtomicBool::default(),
        })
    }

    /// Whether the decoder is for this view, these options and lent memory or not, and the table's definition has not changed.
    pub fn fits(&self, view: Option<&ViewSpec>, options: DecodeOptions, lent: bool) -> bool {
        let (asked_view, asked_options, asked_lent) = &self.asked;
        (asked_view.as_ref(), *asked_options, *asked_lent) == (view, options, lent) && !self.is_outdated()
    }

    /// Whether the table's definition has changed since.
    pub fn is_outdated(&self) -> bool {
        self.outdated.load(Ordering::Relaxed)
    }

    /// Table numbers in the ids of earlier samples.
    pub fn table_numbers(&self) -> Vec<u16> {
        lock(&self.tables).clone()
    }

    /// Checks that no column has the name of the array that a mixed batch adds.
    ///
    /// # Errors
    /// [`replay_core::Error::Schema`].
    pub fn check_mixed(&self) -> Result<()> {
        if self.config.columns.iter().any(|column| column.root() == TABLES) {
            let reason = format!("column {TABLES:?} has the name of an array of mixed batches; rename it");
            return Err(replay_core::Error::schema(&self.config.name, reason).into());
        }
        Ok(())
    }

    /// Checks that samples of the other table, read with the same view, have the same arrays.
    ///
    /// # Errors
    /// [`replay_core::Error::Schema`] for a column that differs, [`replay_core::Error::Config`] for the tables' own views if they differ.
    pub fn check_same_arrays(&self, other: &TableDecoder) -> Result<()> {
        let (ours, theirs) = (&self.config, &other.config);
        if self.view != other.view {
            return Err(Error::Config(format!(
                "tables {:?} and {:?} of a mix have the views {} and {}: name one view in the call",
                ours.name, theirs.name, self.view, other.view
            )));
        }
        let same = |(a, b): (&Column, &Column)| Column { finite: b.finite, ..a.clone() } == *b;
        if ours.columns.len() == theirs.columns.len() && ours.columns.iter().zip(&theirs.columns).all(same) {
            return Ok(());
        }
        let (our_columns, their_columns) = (ours.columns_text(&[]), theirs.columns_text(&[]));
        let reason = format!(
            "it has the columns {their_columns}, and table {:?} of the same mix {our_columns}: the tables of a mix have the same \
             columns, in the same order",
            ours.name
        );
        Err(replay_core::Error::schema(&theirs.name, reason).into())
    }

    /// Records the table numbers in the ids of a sample.
    fn note(&self, sampled: &Sampled) {
        let mut tables = lock(&self.tables);
        for item in &sampled.items {
            let number = IdSpace::number_of(item.id);
            if !tables.contains(&number) {
                tables.push(number);
            }
        }
        let old = tables.len().saturating_sub(Self::MOST_TABLES);
        tables.drain(..old);
    }
}

/// Requests for samples, and how to read them.
pub struct SampleSource {
    pub replay: Arc<dyn Replay<Error>>,
    /// Whether the memory is in this process.
    pub local: bool,
    /// One share, or one for each table of a mix.
    pub shares: Vec<TableShare>,
    /// Whether they are of a mix, which may have one table: its batches name the table of each item.
    pub mixed: bool,
    /// Begins the copy of a batch to a device: called with each batch that is decoded ahead.
    pub copy: Option<Py<PyAny>>,
}

/// One table's share of the batches.
pub struct TableShare {
    pub table: String,
    pub request: SampleRequest,
    pub decoder: Arc<TableDecoder>,
    /// The sample for the next batch, while other shares are missing.
    arrived: Option<Sampled>,
}

impl TableShare {
    pub fn new(table: &str, request: SampleRequest, decoder: Arc<TableDecoder>) -> Self {
        let request = SampleRequest { definition: decoder.checksum, ..request };
        TableShare { table: table.to_owned(), request, decoder, arrived: None }
    }
}

/// A batch for the reader. If it is dropped before `delivered`, the rate limiter of a memory in this process does not count its
/// sample. A server counts a batch when it is sent, and the credit is `None`.
pub struct DecodedSample {
    pub batch: Batch,
    /// What `copy` returned.
    copied: Option<Py<PyAny>>,
    credit: Option<Box<dyn SampleCredit>>,
    /// [`Sampled::lease`].
    pub lease: u64,
    /// Whether the lease has an end, and begins when the batch reaches its caller.
    pub ends: bool,
}

impl DecodedSample {
    /// Begins the copy of the batch to a device. Where `copy` raises, the reader calls it again.
    pub fn begin_copy(&mut self, copy: &Py<PyAny>) {
        let batch = PyBatch::new(self.batch.len, self.batch.arrays.clone());
        let warn = |error: &PyErr| tracing::warn!(%error, "a copy did not begin ahead");
        self.copied = interpreter::try_attach(|py| copy.call1(py, (batch,)).inspect_err(warn).ok()).flatten();
    }

    /// The batch, which now counts for the rate limiter.
    pub fn delivered(self) -> PyBatch {
        if let Some(credit) = self.credit {
            credit.delivered();
        }
        let mut batch = PyBatch::new(self.batch.len, self.batch.arrays);
        batch.copied = self.copied;
        batch
    }
}

impl SampleSource {
    /// Calls `sample`, for each share, until at least one item of the batch can be decoded. `beta` returns the exponent of the weights and
    /// is called once the batch has arrived. Shares that arrived before an error are kept for the next call.
    ///
    /// # Errors
    /// [`Error::Deadline`] at the deadline without a decoded item; [`Error::Interrupted`]; [`Error::TableDiffers`] for a table that was
    /// recreated with other columns, or another view if that is used; errors of `sample` and [`Decoder::decode`].
    pub fn next(
        &mut self,
        wait: &Wait<'_>,
        beta: impl Fn() -> f64,
        sample: impl FnMut(usize, &str, &SampleRequest, &Wait<'_>) -> Result<Sampled>,
    ) -> Result<DecodedSample> {
        let sampled = self.decoded(wait, beta, sample);
        let code = sampled.as_ref().err().map(Error::code);
        if let Some(ErrorCode::UnknownTable | ErrorCode::Corrupt | ErrorCode::View | ErrorCode::TableDiffers) = code {
            for share in &self.shares {
                share.decoder.outdated.store(true, Ordering::Relaxed);
            }
        }
        sampled
    }

    fn decoded(
        &mut self,
        wait: &Wait<'_>,
        beta: impl Fn() -> f64,
        mut sample: impl FnMut(usize, &str, &SampleRequest, &Wait<'_>) -> Result<Sampled>,
    ) -> Result<DecodedSample> {
        loop {
            for (index, share) in self.shares.iter_mut().enumerate() {
                if share.arrived.is_some() {
                    continue;
                }
                let sampled = sample(index, &share.table, &share.request, wait)?;
                if self.mixed {
                    share.decoder.note(&sampled);
                }
                share.arrived = Some(sampled);
            }
            let arrived = self.shares.iter_mut().filter_map(|share| share.arrived.take()).collect();
            let sampled = self.decode(arrived, beta())?;
            let rejected = sampled.batch.rejected.len();
            if sampled.batch.len > 0 || rejected == 0 {
                return Ok(sampled);
            }
            wait.check()?;
            if wait.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Error::deadline(format!(
                    "none of {rejected} items sampled from table {:?} could be decoded; waiting for others",
                    self.shares[0].table
                )));
            }
        }
    }

    /// Makes arrays of the samples of all shares. Items that cannot be decoded are left out, removed from the memory, and logged with the
    /// name of their writer.
    fn decode(&self, shares: Vec<Sampled>, beta: f64) -> Result<DecodedSample> {
        let ends = shares.iter().scan(0, |end, share| {
            *end += share.items.len();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let table_of = |item: usize| ends.partition_point(|&end| end <= item);
        let mut sampled = mix::combine(shares)?;
        let (credit, lease) = (sampled.credit.take(), sampled.lease);
        // A mix has at most 256 tables.
        let tables = |item| table_of(item) as u8;
        let tables = self.mixed.then_some(&tables as &dyn Fn(usize) -> u8);
        // The tables of a mix have the same columns. Those that name no parameters have versions of 0.
        let versioned = self.shares.iter().find(|share| share.decoder.config.parameters.is_some());
        let decoder = &versioned.unwrap_or(&self.shares[0]).decoder.decoder;
        let batch = decoder.decode_mix(&sampled, beta, tables)?;
        for rejected in &batch.rejected {
            let wait = Wait::until(Some(Instant::now() + ASK_WITHIN));
            let table = &self.shares[table_of(rejected.item)].table;
            match self.replay.report_corrupt(table, rejected.id, &rejected.reason, &wait) {
                Ok(writer) => tracing::warn!(
                    table,
                    writer = writer.as_deref().unwrap_or("(already removed)"),
                    reason = rejected.reason,
                    "removed an item that does not decode"
                ),
                Err(error) => tracing::warn!(
                    table,
                    reason = rejected.reason,
                    %error,
                    "an item does not decode and could not be removed"
                ),
            }
        }
        let ends = self.shares[0].request.lease_ms != SampleRequest::NO_END;
        Ok(DecodedSample { batch, copied: None, credit, lease, ends })
    }
}

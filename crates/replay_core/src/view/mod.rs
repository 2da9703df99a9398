//! Arrays of sampled windows: [`ViewSpec`] defines them, [`Decoder`] makes them, with importance weights. `decode` unpacks rows and blobs,
//! `fill` does it in several threads, `nstep` and `sequence` lay them out, `ragged` those whose items have different lengths, `batch` has the arrays, `buffer`
//! their memory. [`mix`](crate::mix) mixes the shares of a batch.

mod batch;
mod buffer;
mod decode;
mod fill;
mod nstep;
mod ragged;
mod sequence;
mod trajectory;

use std::sync::Arc;

use batch::{ArraySpec, put, take_buffer};
use buffer::BufferPool;
use fill::{ArraysOfView, Fillers};

use base::notation::Number;

use crate::chunk::RowLayout;
use crate::error::{Error, Result};
use crate::processor;
use crate::replay::Sampled;
use crate::schema::{Dtype, TableConfig};

pub use crate::view_spec::{ACTION, NStep, Padding, REWARD, Sequences, Stack, Trajectory, ViewSpec, Window};
pub use batch::{Array, Batch, Rejected};
pub use buffer::{Buffer, Lender, Storage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeOptions {
    pub normalization: Normalization,
    /// Threads that unpack one batch, the calling one included; at least 1.
    pub threads: usize,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        DecodeOptions { normalization: Normalization::default(), threads: 2 }
    }
}

/// Name of the array with each item's version, in a batch of a table that names parameters.
const VERSIONS: &str = "versions";
/// Name of the array with each item's table, in a batch of a mix.
pub const TABLES: &str = "tables";

/// Makes arrays of sampled windows. Threads may share a decoder. It reuses the buffers of dropped batches.
pub struct Decoder {
    layout: RowLayout,
    view: Box<dyn ArraysOfView>,
    normalization: Normalization,
    /// Whether batches have the array [`VERSIONS`].
    has_versions: bool,
    fillers: Fillers,
    pool: Arc<BufferPool>,
}

impl Decoder {
    /// A decoder of samples from a table.
    ///
    /// # Errors
    /// Errors of [`TableConfig::validate`] and [`ViewSpec::validate`], and [`Error::Io`] when no thread can be started.
    pub fn new(config: &TableConfig, view: &ViewSpec, options: DecodeOptions) -> Result<Self> {
        config.validate()?;
        view.validate(config)?;
        let view: Box<dyn ArraysOfView> = match view {
            ViewSpec::NStep(spec) => Box::new(nstep::NStepView::new(spec.clone(), config)?),
            ViewSpec::Sequences(spec) => Box::new(sequence::SequenceView::new(spec.clone(), config)?),
            ViewSpec::Window(spec) => Box::new(*spec),
            ViewSpec::Trajectory(spec) => Box::new(trajectory::TrajectoryView::new(spec.clone(), config)?),
        };
        Self::over(config, view, options)
    }

    /// A decoder of single rows, whatever the names of the columns: arrays of the [`Window`] of one row.
    pub(crate) fn of_rows(config: &TableConfig, threads: usize) -> Result<Self> {
        let options = DecodeOptions { threads, ..DecodeOptions::default() };
        Self::over(config, Box::new(Window::default()), options)
    }

    fn over(config: &TableConfig, view: Box<dyn ArraysOfView>, options: DecodeOptions) -> Result<Self> {
        Ok(Decoder {
            layout: RowLayout::of(config),
            view,
            normalization: options.normalization,
            has_versions: config.parameters.is_some(),
            fillers: Fillers::new(options.threads)?,
            pool: Arc::default(),
        })
    }

    /// The decoder, with a `lender` for the storage of its batches, such as page-locked memory; where it lends none, that is on the heap.
    pub fn lent_by(self, lender: Option<Box<Lender>>) -> Self {
        Decoder { pool: Arc::new(BufferPool::lent_by(lender)), ..self }
    }

    pub(crate) fn layout(&self) -> &RowLayout {
        &self.layout
    }

    /// Makes the arrays of a sample. `beta` is the importance-sampling exponent, 0 to 4 (Ape-X: 0.4). Items
    /// whose data does not decode are left out and listed in [`Batch::rejected`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the sample as a whole does not have the rows and blobs that it announces,
    /// [`Error::Config`] for a bad `beta`, or for weights over the memory without its smallest probability,
    /// [`Error::TooLarge`] for arrays beyond 16 GiB.
    pub fn decode(&self, sampled: &Sampled, beta: f64) -> Result<Batch> {
        self.decode_mix(sampled, beta, None)
    }

    /// As [`Self::decode`]; for a mix also with the array [`TABLES`], which has `table_of` each item.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_mix(&self, sampled: &Sampled, beta: f64, table_of: Option<&dyn Fn(usize) -> u8>) -> Result<Batch> {
        let rows = decode::Rows::of(sampled, &self.layout)?;
        let windows = rows.windows(&sampled.items)?;
        let short = self.view.any_short(&windows);
        let mut specs = self.view.specs(&self.layout, short);
        let order = crate::mix::order(sampled);
        let mixed: Vec<_>;
        let windows = match &order {
            Some(order) => {
                mixed = order.iter().map(|&item| windows[item]).collect();
                &mixed
            }
            None => &windows,
        };
        let of_view = specs.len();
        let (mut ragged, mut failed) = (self.view.ragged(&self.layout, windows), Vec::new());
        for array in &mut ragged {
            array.read_counts(&self.layout, &mut failed);
            specs.extend(array.specs(&self.layout));
        }
        let with_ragged = specs.len();
        let of_items = [
            ("weights", Dtype::Float32),
            ("probabilities", Dtype::Float64),
            ("ids", Dtype::Uint64),
            ("ages", Dtype::Uint32),
        ];
        let of_versions = self.has_versions.then_some((VERSIONS, Dtype::Uint64));
        let of_mix = table_of.map(|_| (TABLES, Dtype::Uint8));
        let of_items = of_items.into_iter().chain(of_versions).chain(of_mix);
        specs.extend(of_items.map(|(name, dtype)| ArraySpec::new(name, dtype, vec![])));
        let mut buffer = take_buffer(&self.pool, &mut specs, windows.len())?;
        let view = (&*self.view, short);
        let arrays = (&specs[..with_ragged], &ragged[..]);
        let failed = self.fillers.fill_arrays(&self.layout, windows, arrays, &mut buffer, view, failed);
        if !failed.is_empty() {
            let mut parts = batch::split(&specs, windows.len(), &mut buffer).into_iter();
            for (spec, bytes) in specs[..of_view].iter().zip(parts.by_ref()) {
                fill::remove_items(bytes, spec.item_bytes(), &failed);
            }
            let mut shorter = Vec::new();
            for array in &mut ragged {
                array.remove_items(parts.nth(array.depth()).unwrap_or_default(), &failed);
                shorter.extend(array.specs(&self.layout));
            }
            for (spec, shorter) in specs[of_view..].iter_mut().zip(shorter) {
                *spec = shorter.in_place_of(spec);
            }
        }
        let mut parts = batch::split(&specs, windows.len(), &mut buffer);

        let mut items = order.unwrap_or_else(|| (0..windows.len()).collect());
        let reject = |(place, reason): (usize, String)| {
            let item = std::mem::replace(&mut items[place], usize::MAX);
            Rejected { id: sampled.items[item].id, item, reason }
        };
        let rejected = failed.into_iter().map(reject).collect();
        items.retain(|&item| item < usize::MAX);
        let len = items.len();
        let kept = items.iter().map(|&item| &sampled.items[item]);
        let probabilities = kept.clone().map(|item| item.probability);
        let weights = importance_weights(probabilities.clone(), sampled.min_probability, beta, self.normalization)?;
        let mut rest = &mut parts[of_view..with_ragged];
        for array in &ragged {
            array.put_offsets(rest.split_off_mut(..array.depth() + 1).unwrap_or_default());
        }
        if let [of_weights, of_probabilities, ids, ages, others @ ..] = &mut parts[with_ragged..] {
            let (versions, tables) = others.split_at_mut(usize::from(self.has_versions));
            put(of_weights, weights.into_iter().map(f32::to_ne_bytes));
            put(of_probabilities, probabilities.map(f64::to_ne_bytes));
            put(ids, kept.clone().map(|item| item.id.to_ne_bytes()));
            put(ages, kept.clone().map(|item| item.age.to_ne_bytes()));
            for versions in versions {
                put(versions, kept.clone().map(|item| item.version.to_ne_bytes()));
            }
            for (tables, table_of) in tables.iter_mut().zip(table_of) {
                put(tables, items.iter().map(|&item| [table_of(item)]));
            }
        }
        let buffer = Arc::new(buffer);
        let mut arrays = self.view.arrays(short, &specs[..of_view], len, &buffer);
        let mut rest = &specs[of_view..with_ragged];
        arrays.extend(
            ragged.iter().map(|array| array.array(rest.split_off(..array.depth() + 1).unwrap_or_default(), &buffer)),
        );
        arrays.extend(batch::whole_arrays(&specs[with_ragged..], len, &buffer));
        Ok(Batch { len, arrays, rejected })
    }
}

/// Divisor of the importance weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Normalization {
    /// The largest weight of the batch: the largest weight is 1 in every batch.
    #[default]
    Batch,
    /// The largest weight of any item in the memory; samples then have to request the smallest probability.
    Memory,
}

/// Largest exponent, as for priorities: 1 corrects completely, and a schedule may overshoot it.
const MAX_BETA: f64 = 4.0;

/// Checks the exponent of importance weights, before a sample waits for its items.
pub fn check_beta(beta: f64) -> Result<()> {
    if (0.0..=MAX_BETA).contains(&beta) {
        return Ok(());
    }
    Err(Error::Config(format!("the importance-sampling exponent beta is 0 to {MAX_BETA}, got {}", Number(beta))))
}

/// Importance weights (Schaul et al., 2016, section 3.4): (N P(i))^-beta, divided by the largest, from the probabilities of items. N, the number of live items, cancels: the largest weight belongs to the smallest probability
/// p, and (N P(i))^-beta / (N p)^-beta = (p / P(i))^beta. An item without a positive probability was not sampled at random and weighs 1.
/// [`Normalization::Memory`] needs the smallest probability.
pub(crate) fn importance_weights(
    probabilities: impl Iterator<Item = f64> + Clone,
    min_probability: Option<f64>,
    beta: f64,
    normalization: Normalization,
) -> Result<Vec<f32>> {
    check_beta(beta)?;
    let sampled = |p: f64| p > 0.0 && p.is_finite();
    let smallest = match normalization {
        // Positive floats are ordered as their bits; the compiler vectorises the integer minimum.
        Normalization::Batch => probabilities
            .clone()
            .map(|p| if sampled(p) { p } else { f64::INFINITY }.to_bits())
            .min()
            .map_or(f64::INFINITY, f64::from_bits),
        Normalization::Memory => min_probability.filter(|&p| sampled(p)).ok_or_else(|| {
            Error::Config("weights over the whole memory need a sample that asks for the smallest probability".into())
        })?,
    };
    // At most 1, though another client may have raised the smallest priority since the sample's scan.
    let ratio = |p| {
        if sampled(p) { (smallest / p).min(1.0) } else { 1.0 }
    };
    let mut weights: Vec<_> = probabilities.map(ratio).collect();
    processor::raise(&mut weights, beta);
    Ok(weights.into_iter().map(|weight| weight as f32).collect())
}

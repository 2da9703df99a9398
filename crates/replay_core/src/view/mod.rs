//! Arrays of sampled windows: [`ViewSpec`] defines them, [`Decoder`] makes them, with importance weights. `decode` unpacks rows and blobs,
//! in several threads, `nstep` and `sequence` lay them out, `batch` has the arrays and their memory. [`mix`](crate::mix) mixes the shares of a
//! batch.

mod batch;
mod decode;
mod nstep;
mod sequence;

use std::sync::Arc;

use batch::{ArraySpec, BufferPool};
use decode::{Fill, Fillers, SampledWindow};

use base::notation::Number;

use crate::chunk::RowLayout;
use crate::error::{Error, Result};
use crate::processor;
use crate::replay::Sampled;
use crate::schema::{Dtype, TableConfig};

pub use crate::view_spec::{ACTION, NStep, Padding, REWARD, Sequences, Stack, ViewSpec, Window};
pub use batch::{Array, Batch, Buffer, Rejected};

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

/// Makes arrays of sampled windows. Threads may share a decoder. It reuses the buffers of dropped batches.
pub struct Decoder {
    layout: RowLayout,
    view: View,
    normalization: Normalization,
    fillers: Fillers,
    pool: Arc<BufferPool>,
}

enum View {
    NStep(nstep::NStepView),
    Sequences(sequence::SequenceView),
    Window(Window),
}

impl Decoder {
    /// A decoder of samples from a table.
    ///
    /// # Errors
    /// Errors of [`TableConfig::validate`] and [`ViewSpec::validate`], and [`Error::Io`] when no thread can be started.
    pub fn new(config: &TableConfig, view: &ViewSpec, options: DecodeOptions) -> Result<Self> {
        config.validate()?;
        view.validate(config)?;
        let view = match view {
            ViewSpec::NStep(spec) => View::NStep(nstep::NStepView::new(spec.clone(), config)?),
            ViewSpec::Sequences(spec) => View::Sequences(sequence::SequenceView::new(spec.clone(), config)?),
            ViewSpec::Window(spec) => View::Window(*spec),
        };
        Self::over(config, view, options)
    }

    /// A decoder of single rows, whatever the names of the columns: arrays of the [`Window`] of one row.
    pub(crate) fn of_rows(config: &TableConfig, threads: usize) -> Result<Self> {
        let options = DecodeOptions { threads, ..DecodeOptions::default() };
        Self::over(config, View::Window(Window::default()), options)
    }

    fn over(config: &TableConfig, view: View, options: DecodeOptions) -> Result<Self> {
        Ok(Decoder {
            layout: RowLayout::of(config),
            view,
            normalization: options.normalization,
            fillers: Fillers::new(options.threads)?,
            pool: Arc::default(),
        })
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
    /// [`Error::TooLarge`] for an array beyond 16 GiB.
    pub fn decode(&self, sampled: &Sampled, beta: f64) -> Result<Batch> {
        let rows = decode::split_rows(sampled, &self.layout)?;
        let windows = decode::split_windows(sampled, &rows)?;
        let layout = &self.layout;
        match &self.view {
            View::NStep(view) => {
                let any_short = view.any_short(&windows);
                let specs = view.array_specs(layout, any_short);
                let fill: Fill = &|unpacker, window, out| view.fill(unpacker, any_short, window, out);
                let arrays = |items, buffers| view.arrays(any_short, &specs, items, buffers);
                self.assemble(sampled, beta, &windows, &specs, fill, arrays)
            }
            View::Sequences(view) => {
                let specs = view.array_specs(layout);
                let fill: Fill = &|unpacker, window, out| view.fill(unpacker, window, out);
                let arrays = |items, buffers| view.arrays(&specs, items, buffers);
                self.assemble(sampled, beta, &windows, &specs, fill, arrays)
            }
            View::Window(view) => {
                let specs = view.array_specs(layout);
                let fill: Fill = &|unpacker, window, out| view.fill(unpacker, window, out);
                let arrays = |items, buffers| batch::whole_arrays(&specs, items, buffers);
                self.assemble(sampled, beta, &windows, &specs, fill, arrays)
            }
        }
    }

    /// Orders the windows, fills the arrays, leaves out the items that fail, and adds the arrays that every view has.
    fn assemble<'a>(
        &'a self,
        sampled: &Sampled,
        beta: f64,
        windows: &[SampledWindow<'a>],
        specs: &[ArraySpec],
        fill: Fill<'_, 'a>,
        arrays: impl Fn(usize, Vec<Arc<Buffer>>) -> Vec<Array>,
    ) -> Result<Batch> {
        let order = crate::mix::order(sampled);
        let mixed: Vec<_>;
        let windows = match &order {
            Some(order) => {
                mixed = order.iter().map(|&item| windows[item]).collect();
                &mixed
            }
            None => windows,
        };
        let mut buffers =
            specs.iter().map(|spec| self.pool.take(windows.len(), spec.item_bytes())).collect::<Result<Vec<_>>>()?;
        let failed = self.fillers.fill_arrays(&self.layout, windows, specs, &mut buffers, fill);
        if !failed.is_empty() {
            for (buffer, spec) in buffers.iter_mut().zip(specs) {
                decode::remove_items(buffer.as_mut_slice(), spec.item_bytes(), &failed);
            }
        }
        let len = windows.len() - failed.len();
        let mut arrays = arrays(len, buffers.into_iter().map(Arc::new).collect());

        let (mut items, mut rejected) = (Vec::with_capacity(len), Vec::new());
        let mut failed = failed.into_iter().peekable();
        for position in 0..windows.len() {
            let item = order.as_ref().map_or(position, |order| order[position]);
            match failed.next_if(|(failed, _)| *failed == position) {
                Some((_, reason)) => rejected.push(Rejected { id: sampled.items[item].id, item, reason }),
                None => items.push(item),
            }
        }
        let kept: Vec<_> = items.iter().map(|&item| sampled.items[item]).collect();
        let weights = importance_weights(
            kept.iter().map(|item| item.probability),
            sampled.min_probability,
            beta,
            self.normalization,
        )?;
        let mut column = |name, dtype, bytes: Vec<u8>| -> Result<()> {
            let spec = ArraySpec::new(name, dtype, vec![]);
            let mut buffer = self.pool.take(len, spec.item_bytes())?;
            buffer.as_mut_slice().copy_from_slice(&bytes);
            arrays.push(spec.array(len, Arc::new(buffer)));
            Ok(())
        };
        let bytes = weights.iter().flat_map(|weight| weight.to_ne_bytes());
        column("weights", Dtype::Float32, bytes.collect())?;
        let bytes = kept.iter().flat_map(|v| v.probability.to_ne_bytes());
        column("probabilities", Dtype::Float64, bytes.collect())?;
        let bytes = kept.iter().flat_map(|v| v.id.to_ne_bytes());
        column("ids", Dtype::Uint64, bytes.collect())?;
        let bytes = kept.iter().flat_map(|v| v.age.to_ne_bytes());
        column("ages", Dtype::Uint32, bytes.collect())?;

        Ok(Batch { len, arrays, items, rejected })
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

//! Arrays of consecutive steps: each column as `[steps, *shape]`, and the flags of the steps.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::replay::Sampled;
use crate::row_layout::RowLayout;
use crate::schema::TableConfig;

use super::batch::{Array, ArraySpec, BufferPool, whole_arrays};
use super::decode::{split_rows, split_windows};
use super::fill::{Fill, Fillers};
use super::raw::{FLAGS, flag_specs};

/// Makes arrays of the steps of a table. It reuses the buffers of dropped arrays.
pub struct StepsDecoder {
    layout: RowLayout,
    fillers: Fillers,
    pool: Arc<BufferPool>,
}

impl StepsDecoder {
    /// A decoder for a valid table definition, which unpacks with `threads` threads.
    ///
    /// # Errors
    /// [`Error::Io`] when no thread can be started.
    pub fn new(config: &TableConfig, threads: usize) -> Result<Self> {
        Ok(StepsDecoder { layout: RowLayout::of(config), fillers: Fillers::new(threads)?, pool: Arc::default() })
    }

    /// The layout of the rows.
    pub fn layout(&self) -> &RowLayout {
        &self.layout
    }

    /// Makes the arrays of a sample whose items have one row each: `terminated`, `truncated`, `first`, `final`, then the columns.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for rows that do not decode, [`Error::TooLarge`] for an array beyond 16 GiB.
    pub fn decode(&self, steps: &Sampled) -> Result<Vec<Array>> {
        let rows = split_rows(steps, &self.layout)?;
        let windows = split_windows(steps, &rows)?;
        let mut specs: Vec<_> = flag_specs(&[]).collect();
        let columns = 0..self.layout.columns.len();
        specs.extend(columns.map(|column| ArraySpec::of_column(&self.layout, column, None)));
        let mut buffers =
            specs.iter().map(|spec| self.pool.take(windows.len(), spec.item_bytes())).collect::<Result<Vec<_>>>()?;
        let fill: Fill = &|unpacker, window, out| {
            let row = window.row(0).ok_or("a step is missing")?;
            let (bits, columns) = out.split_at_mut(FLAGS.len());
            for (bit, (_, flag)) in bits.iter_mut().zip(FLAGS) {
                bit[0] = u8::from(row.has(flag));
            }
            for (column, value) in columns.iter_mut().enumerate() {
                unpacker.unpack(row, column, value)?;
            }
            Ok(())
        };
        let failed = (self.fillers).fill_arrays(&self.layout, &windows, &specs, &mut buffers, fill);
        if let Some((step, reason)) = failed.first() {
            return Err(Error::Corrupt(format!(
                "step {step} of an episode in table {:?} does not decode: {reason}",
                self.layout.table
            )));
        }
        let buffers = buffers.into_iter().map(Arc::new).collect();
        Ok(whole_arrays(&specs, windows.len(), buffers))
    }
}

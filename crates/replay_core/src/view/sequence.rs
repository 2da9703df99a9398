//! Arrays of the views of several rows: `Sequences`, and `Window`, which has the rows unchanged.
//!
//! Each part of the observation has a buffer, with `stack - 1 + T + 1` slots for an item. The stack of step t is the `stack`
//! slots from slot t on, so the stacks of a window overlap.

use std::sync::Arc;

use super::batch::{Array, ArraySpec, Buffer, whole_arrays};
use super::decode::{Decoded, SampledWindow, Unpacker};
use super::{REWARD, Sequences, Window};
use crate::chunk::RowLayout;
use crate::error::Result;
use crate::schema::{Dtype, TableConfig, flags};
use crate::view_spec::{self, Part, find_scalar};

pub(super) struct SequenceView {
    spec: Sequences,
    parts: Vec<Part>,
    reward: usize,
    /// Columns returned at the first step.
    state: Vec<usize>,
    /// Columns returned at every step.
    others: Vec<usize>,
}

/// The bool arrays of flags, and the flag in each. `Sequences` have no array of final rows.
const FLAGS: [(&str, u8); 4] = [
    ("terminated", flags::TERMINATED),
    ("truncated", flags::TRUNCATED),
    ("first", flags::FIRST),
    ("final", flags::FINAL),
];

impl SequenceView {
    pub(super) fn new(spec: Sequences, config: &TableConfig) -> Result<Self> {
        let parts = view_spec::parts(config, &spec.observation, &spec.stack)?;
        let reward = find_scalar(config, REWARD)?;
        let (state, others) = (0..config.columns.len())
            .filter(|&column| column != reward && parts.iter().all(|part| part.column != column))
            .partition(|&column| {
                let name = &config.columns[column].name;
                let mut state = spec.state.iter();
                state.any(|state| view_spec::has_column(state, name))
            });
        Ok(SequenceView { spec, parts, reward, state, others })
    }

    fn steps(&self) -> usize {
        usize::from(self.spec.burn_in) + usize::from(self.spec.length)
    }

    /// The arrays of a batch: observations, reward, discount, mask, flags, state columns, other columns.
    pub(super) fn array_specs(&self, layout: &RowLayout) -> Vec<ArraySpec> {
        let steps = self.steps();
        let parts = self.parts.iter();
        let mut specs: Vec<_> =
            parts.map(|part| ArraySpec::of_column(layout, part.column, Some(part.stack + steps))).collect();
        specs.push(ArraySpec::new(REWARD, Dtype::Float32, vec![steps]));
        specs.push(ArraySpec::new("discount", Dtype::Float32, vec![steps]));
        specs.push(ArraySpec::new("mask", Dtype::Bool, vec![steps]));
        specs.extend(FLAGS[..3].iter().map(|(name, _)| ArraySpec::new(name, Dtype::Bool, vec![steps])));
        specs.extend(self.state.iter().map(|&column| ArraySpec::of_column(layout, column, None)));
        specs.extend(self.others.iter().map(|&column| ArraySpec::of_column(layout, column, Some(steps))));
        specs
    }

    pub(super) fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        window: &SampledWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> Decoded<()> {
        let steps = window.steps(self.steps())?;
        let (observed, rest) = out.split_at_mut(self.parts.len());
        let [reward, discount, mask, terminated, truncated, first, columns @ ..] = rest else {
            return Err("the batch has too few arrays".into());
        };

        for (part, slots) in self.parts.iter().zip(observed) {
            let newest = part.stack as isize - 1;
            let offset = |slot: usize| {
                let offset = slot as isize - newest;
                (offset < steps.observations as isize).then_some(offset)
            };
            unpacker.unpack_slots(window, part.column, self.spec.padding, slots, offset)?;
        }

        reward.fill(0);
        discount.fill(0);
        let numbers = reward.chunks_exact_mut(4).zip(discount.chunks_exact_mut(4));
        for ((step, &row), (reward, discount)) in steps.all.iter().enumerate().zip(numbers) {
            let value = unpacker.number(row, self.reward)? as f32;
            reward.copy_from_slice(&value.to_ne_bytes());
            if step < steps.counted.len() && !row.has(flags::TERMINATED) {
                discount.copy_from_slice(&(self.spec.gamma as f32).to_ne_bytes());
            }
        }
        mask.fill(0);
        mask[..steps.counted.len()].fill(1);
        for (values, (_, flag)) in [terminated, truncated, first].into_iter().zip(FLAGS) {
            values.fill(0);
            for (value, row) in values.iter_mut().zip(steps.all) {
                *value = u8::from(row.has(flag));
            }
        }

        let (state, others) = columns.split_at_mut(self.state.len());
        for (&column, value) in self.state.iter().zip(state) {
            unpacker.unpack(steps.all[0], column, value)?;
        }
        for (&column, values) in self.others.iter().zip(others) {
            let used = steps.all.len() * unpacker.bytes(column);
            values[used..].fill(0);
            for (&row, value) in steps.all.iter().zip(values.chunks_exact_mut(unpacker.bytes(column))) {
                unpacker.unpack(row, column, value)?;
            }
        }
        Ok(())
    }

    pub(super) fn arrays(&self, specs: &[ArraySpec], items: usize, buffers: Vec<Arc<Buffer>>) -> Vec<Array> {
        let mut arrays = whole_arrays(specs, items, buffers);
        for (part, window) in self.parts.iter().zip(&mut arrays) {
            // A stack of one observation has no dimension of its own.
            let counts = [self.steps() + 1, part.stack];
            let counts = &counts[..2 - usize::from(part.stack == 1)];
            *window = window.overlapping(&part.array, 0, counts);
            window.shared = part.stack > 1;
        }
        arrays
    }
}

impl Window {
    fn rows(&self) -> usize {
        usize::from(self.before) + 1 + usize::from(self.after)
    }

    /// The arrays of a batch: mask, flags, then the columns.
    pub(super) fn array_specs(&self, layout: &RowLayout) -> Vec<ArraySpec> {
        let bits = ["mask"].into_iter().chain(FLAGS.map(|(name, _)| name));
        let mut specs: Vec<_> = bits.map(|name| ArraySpec::new(name, Dtype::Bool, vec![self.rows()])).collect();
        specs.extend((0..layout.columns.len()).map(|column| ArraySpec::of_column(layout, column, Some(self.rows()))));
        specs
    }

    pub(super) fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        window: &SampledWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> Decoded<()> {
        let (bits, columns) = out.split_at_mut(1 + FLAGS.len());
        for slot in 0..self.rows() {
            let row = window.row(slot as isize - self.before as isize);
            bits[0][slot] = u8::from(row.is_some());
            for (values, (_, flag)) in bits[1..].iter_mut().zip(FLAGS) {
                values[slot] = u8::from(row.is_some_and(|row| row.has(flag)));
            }
            for (column, values) in columns.iter_mut().enumerate() {
                let bytes = unpacker.bytes(column);
                let value = &mut values[slot * bytes..(slot + 1) * bytes];
                match row {
                    Some(row) => unpacker.unpack(row, column, value)?,
                    None => value.fill(0),
                }
            }
        }
        Ok(())
    }
}

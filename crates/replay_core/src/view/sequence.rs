//! Arrays of the views of several rows: `Sequences`, and `Window`, which has the rows unchanged.
//!
//! Each part of the observation has an array, with `stack - 1 + T + 1` slots for an item. The stack of step t is the `stack`
//! slots from slot t on, so the stacks of a window overlap.

use std::sync::Arc;

use super::batch::{Array, ArraySpec, Buffer, whole_arrays};
use super::decode::{ArraysOfView, SampledRow, SampledWindow, Unpacker, for_each, steps_of};
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
}

impl ArraysOfView for SequenceView {
    /// The arrays of a batch: observations, reward, discount, mask, flags, state columns, other columns.
    fn specs(&self, layout: &RowLayout, _short: bool) -> Vec<ArraySpec> {
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

    fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        _short: bool,
        windows: &[SampledWindow<'a>],
        arrays: &mut [&mut [u8]],
        failed: &mut [Option<String>],
    ) {
        let steps = steps_of(windows, self.steps(), failed);
        let mut arrays = arrays.iter_mut();
        let mut next = || arrays.next().map_or(&mut [][..], |array| array);
        for part in &self.parts {
            let newest = part.stack as isize - 1;
            for_each([next()], failed, |item, [slots]| {
                unpacker.unpack_slots(&windows[item], part.column, self.spec.padding, slots, |slot| {
                    Some(slot as isize - newest).filter(|&offset| offset < steps[item].observations as isize)
                })
            });
        }
        for_each([next(), next(), next()], failed, |item, [reward, discount, mask]| {
            let steps = steps[item];
            [&mut *reward, discount, mask].into_iter().for_each(|values| values.fill(0));
            mask[..steps.counted].fill(1);
            let numbers = reward.as_chunks_mut().0.iter_mut().zip(discount.as_chunks_mut().0);
            for (step, (reward, discount)) in (0..steps.all).zip(numbers) {
                *reward = (unpacker.number(steps.row(step), self.reward)? as f32).to_ne_bytes();
                if step < steps.counted && !steps.row(step).has(flags::TERMINATED) {
                    *discount = (self.spec.gamma as f32).to_ne_bytes();
                }
            }
            Ok(())
        });
        for (_, flag) in &FLAGS[..3] {
            for_each([next()], failed, |item, [values]| {
                let is_set = |step| step < steps[item].all && steps[item].row(step).has(*flag);
                values.iter_mut().enumerate().for_each(|(step, value)| *value = is_set(step).into());
                Ok(())
            });
        }
        for &column in &self.state {
            for_each([next()], failed, |item, [value]| unpacker.unpack(steps[item].row(0), column, value));
        }
        for &column in &self.others {
            let bytes = unpacker.bytes(column);
            for_each([next()], failed, |item, [values]| {
                values[steps[item].all * bytes..].fill(0);
                let mut values = (0..steps[item].all).zip(values.chunks_exact_mut(bytes));
                values.try_for_each(|(step, value)| unpacker.unpack(steps[item].row(step), column, value))
            });
        }
    }

    fn arrays(&self, _short: bool, specs: &[ArraySpec], items: usize, buffer: &Arc<Buffer>) -> Vec<Array> {
        let mut arrays = whole_arrays(specs, items, buffer);
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
}

impl ArraysOfView for Window {
    /// The arrays of a batch: mask, flags, then the columns.
    fn specs(&self, layout: &RowLayout, _short: bool) -> Vec<ArraySpec> {
        let bits = ["mask"].into_iter().chain(FLAGS.map(|(name, _)| name));
        let mut specs: Vec<_> = bits.map(|name| ArraySpec::new(name, Dtype::Bool, vec![self.rows()])).collect();
        specs.extend((0..layout.columns.len()).map(|column| ArraySpec::of_column(layout, column, Some(self.rows()))));
        specs
    }

    fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        _short: bool,
        windows: &[SampledWindow<'a>],
        arrays: &mut [&mut [u8]],
        failed: &mut [Option<String>],
    ) {
        let row = |item: usize, slot: usize| windows[item].row(slot as isize - self.before as isize);
        let (bits, columns) = arrays.split_at_mut(1 + FLAGS.len());
        for (number, bits) in bits.iter_mut().enumerate() {
            for_each([bits], failed, |item, [bits]| {
                for (slot, bit) in bits.iter_mut().enumerate() {
                    let set = |row: SampledRow<'_>| number.checked_sub(1).is_none_or(|flag| row.has(FLAGS[flag].1));
                    *bit = u8::from(row(item, slot).is_some_and(set));
                }
                Ok(())
            });
        }
        for (column, values) in columns.iter_mut().enumerate() {
            let bytes = unpacker.bytes(column);
            for_each([values], failed, |item, [values]| {
                for (slot, value) in values.chunks_exact_mut(bytes).enumerate() {
                    match row(item, slot) {
                        Some(row) => unpacker.unpack(row, column, value)?,
                        None => value.fill(0),
                    }
                }
                Ok(())
            });
        }
    }
}

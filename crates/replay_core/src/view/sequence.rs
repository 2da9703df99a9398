//! Arrays of the views of several rows: `Sequences`, and `Window`, which has the rows unchanged.
//!
//! Each part of the observation has an array, with `stack - 1 + T + 1` slots for an item. The stack of step t is the `stack`
//! slots from slot t on, so the stacks of a window overlap.

use std::sync::Arc;

use super::batch::{Array, ArraySpec, whole_arrays};
use super::buffer::Buffer;
use super::decode::{SampledRow, SampledWindow, Steps, Unpacker};
use super::fill::{ArraysOfView, Items};
use super::ragged::RaggedArray;
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
    /// Of each of these the columns of any length.
    ragged: RaggedColumns,
}

struct RaggedColumns {
    parts: Vec<Part>,
    state: Vec<usize>,
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
        let is_ragged = |column: usize| config.columns[column].is_ragged();
        let (state, others): (Vec<_>, Vec<_>) = (0..config.columns.len())
            .filter(|&column| column != reward && parts.iter().all(|part| part.column != column))
            .partition(|&column| {
                let name = &config.columns[column].name;
                let mut state = spec.state.iter();
                state.any(|state| view_spec::has_column(state, name))
            });
        let (ragged_parts, parts) = parts.into_iter().partition(|part| is_ragged(part.column));
        let (ragged_state, state) = state.into_iter().partition(|&column| is_ragged(column));
        let (ragged_others, others) = others.into_iter().partition(|&column| is_ragged(column));
        let ragged = RaggedColumns { parts: ragged_parts, state: ragged_state, others: ragged_others };
        Ok(SequenceView { spec, parts, reward, state, others, ragged })
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

    /// The columns of any length: observations, state columns, other columns.
    fn ragged<'a>(&self, layout: &RowLayout, windows: &[SampledWindow<'a>]) -> Vec<RaggedArray<'a>> {
        let RaggedColumns { parts, state, others } = &self.ragged;
        if parts.is_empty() && state.is_empty() && others.is_empty() {
            return Vec::new();
        }
        let steps: Vec<_> = windows.iter().map(|window| window.steps(self.steps())).collect();
        let name = |column: usize| layout.columns[column].column.name.as_str();
        let of_steps =
            |name: &str, column: usize, slots: usize, row: &dyn Fn(Steps<'a>, usize) -> Option<SampledRow<'a>>| {
                let items =
                    steps.iter().map(|steps| (0..slots).map(move |slot| steps.and_then(|steps| row(steps, slot))));
                RaggedArray::of_rows(layout, name, column, items)
            };
        let observations =
            parts.iter().map(|part| of_steps(&part.array, part.column, self.steps() + 1, &Steps::observation));
        let state = state.iter().map(|&column| {
            let rows = steps.iter().map(|steps| steps.map(|steps| steps.row(0)));
            RaggedArray::of_values(layout, name(column), column, rows)
        });
        let of_step = |steps: Steps<'a>, step: usize| (step < steps.all).then(|| steps.row(step));
        let others = others.iter().map(|&column| of_steps(name(column), column, self.steps(), &of_step));
        observations.chain(state).chain(others).collect()
    }

    fn fill<'a>(&self, unpacker: &mut Unpacker<'a>, items: &mut Items<'_, 'a>, _short: bool) {
        let (windows, steps) = (items.windows, items.steps(self.steps()));
        for part in &self.parts {
            let newest = part.stack as isize - 1;
            items.fill_next(|item, [slots]| {
                unpacker.unpack_slots(&windows[item], part.column, self.spec.padding, slots, |slot| {
                    Some(slot as isize - newest).filter(|&offset| offset < steps[item].observations as isize)
                })
            });
        }
        items.fill_next(|item, [reward, discount, mask]| {
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
            items.fill_next(|item, [values]| {
                let is_set = |step| step < steps[item].all && steps[item].row(step).has(*flag);
                values.iter_mut().enumerate().for_each(|(step, value)| *value = is_set(step).into());
                Ok(())
            });
        }
        for &column in &self.state {
            items.fill_values(unpacker, column, |item, _| Some(steps[item].row(0)));
        }
        for &column in &self.others {
            items.fill_values(unpacker, column, |item, step| (step < steps[item].all).then(|| steps[item].row(step)));
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
        specs.extend(layout.fixed_columns().map(|column| ArraySpec::of_column(layout, column, Some(self.rows()))));
        specs
    }

    fn ragged<'a>(&self, layout: &RowLayout, windows: &[SampledWindow<'a>]) -> Vec<RaggedArray<'a>> {
        let before = self.before as isize;
        let columns = layout.ragged_columns.iter().map(|&column| {
            let rows = |window: &SampledWindow<'a>| {
                let window = *window;
                (0..self.rows() as isize).map(move |slot| window.row(slot - before))
            };
            RaggedArray::of_rows(layout, &layout.columns[column].column.name, column, windows.iter().map(rows))
        });
        columns.collect()
    }

    fn fill<'a>(&self, unpacker: &mut Unpacker<'a>, items: &mut Items<'_, 'a>, _short: bool) {
        let windows = items.windows;
        let row = |item: usize, slot: usize| windows[item].row(slot as isize - self.before as isize);
        for number in 0..=FLAGS.len() {
            items.fill_next(|item, [bits]| {
                for (slot, bit) in bits.iter_mut().enumerate() {
                    let set = |row: SampledRow<'_>| number.checked_sub(1).is_none_or(|flag| row.has(FLAGS[flag].1));
                    *bit = u8::from(row(item, slot).is_some_and(set));
                }
                Ok(())
            });
        }
        for column in unpacker.fixed_columns() {
            items.fill_values(unpacker, column, row);
        }
    }
}

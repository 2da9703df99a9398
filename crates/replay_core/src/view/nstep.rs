//! Arrays of the `NStep` view.
//!
//! The observations of an item are slots of one array, in which `observation` and `next_observation` overlap where they
//! can. With stack 4 and n 3, anchor a, and k = n steps:
//!
//! ```text
//! slot               0    1    2    3    4    5    6
//! row               a-3  a-2  a-1   a   a+1  a+2  a+3
//! observation        [-----------------]
//! next_observation                 [-----------------]
//! ```
//!
//! `next_observation` begins `shift` slots after `observation`, in every item of a batch. A full window has a shift of n. A
//! window that an end cuts to k < n steps would need a shift of k, so a batch with one has no overlap: `next_observation`
//! then has its own array, as where n >= stack; rows between the two are not unpacked. A terminated window whose
//! last observation never came keeps the shift of n. Each part of an observation has an array and a shift of its own.
//!
//! # Invariant
//!
//! Discounts are gamma^k, and 0 only where the episode or life terminated; a truncated episode bootstraps from its
//! final row, or, if that never came, from its last step's observation.

use std::sync::Arc;

use super::batch::{Array, ArraySpec, whole_arrays};
use super::buffer::Buffer;
use super::decode::{SampledWindow, Steps, Unpacker};
use super::fill::{ArraysOfView, Items};
use super::ragged::RaggedArray;
use super::{NStep, REWARD};
use crate::chunk::RowLayout;
use crate::error::Result;
use crate::schema::{Dtype, TableConfig};
use crate::view_spec::{self, Part, find_scalar};

pub(super) struct NStepView {
    spec: NStep,
    parts: Vec<Part>,
    /// The parts of any length, which have no stack.
    ragged_parts: Vec<Part>,
    reward: usize,
    /// Every column that is returned as it is at the anchor.
    others: Vec<usize>,
    ragged_others: Vec<usize>,
}

impl NStepView {
    pub(super) fn new(spec: NStep, config: &TableConfig) -> Result<Self> {
        let parts = view_spec::parts(config, &spec.observation, &spec.stack)?;
        let reward = find_scalar(config, REWARD)?;
        let (ragged_others, others) = (0..config.columns.len())
            .filter(|&column| column != reward && parts.iter().all(|part| part.column != column))
            .partition(|&column| config.columns[column].is_ragged());
        let (ragged_parts, parts) = parts.into_iter().partition(|part| config.columns[part.column].is_ragged());
        Ok(NStepView { spec, parts, ragged_parts, reward, others, ragged_others })
    }

    fn n(&self) -> usize {
        usize::from(self.spec.n)
    }

    /// Steps from an item's observation to its next one: fewer than n where the episode (or life) ends before.
    fn distance(&self, steps: &Steps<'_>) -> usize {
        let known = steps.observations > steps.counted;
        if known { steps.counted } else { self.n() }
    }

    /// Slots from a part's `observation` to its `next_observation`, which fit every window of a batch; `None` without overlap.
    fn shift(&self, part: &Part, short: bool) -> Option<usize> {
        (self.n() < part.stack && !short).then_some(self.n())
    }
}

impl ArraysOfView for NStepView {
    /// Whether observations overlap in a full window, and a window of the batch has its next observation at another distance than n.
    fn any_short(&self, windows: &[SampledWindow<'_>]) -> bool {
        if self.parts.iter().all(|part| self.n() >= part.stack) {
            return false;
        }
        let mut steps = windows.iter().filter_map(|window| window.steps(self.n()));
        steps.any(|steps| self.distance(&steps) < self.n())
    }

    /// The arrays of a batch: both observations of each part, as one array where they overlap, reward, discount, the other columns.
    fn specs(&self, layout: &RowLayout, short: bool) -> Vec<ArraySpec> {
        let mut specs = Vec::new();
        for part in &self.parts {
            let slots = |slots| ArraySpec::of_column(layout, part.column, Some(slots));
            match self.shift(part, short) {
                Some(shift) => specs.push(slots(shift + part.stack)),
                None => specs.extend([slots(part.stack), slots(part.stack)]),
            }
        }
        specs.push(ArraySpec::new(REWARD, Dtype::Float32, vec![]));
        specs.push(ArraySpec::new("discount", Dtype::Float32, vec![]));
        specs.extend(self.others.iter().map(|&column| ArraySpec::of_column(layout, column, None)));
        specs
    }

    /// The observations of any length, with the next ones, and the other columns of any length.
    fn ragged<'a>(&self, layout: &RowLayout, windows: &[SampledWindow<'a>]) -> Vec<RaggedArray<'a>> {
        if self.ragged_parts.is_empty() && self.ragged_others.is_empty() {
            return Vec::new();
        }
        let steps: Vec<_> = windows.iter().map(|window| window.steps(self.n())).collect();
        let of = |name: &str, column: usize, distance: &dyn Fn(&Steps<'a>) -> usize| {
            let rows = steps.iter().map(|steps| steps.and_then(|steps| steps.observation(distance(&steps))));
            RaggedArray::of_values(layout, name, column, rows)
        };
        let observations = self.ragged_parts.iter().map(|part| of(&part.array, part.column, &|_| 0));
        let others = self.ragged_others.iter();
        let others = others.map(|&column| of(&layout.columns[column].column.name, column, &|_| 0));
        let following = self.ragged_parts.iter();
        let following =
            following.map(|part| of(&format!("next_{}", part.array), part.column, &|steps| self.distance(steps)));
        observations.chain(others).chain(following).collect()
    }

    fn fill<'a>(&self, unpacker: &mut Unpacker<'a>, items: &mut Items<'_, 'a>, short: bool) {
        let (windows, steps) = (items.windows, items.steps(self.n()));
        for part in &self.parts {
            let (column, padding) = (part.column, self.spec.padding);
            let newest = part.stack as isize - 1;
            let offset = |item: usize, step: usize| {
                Some(step as isize - newest).filter(|&offset| offset < steps[item].observations as isize)
            };
            let following = |item: usize, slot: usize| offset(item, slot + self.distance(&steps[item]));
            match self.shift(part, short) {
                Some(shift) => items.fill_next(|item, [slots]| {
                    unpacker.unpack_slots(&windows[item], column, padding, slots, |slot| match slot < part.stack {
                        true => offset(item, slot),
                        false => following(item, slot - shift),
                    })
                }),
                // Raw values have no key row, and one observation has no padding.
                None if part.stack == 1 && unpacker.is_raw(column) => {
                    items.fill_values(unpacker, column, |item, _| steps[item].observation(0));
                    items.fill_values(unpacker, column, |item, _| steps[item].observation(self.distance(&steps[item])));
                }
                // Both of an item, since they may have the same key row.
                None => items.fill_next(|item, [slots, next_slots]| {
                    let window = &windows[item];
                    unpacker.unpack_slots(window, column, padding, slots, |slot| offset(item, slot))?;
                    unpacker.unpack_slots(window, column, padding, next_slots, |slot| following(item, slot))
                }),
            }
        }
        items.fill_next(|item, [reward, discount]| {
            let (mut n_step_return, mut factor) = (0.0, 1.0);
            for step in 0..steps[item].counted {
                n_step_return += factor * unpacker.number(steps[item].row(step), self.reward)?;
                factor *= self.spec.gamma;
            }
            let bootstrap = if steps[item].terminated { 0.0 } else { factor };
            reward.copy_from_slice(&(n_step_return as f32).to_ne_bytes());
            discount.copy_from_slice(&(bootstrap as f32).to_ne_bytes());
            Ok(())
        });
        for &column in &self.others {
            items.fill_values(unpacker, column, |item, _| Some(steps[item].row(0)));
        }
    }

    fn arrays(&self, short: bool, specs: &[ArraySpec], items: usize, buffer: &Arc<Buffer>) -> Vec<Array> {
        let mut filled = whole_arrays(specs, items, buffer).into_iter();
        let (mut arrays, mut following) = (Vec::new(), Vec::new());
        for part in &self.parts {
            // Also without overlap in this batch: whether its arrays can be written to does not vary from batch to batch.
            let shared = self.n() < part.stack;
            let mut next = || filled.next().map(|array| Array { shared, ..array });
            // A stack of one observation has no dimension of its own.
            let stack = &[part.stack][usize::from(part.stack == 1)..];
            let Some(window) = next() else { break };
            let next_name = format!("next_{}", part.array);
            following.extend(match self.shift(part, short) {
                Some(shift) => Some(window.overlapping(&next_name, shift, stack)),
                None => next().map(|array| array.overlapping(&next_name, 0, stack)),
            });
            arrays.push(window.overlapping(&part.array, 0, stack));
        }
        arrays.extend(filled);
        arrays.extend(following);
        arrays
    }
}

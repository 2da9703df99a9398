//! Arrays of the `NStep` view.
//!
//! The observations of an item are slots of one buffer, in which `observation` and `next_observation` overlap where they
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
//! terminated one may have any shift: its next observation is not used. A truncated window of k < n steps would need a
//! shift of k, so a batch with one has a shift of `stack`, without overlap. Each part of an observation has a buffer and a
//! shift of its own. There is no overlap either where n >= stack;
//! rows between the two are then not unpacked.
//!
//! # Invariant
//!
//! Discounts are gamma^k, and 0 only where the episode or life terminated; a truncated episode bootstraps from its
//! final row.

use std::sync::Arc;

use super::batch::{Array, ArraySpec, Buffer, whole_arrays};
use super::decode::{Decoded, SampledWindow, Unpacker};
use super::{NStep, REWARD};
use crate::error::Result;
use crate::observation::{self, Part};
use crate::row_layout::RowLayout;
use crate::schema::{Dtype, TableConfig};
use crate::view_spec::find_scalar;

pub(super) struct NStepView {
    spec: NStep,
    /// The observation's parts.
    parts: Vec<Part>,
    reward: usize,
    /// Every column that is returned as it is at the anchor.
    others: Vec<usize>,
}

impl NStepView {
    pub(super) fn new(spec: NStep, config: &TableConfig) -> Result<Self> {
        let parts = observation::parts(config, &spec.observation, &spec.stack)?;
        let reward = find_scalar(config, REWARD)?;
        let others = (0..config.columns.len())
            .filter(|&column| column != reward && parts.iter().all(|part| part.column != column))
            .collect();
        Ok(NStepView {
            spec,
            parts,
            reward,
            others,
        })
    }

    fn n(&self) -> usize {
        usize::from(self.spec.n)
    }

    /// Whether a window of the batch is truncated before its last step.
    pub(super) fn any_short(&self, windows: &[SampledWindow<'_>]) -> bool {
        let short = |window: &SampledWindow<'_>| matches!(window.steps(self.n()), Ok((steps, false)) if steps.len() < self.n());
        windows.iter().any(short)
    }

    /// Slots from a part's `observation` to its `next_observation`, which fit every window of a batch.
    fn shift(&self, part: &Part, any_short: bool) -> usize {
        if self.n() < part.stack && !any_short {
            self.n()
        } else {
            part.stack
        }
    }

    /// The arrays of a batch: observations, reward, discount, then the other columns.
    pub(super) fn array_specs(&self, layout: &RowLayout, any_short: bool) -> Vec<ArraySpec> {
        let slots = |part: &Part| Some(self.shift(part, any_short) + part.stack);
        let parts = self.parts.iter();
        let mut specs: Vec<_> = parts
            .map(|part| ArraySpec::of_column(layout, part.column, slots(part)))
            .collect();
        specs.push(ArraySpec::new(REWARD, Dtype::Float32, vec![]));
        specs.push(ArraySpec::new("discount", Dtype::Float32, vec![]));
        specs.extend(
            self.others
                .iter()
                .map(|&column| ArraySpec::of_column(layout, column, None)),
        );
        specs
    }

    pub(super) fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        any_short: bool,
        window: &SampledWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> Decoded<()> {
        let (observations, rest) = out.split_at_mut(self.parts.len());
        let [reward, discount, others @ ..] = rest else {
            return Err("the batch has too few arrays".into());
        };
        let (steps, terminated) = window.steps(self.n())?;
        let (mut n_step_return, mut factor) = (0.0, 1.0);
        for &row in steps {
            n_step_return += factor * unpacker.number(row, self.reward)?;
            factor *= self.spec.gamma;
        }
        let bootstrap = if terminated { 0.0 } else { factor };
        reward.copy_from_slice(&(n_step_return as f32).to_ne_bytes());
        discount.copy_from_slice(&(bootstrap as f32).to_ne_bytes());

        let next = if terminated { self.n() } else { steps.len() };
        for (part, slots) in self.parts.iter().zip(observations) {
            let shift = self.shift(part, any_short);
            let newest = part.stack as isize - 1;
            let offset = |slot: usize| {
                let step = if slot < part.stack {
                    slot
                } else {
                    slot - shift + next
                };
                Some(step as isize - newest).filter(|&offset| !terminated || offset <= 0)
            };
            unpacker.unpack_slots(window, part.column, self.spec.padding, slots, offset)?;
        }

        for (&column, value) in self.others.iter().zip(others) {
            unpacker.unpack(steps[0], column, value)?;
        }
        Ok(())
    }

    pub(super) fn arrays(
        &self,
        any_short: bool,
        specs: &[ArraySpec],
        items: usize,
        buffers: Vec<Arc<Buffer>>,
    ) -> Vec<Array> {
        let mut arrays = whole_arrays(specs, items, buffers);
        for (index, part) in self.parts.iter().enumerate() {
            let mut window = arrays[index].clone();
            window.shared = part.stack > 1;
            // A stack of one observation has no dimension of its own.
            let stack = &[part.stack][usize::from(part.stack == 1)..];
            arrays[index] = window.overlapping(&part.array, 0, stack);
            let (name, shift) = (format!("next_{}", part.array), self.shift(part, any_short));
            arrays.push(window.overlapping(&name, shift, stack));
        }
        arrays
    }
}

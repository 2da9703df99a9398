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
//! shift of k, so a batch with one has a shift of `stack`, without overlap. There is no overlap either where n >= stack;
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
use crate::row_layout::RowLayout;
use crate::schema::{Dtype, TableConfig};
use crate::view_spec::{find_column, find_scalar};

pub(super) struct NStepView {
    spec: NStep,
    observation: usize,
    reward: usize,
    /// Every column that is returned as it is at the anchor.
    others: Vec<usize>,
}

impl NStepView {
    pub(super) fn new(spec: NStep, config: &TableConfig) -> Result<Self> {
        let observation = find_column(config, &spec.observation)?;
        let reward = find_scalar(config, REWARD)?;
        let others = (0..config.columns.len())
            .filter(|&column| column != observation && column != reward)
            .collect();
        Ok(NStepView {
            spec,
            observation,
            reward,
            others,
        })
    }

    fn stack(&self) -> usize {
        usize::from(self.spec.stack)
    }

    fn n(&self) -> usize {
        usize::from(self.spec.n)
    }

    /// Slots from `observation` to `next_observation` that fit every window of a batch.
    pub(super) fn shift(&self, windows: &[SampledWindow<'_>]) -> usize {
        let short = |window: &SampledWindow<'_>| matches!(window.steps(self.n()), Ok((steps, false)) if steps.len() < self.n());
        if self.n() < self.stack() && !windows.iter().any(short) {
            self.n()
        } else {
            self.stack()
        }
    }

    /// The arrays of a batch: observations, reward, discount, then the other columns.
    pub(super) fn array_specs(&self, layout: &RowLayout, shift: usize) -> Vec<ArraySpec> {
        let mut specs = vec![
            ArraySpec::of_column(layout, self.observation, Some(shift + self.stack())),
            ArraySpec::new(REWARD, Dtype::Float32, vec![]),
            ArraySpec::new("discount", Dtype::Float32, vec![]),
        ];
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
        shift: usize,
        window: &SampledWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> Decoded<()> {
        let [observations, reward, discount, others @ ..] = out else {
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
        let newest = self.stack() as isize - 1;
        let offset = |slot: usize| {
            let step = if slot < self.stack() {
                slot
            } else {
                slot - shift + next
            };
            Some(step as isize - newest).filter(|&offset| !terminated || offset <= 0)
        };
        let padding = self.spec.padding;
        unpacker.unpack_slots(window, self.observation, padding, observations, offset)?;

        for (&column, value) in self.others.iter().zip(others) {
            unpacker.unpack(steps[0], column, value)?;
        }
        Ok(())
    }

    pub(super) fn arrays(
        &self,
        shift: usize,
        specs: &[ArraySpec],
        items: usize,
        buffers: Vec<Arc<Buffer>>,
    ) -> Vec<Array> {
        let mut arrays = whole_arrays(specs, items, buffers);
        if let Some(window) = arrays.first().cloned() {
            // A stack of one observation has no dimension of its own.
            let stack = &[self.stack()][usize::from(self.stack() == 1)..];
            arrays[0] = window.overlapping("observation", 0, stack);
            arrays.push(window.overlapping("next_observation", shift, stack));
        }
        arrays
    }
}

//! Arrays of the `Sequence` view.
//!
//! An item takes one row of a window buffer of `stack - 1 + T + 1` observations; the stack of step t is the
//! `stack` observations from slot t on, so all stacks of a window share them.

use std::sync::Arc;

use super::batch::{Array, Buffer, Plane, whole_planes};
use super::decode::{DrawnWindow, Row, RowLayout, Unpacker};
use super::{REWARD, Sequence, find_column, find_scalar};
use crate::error::Result;
use crate::schema::{Dtype, TableConfig, flags};

pub(super) struct SequenceView {
    spec: Sequence,
    observation: usize,
    reward: usize,
    /// Columns returned at the first step.
    state: Vec<usize>,
    /// Columns returned at every step.
    others: Vec<usize>,
}

/// Bool arrays of flags, after `mask`.
const FLAGS: [(&str, u8); 3] = [
    ("terminated", flags::TERMINATED),
    ("truncated", flags::TRUNCATED),
    ("first", flags::FIRST),
];

impl SequenceView {
    pub(super) fn new(spec: Sequence, config: &TableConfig) -> Result<Self> {
        let observation = find_column(config, &spec.observation)?;
        let reward = find_scalar(config, REWARD)?;
        let (state, others) = (0..config.columns.len())
            .filter(|&column| column != observation && column != reward)
            .partition(|&column| spec.state.contains(&config.columns[column].name));
        Ok(SequenceView {
            spec,
            observation,
            reward,
            state,
            others,
        })
    }

    fn stack(&self) -> usize {
        usize::from(self.spec.stack)
    }

    /// Steps of a full window.
    fn steps(&self) -> usize {
        usize::from(self.spec.burn_in) + usize::from(self.spec.length)
    }

    /// The buffers of a batch: window, reward, discount, mask, flags, state columns, other columns.
    pub(super) fn planes(&self, rows: &RowLayout) -> Vec<Plane> {
        let steps = self.steps();
        let mut planes = vec![
            rows.plane(self.observation, Some(self.stack() + steps)),
            Plane::new(REWARD, Dtype::Float32, vec![steps]),
            Plane::new("discount", Dtype::Float32, vec![steps]),
            Plane::new("mask", Dtype::Bool, vec![steps]),
        ];
        planes.extend(FLAGS.map(|(name, _)| Plane::new(name, Dtype::Bool, vec![steps])));
        planes.extend(self.state.iter().map(|&column| rows.plane(column, None)));
        planes.extend(
            self.others
                .iter()
                .map(|&column| rows.plane(column, Some(steps))),
        );
        planes
    }

    /// The steps of a window, and whether the observation after the last is wanted.
    fn span<'a>(
        &self,
        window: &DrawnWindow<'a>,
    ) -> std::result::Result<(Vec<Row<'a>>, bool), String> {
        let mut steps = Vec::with_capacity(self.steps());
        while steps.len() < self.steps() {
            let row = window
                .row(steps.len() as isize)
                .filter(|row| !row.has(flags::FINAL))
                .ok_or("the window ends before its episode does")?;
            steps.push(row);
            if row.has(flags::TERMINATED) {
                return Ok((steps, false));
            }
            if row.has(flags::TRUNCATED) {
                break;
            }
        }
        window
            .row(steps.len() as isize)
            .ok_or("the observation to bootstrap from is missing")?;
        Ok((steps, true))
    }

    /// Fills one item's part of the planes.
    pub(super) fn fill<'a>(
        &self,
        rows: &mut Unpacker<'a>,
        window: &DrawnWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> std::result::Result<(), String> {
        let (steps, bootstraps) = self.span(window)?;
        let [
            slots,
            reward,
            discount,
            mask,
            terminated,
            truncated,
            first,
            columns @ ..,
        ] = out
        else {
            return Err("the batch has too few planes".into());
        };

        let newest = self.stack() as isize - 1;
        let observations = steps.len() + usize::from(bootstraps);
        for (slot, value) in slots
            .chunks_exact_mut(rows.bytes(self.observation))
            .enumerate()
        {
            let offset = slot as isize - newest;
            if offset < observations as isize {
                rows.unpack_stacked(window, self.observation, self.spec.padding, offset, value)?;
            } else {
                value.fill(0);
            }
        }

        reward.fill(0);
        discount.fill(0);
        let numbers = reward.chunks_exact_mut(4).zip(discount.chunks_exact_mut(4));
        for (&row, (reward, discount)) in steps.iter().zip(numbers) {
            let value = rows.number(row, self.reward)? as f32;
            reward.copy_from_slice(&value.to_ne_bytes());
            if !row.has(flags::TERMINATED) {
                discount.copy_from_slice(&(self.spec.gamma as f32).to_ne_bytes());
            }
        }
        mask.fill(0);
        mask[..steps.len()].fill(1);
        for (plane, (_, flag)) in [terminated, truncated, first].into_iter().zip(FLAGS) {
            plane.fill(0);
            for (value, row) in plane.iter_mut().zip(&steps) {
                *value = u8::from(row.has(flag));
            }
        }

        let (state, others) = columns.split_at_mut(self.state.len());
        for (&column, value) in self.state.iter().zip(state) {
            rows.unpack(steps[0], column, value)?;
        }
        for (&column, values) in self.others.iter().zip(others) {
            let used = steps.len() * rows.bytes(column);
            values[used..].fill(0);
            for (&row, value) in steps
                .iter()
                .zip(values.chunks_exact_mut(rows.bytes(column)))
            {
                rows.unpack(row, column, value)?;
            }
        }
        Ok(())
    }

    /// The arrays of the filled planes.
    pub(super) fn arrays(
        &self,
        planes: &[Plane],
        items: usize,
        buffers: Vec<Arc<Buffer>>,
    ) -> Vec<Array> {
        let mut arrays = whole_planes(planes, items, buffers);
        if let Some(window) = arrays.first_mut() {
            // A stack of one observation has no dimension of its own.
            let counts = [self.steps() + 1, self.stack()];
            let counts = &counts[..2 - usize::from(self.stack() == 1)];
            *window = window.overlapping("observation", 0, counts);
        }
        arrays
    }
}

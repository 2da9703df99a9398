//! Arrays of the `NStep` view.
//!
//! An item takes one row of a window buffer in which `observation` and `next_observation` overlap where they
//! can. With stack 4 and n 3, anchor a, and k = n steps:
//!
//! ```text
//! slot               0    1    2    3    4    5    6
//! row               a-3  a-2  a-1   a   a+1  a+2  a+3
//! observation        [-----------------]
//! next_observation                 [-----------------]
//! ```
//!
//! `next_observation` is the same window `shift` slots later for every item of a batch. A shift of n holds for
//! full windows, and for terminated ones, whose next observation means nothing. A truncated window of k < n
//! steps would need a shift of k: a batch with one takes a shift of `stack`, so that the two do not touch.
//! They do not touch either where n >= stack; rows between them are then not unpacked at all.

use std::sync::Arc;

use super::batch::{Array, Buffer, Plane, whole_planes};
use super::decode::{DrawnWindow, RowLayout, Unpacker};
use super::{NStep, REWARD, find_column, find_scalar};
use crate::error::Result;
use crate::schema::{Dtype, TableConfig, flags};

pub(super) struct NStepView {
    spec: NStep,
    observation: usize,
    reward: usize,
    /// Every column that is returned as it is at the anchor.
    others: Vec<usize>,
}

/// The n-step return that starts at an anchor.
struct Return {
    /// Steps in it: k <= n.
    steps: usize,
    reward: f64,
    discount: f64,
    terminated: bool,
}

/// How a batch's window buffer is laid out.
pub(super) struct Layout {
    shift: usize,
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

    /// The layout that fits every window of a batch.
    pub(super) fn layout(&self, windows: &[DrawnWindow<'_>]) -> Layout {
        let short = |window: &DrawnWindow<'_>| matches!(self.span(window), Ok((steps, false)) if steps < self.n());
        let shift = if self.n() < self.stack() && !windows.iter().any(short) {
            self.n()
        } else {
            self.stack()
        };
        Layout { shift }
    }

    /// The buffers of a batch: window, reward, discount, then the other columns.
    pub(super) fn planes(&self, rows: &RowLayout, layout: &Layout) -> Vec<Plane> {
        let mut planes = vec![
            rows.plane(self.observation, Some(layout.shift + self.stack())),
            Plane::new(REWARD, Dtype::Float32, vec![]),
            Plane::new("discount", Dtype::Float32, vec![]),
        ];
        planes.extend(self.others.iter().map(|&column| rows.plane(column, None)));
        planes
    }

    /// The number of steps k, and whether the last of them terminates.
    fn span(&self, window: &DrawnWindow<'_>) -> std::result::Result<(usize, bool), String> {
        let mut steps = 0;
        loop {
            let row = window
                .row(steps as isize)
                .filter(|row| !row.has(flags::FINAL))
                .ok_or("the window ends before its episode does")?;
            steps += 1;
            if row.has(flags::TERMINATED) {
                return Ok((steps, true));
            }
            if steps == self.n() || row.has(flags::TRUNCATED) {
                window
                    .row(steps as isize)
                    .ok_or("the observation to bootstrap from is missing")?;
                return Ok((steps, false));
            }
        }
    }

    fn n_step_return<'a>(
        &self,
        rows: &mut Unpacker<'a>,
        window: &DrawnWindow<'a>,
    ) -> std::result::Result<Return, String> {
        let (steps, terminated) = self.span(window)?;
        let (mut reward, mut discount) = (0.0, 1.0);
        for row in (0..steps).filter_map(|step| window.row(step as isize)) {
            reward += discount * rows.number(row, self.reward)?;
            discount *= self.spec.gamma;
        }
        Ok(Return {
            steps,
            reward,
            discount: if terminated { 0.0 } else { discount },
            terminated,
        })
    }

    /// Fills one item's part of the planes.
    pub(super) fn fill<'a>(
        &self,
        rows: &mut Unpacker<'a>,
        layout: &Layout,
        window: &DrawnWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> std::result::Result<(), String> {
        let outcome = self.n_step_return(rows, window)?;
        let [slots, reward, discount, others @ ..] = out else {
            return Err("the batch has too few planes".into());
        };
        reward.copy_from_slice(&(outcome.reward as f32).to_ne_bytes());
        discount.copy_from_slice(&(outcome.discount as f32).to_ne_bytes());

        let next = if outcome.terminated {
            self.n()
        } else {
            outcome.steps
        };
        let newest = self.stack() as isize - 1;
        for (slot, value) in slots
            .chunks_exact_mut(rows.bytes(self.observation))
            .enumerate()
        {
            let offset = if slot < self.stack() {
                slot as isize - newest
            } else {
                (slot - layout.shift + next) as isize - newest
            };
            if outcome.terminated && offset > 0 {
                value.fill(0);
            } else {
                rows.unpack_stacked(window, self.observation, self.spec.padding, offset, value)?;
            }
        }

        let anchor = window.row(0).ok_or("the window has no anchor")?;
        for (&column, value) in self.others.iter().zip(others) {
            rows.unpack(anchor, column, value)?;
        }
        Ok(())
    }

    /// The arrays of the filled planes.
    pub(super) fn arrays(
        &self,
        layout: &Layout,
        planes: &[Plane],
        items: usize,
        buffers: Vec<Arc<Buffer>>,
    ) -> Vec<Array> {
        let mut arrays = whole_planes(planes, items, buffers);
        if let Some(window) = arrays.first().cloned() {
            // A stack of one observation has no dimension of its own.
            let stack = &[self.stack()][usize::from(self.stack() == 1)..];
            arrays[0] = window.overlapping("observation", 0, stack);
            arrays.push(window.overlapping("next_observation", layout.shift, stack));
        }
        arrays
    }
}

//! Checked rows of a step or a block, one of each stream at each step: their values, flags and estimates.

use super::step::{StepBatch, StepChecker};
use crate::episode_windows::{EpisodeWindows, Estimate};
use crate::schema::flags;

/// The rows of a step: one of each stream, or of each stream at each step of a block.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// `None` outside a block.
    pub(super) steps: Option<usize>,
    pub(super) streams: usize,
}

impl Rows {
    pub(super) fn count(self) -> usize {
        self.steps.unwrap_or(1) * self.streams
    }

    /// Dimensions of an array before those of its rows.
    pub(super) fn leading(self) -> impl Iterator<Item = usize> + Clone {
        self.steps.into_iter().chain([self.streams])
    }

    pub(super) fn words(self) -> &'static str {
        match self.steps {
            Some(_) => "steps and environments",
            None => "environments",
        }
    }

    /// A row's stream and step, for errors.
    pub(super) fn position(self, row: usize) -> String {
        let stream = row % self.streams;
        match self.steps {
            Some(_) => format!("stream {stream} at step {}", row / self.streams),
            None => format!("stream {stream}"),
        }
    }
}

/// Values of every row, `each` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) each: usize,
}

impl<'a> Strided<'a> {
    pub(super) fn of(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.each..(row + 1) * self.each]
    }
}

/// Q-values, float32 `[rows, actions]`.
#[derive(Clone, Copy)]
pub(super) struct QValues<'a>(pub(super) Strided<'a>);

impl QValues<'_> {
    pub(super) fn actions(&self) -> usize {
        self.0.each / 4
    }

    pub(super) fn of(&self, row: usize, action: usize) -> f32 {
        read_f32(&self.0.of(row)[4 * action..4 * (action + 1)])
    }

    fn greedy(&self, row: usize) -> f32 {
        let values = self.0.of(row).chunks_exact(4).map(read_f32);
        values.fold(f32::NEG_INFINITY, f32::max)
    }
}

pub(super) fn read_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

pub(super) fn is_set(bits: Option<&[bool]>, row: usize) -> bool {
    bits.is_some_and(|bits| bits[row])
}

/// The last observations of episodes that end with a step, checked.
pub(super) struct LastObservations<'a> {
    pub(super) columns: Vec<(usize, Strided<'a>)>,
    pub(super) ended: Option<&'a [bool]>,
    pub(super) q: Option<QValues<'a>>,
}

impl<'a> LastObservations<'a> {
    pub(super) fn values(&self, column: usize) -> Option<Strided<'a>> {
        let mut columns = self.columns.iter();
        columns.find(|(of, _)| *of == column).map(|(_, values)| *values)
    }
}

/// The final row that follows a row.
pub(super) struct LastObservation<'s, 'a> {
    last: &'s LastObservations<'a>,
    row: usize,
    pub(super) estimate: Estimate,
}

impl<'a> LastObservation<'_, 'a> {
    /// The row's value of a column; `None` is zeros.
    pub(super) fn value(&self, column: usize) -> Option<&'a [u8]> {
        let values = self.last.values(column)?;
        Some(values.of(self.row))
    }
}

pub(super) struct CheckedStep<'a> {
    pub(super) checker: &'a StepChecker,
    pub(super) rows: Rows,
    pub(super) columns: Vec<Strided<'a>>,
    pub(super) step: StepBatch<'a>,
    pub(super) q: Option<QValues<'a>>,
    pub(super) last: Option<LastObservations<'a>>,
}

impl<'a> CheckedStep<'a> {
    pub(super) fn is_final(&self, row: usize) -> bool {
        is_set(self.step.final_rows, row)
    }

    pub(super) fn ends(&self, row: usize) -> bool {
        is_set(self.step.terminated, row) || is_set(self.step.truncated, row)
    }

    /// Whether an environment that ended with this row has its last observation in the next one.
    pub(super) fn awaits_final_after(&self, row: usize) -> bool {
        !self.is_final(row) && self.ends(row) && self.last_observation(row).is_none()
    }

    pub(super) fn flags(&self, row: usize, windows: &EpisodeWindows) -> u8 {
        if self.is_final(row) {
            return flags::FINAL;
        }
        let mut bits = 0;
        if windows.starts_stack(self.step.first.map(|first| first[row])) {
            bits |= flags::FIRST;
        }
        if is_set(self.step.terminated, row) {
            bits |= flags::TERMINATED;
        }
        if is_set(self.step.truncated, row) {
            bits |= flags::TRUNCATED;
        }
        bits
    }

    /// The value of a column in a row; `None` is zeros.
    pub(super) fn value(&self, column: usize, row: usize) -> Option<&'a [u8]> {
        let kept = self.checker.kept[column] || !self.is_final(row);
        kept.then(|| self.columns[column].of(row))
    }

    pub(super) fn number(&self, column: usize, row: usize) -> f64 {
        let dtype = self.checker.config.columns[column].dtype;
        dtype.read(self.columns[column].of(row))
    }

    pub(super) fn reward(&self, row: usize) -> f64 {
        let column = self.checker.reward;
        column.map_or(0.0, |column| self.number(column, row))
    }

    /// The actor's reward and Q-values for a row.
    pub(super) fn estimate(&self, row: usize) -> Estimate {
        let greedy = self.q.map(|q| q.greedy(row));
        if self.is_final(row) {
            return Estimate { greedy, ..Estimate::default() };
        }
        let taken = self.q.zip(self.checker.action).map(|(q, column)| {
            let action = self.number(column, row);
            q.of(row, action as usize)
        });
        Estimate {
            reward: self.reward(row),
            taken,
            greedy,
            // The smallest above 0 stays above 0, so that the item is sampled.
            priority: self.step.priority.map(|priority| match priority[row] {
                priority if priority > 0.0 => (priority as f32).max(f32::from_bits(1)),
                priority => priority as f32,
            }),
        }
    }

    /// The final row to append after a row.
    pub(super) fn last_observation(&self, row: usize) -> Option<LastObservation<'_, 'a>> {
        let last = self.last.as_ref()?;
        let ended = last.ended.map_or_else(|| self.ends(row), |ended| ended[row]);
        (ended && !self.is_final(row)).then(|| LastObservation {
            last,
            row,
            estimate: Estimate { greedy: last.q.map(|q| q.greedy(row)), ..Estimate::default() },
        })
    }
}

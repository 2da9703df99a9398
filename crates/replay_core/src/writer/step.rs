//! Steps of every stream, as the caller gives them, checked against the table before any of them is appended.

use std::sync::Arc;

use super::pack::{CheckedStep, LastObservations, QValues, Rows, Strided, is_set, read_f32};
use crate::codec::first_not_finite;
use crate::episode_windows::EpisodeWindows;
use crate::error::{Error, Result};
use crate::replay::check_priorities_to;
use crate::schema::{Column, Dtype, TableConfig};
use crate::view_spec::{ACTION, REWARD, ViewSpec, find_scalar};

/// Values of every stream: a contiguous array whose first dimension is the streams, after the steps in a block; of a ragged column, the
/// rows one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    pub dtype: Dtype,
    /// `[streams, ...]`, or `[steps, streams, ...]`.
    pub shape: &'a [usize],
    /// The elements, little endian, in row-major order.
    pub bytes: &'a [u8],
    /// Of a ragged column, whose shape is `[elements of all rows, ...]`: the first element of each row, and the end.
    pub offsets: Option<&'a [i64]>,
}

impl<'a> Values<'a> {
    /// Elements of `dtype` in the shape `[streams, ...]`: little endian, in row-major order.
    pub const fn new(dtype: Dtype, shape: &'a [usize], bytes: &'a [u8]) -> Self {
        Values { dtype, shape, bytes, offsets: None }
    }
}

/// The last observations of the episodes that a step ends, from an environment that resets in the same step (Gymnasium's
/// SAME_STEP autoreset).
#[derive(Debug, Clone, Copy)]
pub struct FinalObservations<'a> {
    /// The columns of the view's observation, by name, each `[streams, *shape]`; only the streams in `ended` are read.
    pub columns: &'a [(&'a str, Values<'a>)],
    /// `[streams]`: the episode ends with this step; by default where it is terminated or truncated.
    pub ended: Option<&'a [bool]>,
    /// float32 `[streams, actions]`: Q-values of these observations; needed at a truncation where the step has Q-values.
    pub q: Option<Values<'a>>,
}

/// One step of every stream: observation_t, action_t, reward_{t+1}, and whether the episode ends with it. In a block of several steps
/// every array has another dimension before the streams: `[steps, streams, ...]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepBatch<'a> {
    /// Every column of the table, by name, each `[streams, *shape]`.
    pub columns: &'a [(&'a str, Values<'a>)],
    /// `[streams]`: learning ends after this step (a terminal state, or a life lost); by default nowhere.
    pub terminated: Option<&'a [bool]>,
    /// `[streams]`: the episode is cut after this step; by default nowhere.
    pub truncated: Option<&'a [bool]>,
    /// `[streams]`: the observation starts a new stack; by default after every end. The first row of a stream and the
    /// row after a final row always start one.
    pub first: Option<&'a [bool]>,
    /// `[streams]`: the row has only the last observation of an episode (Gymnasium's NEXT_STEP autoreset: the row after
    /// an end). Its other columns and flags are not read. By default nowhere.
    pub final_rows: Option<&'a [bool]>,
    /// Gymnasium's SAME_STEP autoreset: the last observations of the episodes that end here.
    pub final_observations: Option<FinalObservations<'a>>,
    /// float32 `[streams, actions]`: Q-values of the observations, for priorities at birth.
    pub q: Option<Values<'a>>,
    /// `[streams]`: priorities of the items anchored at this step, before the exponent, within a float32's range; they
    /// override priorities from Q-values. Without either an item takes the table's largest priority.
    pub priority: Option<&'a [f64]>,
    /// Version of the parameters that made the steps, in a table that names parameters; 0 is unknown. Another version than before begins new chunks.
    pub version: u64,
}

impl<'a> StepBatch<'a> {
    /// A step with every column of the table; no episode ends with it.
    pub fn new(columns: &'a [(&'a str, Values<'a>)]) -> Self {
        StepBatch { columns, ..StepBatch::default() }
    }
}

pub(super) struct StepChecker {
    pub(super) config: Arc<TableConfig>,
    streams: usize,
    /// Columns of the view's observation, none for a view without one.
    observation: Vec<usize>,
    /// By column, whether a final row keeps its value: the columns of the observation, or all if the view has no observation.
    pub(super) kept: Vec<bool>,
    pub(super) action: Option<usize>,
    pub(super) reward: Option<usize>,
    /// Columns in which NaN and infinities are refused.
    finite: Vec<usize>,
}

impl StepChecker {
    pub(super) fn new(config: Arc<TableConfig>, view: &ViewSpec, streams: usize) -> Self {
        let integer = |&column: &usize| !config.columns[column].dtype.is_float();
        let views = [Some(view), config.view.as_ref()];
        let learned = |name: &str| {
            let mut views = views.iter().flatten();
            name == REWARD || views.any(|view| view.is_observation(name))
        };
        let finite = (0..config.columns.len()).filter(|&column| {
            let column = &config.columns[column];
            column.finite && column.dtype.is_float() && learned(&column.name)
        });
        let columns = config.columns.iter();
        let observed: Vec<_> = columns.map(|column| view.is_observation(&column.name)).collect();
        StepChecker {
            streams,
            observation: (0..observed.len()).filter(|&column| observed[column]).collect(),
            kept: match observed.contains(&true) {
                true => observed,
                false => vec![true; observed.len()],
            },
            action: find_scalar(&config, ACTION).ok().filter(integer),
            reward: find_scalar(&config, REWARD).ok(),
            finite: finite.collect(),
            config,
        }
    }

    /// Checks a step, or a block of `steps`, against the table and the open windows.
    pub(super) fn check<'a>(
        &'a self,
        step: &StepBatch<'a>,
        steps: Option<usize>,
        windows: &[EpisodeWindows],
    ) -> Result<CheckedStep<'a>> {
        let rows = Rows { steps, streams: self.streams };
        if step.version > 0 && self.config.parameters.is_none() {
            let reason = format!(
                "the steps have the version {} of parameters, and the table names none: make it with parameters=\"policy\"",
                step.version
            );
            return Err(self.refuse(reason));
        }
        for (name, _) in step.columns {
            if self.config.column_index(name).is_none() {
                let names = self.config.column_names();
                return Err(self.refuse(format!("the table has no column {name:?}; it has {names}")));
            }
        }
        let columns = (0..self.config.columns.len())
            .map(|column| self.check_column(rows, column, step.columns))
            .collect::<Result<Vec<_>>>()?;
        for (name, bits) in [
            ("terminated", step.terminated),
            ("truncated", step.truncated),
            ("first", step.first),
            ("final_rows", step.final_rows),
        ] {
            self.check_length(rows, name, bits.map(<[bool]>::len))?;
        }
        self.check_length(rows, "priority", step.priority.map(<[f64]>::len))?;
        check_priorities_to(f32::MAX.into(), step.priority.unwrap_or_default().iter().copied())?;
        let last = step.final_observations.map(|last| self.check_last_observations(rows, &last)).transpose()?;
        self.check_row_bytes(rows, columns.iter())?;
        let mut checked = CheckedStep { checker: self, rows, columns, step: *step, q: None, last };
        self.check_finite(&checked)?;
        // Checked after the observations, whose NaN would also be in the Q-values.
        checked.q = step.q.map(|q| self.check_q(rows, "q", &q)).transpose()?;
        if let Some(last) = &mut checked.last {
            let q = step.final_observations.and_then(|last| last.q);
            last.q = q.map(|q| self.check_q(rows, "final q", &q)).transpose()?;
        }
        for row in 0..rows.count() {
            let awaits_final = match windows.get(row) {
                Some(windows) => windows.awaits_final(),
                None => checked.awaits_final_after(row - self.streams),
            };
            self.check_row(&checked, row, awaits_final)?;
        }
        Ok(checked)
    }

    fn check_column<'a>(&self, rows: Rows, column: usize, given: &[(&str, Values<'a>)]) -> Result<Strided<'a>> {
        let name = &self.config.columns[column].name;
        match given.iter().find(|(given, _)| given == name) {
            Some((_, values)) => self.check_values(rows, name, column, values),
            None => Err(self.refuse(format!("column {name:?} is missing"))),
        }
    }

    fn check_values<'a>(&self, rows: Rows, name: &str, column: usize, values: &Values<'a>) -> Result<Strided<'a>> {
        let column = &self.config.columns[column];
        match (column.is_ragged(), values.offsets) {
            (true, Some(offsets)) => self.check_ragged(rows, name, column, values, offsets)?,
            (false, None) => {
                let shape = column.shape.iter().map(|&n| n as usize);
                self.check_array(rows, name, column.dtype, shape, values)?;
            }
            (true, None) => {
                let reason = format!(
                    "{name:?} has the shape {} in each row, got an array: give a list of arrays, or a Ragged",
                    column.shape_text()
                );
                return Err(self.refuse(reason));
            }
            (false, Some(_)) => {
                let reason = format!("{name:?} has the same shape {} in each row, got a Ragged", column.shape_text());
                return Err(self.refuse(reason));
            }
        }
        Ok(Strided { bytes: values.bytes, each: column.element_bytes(), offsets: values.offsets })
    }

    /// Checks the values of a ragged column, and that the offsets divide them among the rows.
    fn check_ragged(
        &self,
        rows: Rows,
        name: &str,
        column: &Column,
        values: &Values<'_>,
        offsets: &[i64],
    ) -> Result<()> {
        let inner = column.inner_shape().iter().map(|&n| n as usize);
        let total = values.shape.first().copied().unwrap_or_default();
        if values.dtype != column.dtype || !values.shape.iter().copied().eq([total].into_iter().chain(inner)) {
            return Err(self.refuse(format!(
                "{name:?} has to be {} of the shape {} in each row, got {}{:?} for all rows",
                column.dtype.name(),
                column.shape_text(),
                values.dtype.name(),
                values.shape
            )));
        }
        let bytes = total.saturating_mul(column.element_bytes());
        if values.bytes.len() != bytes {
            return Err(self.refuse(format!("{name:?} has to have {bytes} bytes, got {}", values.bytes.len())));
        }
        let (first, last) = (offsets.first(), offsets.last().copied().unwrap_or_default());
        if offsets.len() != rows.count() + 1 || first != Some(&0) || last != total as i64 {
            return Err(self.refuse(format!(
                "{name:?} has offsets for {} rows ({}), from 0 to its {total} values, got {} offsets from {} to {last}",
                rows.count(),
                rows.words(),
                offsets.len(),
                first.copied().unwrap_or_default(),
            )));
        }
        let most = column.most_elements();
        for (row, ends) in offsets.windows(2).enumerate() {
            let refuse = |reason: String| Err(self.refuse(format!("{name:?} of {} {reason}", rows.position(row))));
            if ends[0] > ends[1] {
                return refuse(format!("begins at the offset {} and ends before it, at {}", ends[0], ends[1]));
            }
            if (ends[1] - ends[0]) as u64 > most as u64 {
                return refuse(format!(
                    "has {} elements, and the column takes at most {most}: cut it, or give the column a larger max_length",
                    ends[1] - ends[0]
                ));
            }
        }
        Ok(())
    }

    /// Checks the bytes of each row, which ragged columns have together.
    fn check_row_bytes<'a>(&self, rows: Rows, columns: impl Iterator<Item = &'a Strided<'a>> + Clone) -> Result<()> {
        let most = TableConfig::MAX_STEP_BYTES as usize;
        let all: usize = columns.clone().map(|values| values.bytes.len()).sum();
        if all <= most || columns.clone().all(|values| values.offsets.is_none()) {
            return Ok(());
        }
        for row in 0..rows.count() {
            let bytes: usize = columns.clone().map(|values| values.of(row).len()).sum();
            if bytes > most {
                let position = rows.position(row);
                return Err(self.refuse(format!("{position} has {bytes} bytes, and a step at most {most}: divide it")));
            }
        }
        Ok(())
    }

    fn check_q<'a>(&self, rows: Rows, name: &str, values: &Values<'a>) -> Result<QValues<'a>> {
        let actions = values.shape.get(rows.leading().count());
        let actions = actions.copied().unwrap_or_default().max(1);
        self.check_array(rows, name, Dtype::Float32, [actions].into_iter(), values)?;
        let q = QValues(Strided { bytes: values.bytes, each: 4 * actions, offsets: None });
        let mut numbers = values.bytes.chunks_exact(4).map(read_f32);
        match numbers.find(|q| !q.is_finite()) {
            Some(value) => Err(self.refuse(format!("{name} has to be finite, got {value}"))),
            None => Ok(q),
        }
    }

    /// Checks an array whose rows have this shape. Without an error it allocates nothing.
    fn check_array(
        &self,
        rows: Rows,
        name: &str,
        dtype: Dtype,
        shape: impl Iterator<Item = usize> + Clone,
        values: &Values<'_>,
    ) -> Result<()> {
        let shape = rows.leading().chain(shape);
        if dtype != values.dtype || !values.shape.iter().copied().eq(shape.clone()) {
            let shape: Vec<_> = shape.collect();
            let advice = match shape.as_slice() {
                same if same == values.shape => {
                    let wrapper = match name.contains("observation") {
                        true => ", or wrap the environment in gymnasium.wrappers.DtypeObservation",
                        false => "",
                    };
                    format!(": convert it, .astype({:?}){wrapper}", dtype.name())
                }
                // A column of the shape of all environments.
                [streams, rest @ ..] if rest == values.shape && rest.first() == Some(streams) => {
                    ": make the table of one environment's spaces, single_observation_space and single_action_space of a vector \
                     environment"
                        .to_owned()
                }
                _ => String::new(),
            };
            return Err(self.refuse(format!(
                "{name:?} has to be {}{shape:?} ({} first), got {}{:?}{advice}",
                dtype.name(),
                rows.words(),
                values.dtype.name(),
                values.shape
            )));
        }
        let bytes = shape.product::<usize>() * dtype.bytes();
        if values.bytes.len() != bytes {
            return Err(self.refuse(format!("{name:?} has to have {bytes} bytes, got {}", values.bytes.len())));
        }
        Ok(())
    }

    fn check_length(&self, rows: Rows, name: &str, length: Option<usize>) -> Result<()> {
        match length {
            Some(length) if length != rows.count() => Err(self.refuse(format!(
                "{name:?} has to have shape {:?} ({}), got {length} values",
                rows.leading().collect::<Vec<_>>(),
                rows.words()
            ))),
            _ => Ok(()),
        }
    }

    fn check_last_observations<'a>(&self, rows: Rows, last: &FinalObservations<'a>) -> Result<LastObservations<'a>> {
        if self.observation.is_empty() {
            let reason = "final observations need a view that names the observation column";
            return Err(self.refuse(reason.into()));
        }
        self.check_length(rows, "ended", last.ended.map(<[bool]>::len))?;
        let columns = self.observation.iter().map(|&column| {
            let observed = &self.config.columns[column].name;
            let name = format!("final_{observed}");
            match last.columns.iter().find(|(given, _)| given == observed) {
                Some((_, values)) => Ok((column, self.check_values(rows, &name, column, values)?)),
                None => Err(self.refuse(format!("{name:?} is missing"))),
            }
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        self.check_row_bytes(rows, columns.iter().map(|(_, values)| values))?;
        Ok(LastObservations { columns, ended: last.ended, q: None })
    }

    /// Refuses NaN and infinities that learning would read.
    fn check_finite(&self, step: &CheckedStep<'_>) -> Result<()> {
        for &column in &self.finite {
            let dtype = self.config.columns[column].dtype;
            let found = |values: &Strided<'_>| first_not_finite(dtype, values.bytes).is_some();
            if found(&step.columns[column]) {
                // Not all rows are read.
                for row in 0..step.rows.count() {
                    self.check_value("", column, step.rows, row, step.value(column, row))?;
                }
            }
            let last = step.last.as_ref().and_then(|last| last.values(column));
            if last.is_some_and(|last| found(&last)) {
                for row in 0..step.rows.count() {
                    let last = step.last_observation(row).and_then(|last| last.value(column));
                    self.check_value("final_", column, step.rows, row, last)?;
                }
            }
        }
        Ok(())
    }

    fn check_value(&self, prefix: &str, column: usize, rows: Rows, row: usize, value: Option<&[u8]>) -> Result<()> {
        let Column { name, dtype, shape, .. } = &self.config.columns[column];
        let found = value.and_then(|value| first_not_finite(*dtype, value));
        let Some((mut element, number)) = found else {
            return Ok(());
        };
        let mut index = Vec::new();
        for &length in shape.iter().rev() {
            // The free dimension is the first one.
            let length = if length == 0 { usize::MAX } else { length as usize };
            index.insert(0, element % length);
            element /= length;
        }
        let at = if index.is_empty() { String::new() } else { format!(" at {index:?}") };
        Err(self.refuse(format!(
            "\"{prefix}{name}\" of {} is {number}{at}, which learning cannot use: correct it, or, if it is meant, give the column \
             finite=False in the table's definition",
            rows.position(row)
        )))
    }

    fn check_row(&self, step: &CheckedStep<'_>, row: usize, awaits_final: bool) -> Result<()> {
        let refuse = |reason: String| Err(self.refuse(format!("{} {reason}", step.rows.position(row))));
        if step.is_final(row) {
            return match awaits_final {
                true => Ok(()),
                false => {
                    refuse("has a final row, but the row before it neither terminated nor truncated its episode".into())
                }
            };
        }
        let last = step.last_observation(row);
        if last.is_some() && !step.ends(row) {
            return refuse("has a final observation, but its step neither terminates nor truncates the episode".into());
        }
        let Some(q) = step.q else { return Ok(()) };
        let cut = is_set(step.step.truncated, row) && !is_set(step.step.terminated, row);
        if last.is_some_and(|last| cut && last.estimate.greedy.is_none()) {
            return refuse("is truncated, and its final observation has no Q-values: give final_q beside q".into());
        }
        let action = self.action.ok_or_else(|| {
            self.refuse(format!(
                "priorities from Q-values need a column {ACTION:?} of one integer a step; give priorities instead"
            ))
        })?;
        let action = step.number(action, row);
        if !(action >= 0.0 && action < q.actions() as f64) {
            return refuse(format!("has the action {action} without a Q-value: q has {} actions", q.actions()));
        }
        let reward = step.reward(row);
        if !reward.is_finite() {
            return refuse(format!(
                "has the reward {reward}, and a priority from Q-values needs a finite one: give priorities instead"
            ));
        }
        Ok(())
    }

    fn refuse(&self, reason: String) -> Error {
        Error::schema(&self.config.name, reason)
    }
}

//! One step of every stream, as the caller gives it, checked against the table before any of it is appended.

use std::fmt::Write;
use std::sync::Arc;

use super::finite::first_not_finite;
use crate::episode_windows::{EpisodeWindows, Estimate};
use crate::error::{Error, Result, refuse_priority};
use crate::schema::{Column, Dtype, TableConfig, flags};
use crate::view_spec::{ACTION, REWARD, ViewSpec, find_scalar};

/// Values of every stream: a contiguous array whose first dimension is the streams.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// `[streams, ...]`.
    pub shape: &'a [usize],
    /// The elements, little endian, in row-major order.
    pub bytes: &'a [u8],
}

impl<'a> Values<'a> {
    /// Elements of `dtype` in the shape `[streams, ...]`: little endian, in row-major order.
    pub const fn new(dtype: Dtype, shape: &'a [usize], bytes: &'a [u8]) -> Self {
        Values {
            dtype,
            shape,
            bytes,
        }
    }
}

/// The last observations of the episodes that a step ends, from an environment that resets in the same step (Gymnasium's
/// SAME_STEP autoreset).
#[derive(Debug, Clone, Copy)]
pub struct FinalObservations<'a> {
    /// The view's observation column, `[streams, *shape]`; only the streams in `ended` are read.
    pub observation: Values<'a>,
    /// `[streams]`: the episode ends with this step; by default where it is terminated or truncated.
    pub ended: Option<&'a [bool]>,
    /// float32 `[streams, actions]`: Q-values of these observations; needed at a truncation where the step has Q-values.
    pub q: Option<Values<'a>>,
}

/// One step of every stream: observation_t, action_t, reward_{t+1}, and whether the episode ends with it.
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
}

impl<'a> StepBatch<'a> {
    /// A step with every column of the table; no episode ends with it.
    pub fn new(columns: &'a [(&'a str, Values<'a>)]) -> Self {
        StepBatch {
            columns,
            ..StepBatch::default()
        }
    }
}

pub(super) struct StepChecker {
    config: Arc<TableConfig>,
    streams: usize,
    /// The view's observation column: the only one that a final row keeps.
    observation: Option<usize>,
    action: Option<usize>,
    reward: Option<usize>,
    /// Columns in which NaN and infinities are refused.
    finite: Vec<usize>,
}

impl StepChecker {
    pub(super) fn new(config: Arc<TableConfig>, view: &ViewSpec, streams: usize) -> Self {
        let integer = |&column: &usize| !config.columns[column].dtype.is_float();
        let views = [Some(view), config.view.as_ref()];
        let learned = |name: &str| {
            let mut views = views.iter().flatten();
            name == REWARD || views.any(|view| view.observation() == Some(name))
        };
        let finite = (0..config.columns.len()).filter(|&column| {
            let column = &config.columns[column];
            column.finite && column.dtype.is_float() && learned(&column.name)
        });
        let observation = view.observation();
        let observation = observation.and_then(|name| config.column_index(name));
        StepChecker {
            streams,
            observation,
            action: find_scalar(&config, ACTION).ok().filter(integer),
            reward: find_scalar(&config, REWARD).ok(),
            finite: finite.collect(),
            config,
        }
    }

    /// Checks a step against the table and the open windows.
    ///
    /// # Errors
    /// [`Error::Schema`] or [`Error::Priority`].
    pub(super) fn check<'a>(
        &'a self,
        step: &StepBatch<'a>,
        windows: &[EpisodeWindows],
    ) -> Result<CheckedStep<'a>> {
        for (name, _) in step.columns {
            if self.config.column_index(name).is_none() {
                let names = self.config.column_names();
                return Err(
                    self.refuse(format!("the table has no column {name:?}; it has {names}"))
                );
            }
        }
        let columns = (0..self.config.columns.len())
            .map(|column| self.check_column(column, step.columns))
            .collect::<Result<Vec<_>>>()?;
        for (name, bits) in [
            ("terminated", step.terminated),
            ("truncated", step.truncated),
            ("first", step.first),
            ("final_rows", step.final_rows),
        ] {
            self.check_length(name, bits.map(<[bool]>::len))?;
        }
        self.check_length("priority", step.priority.map(<[f64]>::len))?;
        let priorities = step.priority.unwrap_or_default();
        let bad = |priority: &f64| !(0.0..=f64::from(f32::MAX)).contains(priority);
        let position = priorities.iter().position(bad);
        refuse_priority(position, priorities.len(), |at| priorities[at])?;
        let last = step
            .final_observations
            .map(|last| self.check_last_observations(&last))
            .transpose()?;
        let mut checked = CheckedStep {
            checker: self,
            columns,
            step: *step,
            q: None,
            last,
        };
        self.check_finite(&checked)?;
        // Checked after the observations, whose NaN would also be in the Q-values.
        checked.q = step.q.map(|q| self.check_q("q", &q)).transpose()?;
        if let Some(last) = &mut checked.last {
            let q = step.final_observations.and_then(|last| last.q);
            last.q = q.map(|q| self.check_q("final q", &q)).transpose()?;
        }
        for (stream, windows) in windows.iter().enumerate() {
            self.check_stream(&checked, stream, windows)?;
        }
        Ok(checked)
    }

    fn check_column<'a>(&self, column: usize, given: &[(&str, Values<'a>)]) -> Result<Strided<'a>> {
        let name = &self.config.columns[column].name;
        match given.iter().find(|(given, _)| given == name) {
            Some((_, values)) => self.check_values(name, column, values),
            None => Err(self.refuse(format!("column {name:?} is missing"))),
        }
    }

    fn check_values<'a>(
        &self,
        name: &str,
        column: usize,
        values: &Values<'a>,
    ) -> Result<Strided<'a>> {
        let column = &self.config.columns[column];
        let shape = std::iter::once(self.streams).chain(column.shape.iter().map(|&n| n as usize));
        self.check_array(name, column.dtype, shape.collect(), values)?;
        Ok(Strided {
            bytes: values.bytes,
            each: column.bytes(),
        })
    }

    fn check_q<'a>(&self, name: &str, values: &Values<'a>) -> Result<QValues<'a>> {
        let actions = values.shape.get(1).copied().unwrap_or_default().max(1);
        self.check_array(name, Dtype::Float32, vec![self.streams, actions], values)?;
        let q = QValues(Strided {
            bytes: values.bytes,
            each: 4 * actions,
        });
        let mut numbers = values.bytes.chunks_exact(4).map(read_f32);
        match numbers.find(|q| !q.is_finite()) {
            Some(value) => Err(self.refuse(format!("{name} has to be finite, got {value}"))),
            None => Ok(q),
        }
    }

    fn check_array(
        &self,
        name: &str,
        dtype: Dtype,
        shape: Vec<usize>,
        values: &Values<'_>,
    ) -> Result<()> {
        if (dtype, &shape[..]) != (values.dtype, values.shape) {
            let advice = match shape.as_slice() {
                same if same == values.shape => {
                    let wrapper = match name.ends_with("observation") {
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
                "{name:?} has to be {}{shape:?} (environments first), got {}{:?}{advice}",
                dtype.name(),
                values.dtype.name(),
                values.shape
            )));
        }
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        if values.bytes.len() != bytes {
            return Err(self.refuse(format!(
                "{name:?} has to have {bytes} bytes, got {}",
                values.bytes.len()
            )));
        }
        Ok(())
    }

    fn check_length(&self, name: &str, length: Option<usize>) -> Result<()> {
        match length {
            Some(length) if length != self.streams => Err(self.refuse(format!(
                "{name:?} has to have shape [{}] (streams), got [{length}]",
                self.streams
            ))),
            _ => Ok(()),
        }
    }

    fn check_last_observations<'a>(
        &self,
        last: &FinalObservations<'a>,
    ) -> Result<LastObservations<'a>> {
        let column = self.observation.ok_or_else(|| {
            self.refuse("final observations need a view that names the observation column".into())
        })?;
        self.check_length("ended", last.ended.map(<[bool]>::len))?;
        Ok(LastObservations {
            column,
            values: self.check_values("final observation", column, &last.observation)?,
            ended: last.ended,
            q: None,
        })
    }

    /// Refuses NaN and infinities that learning would read.
    fn check_finite(&self, step: &CheckedStep<'_>) -> Result<()> {
        for &column in &self.finite {
            let dtype = self.config.columns[column].dtype;
            let found = |values: &Strided<'_>| first_not_finite(dtype, values.bytes).is_some();
            if found(&step.columns[column]) {
                // Not all rows are read.
                for stream in 0..self.streams {
                    self.check_value("", column, stream, step.value(column, stream))?;
                }
            }
            let last = step.last.as_ref().filter(|last| last.column == column);
            if last.is_some_and(|last| found(&last.values)) {
                for stream in 0..self.streams {
                    let last = step.last_observation(stream).map(|last| last.value);
                    self.check_value("final_", column, stream, last)?;
                }
            }
        }
        Ok(())
    }

    fn check_value(
        &self,
        prefix: &str,
        column: usize,
        stream: usize,
        value: Option<&[u8]>,
    ) -> Result<()> {
        let Column {
            name, dtype, shape, ..
        } = &self.config.columns[column];
        let found = value.and_then(|value| first_not_finite(*dtype, value));
        let Some((mut element, number)) = found else {
            return Ok(());
        };
        let mut place = Vec::new();
        for &length in shape.iter().rev() {
            place.insert(0, element % length as usize);
            element /= length as usize;
        }
        let mut reason = format!("\"{prefix}{name}\" of stream {stream} is {number}");
        if !place.is_empty() {
            let _ = write!(reason, " at {place:?}");
        }
        reason += ", which learning cannot use: correct it, or, if it is meant, give the column finite=False in the table's \
                   definition";
        Err(self.refuse(reason))
    }

    fn check_stream(
        &self,
        step: &CheckedStep<'_>,
        stream: usize,
        windows: &EpisodeWindows,
    ) -> Result<()> {
        if step.is_final(stream) {
            if !windows.awaits_final() {
                return Err(self.refuse(format!(
                    "stream {stream} has a final row, but the row before it neither terminated nor truncated its episode"
                )));
            }
            return Ok(());
        }
        if step.last_observation(stream).is_some() && !step.ends(stream) {
            return Err(self.refuse(format!(
                "stream {stream} has a final observation, but its step neither terminates nor truncates the episode"
            )));
        }
        let Some(q) = step.q else { return Ok(()) };
        let cut = is_set(step.step.truncated, stream) && !is_set(step.step.terminated, stream);
        let last = step.last_observation(stream).filter(|_| cut);
        if last.is_some_and(|last| last.estimate.greedy.is_none()) {
            return Err(self.refuse(format!(
                "stream {stream} is truncated, and its final observation has no Q-values: give final_q beside q"
            )));
        }
        let action = self.action.ok_or_else(|| {
            self.refuse(format!(
                "priorities from Q-values need a column {ACTION:?} of one integer a step; give priorities instead"
            ))
        })?;
        let action = step.number(action, stream);
        if !(action >= 0.0 && action < q.actions() as f64) {
            return Err(self.refuse(format!(
                "action {action} of stream {stream} has no Q-value: q has {} actions",
                q.actions()
            )));
        }
        let reward = step.reward(stream);
        if !reward.is_finite() {
            return Err(self.refuse(format!(
                "the reward of stream {stream} is {reward}, and a priority from Q-values needs a finite one: give priorities \
                 instead"
            )));
        }
        Ok(())
    }

    fn refuse(&self, reason: String) -> Error {
        Error::schema(&self.config.name, reason)
    }
}

/// Values of every stream, `each` bytes apart.
#[derive(Clone, Copy)]
struct Strided<'a> {
    bytes: &'a [u8],
    each: usize,
}

impl<'a> Strided<'a> {
    fn of(&self, stream: usize) -> &'a [u8] {
        &self.bytes[stream * self.each..(stream + 1) * self.each]
    }
}

/// Q-values, float32 `[streams, actions]`.
#[derive(Clone, Copy)]
struct QValues<'a>(Strided<'a>);

impl QValues<'_> {
    fn actions(&self) -> usize {
        self.0.each / 4
    }

    fn of(&self, stream: usize, action: usize) -> f32 {
        read_f32(&self.0.of(stream)[4 * action..4 * (action + 1)])
    }

    fn greedy(&self, stream: usize) -> f32 {
        let values = self.0.of(stream).chunks_exact(4).map(read_f32);
        values.fold(f32::NEG_INFINITY, f32::max)
    }
}

fn read_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

fn is_set(bits: Option<&[bool]>, stream: usize) -> bool {
    bits.is_some_and(|bits| bits[stream])
}

/// The last observations of episodes that end with a step, checked.
struct LastObservations<'a> {
    column: usize,
    values: Strided<'a>,
    ended: Option<&'a [bool]>,
    q: Option<QValues<'a>>,
}

/// The final row that follows a step of one stream.
pub(super) struct LastObservation<'a> {
    column: usize,
    value: &'a [u8],
    pub(super) estimate: Estimate,
}

impl<'a> LastObservation<'a> {
    /// The row's value of a column; `None` is zeros.
    pub(super) fn value(&self, column: usize) -> Option<&'a [u8]> {
        (column == self.column).then_some(self.value)
    }
}

pub(super) struct CheckedStep<'a> {
    checker: &'a StepChecker,
    columns: Vec<Strided<'a>>,
    step: StepBatch<'a>,
    q: Option<QValues<'a>>,
    last: Option<LastObservations<'a>>,
}

impl<'a> CheckedStep<'a> {
    fn is_final(&self, stream: usize) -> bool {
        is_set(self.step.final_rows, stream)
    }

    fn ends(&self, stream: usize) -> bool {
        is_set(self.step.terminated, stream) || is_set(self.step.truncated, stream)
    }

    /// The flags of a stream's row.
    pub(super) fn flags(&self, stream: usize, windows: &EpisodeWindows) -> u8 {
        if self.is_final(stream) {
            return flags::FINAL;
        }
        let mut row = 0;
        if windows.starts_stack(self.step.first.map(|first| first[stream])) {
            row |= flags::FIRST;
        }
        if is_set(self.step.terminated, stream) {
            row |= flags::TERMINATED;
        }
        if is_set(self.step.truncated, stream) {
            row |= flags::TRUNCATED;
        }
        row
    }

    /// The value of a column in a stream's row; `None` is zeros.
    pub(super) fn value(&self, column: usize, stream: usize) -> Option<&'a [u8]> {
        let kept = match self.checker.observation {
            Some(observation) => column == observation || !self.is_final(stream),
            None => true,
        };
        kept.then(|| self.columns[column].of(stream))
    }

    fn number(&self, column: usize, stream: usize) -> f64 {
        let dtype = self.checker.config.columns[column].dtype;
        dtype.read(self.columns[column].of(stream))
    }

    fn reward(&self, stream: usize) -> f64 {
        let column = self.checker.reward;
        column.map_or(0.0, |column| self.number(column, stream))
    }

    /// The actor's reward and Q-values for a stream's row.
    pub(super) fn estimate(&self, stream: usize) -> Estimate {
        let greedy = self.q.map(|q| q.greedy(stream));
        if self.is_final(stream) {
            return Estimate {
                greedy,
                ..Estimate::default()
            };
        }
        let taken = self.q.zip(self.checker.action).map(|(q, column)| {
            let action = self.number(column, stream);
            q.of(stream, action as usize)
        });
        Estimate {
            reward: self.reward(stream),
            taken,
            greedy,
            priority: self.step.priority.map(|priority| priority[stream] as f32),
        }
    }

    /// The final row to append after a stream's row.
    pub(super) fn last_observation(&self, stream: usize) -> Option<LastObservation<'a>> {
        let last = self.last.as_ref()?;
        let ended = last
            .ended
            .map_or_else(|| self.ends(stream), |ended| ended[stream]);
        (ended && !self.is_final(stream)).then(|| LastObservation {
            column: last.column,
            value: last.values.of(stream),
            estimate: Estimate {
                greedy: last.q.map(|q| q.greedy(stream)),
                ..Estimate::default()
            },
        })
    }
}

//! Definitions of views: the arrays that a client makes of sampled windows, and so the extents of a writer's windows.
//! An observation is one column, or a column for each part of a structure (`observation/camera`), each with a stack of its own.
//! [`crate::view`] makes the arrays, [`crate::episode_windows`] the windows.

mod trajectory;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use base::notation::{Number, tuple};

use crate::error::{Error, Result};
use crate::schema::{Column, TableConfig};

pub use trajectory::Trajectory;

/// The column of rewards: a scalar of any type.
pub const REWARD: &str = "reward";
/// The column of actions: an integer. Only priorities from Q-values read it.
pub const ACTION: &str = "action";

/// Padding of an observation stack before the first observation of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// Zeros, as `AtariVectorEnv` does.
    #[default]
    Zero,
    /// The first observation again, as Gymnasium's `FrameStackObservation` does by default.
    #[serde(rename = "repeat")]
    RepeatFirst,
}

impl Padding {
    /// The name in TOML and Python.
    pub const fn name(self) -> &'static str {
        match self {
            Padding::Zero => "zero",
            Padding::RepeatFirst => "repeat",
        }
    }
}

/// Transitions over n steps (Sutton, 1988; Ape-X: Horgan et al., 2018), with `B` items:
///
/// | array | dtype | shape | |
/// | --- | --- | --- | --- |
/// | `observation` | column's | `[B, stack, *shape]` | `[B, *shape]` where `stack` is 1; or `observation/part` for each part |
/// | `next_observation` | column's | the same | the stack after the last of the k <= n steps |
/// | `reward` | float32 | `[B]` | sum over i < k of gamma^i r_{t+i+1} |
/// | `discount` | float32 | `[B]` | gamma^k, 0 where the episode (or life) terminated |
/// | every other column | column's | `[B, *shape]` | at the anchor |
///
/// An observation after a termination that never came counts as zeros, and the stack ends n steps after the anchor. A truncated
/// step whose next observation never came counts as the final row: windows end at its observation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NStep {
    /// The column of observations, or what the names of its parts' columns begin with: `observation` of `observation/camera`.
    pub observation: String,
    pub stack: Stack,
    /// Steps of the return; 1 to 1024.
    pub n: u16,
    /// Discount of one step, 0 to 1.
    pub gamma: f64,
    /// Padding of a stack at the start of an episode.
    pub padding: Padding,
}

/// Windows for recurrent agents (R2D2: Kapturowski et al., 2019): `T = burn_in + length` steps and the
/// observation after the last of them, a new item every `period` steps counted from the start of the episode
/// (or life). An item needs one step beyond its burn-in; at the end of an episode it is short: padded with
/// zeros, and masked. A truncated step without a next observation is padded the same way; its own values stay.
///
/// | array | dtype | shape | |
/// | --- | --- | --- | --- |
/// | `observation` | column's | `[B, T + 1, stack, *shape]` | `[B, T + 1, *shape]` where `stack` is 1; or `observation/part` for each part |
/// | `reward` | float32 | `[B, T]` | r_{t+1} |
/// | `discount` | float32 | `[B, T]` | gamma, 0 where the step terminates and in padding |
/// | `mask` | bool | `[B, T]` | the step exists, and the observation after it is known, or it terminates |
/// | `terminated`, `truncated`, `first` | bool | `[B, T]` | flags of the step |
/// | columns in `state` | column's | `[B, *shape]` | at the first step |
/// | every other column | column's | `[B, T, *shape]` | |
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequences {
    /// The column of observations, or what the names of its parts' columns begin with: `observation` of `observation/camera`.
    pub observation: String,
    pub stack: Stack,
    /// Steps in the loss; 1 to 16384.
    pub length: u16,
    /// Steps before them that only warm up the recurrent state; 0 to 16384.
    pub burn_in: u16,
    /// Steps from one item to the next; 1 or more.
    pub period: u16,
    /// Discount of one step, 0 to 1.
    pub gamma: f64,
    /// Padding of a stack at the start of an episode.
    pub padding: Padding,
    /// Columns returned for the first step alone: the stored recurrent state. Each appears once.
    pub state: Vec<String>,
}

/// The rows around every step, unchanged: each column as `[B, before + 1 + after, *shape]` with zeros where
/// there is no row, and bool arrays `[B, before + 1 + after]`: `mask` (the row exists), `terminated`,
/// `truncated`, `first`, `final` (a final row: only its observation is set). At the end of an episode or life the last
/// row has the observation after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Rows before the anchor; at most 16384.
    pub before: u16,
    /// Rows after the anchor; at most 16384.
    pub after: u16,
}

/// Transitions of one step on single observations.
impl Default for NStep {
    fn default() -> Self {
        NStep { observation: "observation".into(), stack: Stack::All(1), n: 1, gamma: 0.99, padding: Padding::Zero }
    }
}

/// The definition of a view. Every batch also has, per item, `weights` (float32), `probabilities`
/// (float64), `ids` (uint64) and `ages` (uint32), each `[B]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewSpec {
    #[serde(rename = "n_step")]
    NStep(NStep),
    Sequences(Sequences),
    Window(Window),
    Trajectory(Trajectory),
}

/// The Python call that creates it.
impl fmt::Display for ViewSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ViewSpec::NStep(NStep { observation, stack, n, gamma, padding }) => write!(
                f,
                "NStep(stack={stack}, n={n}, gamma={gamma:?}, observation='{observation}', padding='{}')",
                padding.name()
            ),
            ViewSpec::Sequences(Sequences { observation, stack, length, burn_in, period, gamma, padding, state }) => {
                write!(
                    f,
                    "Sequences(length={length}, burn_in={burn_in}, period={period}, stack={stack}, observation='{observation}', \
                 padding='{}', gamma={gamma:?}, state={})",
                    padding.name(),
                    tuple(state.iter().map(|name| format!("'{name}'")))
                )
            }
            ViewSpec::Window(Window { before, after }) => {
                write!(f, "Window(before={before}, after={after})")
            }
            ViewSpec::Trajectory(view) => view.fmt(f),
        }
    }
}

const LARGEST_N: u16 = 1024;
const LARGEST_LENGTH: u16 = 16_384;

impl ViewSpec {
    /// Rows that the view needs before the anchor.
    pub fn before(&self) -> u16 {
        match self {
            ViewSpec::Window(view) => view.before,
            ViewSpec::Trajectory(_) => Trajectory::BEFORE,
            _ => self.observed().map_or(0, |(_, stack)| stack.before()),
        }
    }

    /// Rows that the view needs after the anchor.
    pub fn after(&self) -> u16 {
        match self {
            ViewSpec::NStep(view) => view.n,
            ViewSpec::Sequences(view) => view.burn_in.saturating_add(view.length),
            ViewSpec::Window(view) => view.after,
            ViewSpec::Trajectory(view) => view.max_steps,
        }
    }

    /// The observation and its stack, where the view has one of a table's columns.
    fn observed(&self) -> Option<(&str, &Stack)> {
        match self {
            ViewSpec::NStep(view) => Some((&view.observation, &view.stack)),
            ViewSpec::Sequences(view) => Some((&view.observation, &view.stack)),
            ViewSpec::Window(_) | ViewSpec::Trajectory(_) => None,
        }
    }

    /// Name of the observation, where the view has one.
    pub fn observation(&self) -> Option<&str> {
        match self {
            ViewSpec::Trajectory(view) => Some(&view.observation),
            _ => self.observed().map(|(name, _)| name),
        }
    }

    /// Whether the column is the view's observation, or a part of it.
    pub fn is_observation(&self, column: &str) -> bool {
        self.observation().is_some_and(|name| has_column(name, column))
    }

    /// Checks the numbers.
    pub fn check_numbers(&self) -> Result<()> {
        if let Some(name) = self.observation()
            && let Some((whole, _)) = name.split_once('/')
        {
            return Err(Error::Config(format!(
                "a view's observation is a column, or all parts of one: {whole:?}, not the part {name:?}"
            )));
        }
        if let Some((_, stack)) = self.observed() {
            stack.check()?;
        }
        let check_gamma = |gamma| within("gamma", Number(gamma), Number(0.0), Number(1.0));
        match self {
            ViewSpec::NStep(view) => {
                within("n", view.n, 1, LARGEST_N)?;
                check_gamma(view.gamma)
            }
            ViewSpec::Sequences(view) => {
                within("length", view.length, 1, LARGEST_LENGTH)?;
                within("burn_in", view.burn_in, 0, LARGEST_LENGTH)?;
                within("period", view.period, 1, u16::MAX)?;
                let (names, most) = (view.state.len(), TableConfig::MAX_COLUMNS);
                if names > most {
                    return Err(Error::Config(format!("a view's state has at most {most} columns, got {names}")));
                }
                check_gamma(view.gamma)
            }
            ViewSpec::Window(view) => {
                within("before", view.before, 0, LARGEST_LENGTH)?;
                within("after", view.after, 0, LARGEST_LENGTH)
            }
            ViewSpec::Trajectory(view) => {
                within("max_steps", view.max_steps, 1, Trajectory::MOST_STEPS)?;
                check_gamma(view.gamma)
            }
        }
    }

    /// Checks the numbers, and that the table has the columns that the view reads, with the right shapes and names.
    pub fn validate(&self, config: &TableConfig) -> Result<()> {
        self.check_numbers()?;
        let mut made = vec!["weights", "probabilities", "ids", "ages"];
        if let Some((observation, stack)) = self.observed() {
            for Part { column, stack, .. } in parts(config, observation, stack)? {
                let Column { name, .. } = &config.columns[column];
                if stack > 1 && config.columns[column].is_ragged() {
                    return Err(Error::Config(format!(
                        "column {name:?} of table {:?} has values of any length, which have no stack: give it the stack 1",
                        config.name
                    )));
                }
            }
            find_scalar(config, REWARD)?;
            // Another column of this name would hide the view's array.
            if observation != "observation" {
                made.push("observation");
            }
        }
        match self {
            ViewSpec::NStep(_) => made.extend(["next_observation", "discount"]),
            ViewSpec::Sequences(view) => {
                for (i, name) in view.state.iter().enumerate() {
                    if view.state[..i].contains(name) {
                        return Err(Error::Config(format!("column {name:?} appears twice in the stored state")));
                    }
                    if self.is_observation(name) || name == REWARD {
                        return Err(Error::Config(format!(
                            "column {name:?} cannot be a stored state: the view returns it at every step"
                        )));
                    }
                    let mut columns = config.columns.iter();
                    if !columns.any(|column| has_column(name, &column.name)) {
                        find_column(config, name)?;
                    }
                }
                made.extend(["discount", "mask", "terminated", "truncated", "first"]);
            }
            ViewSpec::Window(_) => {
                made.extend(["mask", "terminated", "truncated", "first", "final"]);
            }
            ViewSpec::Trajectory(view) => made.extend(view.made(config)?),
        }
        let mut columns = config.columns.iter();
        match columns.find(|column| made.contains(&column.root())) {
            None => Ok(()),
            Some(Column { name, .. }) => {
                let reason = format!("column {name:?} has the name of an array that the view makes; rename it");
                Err(Error::schema(&config.name, reason))
            }
        }
    }
}

pub(crate) fn within<T: PartialOrd + fmt::Display>(name: &str, value: T, least: T, most: T) -> Result<()> {
    if (&least..=&most).contains(&&value) {
        return Ok(());
    }
    Err(Error::Config(format!("a view's {name} is {least} to {most}, got {value}")))
}

pub(crate) fn find_column(config: &TableConfig, name: &str) -> Result<usize> {
    config.column_index(name).ok_or_else(|| {
        let names = config.column_names();
        let reason = format!(
            "the view reads column {name:?}, the table has {names}: name the column in the view (`observation`, `state`), or \
             in the table"
        );
        Error::schema(&config.name, reason)
    })
}

/// The index of a column that holds one number.
pub(crate) fn find_scalar(config: &TableConfig, name: &str) -> Result<usize> {
    let index = find_column(config, name)?;
    let column = &config.columns[index];
    if column.fixed_bytes() == column.dtype.bytes() {
        return Ok(index);
    }
    let reason = format!("column {name:?} has to be one number a step, it has shape {}", column.shape_text());
    Err(Error::schema(&config.name, reason))
}

/// Observations in a stack, the newest last; each number is 1 to 1024.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a stack is a number of observations, 1 to 1024, or one for each part")]
pub enum Stack {
    /// The same number for every part of the observation.
    All(u16),
    /// By part, as `camera` of `observation/camera`; 1 for parts that are not named.
    Parts(BTreeMap<String, u16>),
}

impl Stack {
    const LARGEST: u16 = 1024;

    /// Observations in the stack of a part.
    fn of(&self, part: &str) -> u16 {
        match self {
            Stack::All(stack) => *stack,
            Stack::Parts(parts) => parts.get(part).copied().unwrap_or(1),
        }
    }

    /// Rows before the anchor that the largest stack needs.
    pub fn before(&self) -> u16 {
        let largest = match self {
            Stack::All(stack) => *stack,
            Stack::Parts(parts) => parts.values().copied().max().unwrap_or(1),
        };
        largest.saturating_sub(1)
    }

    /// Checks the numbers.
    pub(crate) fn check(&self) -> Result<()> {
        let check = |stack: u16| within("stack", stack, 1, Self::LARGEST);
        match self {
            Stack::All(stack) => check(*stack),
            Stack::Parts(parts) if parts.len() > TableConfig::MAX_COLUMNS => Err(Error::Config(format!(
                "a view's stack names at most {} parts, got {}",
                TableConfig::MAX_COLUMNS,
                parts.len()
            ))),
            Stack::Parts(parts) => parts.values().copied().try_for_each(check),
        }
    }
}

impl From<u16> for Stack {
    fn from(stack: u16) -> Self {
        Stack::All(stack)
    }
}

/// As in Python.
impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stack::All(stack) => stack.fmt(f),
            Stack::Parts(parts) => {
                let parts = parts.iter().map(|(part, stack)| format!("'{part}': {stack}"));
                write!(f, "{{{}}}", parts.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

/// One part of a view's observation, or the whole where it is one column.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) column: usize,
    pub(crate) stack: usize,
    /// Its array in a batch: `observation`, or `observation/camera`.
    pub(crate) array: String,
}

/// Whether the observation of this name has the column, as a whole or as a part.
pub(crate) fn has_column(observation: &str, column: &str) -> bool {
    part_of(observation, column).is_some()
}

/// The path of a column in the observation; empty for the whole.
fn part_of<'a>(observation: &str, column: &'a str) -> Option<&'a str> {
    let rest = column.strip_prefix(observation)?;
    match rest.is_empty() {
        true => Some(rest),
        false => rest.strip_prefix('/'),
    }
}

/// The parts of an observation, in the order of the columns.
///
/// # Errors
/// [`Error::Schema`] if the table has no such column; [`Error::Config`] if `stack` names a part that the observation does not have.
pub(crate) fn parts(config: &TableConfig, observation: &str, stack: &Stack) -> Result<Vec<Part>> {
    let columns = config.columns.iter().enumerate();
    let found: Vec<_> =
        columns.filter_map(|(index, column)| Some((index, part_of(observation, &column.name)?))).collect();
    if found.is_empty() {
        find_column(config, observation)?;
    }
    if let Stack::Parts(named) = stack {
        let known = |part: &String| !part.is_empty() && found.iter().any(|(_, of)| of == part);
        if let Some(unknown) = named.keys().find(|part| !known(part)) {
            let parts: Vec<_> = found.iter().map(|(_, part)| *part).collect();
            return Err(Error::Config(match found.as_slice() {
                [(_, "")] => format!(
                    "stack names the part {unknown:?}, and the observation {observation:?} is one column: give a number"
                ),
                _ => format!(
                    "stack names the part {unknown:?}, and the observation {observation:?} of table {:?} has the parts {}",
                    config.name,
                    parts.join(", ")
                ),
            }));
        }
    }
    Ok(found
        .into_iter()
        .map(|(column, part)| Part {
            column,
            stack: usize::from(stack.of(part)),
            array: match part {
                "" => "observation".to_owned(),
                part => format!("observation/{part}"),
            },
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Column, Dtype};

    fn table(columns: &[&str]) -> TableConfig {
        let columns = columns.iter().map(|name| Column::new(*name, Dtype::Float32, vec![]));
        TableConfig::new("table", columns.collect(), 10)
    }

    fn named(stacks: &[(&str, u16)]) -> Stack {
        let stacks = stacks.iter().map(|(part, stack)| ((*part).to_owned(), *stack));
        Stack::Parts(stacks.collect())
    }

    #[test]
    fn parts_are_columns_below_the_name() {
        let config = table(&["view/b", "reward", "view/a/c", "viewer"]);
        let found = parts(&config, "view", &named(&[("a/c", 4)])).unwrap();
        let found: Vec<_> = found.iter().map(|part| (part.column, part.stack, part.array.as_str())).collect();
        assert_eq!(found, [(0, 1, "observation/b"), (2, 4, "observation/a/c")]);
        let whole = parts(&config, "viewer", &Stack::All(2)).unwrap();
        assert_eq!((whole[0].column, whole[0].stack), (3, 2));
        assert_eq!(whole[0].array, "observation");
    }

    #[test]
    fn unknown_parts_are_refused() {
        let config = table(&["view/b", "view/a", "whole"]);
        let error = |observation, stacks| parts(&config, observation, &named(stacks)).unwrap_err().to_string();
        assert!(error("view", &[("c", 4)]).ends_with("has the parts b, a"));
        assert!(error("whole", &[("a", 4)]).ends_with("is one column: give a number"));
        assert!(error("whole", &[("", 4)]).ends_with("is one column: give a number"));
        assert!(parts(&config, "vie", &Stack::All(1)).is_err());
    }

    #[test]
    fn a_stack_is_a_number_or_numbers_by_part() {
        for stack in [Stack::All(4), named(&[("a", 4), ("b/c", 2)])] {
            let text = serde_json::to_string(&stack).unwrap();
            assert_eq!(serde_json::from_str::<Stack>(&text).unwrap(), stack);
        }
        let many: BTreeMap<String, u16> = (0..1000).map(|part| (part.to_string(), 1)).collect();
        assert!(Stack::Parts(many).check().is_err());
        for bad in ["-1", "70000", "\"4\"", "[4]"] {
            assert!(serde_json::from_str::<Stack>(bad).is_err(), "{bad}");
        }
    }
}

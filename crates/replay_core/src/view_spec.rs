//! Definitions of views: the arrays that a client makes of sampled windows, and so the extents of a writer's windows.
//! [`crate::view`] makes the arrays, [`crate::episode_windows`] the windows.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::observation::{self, Stack};
use crate::schema::{Column, TableConfig};
use base::notation::{Number, tuple};

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
            _ => self.observed().map_or(0, |(_, stack)| stack.before()),
        }
    }

    /// Rows that the view needs after the anchor.
    pub fn after(&self) -> u16 {
        match self {
            ViewSpec::NStep(view) => view.n,
            ViewSpec::Sequences(view) => view.burn_in.saturating_add(view.length),
            ViewSpec::Window(view) => view.after,
        }
    }

    /// The observation and its stack, where the view has one.
    fn observed(&self) -> Option<(&str, &Stack)> {
        match self {
            ViewSpec::NStep(view) => Some((&view.observation, &view.stack)),
            ViewSpec::Sequences(view) => Some((&view.observation, &view.stack)),
            ViewSpec::Window(_) => None,
        }
    }

    /// Name of the observation, where the view has one.
    pub fn observation(&self) -> Option<&str> {
        self.observed().map(|(name, _)| name)
    }

    /// Whether the column is the view's observation, or a part of it.
    pub fn is_observation(&self, column: &str) -> bool {
        self.observation().is_some_and(|name| observation::has_column(name, column))
    }

    /// Checks the numbers.
    pub fn check_numbers(&self) -> Result<()> {
        if let Some((name, stack)) = self.observed() {
            if let Some((whole, _)) = name.split_once('/') {
                return Err(Error::Config(format!(
                    "a view's observation is a column, or all parts of one: {whole:?}, not the part {name:?}"
                )));
            }
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
        }
    }

    /// Checks the numbers, and that the table has the columns that the view reads, with the right shapes and names.
    pub fn validate(&self, config: &TableConfig) -> Result<()> {
        self.check_numbers()?;
        let mut made = vec!["weights", "probabilities", "ids", "ages"];
        if let Some((observation, stack)) = self.observed() {
            observation::parts(config, observation, stack)?;
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
                    if !columns.any(|column| observation::has_column(name, &column.name)) {
                        find_column(config, name)?;
                    }
                }
                made.extend(["discount", "mask", "terminated", "truncated", "first"]);
            }
            ViewSpec::Window(_) => {
                made.extend(["mask", "terminated", "truncated", "first", "final"]);
            }
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
    let Column { dtype, shape, .. } = &config.columns[index];
    if config.columns[index].bytes() == dtype.bytes() {
        return Ok(index);
    }
    let reason = format!("column {name:?} has to be one number a step, it has shape {shape:?}");
    Err(Error::schema(&config.name, reason))
}

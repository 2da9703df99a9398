//! The observation of a view: one column, or a column for each part of a structure (`observation/camera`), each with a stack of
//! its own.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::view_spec::{find_column, within};

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
        let columns = columns.iter().map(|name| Column::scalar(*name, Dtype::Float32));
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

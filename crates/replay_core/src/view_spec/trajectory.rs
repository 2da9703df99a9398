//! The view of whole trajectories: its definition, and the arrays that it makes beside the columns.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Part, REWARD, Stack, find_scalar, has_column, parts};
use crate::error::Result;
use crate::schema::TableConfig;

/// Whole episodes, or lives: an item has all steps of one, and the observation after the last of them where it came. A longer one than
/// `max_steps` is divided: each part has `max_steps` steps, and the last one the rest. With `B` items, of `T` steps each:
///
/// | array | dtype | shape | |
/// | --- | --- | --- | --- |
/// | `observation` | column's | `[B][T, *shape]` | ragged; or `observation/part` for each part |
/// | `next_observation` | column's | `[B, *shape]` | after the last step; zeros where it never came |
/// | `has_next` | bool | `[B]` | whether it came |
/// | `returns` | float32 | `[B][T]` | sum over i of gamma^i r_{t+i+1}, to the end of the item |
/// | `begins`, `ends` | bool | `[B]` | the item has the first, the last step of its episode |
/// | `terminated`, `truncated` | bool | `[B]` | flags of the last step |
/// | every other column | column's | `[B][T, *shape]` | ragged |
///
/// The first three are left out where the table has no column `observation` and the view names no other one, and `returns` where it has no
/// scalar `reward`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Trajectory {
    /// Most steps of an item; 1 to 65,534.
    pub max_steps: u16,
    /// Discount of one step, 0 to 1.
    pub gamma: f64,
    /// The column of observations, or what the names of its parts' columns begin with.
    pub observation: String,
}

impl Default for Trajectory {
    fn default() -> Self {
        Trajectory { max_steps: 1000, gamma: 1.0, observation: Self::OBSERVATION.into() }
    }
}

impl Trajectory {
    /// Rows before the anchor: that before a part of an episode says whether another life begins with the part.
    pub(super) const BEFORE: u16 = 1;
    /// With the row after it an item has an extent that a u16 holds.
    pub(super) const MOST_STEPS: u16 = u16::MAX - 1;
    const OBSERVATION: &str = "observation";

    /// The parts of the observation. A table without a column of this name has none, such as one of rollouts.
    pub(crate) fn parts(&self, config: &TableConfig) -> Result<Vec<Part>> {
        let mut columns = config.columns.iter();
        if self.observation == Self::OBSERVATION && !columns.any(|column| has_column(&self.observation, &column.name)) {
            return Ok(Vec::new());
        }
        parts(config, &self.observation, &Stack::All(1))
    }

    /// The column of rewards, where the table has one of single numbers.
    pub(crate) fn reward(config: &TableConfig) -> Option<usize> {
        find_scalar(config, REWARD).ok()
    }

    /// Names of arrays that no column may have.
    pub(super) fn made(&self, config: &TableConfig) -> Result<Vec<&'static str>> {
        let mut made = vec!["begins", "ends", "terminated", "truncated"];
        if !self.parts(config)?.is_empty() {
            made.extend(["next_observation", "has_next"]);
            // Another column of this name would hide the view's array.
            made.extend((self.observation != Self::OBSERVATION).then_some(Self::OBSERVATION));
        }
        made.extend(Self::reward(config).map(|_| "returns"));
        Ok(made)
    }
}

/// The Python call that creates it.
impl fmt::Display for Trajectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trajectory { max_steps, gamma, observation } = self;
        write!(f, "Trajectory(max_steps={max_steps}, gamma={gamma:?}, observation='{observation}')")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::schema::{Column, Dtype};
    use crate::view_spec::ViewSpec;

    fn table(columns: &[&str]) -> TableConfig {
        let columns = columns.iter().map(|name| Column::new(*name, Dtype::Float32, vec![]));
        TableConfig::new("table", columns.collect(), 10)
    }

    fn check(view: Trajectory, columns: &[&str]) -> Result<()> {
        ViewSpec::Trajectory(view).validate(&table(columns))
    }

    #[test]
    fn a_definition_is_read_with_its_defaults_and_written_as_python_calls_it() {
        let read: ViewSpec = serde_json::from_str(r#"{"trajectory": {"max_steps": 8}}"#).unwrap();
        assert_eq!(read, ViewSpec::Trajectory(Trajectory { max_steps: 8, ..Trajectory::default() }));
        assert_eq!(read.to_string(), "Trajectory(max_steps=8, gamma=1.0, observation='observation')");
        let text = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<ViewSpec>(&text).unwrap(), read);
        assert!(serde_json::from_str::<ViewSpec>(r#"{"trajectory": {"steps": 8}}"#).is_err());
        assert_eq!((read.before(), read.after(), read.observation()), (1, 8, Some("observation")));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let refused = |view: Trajectory| check(view, &["tokens"]).unwrap_err().to_string();
        for max_steps in [0, u16::MAX] {
            let error = refused(Trajectory { max_steps, ..Trajectory::default() });
            assert!(error.contains("max_steps is 1 to 65534"), "{error}");
        }
        for gamma in [-0.1, 1.1, f64::NAN] {
            assert!(refused(Trajectory { gamma, ..Trajectory::default() }).contains("gamma is 0 to 1"));
        }
        let part = Trajectory { observation: "view/camera".into(), ..Trajectory::default() };
        assert!(refused(part).contains("not the part"));
    }

    #[test]
    fn a_table_needs_the_observation_that_a_view_names_and_not_the_default_one() {
        let named = Trajectory { observation: "frame".into(), ..Trajectory::default() };
        check(Trajectory::default(), &["tokens", "reward"]).unwrap();
        check(named.clone(), &["frame", "reward"]).unwrap();
        assert!(matches!(check(named, &["observation"]), Err(Error::Schema { .. })));
    }

    #[test]
    fn columns_with_names_of_arrays_are_refused() {
        let named = Trajectory { observation: "frame".into(), ..Trajectory::default() };
        for name in ["begins", "ends", "next_observation", "has_next", "returns"] {
            let error = check(Trajectory::default(), &["observation", "reward", name]).unwrap_err().to_string();
            assert!(error.contains("rename it"), "{error}");
        }
        assert!(check(named, &["frame", "observation"]).is_err());
        // No such array is made.
        check(Trajectory::default(), &["tokens", "returns", "has_next"]).unwrap();
    }
}

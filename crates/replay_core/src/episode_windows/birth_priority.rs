//! Priorities of new items, from what their writer says of each row: Q-values, or a priority.

use std::collections::VecDeque;

use crate::view_spec::ViewSpec;

/// Weight of the largest TD error of a sequence against the mean (R2D2: Kapturowski et al., 2019, section 2.3).
const LARGEST_ERROR_WEIGHT: f64 = 0.9;

/// The actor's reward and Q-values for a row, from which priorities at birth are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// r_{t+1}.
    pub reward: f64,
    /// Q-value of the action taken.
    pub taken: Option<f32>,
    /// Largest Q-value of the observation.
    pub greedy: Option<f32>,
    /// Priority given for the item anchored here, or for the trajectory up to here; it overrides the one from Q-values.
    pub priority: Option<f32>,
}

/// The priority of a new item that is given none.
#[derive(Debug, Clone, Copy)]
enum BirthPriority {
    /// The n-step TD error.
    NStep {
        gamma: f64,
    },
    /// A mix of the largest and the mean one-step TD error after the burn-in.
    Sequence {
        gamma: f64,
        burn_in: usize,
    },
    /// The one given last for a step of the item: what a trajectory is worth is known at its end.
    LastGiven(Option<f32>),
    Default,
}

/// The estimates of a stream's newest rows: enough for the oldest open window.
#[derive(Debug)]
pub(super) struct Estimates {
    birth: BirthPriority,
    /// Rows after the anchor of a full window.
    reach: u64,
    rows: VecDeque<Estimate>,
}

impl Estimates {
    pub(super) fn new(view: &ViewSpec) -> Self {
        let birth = match view {
            ViewSpec::NStep(view) => BirthPriority::NStep { gamma: view.gamma },
            ViewSpec::Sequences(view) => {
                BirthPriority::Sequence { gamma: view.gamma, burn_in: usize::from(view.burn_in) }
            }
            ViewSpec::Window(_) => BirthPriority::Default,
            ViewSpec::Trajectory(_) => BirthPriority::LastGiven(None),
        };
        Estimates { birth, reach: u64::from(view.after()), rows: VecDeque::new() }
    }

    /// Adds the estimate of a row.
    pub(super) fn push(&mut self, estimate: Estimate) {
        if matches!(self.birth, BirthPriority::LastGiven(_)) {
            return;
        }
        if self.rows.len() as u64 > self.reach {
            self.rows.pop_front();
        }
        self.rows.push_back(estimate);
    }

    /// Adds a row to the newest window, which it `opens` or continues. Windows that end before it are complete by then.
    pub(super) fn count_step(&mut self, estimate: Estimate, opens: bool) {
        if let BirthPriority::LastGiven(given) = &mut self.birth {
            *given = estimate.priority.or(given.filter(|_| !opens));
        }
    }

    /// The priority of a window that ends with the newest row, `after` rows after its anchor.
    pub(super) fn priority(&self, after: usize, steps: usize, terminated: bool) -> Option<f32> {
        if let BirthPriority::LastGiven(given) = self.birth {
            return given;
        }
        let anchor = self.rows.len() - 1 - after;
        if let Some(given) = self.rows[anchor].priority {
            return Some(given);
        }
        let error = match self.birth {
            BirthPriority::NStep { gamma } => self.td_error(anchor, steps, gamma, terminated)?,
            BirthPriority::Sequence { gamma, burn_in } => {
                let (mut largest, mut sum) = (0.0, 0.0);
                for step in burn_in..steps {
                    let last = terminated && step + 1 == steps;
                    let error = self.td_error(anchor + step, 1, gamma, last)?;
                    largest = error.max(largest);
                    sum += error;
                }
                let mean = sum / (steps - burn_in) as f64;
                LARGEST_ERROR_WEIGHT * largest + (1.0 - LARGEST_ERROR_WEIGHT) * mean
            }
            BirthPriority::LastGiven(_) | BirthPriority::Default => return None,
        };
        Some(error.min(f64::from(f32::MAX)) as f32)
    }

    /// The n-step TD error |sum over i < k of gamma^i r_{t+i+1} + gamma^k max_a Q(s_{t+k}, a) - Q(s_t, a_t)| over
    /// k = `steps` rows from the estimate at index `first` on, without the bootstrap where the last step terminates.
    /// It equals that of a double-Q learner with the actor's network as online and target network. `None` where a Q-value is
    /// missing.
    fn td_error(&self, first: usize, steps: usize, gamma: f64, terminated: bool) -> Option<f64> {
        let (mut target, mut discount) = (0.0, 1.0);
        for row in self.rows.range(first..first + steps) {
            target += discount * row.reward;
            discount *= gamma;
        }
        if !terminated {
            target += discount * f64::from(self.rows[first + steps].greedy?);
        }
        Some((target - f64::from(self.rows[first].taken?)).abs())
    }
}

#[cfg(test)]
mod tests {
    use super::super::EpisodeWindows;
    use super::super::tests::{n_step, sequence, trajectory};
    use super::*;
    use crate::schema::flags::{FINAL, FIRST, TERMINATED, TRUNCATED};

    /// Priorities of the items that rows with these flags, rewards, Q of the action and largest Q complete.
    fn priorities(view: &ViewSpec, rows: &[(u8, f64, f32, f32)]) -> Vec<Option<f32>> {
        let mut windows = EpisodeWindows::new(0, view);
        let mut items = Vec::new();
        for &(row, reward, taken, greedy) in rows {
            let estimate = Estimate { reward, taken: Some(taken), greedy: Some(greedy), priority: None };
            windows.append(row, estimate, &mut items);
        }
        items.iter().map(|item| item.priority).collect()
    }

    #[test]
    fn priorities_are_n_step_td_errors() {
        let rows = [(FIRST, 1.0, 2.0, 9.0), (0, 2.0, 9.0, 9.0), (0, 0.0, 9.0, 4.0)];
        // 1 + 0.5 * 2 + 0.25 * 4 - 2
        assert_eq!(priorities(&n_step(1, 2), &rows), [Some(1.0)]);
        let rows = [(FIRST, 1.0, 5.0, 9.0), (TERMINATED, 2.0, 2.5, 9.0)];
        // |1 + 0.5 * 2 - 5| and |2 - 2.5|: no bootstrap.
        assert_eq!(priorities(&n_step(1, 3), &rows), [Some(3.0), Some(0.5)]);
        let rows = [(TRUNCATED, 1.0, 2.0, 9.0), (FINAL, 7.0, 7.0, 4.0)];
        // 1 + 0.5 * 4 - 2: the final row bootstraps.
        assert_eq!(priorities(&n_step(1, 3), &rows), [Some(1.0)]);
    }

    #[test]
    fn priorities_of_sequences_mix_the_largest_and_the_mean_error() {
        let rows = [(FIRST, 100.0, 0.0, 0.0), (0, 1.0, 0.0, 0.0), (TERMINATED, 3.0, 0.0, 0.0)];
        // Errors 1 and 3 after one step of burn-in; the second window has error 3 alone.
        assert_eq!(priorities(&sequence(2, 1, 1), &rows), [Some(2.9), Some(3.0)]);
    }

    #[test]
    fn an_error_beyond_float32_saturates() {
        let rows = [(TERMINATED, f64::MAX, 0.0, 0.0)];
        assert_eq!(priorities(&n_step(1, 1), &rows), [Some(f32::MAX)]);
    }

    #[test]
    fn without_q_values_there_is_no_priority() {
        let mut windows = EpisodeWindows::new(0, &n_step(1, 1));
        let mut items = Vec::new();
        let with_q = Estimate { taken: Some(1.0), greedy: Some(1.0), ..Estimate::default() };
        for estimate in [with_q, Estimate::default(), with_q, with_q] {
            windows.append(0, estimate, &mut items);
        }
        let priorities: Vec<_> = items.iter().map(|item| item.priority).collect();
        // |0 + 0.5 * 1 - 1| where both rows have Q-values.
        assert_eq!(priorities, [None, None, Some(0.5)]);
    }

    #[test]
    fn a_trajectory_has_the_priority_given_last_for_one_of_its_steps() {
        let priorities = |rows: &[(u8, Option<f32>)]| {
            let mut windows = EpisodeWindows::new(0, &trajectory(3));
            let mut items = Vec::new();
            for &(row, priority) in rows {
                let estimate = Estimate { taken: Some(1.0), greedy: Some(9.0), priority, ..Estimate::default() };
                windows.append(row, estimate, &mut items);
            }
            windows.end(&mut items);
            items.iter().map(|item| item.priority).collect::<Vec<_>>()
        };
        assert_eq!(priorities(&[(FIRST, Some(1.0)), (0, Some(2.0)), (TERMINATED, None)]), [Some(2.0)]);
        assert_eq!(
            priorities(&[(FIRST, Some(1.0)), (TERMINATED, Some(0.0)), (FIRST | TERMINATED, None)]),
            [Some(0.0), None]
        );
        // The row after a part, or after a truncated step, is none of its steps; the truncated step is one.
        assert_eq!(priorities(&[(FIRST, None), (0, Some(2.0)), (0, None), (0, Some(3.0))]), [Some(2.0)]);
        assert_eq!(priorities(&[(FIRST, None), (TRUNCATED, Some(4.0)), (0, Some(3.0))]), [Some(4.0)]);
        assert_eq!(priorities(&[(FIRST, Some(5.0)), (TRUNCATED, None), (FINAL, None)]), [Some(5.0)]);
        assert_eq!(priorities(&[(FIRST, Some(5.0)), (TRUNCATED, Some(6.0))]), [Some(6.0)]);
    }
}

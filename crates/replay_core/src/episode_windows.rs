//! Episode windows: the complete items of a stream and their initial priorities. [`EpisodeWindows::append`] returns the
//! items that a row completes.
//!
//! A window opens at its anchor. It completes with the row `reach` steps after the anchor, or earlier at the end of the
//! episode (or life): at once where the episode terminates; where it is truncated, with the next row, which has the last
//! observation if it is a final row or goes on with the stack. If that observation never comes, the truncated step counts as
//! the final row. A sample of a terminated window has the last observation, too, once it is stored
//! ([`Table::try_sample`](crate::table::Table::try_sample)). A window never extends back beyond the first row of the
//! anchor's observation stack.
//!
//! # Invariant
//!
//! Windows never cross a gap in a stream, the first row of an observation stack (backwards), or the observation after the end
//! of an episode or life (forwards).

use std::collections::VecDeque;

use crate::replay::NewItem;
use crate::schema::flags;
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
    /// Priority given for the item anchored here; it overrides the one from Q-values.
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
    Default,
}

/// Numbers of windows that never became items.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DroppedWindows {
    /// Cut by a reset without an end of the episode.
    pub by_reset: u64,
    /// Of the shortest length: the observation after their truncated step did not come.
    pub without_final_row: u64,
    /// Too short to be an item: the episode or life ended within the burn-in.
    pub within_burn_in: u64,
}

impl DroppedWindows {
    pub(crate) fn add(&mut self, others: &Self) {
        self.by_reset += others.by_reset;
        self.without_final_row += others.without_final_row;
        self.within_burn_in += others.within_burn_in;
    }

    /// All but those that the view leaves out.
    pub fn by_mistake(&self) -> u64 {
        self.by_reset + self.without_final_row
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastRow {
    None,
    Step,
    Terminated,
    Truncated,
    Final,
}

/// The open windows of one stream.
#[derive(Debug)]
pub struct EpisodeWindows {
    stream: u32,
    /// Most rows before the anchor.
    before: u64,
    /// Rows after the anchor of a full window.
    reach: u64,
    /// Steps from one anchor to the next.
    period: u64,
    /// Least steps of a window that an episode's end cuts short.
    shortest: u64,
    birth: BirthPriority,
    last: LastRow,
    pub next_step: u64,
    /// First row of the current observation stack.
    stack_start: u64,
    /// First row of the current episode, or life.
    life_start: u64,
    /// Anchors of open windows, oldest first.
    open: VecDeque<u64>,
    /// Estimates of the newest rows, up to row `next_step - 1`: enough for the oldest open window.
    estimates: VecDeque<Estimate>,
    pub dropped: DroppedWindows,
}

impl EpisodeWindows {
    /// An empty set of windows of `view` on stream `stream`.
    pub fn new(stream: u32, view: &ViewSpec) -> Self {
        let (period, shortest, birth) = match view {
            ViewSpec::NStep(view) => (1, 1, BirthPriority::NStep { gamma: view.gamma }),
            ViewSpec::Sequences(view) => (
                u64::from(view.period),
                u64::from(view.burn_in) + 1,
                BirthPriority::Sequence { gamma: view.gamma, burn_in: usize::from(view.burn_in) },
            ),
            ViewSpec::Window(_) => (1, 0, BirthPriority::Default),
        };
        EpisodeWindows {
            stream,
            before: u64::from(view.before()),
            reach: u64::from(view.after()),
            period,
            shortest,
            birth,
            last: LastRow::None,
            next_step: 0,
            stack_start: 0,
            life_start: 0,
            open: VecDeque::new(),
            estimates: VecDeque::new(),
            dropped: DroppedWindows::default(),
        }
    }

    /// Whether a final row may follow: the last row ended an episode or life.
    pub fn awaits_final(&self) -> bool {
        matches!(self.last, LastRow::Terminated | LastRow::Truncated)
    }

    /// Whether the next row starts an observation stack: as `asked`, by default after every end. The first row of a
    /// stream and the row after a final row always do.
    pub fn starts_stack(&self, asked: Option<bool>) -> bool {
        match self.last {
            LastRow::None | LastRow::Final => true,
            LastRow::Terminated | LastRow::Truncated => asked.unwrap_or(true),
            LastRow::Step => asked.unwrap_or(false),
        }
    }

    /// Appends a row with these [`flags`], and adds the items that it completes to `items`.
    pub fn append(&mut self, row_flags: u8, estimate: Estimate, items: &mut Vec<NewItem>) {
        let is_final = row_flags & flags::FINAL != 0;
        let first = !is_final && self.starts_stack(Some(row_flags & flags::FIRST != 0));
        if first {
            self.end(items);
        }
        let row = self.next_step;
        self.next_step += 1;
        self.remember(estimate);
        if self.last == LastRow::Truncated {
            self.complete_all(row, false, items);
        }
        if is_final {
            self.last = LastRow::Final;
            return;
        }

        if first {
            self.dropped.by_reset += self.open.len() as u64;
            self.open.clear();
            self.stack_start = row;
        }
        if first || self.awaits_final() {
            self.life_start = row;
        }

        if (row - self.life_start).is_multiple_of(self.period) {
            self.open.push_back(row);
        }
        if let Some(&anchor) = self.open.front()
            && anchor + self.reach == row
        {
            self.open.pop_front();
            self.complete(anchor, row, false, items);
        }
        self.last = if row_flags & flags::TERMINATED != 0 {
            self.complete_all(row, true, items);
            LastRow::Terminated
        } else if row_flags & flags::TRUNCATED != 0 {
            LastRow::Truncated
        } else {
            LastRow::Step
        };
    }

    /// Completes the windows of a truncated episode whose last observation does not come. They end with the truncated step.
    pub fn end(&mut self, items: &mut Vec<NewItem>) {
        if self.last == LastRow::Truncated {
            let (last, open) = (self.next_step - 1, self.open.len());
            // Windows of exactly `shortest` steps lack only that observation.
            self.open.retain(|anchor| last - anchor + 1 != self.shortest);
            self.dropped.without_final_row += (open - self.open.len()) as u64;
            self.complete_all(last, false, items);
        }
    }

    /// Whether the next row may join this window's samples: its last row is the newest, terminates, and lies before `reach`.
    pub fn may_extend(&self, item: &NewItem) -> bool {
        let after = u64::from(item.after);
        self.last == LastRow::Terminated && item.anchor + after + 1 == self.next_step && after < self.reach
    }

    /// Completes every open window at the end of the episode, with `row` as the last row.
    fn complete_all(&mut self, row: u64, terminated: bool, items: &mut Vec<NewItem>) {
        while let Some(anchor) = self.open.pop_front() {
            self.complete(anchor, row, terminated, items);
        }
    }

    fn complete(&mut self, anchor: u64, row: u64, terminated: bool, items: &mut Vec<NewItem>) {
        let after = row - anchor;
        let steps = after + u64::from(terminated);
        if steps < self.shortest && after < self.reach {
            self.dropped.within_burn_in += 1;
            return;
        }
        // A view's extents are u16.
        items.push(NewItem {
            anchor,
            stream: self.stream,
            before: (anchor - self.stack_start).min(self.before) as u16,
            after: after as u16,
            priority: self.priority(after as usize, steps as usize, terminated),
        });
    }

    fn remember(&mut self, estimate: Estimate) {
        if self.estimates.len() as u64 > self.reach {
            self.estimates.pop_front();
        }
        self.estimates.push_back(estimate);
    }

    /// The priority of a window that ends with the newest row.
    fn priority(&self, after: usize, steps: usize, terminated: bool) -> Option<f32> {
        let anchor = self.estimates.len() - 1 - after;
        if let Some(given) = self.estimates[anchor].priority {
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
            BirthPriority::Default => return None,
        };
        Some(error.min(f64::from(f32::MAX)) as f32)
    }

    /// The n-step TD error |sum over i < k of gamma^i r_{t+i+1} + gamma^k max_a Q(s_{t+k}, a) - Q(s_t, a_t)| over
    /// k = `steps` rows from the estimate at index `first` on, without the bootstrap where the last step terminates.
    /// It equals a double-Q learner's whose online and target networks are the actor's. `None` where a Q-value is
    /// missing.
    fn td_error(&self, first: usize, steps: usize, gamma: f64, terminated: bool) -> Option<f64> {
        let (mut target, mut discount) = (0.0, 1.0);
        for row in self.estimates.range(first..first + steps) {
            target += discount * row.reward;
            discount *= gamma;
        }
        if !terminated {
            target += discount * f64::from(self.estimates[first + steps].greedy?);
        }
        Some((target - f64::from(self.estimates[first].taken?)).abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::flags::{FINAL, FIRST, TERMINATED, TRUNCATED};
    use crate::view_spec::{NStep, Padding, Sequences, Window};

    fn n_step(stack: u16, n: u16) -> ViewSpec {
        ViewSpec::NStep(NStep {
            observation: "frame".into(),
            stack: stack.into(),
            n,
            gamma: 0.5,
            padding: Padding::Zero,
        })
    }

    fn sequence(length: u16, burn_in: u16, period: u16) -> ViewSpec {
        ViewSpec::Sequences(Sequences {
            observation: "frame".into(),
            stack: 1.into(),
            length,
            burn_in,
            period,
            gamma: 0.5,
            padding: Padding::Zero,
            state: Vec::new(),
        })
    }

    /// Windows (anchor, before, after) that rows with these flags complete, and counts of dropped windows.
    fn windows(view: &ViewSpec, rows: &[u8]) -> (Vec<(u64, u16, u16)>, DroppedWindows) {
        let mut windows = EpisodeWindows::new(0, view);
        let mut items = Vec::new();
        for &row in rows {
            windows.append(row, Estimate::default(), &mut items);
        }
        let items = items.iter().map(|i| (i.anchor, i.before, i.after));
        (items.collect(), windows.dropped)
    }

    const NOTHING: DroppedWindows = DroppedWindows { by_reset: 0, without_final_row: 0, within_burn_in: 0 };

    #[test]
    fn a_window_completes_with_its_bootstrap_row() {
        assert_eq!(windows(&n_step(2, 2), &[FIRST, 0]).0, []);
        let (items, dropped) = windows(&n_step(2, 2), &[FIRST, 0, 0, 0]);
        assert_eq!(items, [(0, 0, 2), (1, 1, 2)]);
        assert_eq!(dropped, NOTHING);
    }

    #[test]
    fn a_terminal_step_completes_every_open_window_at_once() {
        let (items, dropped) = windows(&n_step(1, 3), &[FIRST, 0, TERMINATED]);
        assert_eq!(items, [(0, 0, 2), (1, 0, 1), (2, 0, 0)]);
        assert_eq!(dropped, NOTHING);
    }

    #[test]
    fn an_episode_of_one_step_is_one_window() {
        let rows = [FIRST | TERMINATED, FINAL, FIRST | TRUNCATED, FINAL];
        assert_eq!(windows(&n_step(4, 3), &rows).0, [(0, 0, 0), (2, 0, 1)]);
    }

    #[test]
    fn a_truncated_episode_completes_with_its_final_row() {
        let (items, dropped) = windows(&n_step(1, 3), &[FIRST, TRUNCATED]);
        assert_eq!((items.len(), dropped), (0, NOTHING));
        let (items, dropped) = windows(&n_step(1, 3), &[FIRST, TRUNCATED, FINAL, FIRST, 0]);
        assert_eq!(items, [(0, 0, 2), (1, 0, 1)]);
        assert_eq!(dropped, NOTHING);
    }

    #[test]
    fn a_truncated_step_without_final_row_counts_as_the_final_row() {
        let (items, dropped) = windows(&n_step(1, 2), &[FIRST, 0, 0, TRUNCATED, FIRST]);
        assert_eq!(items, [(0, 0, 2), (1, 0, 2), (2, 0, 1)]);
        assert_eq!(dropped, DroppedWindows { without_final_row: 1, ..NOTHING });
        // Sequences need a step beyond the burn-in, raw windows none.
        let rows = [FIRST, 0, 0, TRUNCATED, FIRST];
        let (items, dropped) = windows(&sequence(3, 1, 1), &rows);
        assert_eq!((items, dropped.without_final_row), (vec![(0, 0, 3), (1, 0, 2)], 1));
        let view = ViewSpec::Window(Window { before: 0, after: 2 });
        let (items, dropped) = windows(&view, &rows);
        assert_eq!((items, dropped), (vec![(0, 0, 2), (1, 0, 2), (2, 0, 1), (3, 0, 0)], NOTHING));
    }

    #[test]
    fn a_truncated_episode_whose_stack_goes_on_bootstraps_from_the_next_step() {
        let (items, dropped) = windows(&n_step(2, 2), &[FIRST, TRUNCATED, 0, 0]);
        assert_eq!(items, [(0, 0, 2), (1, 1, 1)]);
        assert_eq!(dropped, NOTHING);
    }

    #[test]
    fn the_windows_of_a_truncated_episode_complete_at_the_end_of_the_stream() {
        let mut windows = EpisodeWindows::new(0, &n_step(1, 2));
        let mut items = Vec::new();
        for row in [FIRST, 0, TRUNCATED] {
            windows.append(row, Estimate::default(), &mut items);
        }
        assert_eq!(items.len(), 1);
        windows.end(&mut items);
        let places: Vec<_> = items.iter().map(|item| (item.anchor, item.after)).collect();
        assert_eq!(places, [(0, 2), (1, 1)]);
        windows.end(&mut items);
        assert_eq!((items.len(), windows.dropped.without_final_row), (2, 1));
    }

    #[test]
    fn an_unannounced_reset_is_dropped_and_counted() {
        let (items, dropped) = windows(&n_step(1, 2), &[FIRST, 0, 0, FIRST, 0, 0]);
        assert_eq!(items, [(0, 0, 2), (3, 0, 2)]);
        assert_eq!((dropped.without_final_row, dropped.by_reset), (0, 2));
    }

    #[test]
    fn a_lost_life_ends_learning_and_the_stack_goes_on() {
        let (items, dropped) = windows(&n_step(4, 2), &[FIRST, TERMINATED, 0, 0, 0]);
        assert_eq!(items, [(0, 0, 1), (1, 1, 0), (2, 2, 2)]);
        assert_eq!(dropped, NOTHING);
    }

    #[test]
    fn the_row_after_a_final_row_starts_a_stack_whatever_its_flags_say() {
        let rows = [0, TERMINATED, FINAL, 0, 0];
        assert_eq!(windows(&n_step(4, 1), &rows).0, [(0, 0, 1), (1, 1, 0), (3, 0, 1)]);
    }

    #[test]
    fn sequences_start_every_period_of_a_life() {
        let rows = [FIRST, 0, 0, TERMINATED, 0, 0, 0, 0];
        // Anchors 0 and 2 of the first life, 4 and 6 of the second, of which 6 is still open.
        assert_eq!(windows(&sequence(3, 0, 2), &rows).0, [(0, 0, 3), (2, 0, 1), (4, 0, 3)]);
    }

    #[test]
    fn a_sequence_needs_a_step_beyond_its_burn_in() {
        let rows = [FIRST, 0, TERMINATED];
        let (items, dropped) = windows(&sequence(2, 1, 1), &rows);
        assert_eq!((items, dropped.within_burn_in), (vec![(0, 0, 2), (1, 0, 1)], 1));
    }

    #[test]
    fn raw_windows_of_no_rows_after_complete_at_once() {
        let view = ViewSpec::Window(Window { before: 1, after: 0 });
        assert_eq!(windows(&view, &[FIRST, 0]).0, [(0, 0, 0), (1, 1, 0)]);
    }

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
}

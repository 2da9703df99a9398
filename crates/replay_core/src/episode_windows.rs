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

mod birth_priority;

use std::collections::VecDeque;

use crate::replay::NewItem;
use crate::schema::flags;
use crate::view_spec::ViewSpec;
use birth_priority::Estimates;

pub use birth_priority::Estimate;

/// Numbers of windows that never became items.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DroppedWindows {
    /// Cut by a reset without an end of the episode.
    pub by_reset: u64,
    /// Of the shortest length: the observation after their truncated step did not come.
    pub without_final_row: u64,
    /// Trajectories that the writer left unfinished when it closed.
    pub unfinished: u64,
    /// Too short to be an item: the episode or life ended within the burn-in.
    pub within_burn_in: u64,
}

impl DroppedWindows {
    pub(crate) fn add(&mut self, others: &Self) {
        self.by_reset += others.by_reset;
        self.without_final_row += others.without_final_row;
        self.unfinished += others.unfinished;
        self.within_burn_in += others.within_burn_in;
    }

    /// All but those that the view leaves out.
    pub fn by_mistake(&self) -> u64 {
        self.by_reset + self.without_final_row + self.unfinished
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
    /// Whether items are whole episodes: those that have no end are counted.
    whole: bool,
    last: LastRow,
    pub next_step: u64,
    /// First row of the current observation stack.
    stack_start: u64,
    /// First row of the current episode, or life.
    life_start: u64,
    /// Anchors of open windows, oldest first.
    open: VecDeque<u64>,
    estimates: Estimates,
    pub dropped: DroppedWindows,
}

impl EpisodeWindows {
    /// An empty set of windows of `view` on stream `stream`.
    pub fn new(stream: u32, view: &ViewSpec) -> Self {
        let (period, shortest) = match view {
            ViewSpec::NStep(_) => (1, 1),
            ViewSpec::Sequences(view) => (u64::from(view.period), u64::from(view.burn_in) + 1),
            ViewSpec::Window(_) => (1, 0),
            ViewSpec::Trajectory(view) => (u64::from(view.max_steps), 0),
        };
        EpisodeWindows {
            stream,
            before: u64::from(view.before()),
            reach: u64::from(view.after()),
            period,
            shortest,
            whole: matches!(view, ViewSpec::Trajectory(_)),
            last: LastRow::None,
            next_step: 0,
            stack_start: 0,
            life_start: 0,
            open: VecDeque::new(),
            estimates: Estimates::new(view),
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
        self.estimates.push(estimate);
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

        let opens = (row - self.life_start).is_multiple_of(self.period);
        if opens {
            self.open.push_back(row);
        }
        if let Some(&anchor) = self.open.front()
            && anchor + self.reach == row
        {
            self.open.pop_front();
            self.complete(anchor, row, false, items);
        }
        self.estimates.count_step(estimate, opens);
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

    /// Counts the trajectory that the stream leaves unfinished.
    pub fn leave(&mut self) {
        if self.whole {
            self.dropped.unfinished += self.open.len() as u64;
            self.open.clear();
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
            priority: self.estimates.priority(after as usize, steps as usize, terminated),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::flags::{FINAL, FIRST, TERMINATED, TRUNCATED};
    use crate::view_spec::{NStep, Padding, Sequences, Trajectory, Window};

    pub(super) fn n_step(stack: u16, n: u16) -> ViewSpec {
        ViewSpec::NStep(NStep {
            observation: "frame".into(),
            stack: stack.into(),
            n,
            gamma: 0.5,
            padding: Padding::Zero,
        })
    }

    pub(super) fn sequence(length: u16, burn_in: u16, period: u16) -> ViewSpec {
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

    pub(super) fn trajectory(max_steps: u16) -> ViewSpec {
        ViewSpec::Trajectory(Trajectory { max_steps, ..Trajectory::default() })
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

    const NOTHING: DroppedWindows =
        DroppedWindows { by_reset: 0, without_final_row: 0, unfinished: 0, within_burn_in: 0 };

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

    #[test]
    fn a_trajectory_is_an_episode_with_the_observation_after_a_truncation() {
        let rows = [FIRST, 0, TERMINATED, FINAL, FIRST, TRUNCATED, FINAL, FIRST | TERMINATED];
        assert_eq!(windows(&trajectory(5), &rows), (vec![(0, 0, 2), (4, 0, 2), (7, 0, 0)], NOTHING));
        // An episode of exactly as many steps as an item has is one item.
        assert_eq!(windows(&trajectory(3), &rows), (vec![(0, 0, 2), (4, 0, 2), (7, 0, 0)], NOTHING));
    }

    #[test]
    fn a_long_episode_is_divided_into_trajectories_as_soon_as_they_are_complete() {
        // With the row before a part, which says that no life begins there, and the one after it.
        let rows = [FIRST, 0, 0, 0, 0, TRUNCATED, FINAL];
        let (items, _) = windows(&trajectory(2), &rows[..5]);
        assert_eq!(items, [(0, 0, 2), (2, 1, 2)]);
        assert_eq!(windows(&trajectory(2), &rows), (vec![(0, 0, 2), (2, 1, 2), (4, 1, 2)], NOTHING));
        assert_eq!(windows(&trajectory(5), &rows), (vec![(0, 0, 5), (5, 1, 1)], NOTHING));
    }

    #[test]
    fn a_truncated_trajectory_without_its_final_row_is_whole_however_short() {
        let mut windows = EpisodeWindows::new(0, &trajectory(3));
        let mut items = Vec::new();
        for row in [FIRST | TRUNCATED, FIRST, TRUNCATED] {
            windows.append(row, Estimate::default(), &mut items);
        }
        windows.end(&mut items);
        windows.leave();
        assert_eq!(items.iter().map(|item| (item.anchor, item.after)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
        assert_eq!(windows.dropped, NOTHING);
    }

    #[test]
    fn unfinished_trajectories_are_no_items_and_are_counted() {
        let mut windows = EpisodeWindows::new(0, &trajectory(2));
        let mut items = Vec::new();
        for row in [FIRST, FIRST, 0, 0, 0] {
            windows.append(row, Estimate::default(), &mut items);
        }
        assert_eq!(items.iter().map(|item| (item.anchor, item.after)).collect::<Vec<_>>(), [(1, 2)]);
        windows.end(&mut items);
        windows.leave();
        windows.leave();
        assert_eq!((items.len(), windows.dropped), (1, DroppedWindows { by_reset: 1, unfinished: 1, ..NOTHING }));
        assert_eq!(windows.dropped.by_mistake(), 2);
    }
}

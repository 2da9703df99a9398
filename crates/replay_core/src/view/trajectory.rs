//! Arrays of the `Trajectory` view: each column over the steps of each item, the returns, and how items begin and end.

use super::Trajectory;
use super::batch::ArraySpec;
use super::decode::{SampledRow, SampledWindow, Unpacker};
use super::fill::{ArraysOfView, Items};
use super::ragged::RaggedArray;
use crate::chunk::RowLayout;
use crate::error::Result;
use crate::schema::{Dtype, TableConfig, flags};

pub(super) struct TrajectoryView {
    spec: Trajectory,
    reward: Option<usize>,
    /// The columns, and the names of their arrays.
    columns: Vec<(usize, String)>,
    /// The parts of the observation, and the names of the arrays of the next one; of any length in `ragged_following`.
    following: Vec<(usize, String)>,
    ragged_following: Vec<(usize, String)>,
}

/// The rows of one item.
struct Item<'a> {
    window: SampledWindow<'a>,
    steps: usize,
    last: SampledRow<'a>,
    /// The row with the observation after the last step.
    following: Option<SampledRow<'a>>,
    begins: bool,
}

const END: u8 = flags::TERMINATED | flags::TRUNCATED;

/// A bool array, and the value of an item in it.
type Bit = (&'static str, fn(&Item<'_>) -> bool);

/// The last one where there is an observation.
const BITS: [Bit; 5] = [
    ("begins", |item| item.begins),
    ("ends", |item| item.last.has(END)),
    ("terminated", |item| item.last.has(flags::TERMINATED)),
    ("truncated", |item| item.last.has(flags::TRUNCATED)),
    ("has_next", |item| item.following.is_some()),
];

impl TrajectoryView {
    pub(super) fn new(spec: Trajectory, config: &TableConfig) -> Result<Self> {
        let parts = spec.parts(config)?;
        let following = parts.iter().map(|part| (part.column, format!("next_{}", part.array)));
        let (ragged_following, following) = following.partition(|(column, _)| config.columns[*column].is_ragged());
        let columns = config.columns.iter().enumerate().map(|(index, column)| {
            let part = parts.iter().find(|part| part.column == index);
            (index, part.map_or_else(|| column.name.clone(), |part| part.array.clone()))
        });
        let (columns, reward) = (columns.collect(), Trajectory::reward(config));
        Ok(TrajectoryView { spec, reward, columns, following, ragged_following })
    }

    fn bits(&self) -> &'static [Bit] {
        let observed = !(self.following.is_empty() && self.ragged_following.is_empty());
        &BITS[..BITS.len() - usize::from(!observed)]
    }

    /// The steps of a window up to the end of its episode (or life), at most `max_steps`; `None` where it ends before.
    fn item<'a>(&self, window: &SampledWindow<'a>) -> Option<Item<'a>> {
        let most = usize::from(self.spec.max_steps);
        let (mut steps, mut last) = (0, None);
        while steps < most
            && last.is_none_or(|last: SampledRow<'a>| !last.has(END))
            && let Some(row) = window.row(steps as isize).filter(|row| !row.has(flags::FINAL))
        {
            (steps, last) = (steps + 1, Some(row));
        }
        let following = window.row(steps as isize);
        match last {
            Some(last) if last.has(END) || steps == most && following.is_some() => {
                let begins = window.row(-1).is_none_or(|before| before.has(END | flags::FINAL));
                Some(Item { window: *window, steps, last, following, begins })
            }
            _ => None,
        }
    }
}

impl ArraysOfView for TrajectoryView {
    /// The arrays with one value for each item: how it begins and ends, and next observations of fixed shape.
    fn specs(&self, layout: &RowLayout, _short: bool) -> Vec<ArraySpec> {
        let bits = self.bits().iter().map(|(name, _)| ArraySpec::new(name, Dtype::Bool, vec![]));
        let following = self.following.iter();
        bits.chain(following.map(|(column, name)| ArraySpec::of_column(layout, *column, None).named(name))).collect()
    }

    fn ragged<'a>(&self, layout: &RowLayout, windows: &[SampledWindow<'a>]) -> Vec<RaggedArray<'a>> {
        let items: Vec<_> = windows.iter().map(|window| self.item(window)).collect();
        let rows = items.iter().map(|item| {
            let steps = item.as_ref().map_or(0, |item| item.steps);
            (0..steps).map(move |step| item.as_ref().and_then(|item| item.window.row(step as isize)))
        });
        // A table has a column, and all arrays the same rows.
        let first = RaggedArray::of_rows(layout, "", 0, rows);
        let columns = self.columns.iter().map(|(column, name)| first.of_column(layout, name, *column));
        let returns =
            self.reward.map(|reward| first.of_column(layout, "returns", reward).into_returns(self.spec.gamma));
        let following = self.ragged_following.iter().map(|(column, name)| {
            let rows = items.iter().map(|item| item.as_ref().and_then(|item| item.following));
            RaggedArray::of_values(layout, name, *column, rows)
        });
        columns.chain(returns).chain(following).collect()
    }

    fn fill<'a>(&self, unpacker: &mut Unpacker<'a>, items: &mut Items<'_, 'a>, _short: bool) {
        let read = items.read(|window| self.item(window).map(Some), |_| None);
        for (_, bit) in self.bits() {
            items.fill_next(|item, [value]| {
                value[0] = read[item].as_ref().is_some_and(bit).into();
                Ok(())
            });
        }
        for (column, _) in &self.following {
            items.fill_values(unpacker, *column, |item, _| read[item].as_ref().and_then(|item| item.following));
        }
    }
}

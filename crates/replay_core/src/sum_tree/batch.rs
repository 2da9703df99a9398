//! Many priorities at once: the changes are merged before they touch the levels above.

use crate::memory_hints::prefetch;

use super::leaf::Leaf;
use super::node::Node;
use super::{SumTree, mass_change};

/// A new priority for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// The item's leaf.
    pub slot: u32,
    /// The item's generation.
    pub generation: u32,
    /// The priority in units, at most [`SumTree::MAX_UNITS`].
    pub units: u64,
}

/// A pending change of a level: a difference (modulo 2^64) for one of its words.
#[derive(Clone, Copy)]
struct Change {
    index: u32,
    difference: u64,
}

/// Words that are asked for ahead of their use. An atomic change waits until its word is there, and everything after
/// it waits with it.
const AHEAD: usize = 16;

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Sets many priorities; of a repeated item the last one counts. Returns how many updates found
    /// their item. O(n depth), with at most one atomic add for each update and level: one for each word of a level that has
    /// fewer words than there are changes, and one for each run of neighbouring changes on the others.
    pub fn set_batch(&self, updates: &[Update]) -> usize {
        let mut applied = 0;
        let mut mass = 0;
        let mut changes = Vec::with_capacity(updates.len());
        let ask = |update: &Update| {
            if let Some(word) = self.leaf(update.slot) {
                prefetch(word);
            }
        };
        for_each_ahead(updates, ask, |update| {
            if let Some((old, new)) = self.replace(update.slot, update.generation, update.units) {
                applied += 1;
                if old != new {
                    mass += mass_change(old, new);
                    changes.push(Change {
                        index: update.slot,
                        difference: difference(old, new),
                    });
                }
            }
        });
        let sums = &self.levels[1..];
        let (wide, narrow) =
            sums.split_at(sums.partition_point(|level| level.len() * FANOUT > changes.len()));
        for level in wide {
            merge_neighbours(&mut changes, Self::CHILD_BITS);
            for_each_ahead(
                &changes,
                |change| prefetch(Self::word(level, change.index as usize)),
                |change| self.add(level, change.index as usize, change.difference),
            );
        }
        self.add_to_all(narrow, &changes);
        self.count_mass(mass);
        applied
    }

    /// Adds changes of the level below to levels of which the first has no more words than there are changes.
    fn add_to_all(&self, levels: &[Box<[Node<FANOUT>]>], changes: &[Change]) {
        let Some(first) = levels.first() else {
            return;
        };
        let mut differences = vec![0u64; first.len() * FANOUT];
        for change in changes {
            let sum = &mut differences[change.index as usize >> Self::CHILD_BITS];
            *sum = sum.wrapping_add(change.difference);
        }
        for level in levels {
            for (index, &difference) in differences.iter().enumerate() {
                if difference != 0 {
                    self.add(level, index, difference);
                }
            }
            let sum = |sum: u64, &difference: &u64| sum.wrapping_add(difference);
            let children = differences.chunks(FANOUT);
            differences = children
                .map(|children| children.iter().fold(0, sum))
                .collect();
        }
    }
}

fn difference(old: Leaf, new: Leaf) -> u64 {
    new.units().wrapping_sub(old.units())
}

/// Takes changes one level up, and makes one of neighbours that meet there.
fn merge_neighbours(changes: &mut Vec<Change>, child_bits: u32) {
    let mut merged: usize = 0;
    for i in 0..changes.len() {
        let Change { index, difference } = changes[i];
        let index = index >> child_bits;
        match changes[..merged].last_mut() {
            // It is of this level already: it was written below.
            Some(last) if last.index == index => {
                last.difference = last.difference.wrapping_add(difference);
            }
            _ => {
                changes[merged] = Change { index, difference };
                merged += 1;
            }
        }
    }
    changes.truncate(merged);
}

/// Works through `all`, and asks for the memory of the next ones before those at hand.
#[inline(always)]
fn for_each_ahead<T>(all: &[T], ask: impl Fn(&T), mut work: impl FnMut(&T)) {
    let mut next = all.chunks(AHEAD);
    next.next().into_iter().flatten().for_each(&ask);
    for part in all.chunks(AHEAD) {
        next.next().into_iter().flatten().for_each(&ask);
        part.iter().for_each(&mut work);
    }
}

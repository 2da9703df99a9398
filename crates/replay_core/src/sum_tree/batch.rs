//! Batched priority updates: changes are merged before they are added to the levels above.

use crate::processor::prefetch;

use super::node::{Leaf, Node};
use super::{SumTree, mass_change};

/// A new priority for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    pub slot: u32,
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

/// Prefetch distance in words. An atomic change stalls the thread until its word is in the cache.
const AHEAD: usize = 16;

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Sets many priorities; the last one of a repeated item counts. Returns the number of updates whose item was live.
    /// O(n depth), with at most one atomic add per update and level: one per word of a level that has fewer words than there
    /// are changes, and one per run of neighbouring changes on the others.
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
                    changes.push(Change { index: update.slot, difference: difference(old, new) });
                }
            }
        });
        let sums = &self.levels[1..];
        let (wide, narrow) = sums.split_at(sums.partition_point(|level| level.len() * FANOUT > changes.len()));
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

    /// Adds changes of the level below to `levels`, the first of which has no more words than there are changes.
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
            differences = children.map(|children| children.iter().fold(0, sum)).collect();
        }
    }
}

fn difference(old: Leaf, new: Leaf) -> u64 {
    new.units().wrapping_sub(old.units())
}

/// Moves changes one level up, and merges neighbours that fall on one word.
fn merge_neighbours(changes: &mut Vec<Change>, child_bits: u32) {
    let mut merged: usize = 0;
    for i in 0..changes.len() {
        let Change { index, difference } = changes[i];
        let index = index >> child_bits;
        match changes[..merged].last_mut() {
            // The last entry already has an index of this level.
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

/// Calls `work` on each entry, and `ask`, which prefetches, on entries ahead of it.
#[inline(always)]
fn for_each_ahead<T>(all: &[T], ask: impl Fn(&T), mut work: impl FnMut(&T)) {
    let mut next = all.chunks(AHEAD);
    next.next().into_iter().flatten().for_each(&ask);
    for part in all.chunks(AHEAD) {
        next.next().into_iter().flatten().for_each(&ask);
        part.iter().for_each(&mut work);
    }
}

//! Many priorities at once: the changes are merged per node before they touch the levels above.

use super::SumTree;
use super::leaf::Leaf;
use super::mass_change;

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

/// What a level still has to take: a difference (modulo 2^64) for one of its words.
struct Change {
    index: u32,
    difference: u64,
}

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Sets many priorities; the last one of an item that stands twice counts. Returns how many updates found
    /// their item; the others were for items that have gone. O(n log n + n depth), with at most one atomic add
    /// for each node touched.
    pub fn set_batch(&self, updates: &[Update]) -> usize {
        for update in updates {
            self.prefetch_leaf(update.slot);
        }
        let mut applied = 0;
        let mut mass = 0;
        let mut changes = Vec::with_capacity(updates.len());
        for update in updates {
            if let Some((old, new)) = self.replace(update.slot, update.generation, update.units) {
                applied += 1;
                mass += mass_change(old, new);
                changes.push(Change {
                    index: update.slot,
                    difference: difference(old, new),
                });
            }
        }
        // Sorted once, the words below one node are neighbours on every level.
        changes.sort_unstable_by_key(|change| change.index);
        for level in &self.levels[1..] {
            for change in &mut changes {
                change.index >>= Self::CHILD_BITS;
            }
            changes.dedup_by(|next, kept| {
                let same = next.index == kept.index;
                if same {
                    kept.difference = kept.difference.wrapping_add(next.difference);
                }
                same
            });
            for change in &changes {
                self.add(level, change.index as usize, change.difference);
            }
        }
        self.count_mass(mass);
        applied
    }

    fn prefetch_leaf(&self, slot: u32) {
        if let Some(node) = self.levels[0].get(slot as usize >> Self::CHILD_BITS) {
            node.prefetch();
        }
    }
}

fn difference(old: Leaf, new: Leaf) -> u64 {
    new.units().wrapping_sub(old.units())
}

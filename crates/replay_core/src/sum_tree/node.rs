//! One node: its children's words side by side, read at once and searched without a branch.

use crate::memory_hints::prefetch;
use crate::sync::{AtomicU64, Ordering};

use super::leaf::Leaf;

/// The children of one node: with 16 children, an aligned pair of cache lines.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Node<const FANOUT: usize> {
    pub words: [AtomicU64; FANOUT],
}

/// Meaning of the words of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// [`Leaf`] words.
    Leaves,
    /// Sums in units, modulo 2^64. One that a writer is still adding to may be "negative"; it counts as 0.
    Sums,
}

impl<const FANOUT: usize> Node<FANOUT> {
    pub fn filled(word: u64) -> Self {
        Node { words: std::array::from_fn(|_| AtomicU64::new(word)) }
    }

    /// The children as they are now. Relaxed: a caller that needs writes from before a leaf went live puts an Acquire
    /// fence after it.
    #[inline(always)]
    pub fn read(&self, level: Level) -> Children<FANOUT> {
        let mut words = std::array::from_fn(|child| self.words[child].load(Ordering::Relaxed));
        let signs = words.iter().fold(0, |signs, word| signs | word);
        if level == Level::Sums && (signs as i64) < 0 {
            words = words.map(|word| (word as i64).max(0) as u64);
        }
        Children { level, words }
    }

    /// Asks for the node's cache lines ahead of their use.
    #[inline(always)]
    pub fn prefetch(&self) {
        prefetch(&self.words);
    }
}

/// The children of a node as they were read at one instant, to search by their running sums.
pub(super) trait ChildSums {
    /// Units of all children. Never wraps at rest: 2^24 leaves of 39 bits stay under 2^63.
    fn sum(&self) -> u64;

    /// The first child whose running sum passes `position`, the position within it, and its units. `position` is
    /// below [`ChildSums::sum`], so a child without units is never found.
    fn find(&self, position: u64) -> (usize, u64, u64);
}

/// Sums of a node's children as they were read, on any processor. No sum is negative.
pub(super) struct Children<const FANOUT: usize> {
    level: Level,
    words: [u64; FANOUT],
}

impl<const FANOUT: usize> Children<FANOUT> {
    /// A position is searched for among groups first: two searches of 4 take half the work of one of 16.
    const GROUP: usize = if FANOUT < 4 { FANOUT } else { 4 };

    #[inline(always)]
    fn units(&self, child: usize) -> u64 {
        match self.level {
            Level::Leaves => Leaf::from_word(self.words[child]).units(),
            Level::Sums => self.words[child],
        }
    }

    #[inline(always)]
    fn group(&self, group: usize) -> u64 {
        let children = group * Self::GROUP..(group + 1) * Self::GROUP;
        children.fold(0, |sum, child| sum.wrapping_add(self.units(child)))
    }
}

impl<const FANOUT: usize> ChildSums for Children<FANOUT> {
    #[inline(always)]
    fn sum(&self) -> u64 {
        let groups = 0..FANOUT / Self::GROUP;
        groups.fold(0, |sum, group| sum.wrapping_add(self.group(group)))
    }

    #[inline(always)]
    fn find(&self, position: u64) -> (usize, u64, u64) {
        let groups = 0..FANOUT / Self::GROUP;
        let (group, position) = first_beyond(groups, position, |group| self.group(group));
        let first = group * Self::GROUP;
        let children = first..first + Self::GROUP;
        let (child, position) = first_beyond(children, position, |child| self.units(child));
        (child, position, self.units(child))
    }
}

/// The first of `range` whose running sum of `units` passes `position`, the last when none does, and the position
/// within it.
#[inline(always)]
fn first_beyond(range: std::ops::Range<usize>, position: u64, units: impl Fn(usize) -> u64) -> (usize, u64) {
    let (mut found, mut before, mut sum) = (range.start, 0, 0u64);
    for index in range.start..range.end - 1 {
        sum = sum.wrapping_add(units(index));
        let passed = sum <= position;
        found += usize::from(passed);
        before = if passed { sum } else { before };
    }
    (found, position - before)
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    fn read(level: Level, words: [u64; 8]) -> Children<8> {
        let node = Node { words: words.map(AtomicU64::new) };
        node.read(level)
    }

    #[test]
    fn a_position_falls_into_the_child_that_covers_it() {
        let children = read(Level::Sums, [0, 3, 0, 2, 0, 0, 1, 0]);
        assert_eq!(children.sum(), 6);
        let found: Vec<_> = (0..6).map(|position| children.find(position)).collect();
        let expected = [(1, 0, 3), (1, 1, 3), (1, 2, 3), (3, 0, 2), (3, 1, 2), (6, 0, 1)];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_negative_sum_counts_as_nothing() {
        let children = read(Level::Sums, [5u64.wrapping_neg(), 4, 0, 0, 0, 0, 0, 0]);
        assert_eq!(children.sum(), 4);
        assert_eq!(children.find(0), (1, 0, 4));
    }

    #[test]
    fn a_leaf_counts_its_units_alone() {
        let leaf = |units| Leaf::from_word(1).with_units(units).word();
        let words = [leaf(0), leaf(Leaf::MAX_UNITS), 0, 0, 0, 0, 0, leaf(2)];
        let children = read(Level::Leaves, words);
        assert_eq!(children.sum(), Leaf::MAX_UNITS + 2);
        assert_eq!(children.find(Leaf::MAX_UNITS - 1).0, 1);
        assert_eq!(children.find(Leaf::MAX_UNITS), (7, 0, 2));
    }
}

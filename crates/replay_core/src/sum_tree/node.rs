//! One node: its children's words side by side, read at once and searched without a branch; and the word of a leaf, priority and
//! generation together.
//!
//! # Invariant
//!
//! A leaf changes by one compare-and-exchange on priority and generation together, so an update of an evicted item
//! fails.

use crate::processor::prefetch;
use crate::sync::{AtomicU64, Ordering};

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

/// A leaf's word: 39 bits of priority in units, then 25 bits of generation.
///
/// The generation rises by one when an item takes the slot and by one when it leaves (modulo 2^25): odd is live,
/// even is dead. A dead leaf has no units; a live one may have none, and is then never sampled. A stale id matches a
/// new item only after 2^24 reuses of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leaf(u64);

pub(super) const GENERATION_BITS: u32 = 25;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

impl Leaf {
    /// The largest priority in units.
    pub const MAX_UNITS: u64 = (1 << (u64::BITS - GENERATION_BITS)) - 1;

    /// A leaf without an item.
    pub const fn dead(generation: u32) -> Self {
        let leaf = Leaf(generation as u64);
        assert!(leaf.0 <= GENERATION_MASK && !leaf.is_live());
        leaf
    }

    pub const fn from_word(word: u64) -> Self {
        Leaf(word)
    }

    pub const fn word(self) -> u64 {
        self.0
    }

    pub const fn units(self) -> u64 {
        self.0 >> GENERATION_BITS
    }

    pub const fn generation(self) -> u32 {
        (self.0 & GENERATION_MASK) as u32
    }

    pub const fn is_live(self) -> bool {
        self.0 & 1 == 1
    }

    /// Whether the item that took the slot with `generation` is still there.
    pub const fn holds(self, generation: u32) -> bool {
        self.is_live() && self.generation() == generation
    }

    /// The same item with another priority, at most [`Leaf::MAX_UNITS`].
    pub const fn with_units(self, units: u64) -> Self {
        Leaf(units << GENERATION_BITS | self.0 & GENERATION_MASK)
    }

    /// Addend that turns the word of a dead leaf into a live one with `units`. An even generation becomes odd, which
    /// carries nothing over.
    pub const fn birth(units: u64) -> u64 {
        units << GENERATION_BITS | 1
    }

    /// The leaf after an item is inserted or removed.
    pub const fn next_generation(self, units: u64) -> Self {
        Leaf(self.0.wrapping_add(1) & GENERATION_MASK).with_units(units)
    }
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

    #[test]
    fn generation_wraps_without_touching_the_units() {
        let last = Leaf::from_word(GENERATION_MASK).with_units(Leaf::MAX_UNITS);
        assert!(last.is_live());
        let dead = last.next_generation(0);
        assert_eq!((dead.generation(), dead.units()), (0, 0));
        assert!(!dead.is_live() && !dead.holds(0));
        let live = dead.next_generation(7);
        assert_eq!((live.generation(), live.units()), (1, 7));
        assert_eq!(live.word(), dead.word() + Leaf::birth(7));
        assert!(live.holds(1));
    }
}

//! One node: its children's words side by side, read at once and searched without a branch.

use crate::sync::{AtomicU64, Ordering};

use super::leaf::Leaf;

/// The children of one node. With 16 children, two cache lines that start at an even one.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Node<const FANOUT: usize> {
    pub words: [AtomicU64; FANOUT],
}

/// What the words of a level mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// [`Leaf`] words.
    Leaves,
    /// Sums, in units, modulo 2^64.
    Sums,
}

/// Where a position falls among the children of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// The child; `FANOUT` when the position is not below `sum`.
    pub child: usize,
    /// The position within the child.
    pub position: u64,
    /// Units of all children, as just read.
    pub sum: u64,
}

impl<const FANOUT: usize> Node<FANOUT> {
    pub fn new() -> Self {
        Node {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The children's words. Relaxed: who needs what was written before a leaf went live puts an Acquire fence
    /// after it.
    #[inline(always)]
    pub fn load(&self) -> [u64; FANOUT] {
        std::array::from_fn(|child| self.words[child].load(Ordering::Relaxed))
    }

    /// Asks for the node's cache lines ahead of their use.
    #[inline(always)]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in self.words.chunks(8) {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch is a hint and reads nothing; SSE is part of every x86_64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
}

/// Units of a word. A sum that a writer is still adding to may be "negative"; it counts as 0.
#[inline(always)]
pub(super) fn units(level: Level, word: u64) -> u64 {
    match level {
        Level::Leaves => Leaf::from_word(word).units(),
        Level::Sums => (word as i64).max(0) as u64,
    }
}

/// The first child whose running sum passes `position`. A child without units is never found.
#[inline(always)]
pub(super) fn find<const FANOUT: usize>(
    level: Level,
    words: &[u64; FANOUT],
    position: u64,
) -> Found {
    let (mut sum, mut child, mut before) = (0u64, 0, 0);
    for &word in words {
        // Wrapping never happens at rest: 2^24 leaves of 39 bits stay under 2^63.
        sum = sum.wrapping_add(units(level, word));
        let passed = sum <= position;
        child += usize::from(passed);
        before = if passed { sum } else { before };
    }
    Found {
        child,
        position: position - before,
        sum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_falls_into_the_child_that_covers_it() {
        let words = [0, 3, 0, 2];
        let children: Vec<_> = (0..6).map(|p| find(Level::Sums, &words, p).child).collect();
        assert_eq!(children, [1, 1, 1, 3, 3, 4]);
        assert_eq!(
            find(Level::Sums, &words, 4),
            Found {
                child: 3,
                position: 1,
                sum: 5
            }
        );
    }

    #[test]
    fn a_negative_sum_counts_as_nothing() {
        let words = [5u64.wrapping_neg(), 4];
        assert_eq!(
            find(Level::Sums, &words, 0),
            Found {
                child: 1,
                position: 0,
                sum: 4
            }
        );
    }
}

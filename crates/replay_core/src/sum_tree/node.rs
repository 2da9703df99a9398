//! One node: its children's words side by side, read at once and searched without a branch; and the word of a leaf, priority and
//! generation together. `vector` reads and searches the children with AVX2.
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

/// A leaf's word: 39 bits of mass in units, then 25 bits of generation.
///
/// The generation rises by one when an item takes the slot and by one when it leaves (modulo 2^25): odd is live,
/// even is dead. A dead leaf has no units; a live one may have none, and is then never sampled. A stale id matches a
/// new item only after 2^24 reuses of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leaf(u64);

pub(super) const GENERATION_BITS: u32 = 25;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;

impl Leaf {
    /// The largest mass in units.
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

/// The running sums of 16 children with AVX2 and BMI1, where the processor has them: a node is then read with four loads and
/// searched with four comparisons.
#[cfg(all(target_arch = "x86_64", not(feature = "model")))]
pub(super) mod vector {
    use core::arch::asm;
    use core::arch::x86_64::{
        __m256i, _mm256_add_epi64, _mm256_andnot_si256, _mm256_blend_epi32, _mm256_castsi256_pd, _mm256_cmpgt_epi64,
        _mm256_movemask_pd, _mm256_or_si256, _mm256_permute4x64_epi64, _mm256_set1_epi64x, _mm256_setzero_si256,
        _mm256_slli_si256, _mm256_srli_epi64, _mm256_store_si256,
    };
    use std::mem::MaybeUninit;

    use super::{ChildSums, GENERATION_BITS, Level, Node};

    /// Fan-out of the nodes that [`read`] supports.
    pub const FANOUT: usize = 16;

    /// Whether [`read`] can be used on this processor.
    pub fn is_available() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi1")
    }

    /// Running sums of 16 children: in registers for comparisons, in memory for lookups.
    pub struct RunningSums {
        vectors: [__m256i; 4],
        lines: Lines,
    }

    /// The running sums from `FIRST` on, with a 0 before them. No store and no look-up crosses a cache line.
    #[repr(align(64))]
    struct Lines([MaybeUninit<u64>; FIRST + FANOUT]);

    const FIRST: usize = 8;

    /// The node's words as they are now. Each word is one that was stored at some time: no processor splits a word that
    /// lies within a cache line. They guide a sample; the word of the leaf that it ends at is loaded again as an atomic.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn load<const N: usize>(node: &Node<N>) -> [__m256i; 4] {
        assert_eq!(N, FANOUT);
        let (a, b, c, d): (__m256i, __m256i, __m256i, __m256i);
        // SAFETY: 128 bytes are read from a node of 16 words, aligned to 128. Other threads may change them: an
        // instruction may read what a vector of atomics, which Rust does not have, could.
        unsafe {
            asm!(
                "vmovdqa {a}, [{words}]",
                "vmovdqa {b}, [{words} + 32]",
                "vmovdqa {c}, [{words} + 64]",
                "vmovdqa {d}, [{words} + 96]",
                words = in(reg) node,
                a = out(ymm_reg) a,
                b = out(ymm_reg) b,
                c = out(ymm_reg) c,
                d = lateout(ymm_reg) d,
                options(nostack, preserves_flags, readonly),
            );
        }
        [a, b, c, d]
    }

    /// Result of [`Node::read`] for a node of 16.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn read<const N: usize>(node: &Node<N>, level: Level) -> RunningSums {
        let zero = _mm256_setzero_si256();
        let mut vectors = load(node);
        match level {
            Level::Leaves => {
                vectors = vectors.map(|words| _mm256_srli_epi64::<{ GENERATION_BITS as i32 }>(words));
            }
            Level::Sums => {
                let [a, b, c, d] = vectors;
                let signs = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
                if _mm256_movemask_pd(_mm256_castsi256_pd(signs)) != 0 {
                    let no_less_than_0 = |words| _mm256_andnot_si256(_mm256_cmpgt_epi64(zero, words), words);
                    vectors = vectors.map(no_less_than_0);
                }
            }
        }
        // Within each vector: neighbours, then the lower pair added to the upper one.
        vectors = vectors.map(|words| {
            let pairs = _mm256_add_epi64(words, _mm256_slli_si256::<8>(words));
            let lower = _mm256_permute4x64_epi64::<0b01_01_00_00>(pairs);
            _mm256_add_epi64(pairs, _mm256_blend_epi32::<0b1111_0000>(zero, lower))
        });
        let mut before = zero;
        let mut lines = Lines([MaybeUninit::uninit(); FIRST + FANOUT]);
        lines.0[FIRST - 1].write(0);
        for (part, vector) in vectors.iter_mut().enumerate() {
            let total = _mm256_permute4x64_epi64::<0b11_11_11_11>(*vector);
            *vector = _mm256_add_epi64(*vector, before);
            before = _mm256_add_epi64(before, total);
            let part_sums: &mut [_; 4] =
                lines.0[FIRST..].as_chunks_mut().0[part..].first_mut().expect("16 sums are four times four");
            // SAFETY: 32 bytes at a multiple of 32 from an address aligned to 64.
            unsafe { _mm256_store_si256(part_sums.as_mut_ptr().cast(), *vector) };
        }
        RunningSums { vectors, lines }
    }

    impl RunningSums {
        /// The running sum of the children before `child`, of all for [`FANOUT`].
        #[inline(always)]
        fn before(&self, child: usize) -> u64 {
            // SAFETY: `read` has written them, from the 0 on.
            unsafe { self.lines.0[FIRST - 1 + child].assume_init() }
        }

        #[target_feature(enable = "avx2")]
        #[inline]
        fn first_beyond(&self, position: u64) -> usize {
            let position = _mm256_set1_epi64x(position as i64);
            let beyond = self.vectors.map(|sums| {
                let greater = _mm256_cmpgt_epi64(sums, position);
                _mm256_movemask_pd(_mm256_castsi256_pd(greater)) as u32
            });
            let [a, b, c, d] = beyond;
            let last = 1 << (FANOUT - 1);
            (a | b << 4 | c << 8 | d << 12 | last).trailing_zeros() as usize
        }
    }

    impl ChildSums for RunningSums {
        #[inline(always)]
        fn sum(&self) -> u64 {
            self.before(FANOUT)
        }

        #[inline(always)]
        fn find(&self, position: u64) -> (usize, u64, u64) {
            // SAFETY: only `read` makes this value, and its callers have AVX2.
            let child = unsafe { self.first_beyond(position) };
            let before = self.before(child);
            (child, position - before, self.before(child + 1) - before)
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::sync::AtomicU64;
        use proptest::prelude::*;

        proptest! {
            #[test]
            #[cfg_attr(miri, ignore = "a node is read by assembly")]
            fn agrees_with_the_portable_form(
                words in prop::array::uniform16(prop_oneof![Just(0), 0..1000u64, (-50..0i64).prop_map(|n| n as u64), 0..1u64 << 58]),
                fractions in prop::collection::vec(0.0..1.0f64, 8),
                leaves: bool,
            ) {
                prop_assume!(is_available());
                let level = if leaves { Level::Leaves } else { Level::Sums };
                let node = Node { words: words.map(AtomicU64::new) };
                // SAFETY: the processor has AVX2.
                let vector = unsafe { read(&node, level) };
                let portable = node.read(level);
                prop_assert_eq!(vector.sum(), portable.sum());
                let inside = fractions.iter().map(|f| (f * portable.sum() as f64) as u64);
                for position in inside.chain([0, portable.sum().saturating_sub(1)]) {
                    if position < portable.sum() {
                        prop_assert_eq!(vector.find(position), ChildSums::find(&portable, position));
                    }
                }
            }
        }
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

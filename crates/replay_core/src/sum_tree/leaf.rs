//! The word of a leaf: priority and generation together, so that one compare-and-exchange changes a priority
//! only while the item it was meant for is there.
//!
//! # Invariant
//!
//! A leaf changes by one compare-and-exchange on priority and generation together, so an update of an evicted item
//! fails.

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

#[cfg(test)]
mod tests {
    use super::*;

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

//! `min_heap`: the item with the lowest priority.

use super::heap::{HeapSampler, RankBy};

pub type MinHeap = HeapSampler<Lowest>;

pub struct Lowest;

impl RankBy for Lowest {
    fn first(priority: u64, _: u64) -> u64 {
        priority
    }

    fn priority(first: u64) -> u64 {
        first
    }
}

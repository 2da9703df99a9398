//! `max_heap`: the item with the highest priority.

use super::heap::{HeapSampler, RankBy};

pub type MaxHeap = HeapSampler<Highest>;

pub struct Highest;

impl RankBy for Highest {
    fn first(priority: u64, _: u64) -> u64 {
        !priority
    }

    fn priority(first: u64) -> u64 {
        !first
    }
}

//! `lifo`: the newest item. Priorities are ignored and not kept.

use super::heap::{HeapSampler, RankBy};

pub type Lifo = HeapSampler<Newest>;

pub struct Newest;

impl RankBy for Newest {
    const BY_PRIORITY: bool = false;

    fn first(_: u64, change: u64) -> u64 {
        !change
    }

    fn priority(_: u64) -> u64 {
        0
    }
}

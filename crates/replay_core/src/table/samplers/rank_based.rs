//! `rank_based`: at random, in proportion to 1 / rank^`priority_exponent` (Schaul et al., 2016, section 3.3, the rank-based
//! variant).
//!
//! Items that can be sampled are ranked from 1 on: by priority, the highest first, and among equal priorities by the last insertion or
//! update, the oldest first. Items of priority 0 are ranked like any other. As in the paper, ranks are the positions in an array that is
//! sorted at intervals, by the sample that finds more than one in [`INTERVAL`] of the items inserted, updated or removed since. Until
//! then the array is a heap: a changed item moves up or down by halving or doubling its rank, and the first rank is always exact.
//!
//! With n items, the probability of rank r is u(r) / (u(1) + .. + u(n)), where u(r) is 1 / r^`priority_exponent` in units of
//! 1 / [`FIRST`], rounded to at least one. Batches report this probability, and importance weights use it: both hold for the ranks of
//! the instant. As in the paper, a batch of k items has one of each of k ranges of ranks with equal probability.
//!
//! The masses in the sum tree only mark the items that can be sampled. Each of several servers ranks its own items; the probability is
//! then u(r) over the sum of u of all servers.

use crate::processor;
use crate::schema::TableConfig;
use crate::sum_tree::{SampledLeaf, SumTree};
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::ranking::{LockedRanking, RankBy};
use super::{ItemSampler, Total};

/// Units of the first rank. All ranks together have fewer than 2^63, as all leaves of a sum tree have.
const FIRST: u64 = SumTree::<16>::MAX_UNITS;

/// Items for each change between two sorts: then a table of fewer items has exact ranks, and sorting costs less than the changes.
const INTERVAL: usize = 16;

pub struct RankBased {
    ranking: LockedRanking,
    /// Cumulative units of the ranks; the first rank at index 0.
    sums: Box<[u64]>,
}

impl RankBased {
    pub fn new(config: &TableConfig) -> Self {
        let ranking = LockedRanking::new(config, RankBy::Highest);
        RankBased { ranking, sums: sums(config.capacity as u32, config.priority_exponent) }
    }

    pub fn bytes(config: &TableConfig) -> u64 {
        LockedRanking::bytes(config) + config.capacity * size_of::<u64>() as u64
    }

    fn units(&self, index: usize) -> u64 {
        self.sums[index] - index.checked_sub(1).map_or(0, |before| self.sums[before])
    }
}

impl ItemSampler for RankBased {
    fn ranking(&self) -> Option<&LockedRanking> {
        Some(&self.ranking)
    }

    fn choose(&self, _: &Items, targets: &[f64], chosen: &mut Vec<SampledLeaf>) -> Total {
        chosen.clear();
        let mut ranking = self.ranking.lock();
        let sums = &self.sums[..ranking.len()];
        let Some(&units) = sums.last() else { return Total::default() };
        if !targets.is_empty() {
            ranking.sort_at(INTERVAL);
        }
        for target in targets {
            let position = ((target * units as f64) as u64).min(units - 1);
            let index = sums.partition_point(|&sum| sum <= position);
            chosen.extend(ranking.at(index).map(|ItemId { slot, generation }| SampledLeaf {
                slot,
                generation,
                units: self.units(index),
            }));
        }
        Total { units, mass: units as f64 / FIRST as f64 }
    }

    fn fewest_units(&self, _: &Items) -> Option<u64> {
        let last = self.ranking.lock().len().checked_sub(1)?;
        Some(self.units(last))
    }
}

/// Sums of the units of the first ranks, one for each of `capacity` ranks.
fn sums(capacity: u32, exponent: f64) -> Box<[u64]> {
    let mut shares: Vec<_> = (1..=capacity).map(|rank| f64::from(rank).recip()).collect();
    processor::raise(&mut shares, exponent);
    let mut sum = 0;
    let units = shares.into_iter().map(|share| {
        sum += ((share * FIRST as f64).round() as u64).max(1);
        sum
    });
    units.collect()
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "takes hours: 2^20 ranks")]
    fn units_fall_as_a_power_of_the_rank_and_never_to_nothing() {
        for exponent in [0.0, 0.7, 1.0, 4.0] {
            let config = TableConfig { priority_exponent: exponent, ..TableConfig::new("t", vec![], 1 << 20) };
            let sampler = RankBased::new(&config);
            for rank in [1, 2, 10, 1 << 10, 1 << 20] {
                let exact = FIRST as f64 * f64::from(rank).powf(-exponent);
                let units = sampler.units(rank as usize - 1);
                assert!(units >= 1 && (units as f64 - exact).abs() <= 1.0, "{exponent} {rank}");
            }
        }
    }
}

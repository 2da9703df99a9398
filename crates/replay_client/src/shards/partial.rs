//! A batch in progress: its division over the servers, the received shares, and the items still to be requested.

use std::time::Instant;

use bytes::Bytes;

use base::allocation::{self, OutOfMemory};
use base::system;
use replay_core::replay::{Sampled, ShareState};

/// A server's answer about its table.
#[derive(Clone, Copy)]
pub struct Seen {
    /// The state.
    pub state: ShareState,
    /// Live items with a priority above zero.
    pub with_mass: u64,
    /// Smallest probability of an item there.
    pub min_probability: Option<f64>,
}

/// A batch in progress.
pub struct PartialBatch {
    /// Counts from 1 on each channel.
    pub number: u64,
    /// Time of the first requests, and the count of batches received before.
    pub asked: (Instant, u64),
    /// Expected share of each server, as a fraction of the batch. It multiplies the items' probabilities at the server, so the weights
    /// match how the batch was sampled, even if the servers have changed since their last answers.
    shares: Vec<f64>,
    /// Smallest probability at each server when the batch was divided.
    least: Vec<Option<f64>>,
    with_mass: u64,
    /// Items still to be requested from each server.
    owed: Vec<u32>,
    /// Items requested from each server: received, or in flight.
    requested: Vec<u32>,
    /// The last requests have brought nothing.
    pub has_stalled: bool,
    arrived: Vec<(usize, Sampled)>,
}

/// Divides `count` in proportion to `weights`; each share is rounded up or down. With a new random `at` from 0 to 1 for each batch, the
/// expected shares are exact (systematic sampling). All shares are 0 if no weight is above 0.
pub fn divide(count: u32, weights: &[f64], at: f64) -> Vec<u32> {
    let total: f64 = weights.iter().sum();
    if total <= 0.0 {
        return vec![0; weights.len()];
    }
    let last = weights.iter().rposition(|&weight| weight > 0.0);
    let (mut sum, mut given) = (0.0, 0);
    let share = |(index, &weight): (usize, &f64)| {
        sum += weight;
        // The last share is the rest, despite rounding errors of the sums.
        let up_to = match last == Some(index) {
            true => count,
            false => ((f64::from(count) * (sum / total) + at).floor() as u32).clamp(given, count),
        };
        let share = if weight > 0.0 { up_to - given } else { 0 };
        given += share;
        share
    };
    weights.iter().enumerate().map(share).collect()
}

fn totals(seen: &[Option<Seen>]) -> Vec<f64> {
    let total = |seen: &Option<Seen>| seen.map_or(0.0, |seen| seen.state.total_mass);
    seen.iter().map(total).collect()
}

impl PartialBatch {
    /// Divides a batch of `count` items in proportion to the sums of priorities. `at` is a new random number from 0 to 1. `received` is the
    /// count of batches received before.
    pub fn new(number: u64, count: u32, seen: &[Option<Seen>], at: f64, received: u64) -> Self {
        let totals = totals(seen);
        let sum: f64 = totals.iter().sum();
        PartialBatch {
            number,
            asked: (system::now(), received),
            shares: totals.iter().map(|total| total / sum).collect(),
            least: seen.iter().map(|seen| seen.and_then(|seen| seen.min_probability)).collect(),
            with_mass: seen.iter().flatten().map(|seen| seen.with_mass).sum(),
            owed: divide(count, &totals, at),
            requested: vec![0; seen.len()],
            has_stalled: false,
            arrived: Vec::new(),
        }
    }

    /// Returns `count` requested items that a server did not deliver.
    pub fn owe(&mut self, shard: usize, count: u32) {
        self.owed[shard] += count;
        self.requested[shard] -= count;
    }

    /// Takes the outstanding items of each server, to be requested. Items of servers that are absent or empty are divided among the
    /// others, and the servers' shares with them.
    pub fn take_owed(&mut self, seen: &[Option<Seen>], at: f64) -> Vec<u32> {
        let totals = totals(seen);
        let sum: f64 = totals.iter().sum();
        self.has_stalled = true;
        if sum <= 0.0 {
            return vec![0; self.owed.len()];
        }
        for shard in 0..self.owed.len() {
            let lost = self.owed[shard];
            if lost == 0 || totals[shard] > 0.0 {
                continue;
            }
            self.owed[shard] = 0;
            // Items in flight may still arrive, and keep their fraction of the share.
            let all = f64::from(lost) + f64::from(self.requested[shard]);
            let lost_share = self.shares[shard] * f64::from(lost) / all;
            self.shares[shard] -= lost_share;
            let more = divide(lost, &totals, at);
            for (other, more) in more.into_iter().enumerate() {
                self.owed[other] += more;
                self.shares[other] += lost_share * totals[other] / sum;
            }
        }
        for (requested, owed) in self.requested.iter_mut().zip(&self.owed) {
            *requested += owed;
        }
        let none = vec![0; self.owed.len()];
        std::mem::replace(&mut self.owed, none)
    }

    /// Adds the items of a server.
    pub fn add(&mut self, shard: usize, sampled: Sampled) {
        if !sampled.items.is_empty() {
            self.has_stalled = false;
            self.arrived.push((shard, sampled));
        }
    }

    /// Bytes received.
    pub fn bytes(&self) -> usize {
        let of = |share: &Sampled| share.rows.len() + share.blobs.iter().map(Bytes::len).sum::<usize>();
        self.arrived.iter().map(|(_, share)| of(share)).sum()
    }

    /// Items received.
    pub fn items(&self) -> usize {
        self.arrived.iter().map(|(_, share)| share.items.len()).sum()
    }

    /// Whether everything was requested; requests may still be in flight.
    pub fn is_complete(&self) -> bool {
        self.owed.iter().all(|&owed| owed == 0)
    }

    /// Whether nothing was requested yet.
    pub fn begins(&self) -> bool {
        self.requested.iter().all(|&requested| requested == 0)
    }

    /// The complete batch, ordered by server. Copies rows, but not blobs.
    pub fn into_sampled(mut self) -> Result<Sampled, OutOfMemory> {
        self.arrived.sort_by_key(|(shard, _)| *shard);
        let least = self.shares.iter().zip(&self.least);
        let least = least.filter_map(|(&share, least)| least.map(|least| share * least));
        let min_probability = least.filter(|&least| least > 0.0).reduce(f64::min);
        let length = self.arrived.iter().map(|(_, share)| share.rows.len()).sum();
        let mut rows = allocation::with_capacity("a batch", length)?;
        let (mut items, mut blobs) = (Vec::with_capacity(self.items()), Vec::new());
        let shares = self.arrived.iter().map(|(_, share)| share.items.len()).collect();
        for (shard, sampled) in self.arrived {
            let fraction = self.shares[shard];
            rows.extend_from_slice(&sampled.rows);
            blobs.extend(sampled.blobs);
            items.extend(sampled.items.into_iter().map(|mut item| {
                if !base::planted!(LoneProbability) {
                    // A share that was added to, of the whole batch, may be 1 and a rounding error.
                    item.probability = (item.probability * fraction).min(1.0);
                }
                item
            }));
        }
        // An item's priority may have changed since the servers' last answers.
        let min_probability =
            min_probability.map(|least| items.iter().map(|item| item.probability).fold(least, f64::min));
        Ok(Sampled {
            items,
            live_items: self.with_mass,
            min_probability,
            state: None,
            rows: Bytes::from(rows),
            blobs,
            shares,
            lease: 0,
            credit: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use replay_core::replay::SampledItem;

    use super::*;

    /// Answers of servers with these sums of priorities.
    fn answers<const N: usize>(totals: [f64; N]) -> [Option<Seen>; N] {
        totals.map(|total_mass| {
            Some(Seen {
                state: ShareState {
                    number: 0,
                    total_mass,
                    items: 4,
                    taken: 0,
                    allowance: f64::INFINITY,
                    holds_pushes: false,
                    min_size: 1,
                    samples_per_insert: 0.0,
                    max_times_sampled: 0,
                },
                with_mass: 4,
                min_probability: None,
            })
        })
    }

    /// A part of four items of equal probability.
    fn part() -> Sampled {
        let item = SampledItem { probability: 0.25, times_sampled: 1, ..SampledItem::default() };
        Sampled {
            items: vec![item; 4],
            live_items: 4,
            min_probability: None,
            state: None,
            rows: Bytes::new(),
            blobs: Vec::new(),
            shares: Vec::new(),
            lease: 0,
            credit: None,
        }
    }

    #[test]
    fn items_in_flight_keep_their_part_of_the_share() {
        let both = answers([1.0, 1.0]);
        let mut batch = PartialBatch::new(1, 8, &both, 0.5, 0);
        assert_eq!(batch.take_owed(&both, 0.5), [4, 4]);
        // The second server is away: the first one is asked for its part, too.
        batch.owe(1, 4);
        assert_eq!(batch.take_owed(&[both[0], None], 0.5), [4, 0]);
        // The first server had nothing for the first request, and the second one is back.
        batch.owe(0, 4);
        assert_eq!(batch.take_owed(&answers([0.0, 1.0]), 0.5), [0, 4]);
        batch.add(0, part());
        batch.add(1, part());
        for item in batch.into_sampled().unwrap().items {
            assert_eq!(item.probability, 0.5 * 0.25);
        }
    }

    #[test]
    fn no_probability_is_above_one() {
        let all = answers([6.0, 3.0, 4.0]);
        let mut batch = PartialBatch::new(1, 13, &all, 0.5, 0);
        assert_eq!(batch.take_owed(&all, 0.5), [6, 3, 4]);
        // The first server takes the shares of the others, one after the other, and their sum is rounded up.
        batch.owe(1, 3);
        let more = batch.take_owed(&[all[0], None, all[2]], 0.5);
        batch.owe(2, 4 + more[2]);
        batch.take_owed(&[all[0], None, None], 0.5);
        assert!(batch.shares[0] > 1.0);
        let mut certain = part();
        certain.items[0].probability = 1.0;
        batch.add(0, certain);
        assert_eq!(batch.into_sampled().unwrap().items[0].probability, 1.0);
    }

    #[test]
    fn parts_add_up_and_their_mean_is_the_share() {
        let weights = [3.0, 0.0, 1.0, 2.5];
        let mut sums = [0_u64; 4];
        let draws = 10_000;
        for draw in 0..draws {
            let parts = divide(7, &weights, f64::from(draw) / f64::from(draws));
            assert_eq!(parts.iter().sum::<u32>(), 7);
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum += u64::from(part);
            }
        }
        for (sum, weight) in sums.into_iter().zip(weights) {
            let mean = sum as f64 / f64::from(draws);
            assert!((mean - 7.0 * weight / 6.5).abs() < 1e-3, "{mean} {weight}");
        }
        assert_eq!(divide(5, &[0.0, 0.0], 0.3), [0, 0]);
        assert_eq!(divide(5, &[0.0, 1e-300, 0.0], 0.99), [0, 5, 0]);
    }

    #[test]
    fn no_limiter_is_asked_for_more_than_it_admits_while_all_admit_enough() {
        let divided = |count: u32, allowances: &[f64]| divide(count, allowances, 0.5);
        assert_eq!(divided(8, &[4.0, 12.0]), [2, 6]);
        assert_eq!(divided(8, &[8.0, 0.0]), [8, 0]);
        assert_eq!(divided(3, &[1.0, 1.0, 1.0]), [1, 1, 1]);
        assert_eq!(divided(4, &[0.0, 0.0]), [0, 0]);
        for admitted in 0..50_u32.pow(3) {
            let allowances = [admitted % 50, admitted / 50 % 50, admitted / 2500];
            let all: u32 = allowances.iter().sum();
            for count in [all, all / 2 + 1, all / 3] {
                let parts = divided(count.min(all), &allowances.map(f64::from));
                assert!(
                    parts.iter().zip(allowances).all(|(&part, allowed)| part <= allowed),
                    "{allowances:?}: {parts:?}"
                );
            }
        }
    }
}

//! Histograms for statistics.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// Most ranges of a histogram.
const MAX_RANGES: usize = 32;

/// Counts of values by range, and their sum. Operations are relaxed: no other data is published with them. The upper bounds of
/// the ranges are consecutive powers of two; the last range is unbounded.
#[derive(Debug)]
pub struct Histogram {
    first_log2: u32,
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    /// An empty histogram with the bounds 2^`first_log2`, ..., 2^`last_log2`.
    ///
    /// # Panics
    /// When it would have more than 32 ranges.
    pub fn new(first_log2: u32, last_log2: u32) -> Self {
        let ranges = (last_log2 - first_log2) as usize + 2;
        assert!(ranges <= MAX_RANGES, "a histogram has 32 ranges at most");
        Histogram { first_log2, counts: (0..ranges).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    /// Counts one value.
    pub fn record(&self, value: u64) {
        self.counts[self.range(value)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Counts the values of a batch, with one atomic addition per occupied range.
    pub fn record_batch(&self, values: impl Iterator<Item = u64>) {
        let (mut counts, mut sum) = ([0; MAX_RANGES], 0);
        for value in values {
            counts[self.range(value)] += 1;
            sum += value;
        }
        for (total, count) in self.counts.iter().zip(counts) {
            if count > 0 {
                total.fetch_add(count, Ordering::Relaxed);
            }
        }
        self.sum.fetch_add(sum, Ordering::Relaxed);
    }

    /// Range of a value: the first one whose bound is not less.
    fn range(&self, value: u64) -> usize {
        let log2 = u64::BITS - value.saturating_sub(1).leading_zeros();
        let range = log2.saturating_sub(self.first_log2) as usize;
        range.min(self.counts.len() - 1)
    }

    /// The counts of the ranges and the sum, for a snapshot; empty without a value.
    pub fn saved(&self) -> Vec<u64> {
        let numbers: Vec<u64> = self.numbers().map(|number| number.load(Ordering::Relaxed)).collect();
        if numbers.iter().all(|&number| number == 0) { Vec::new() } else { numbers }
    }

    /// Takes over the counts that [`Self::saved`] has returned for a histogram of the same ranges.
    pub fn go_on_from(&self, saved: &[u64]) {
        self.numbers().zip(saved).for_each(|(number, &saved)| number.store(saved, Ordering::Relaxed));
    }

    fn numbers(&self) -> impl Iterator<Item = &AtomicU64> {
        self.counts.iter().chain([&self.sum])
    }

    /// `count`, `sum` and `buckets`: for each range its upper bound, null for the last one, and its count. Sum and bounds are
    /// multiplied by `unit`.
    pub fn stats(&self, unit: f64) -> Value {
        let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
        let counts: Vec<u64> = counts.collect();
        let bound = |range: usize| (1u64 << (self.first_log2 + range as u32)) as f64 * unit;
        let buckets: Vec<Value> = counts
            .iter()
            .enumerate()
            .map(|(range, count)| match range + 1 == counts.len() {
                true => json!([null, count]),
                false => json!([bound(range), count]),
            })
            .collect();
        json!({
            "count": counts.iter().sum::<u64>(),
            "sum": self.sum.load(Ordering::Relaxed) as f64 * unit,
            "buckets": buckets,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_in_the_first_range_that_holds_it() {
        let histogram = Histogram::new(1, 3);
        let values = [0, 1, 2, 3, 4, 8, 9, u64::MAX >> 8];
        for value in &values[..4] {
            histogram.record(*value);
        }
        histogram.record_batch(values[4..].iter().copied());
        let sum: u64 = values.iter().sum();
        let expected = json!({
            "count": 8,
            "sum": sum as f64 * 0.5,
            "buckets": [[1.0, 3], [2.0, 2], [4.0, 1], [null, 2]],
        });
        assert_eq!(histogram.stats(0.5), expected);
        let again = Histogram::new(1, 3);
        assert!(again.saved().is_empty());
        again.go_on_from(&histogram.saved());
        assert_eq!(again.stats(0.5), expected);
    }
}

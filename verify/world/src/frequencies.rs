//! How often items are sampled, against their probabilities, while nothing changes.

use std::collections::{BTreeMap, HashMap};

/// Least expected samples of a bin.
const LEAST: f64 = 10.0;
/// Logarithm of the probability by which sampling that is right may fail.
const RARE: f64 = 25.0;

/// Sampled items in their order: id and probability.
#[derive(Debug, Default)]
pub struct Frequencies(Vec<(u64, f64)>);

impl Frequencies {
    /// Adds a sampled item.
    pub fn add(&mut self, id: u64, probability: f64) {
        self.0.push((id, probability));
    }

    /// Compares by Pearson's chi-square. The first half of the samples says which items there are, the second half is counted: an item is
    /// found by being sampled, and would otherwise be counted too often. Its sum of k degrees of freedom exceeds k + 2 sqrt(k x) + 2 x with
    /// a probability below exp(-x) (Laurent and Massart, 2000, lemma 1). Strata make it smaller.
    ///
    /// # Panics
    /// When the frequencies differ, or an item has two probabilities.
    pub fn check(&self) {
        let (first, second) = self.0.split_at(self.0.len() / 2);
        let known: BTreeMap<u64, f64> = first.iter().copied().collect();
        let mut counts: HashMap<u64, f64> = HashMap::new();
        for (id, probability) in second {
            let before = known.get(id).unwrap_or(probability);
            assert!(
                (probability / before - 1.0).abs() < 1e-3,
                "item {id} has the probability {before}, then {probability}"
            );
            *counts.entry(*id).or_default() += 1.0;
        }
        let samples = second.len() as f64;
        let mut bins = Vec::new();
        let (mut expected, mut seen) = (0.0, 0.0);
        for (id, probability) in &known {
            expected += samples * probability;
            seen += counts.remove(id).unwrap_or(0.0);
            if expected >= LEAST {
                bins.push((expected, seen));
                (expected, seen) = (0.0, 0.0);
            }
        }
        // The last bin: items that only the second half sampled, and items that were never sampled.
        expected += samples * (1.0 - known.values().sum::<f64>());
        seen += counts.values().sum::<f64>();
        if expected >= LEAST {
            bins.push((expected, seen));
        } else if let Some(last) = bins.last_mut() {
            last.0 += expected;
            last.1 += seen;
        }
        let terms = bins.iter();
        let sum: f64 = terms.map(|(expected, seen)| (seen - expected).powi(2) / expected).sum();
        let freedom = (bins.len() as f64 - 1.0).max(0.0);
        let most = freedom + 2.0 * (freedom * RARE).sqrt() + 2.0 * RARE;
        assert!(sum <= most, "chi-square {sum:.0} of {freedom} degrees of freedom, in {samples} samples");
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// Samples of 100 items, drawn from the first `share` of their probabilities.
    fn sampled(share: f64) -> Frequencies {
        let mut random = StdRng::seed_from_u64(1);
        let mut frequencies = Frequencies::default();
        for _ in 0..4_000 {
            // Item i has a probability in proportion to i + 1: the root inverts the sum.
            let position = share * random.random::<f64>() * 5050.0;
            let item = ((0.25 + 2.0 * position).sqrt() - 0.5).floor();
            frequencies.add(item as u64, (item + 1.0) / 5050.0);
        }
        frequencies
    }

    #[test]
    fn samples_by_their_probabilities_pass() {
        sampled(1.0).check();
    }

    #[test]
    #[should_panic(expected = "chi-square")]
    fn samples_from_a_part_fail() {
        sampled(0.9).check();
    }

    #[test]
    #[should_panic(expected = "has the probability")]
    fn an_item_has_one_probability() {
        let mut frequencies = Frequencies::default();
        frequencies.add(1, 0.5);
        frequencies.add(1, 0.4);
        frequencies.check();
    }
}

//! Prioritized sampling of indexes when another buffer holds the data. An index always names the same entry.

use base::system::random_number;

use crate::error::{Error, Result};
use crate::processor;
use crate::replay::check_priorities;
use crate::schema::TableConfig;
use crate::sum_tree::{Strata, SumTree, Update, check_samples};
use crate::sync::{AtomicU64, Ordering};
use crate::view::{Normalization, importance_weights};
use base::allocation;

/// Samples indexes by priority. Threads may share one.
#[derive(Debug)]
pub struct PriorityIndex {
    /// Priorities after the exponent.
    pub tree: SumTree,
    /// Exponent on priorities (alpha).
    pub exponent: f64,
    /// Base-2 logarithm of the unit of priorities, after the exponent.
    pub unit_log2: i32,
    seed: u64,
    /// Whether the caller has chosen the seed.
    seeded: bool,
    batches: AtomicU64,
}

/// A sampled batch: one entry for each sample, in random order.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledIndexes {
    pub indexes: Vec<i64>,
    /// Probabilities at the instant of sampling: above 0, at most 1.
    pub probabilities: Vec<f64>,
    /// Importance weights (N P(i))^-beta, divided by the batch's largest.
    pub weights: Vec<f32>,
}

/// Bytes that [`PriorityIndex::update`] allocates for an index: the update, and its change of a sum.
const UPDATE_BYTES: u64 = (size_of::<Update>() + 16) as u64;

/// The generation of every leaf: all are live from the start, and none is ever freed.
const GENERATION: u32 = 1;

impl PriorityIndex {
    /// An index without priorities. A seed makes samples repeatable where one thread samples and updates; without one,
    /// forked processes draw different samples.
    ///
    /// # Errors
    /// [`Error::Config`] for a capacity that is not 1 to 2^24, an exponent that is not 0 to 4, or a unit that is not
    /// 2^-30 to 1; [`Error::OutOfMemory`].
    pub fn new(capacity: u64, exponent: f64, unit_log2: i32, seed: Option<u64>) -> Result<Self> {
        TableConfig::check_priorities(exponent, unit_log2).map_err(Error::Config)?;
        let most = u64::from(SumTree::<16>::MAX_CAPACITY);
        if !(1..=most).contains(&capacity) {
            let reason = format!("capacity is 1 to {most} indexes, got {capacity}");
            return Err(Error::Config(reason));
        }
        allocation::check("a sum tree", <SumTree>::bytes(capacity as u32))?;
        Ok(PriorityIndex {
            tree: SumTree::live(capacity as u32, unit_log2),
            exponent,
            unit_log2,
            seed: seed.unwrap_or_else(random_number),
            seeded: seed.is_some(),
            batches: AtomicU64::new(0),
        })
    }

    /// Sets the priorities of indexes, before the exponent. The last priority of a repeated index counts. An index with
    /// priority 0 is never sampled; with an exponent of 0 every index that was set has the same probability.
    ///
    /// # Errors
    /// [`Error::Config`] for more or fewer priorities than indexes, or an index out of range; [`Error::Priority`] for a
    /// priority that is NaN, infinite or negative; [`Error::OutOfMemory`]. Nothing is changed then.
    pub fn update(&self, indexes: &[i64], mut priorities: Vec<f64>) -> Result<()> {
        if indexes.len() != priorities.len() {
            return Err(Error::Config(format!("{} indexes came with {} priorities", indexes.len(), priorities.len())));
        }
        let capacity = i64::from(self.tree.capacity());
        if let Some(index) = indexes.iter().find(|&i| !(0..capacity).contains(i)) {
            return Err(Error::Config(format!(
                "an index is 0 to {}, one less than the capacity; got {index}",
                capacity - 1
            )));
        }
        check_priorities(&priorities)?;
        // The differences of the upper levels take less than the tree.
        let differences = <SumTree>::bytes(self.tree.capacity()).min(128 * indexes.len() as u64);
        allocation::check("an update of priorities", UPDATE_BYTES * indexes.len() as u64 + differences)?;
        if self.exponent == 0.0 {
            priorities.fill(1.0);
        } else {
            processor::raise(&mut priorities, self.exponent);
        }
        let mut updates = Vec::with_capacity(indexes.len());
        for (&index, &mass) in indexes.iter().zip(&priorities) {
            updates.push(Update { slot: index as u32, generation: GENERATION, units: self.tree.units_of(mass) });
        }
        self.tree.set_batch(&updates);
        Ok(())
    }

    /// Samples `count` indexes with replacement, one from each of `count` equal parts of the sum of priorities. [`Error::NothingSet`] when no
    /// index has a priority above zero; [`Error::Config`] for no indexes, or a `beta` out of range; [`Error::TooLarge`] beyond
    /// [`MAX_SAMPLES`](crate::sum_tree::MAX_SAMPLES).
    pub fn sample(&self, count: u32, beta: f64) -> Result<SampledIndexes> {
        check_samples(count)?;
        // The process: forks inherit the index, and draw samples of their own unless the caller has chosen the seed.
        let process = if self.seeded { 0 } else { u64::from(std::process::id()) };
        // Relaxed: the counter only gives each batch its own number.
        let mut strata = Strata::new(self.seed ^ process << 32, self.batches.fetch_add(1, Ordering::Relaxed));
        let mut indexes = Vec::with_capacity(count as usize);
        let mut probabilities = Vec::with_capacity(count as usize);
        let (mut targets, mut sampled) = (Vec::new(), Vec::new());
        // Further rounds only where concurrent updates remove priorities.
        while indexes.len() < count as usize {
            strata.fill(count - indexes.len() as u32, &mut targets);
            let total = self.tree.sample_batch(&targets, &mut sampled) as f64;
            if sampled.is_empty() {
                return Err(Error::NothingSet { capacity: self.tree.capacity() });
            }
            strata.shuffle(&mut sampled);
            indexes.extend(sampled.iter().map(|leaf| i64::from(leaf.slot)));
            // A leaf that a concurrent update raised may exceed the total.
            probabilities.extend(sampled.iter().map(|leaf| (leaf.units as f64 / total).min(1.0)));
        }
        let weights = importance_weights(probabilities.iter().copied(), None, beta, Normalization::Batch)?;
        Ok(SampledIndexes { indexes, probabilities, weights })
    }
}

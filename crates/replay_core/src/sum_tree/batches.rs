//! Batches. Of samples: many descents side by side, level by level, so that the cache misses of one level overlap. Of updates: changes are merged
//! before they are added to the levels above.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use base::planted;

use super::node::{ChildSums, Leaf, Level, Node};
use super::{SumTree, mass_change};
use crate::processor::prefetch;
use crate::sync::{Ordering, fence};

#[cfg(all(target_arch = "x86_64", not(feature = "model")))]
use super::node::vector;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampledLeaf {
    pub slot: u32,
    pub generation: u32,
    /// Its mass in units when it was sampled: above zero.
    pub units: u64,
}

impl SampledLeaf {
    #[inline(always)]
    fn new(slot: u32, leaf: Leaf) -> Self {
        SampledLeaf { slot, generation: leaf.generation(), units: leaf.units() }
    }
}

/// Descents side by side: enough to hide the misses, few enough that their nodes stay in the
/// first-level cache.
const SIDE_BY_SIDE: usize = 32;

/// How often a sample starts again before the leaves are scanned. A restart needs a node to have lost all of its
/// mass since its parent was read. Under loom every read multiplies the executions to explore.
const RESTARTS: usize = if cfg!(feature = "loom") { 1 } else { 8 };

/// Random targets of a batch, one in each of as many equal parts of the sum of priorities (Schaul et al., 2016, appendix
/// B.2.1), and the order of the batch. They follow from a seed and the batch's number alone: no lock between threads.
///
/// `StdRng` although a faster generator would do: snapshots and journals of serial runs store the number of the next batch,
/// and a resumed run has to repeat the samples of the previous release.
pub struct Strata(StdRng);

impl Strata {
    /// Targets of batch `number` under `seed`.
    pub fn new(seed: u64, number: u64) -> Self {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Strata(StdRng::seed_from_u64(seed.wrapping_add(mixed)))
    }

    /// Puts `count` ascending targets in [0, 1) into `targets`, cleared first.
    pub fn fill(&mut self, count: u32, targets: &mut Vec<f64>) {
        let strata = f64::from(count);
        targets.clear();
        targets.extend((0..count).map(|stratum| {
            let target = (f64::from(stratum) + self.0.random::<f64>()) / strata;
            planted!(SkewedSample => return 0.9 * target);
            // Rounding may reach 1, which is outside.
            target.min(1.0 - f64::EPSILON)
        }));
    }

    /// Puts what the targets found into a random order: they ascend, and so do slots and ranks.
    pub fn shuffle(&mut self, sampled: &mut [SampledLeaf]) {
        sampled.shuffle(&mut self.0);
    }
}

/// One descent on its way down.
#[derive(Clone, Copy)]
struct Descent {
    /// The node to read next, on the level at hand.
    node: u32,
    /// The position to find within it, in units.
    position: u64,
    /// Sum of the node according to its parent; 0 once the descent has missed.
    expected: u64,
}

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// The generation of the item in a slot; `None` when there is none.
    pub fn live_generation(&self, slot: u32) -> Option<u32> {
        let leaf = Leaf::from_word(self.leaf(slot)?.load(Ordering::Relaxed));
        leaf.is_live().then(|| leaf.generation())
    }

    /// Samples one leaf for each target in [0, 1), with a probability in proportion to its units, into `out`
    /// (cleared first), and returns the total that a probability refers to: the root's at the start, or at the first
    /// restart that reads one above zero. Without concurrent
    /// updates, ascending targets give ascending slots.
    ///
    /// Nothing is sampled, and 0 returned, when no leaf has a priority above zero. Fewer than asked for are sampled when
    /// priorities fall to zero meanwhile. A leaf whose priority rises meanwhile may have more units than the total.
    /// O(n depth); O(capacity + n log n) when restarts did not help, or the root is zero while concurrent updates are
    /// not in it yet.
    pub fn sample_batch(&self, targets: &[f64], out: &mut Vec<SampledLeaf>) -> u64 {
        out.clear();
        out.reserve(targets.len());
        let mut total = self.total();
        let mut missed = self.descend(targets, total, out);
        for _ in 0..RESTARTS {
            if missed.is_empty() {
                break;
            }
            missed.iter_mut().for_each(|target| *target = another_target(*target));
            let now = self.total();
            missed = self.descend(&missed, now, out);
            if total == 0 && !planted!(StaleTotal) {
                total = now;
            }
        }
        if missed.is_empty() {
            return total;
        }
        let scanned = self.scan(&missed, out);
        if total == 0 { scanned } else { total }
    }

    /// Goes down once for each target. Returns the targets that missed.
    fn descend(&self, targets: &[f64], total: u64, out: &mut Vec<SampledLeaf>) -> Vec<f64> {
        #[cfg(all(target_arch = "x86_64", not(feature = "model")))]
        if FANOUT == vector::FANOUT && vector::is_available() {
            // SAFETY: the processor has AVX2 and BMI1.
            return unsafe { self.descend_avx2(targets, total, out) };
        }
        self.descend_by(targets, total, out, |node, level| node.read(level))
    }

    #[cfg(all(target_arch = "x86_64", not(feature = "model")))]
    #[target_feature(enable = "avx2,bmi1")]
    fn descend_avx2(&self, targets: &[f64], total: u64, out: &mut Vec<SampledLeaf>) -> Vec<f64> {
        self.descend_by(targets, total, out, |node, level| vector::read(node, level))
    }

    #[inline(always)]
    fn descend_by<R: ChildSums>(
        &self,
        targets: &[f64],
        total: u64,
        out: &mut Vec<SampledLeaf>,
        read: impl Fn(&Node<FANOUT>, Level) -> R,
    ) -> Vec<f64> {
        if total == 0 {
            return targets.to_vec();
        }
        let mut missed = Vec::new();
        let [leaves, sums @ ..] = &*self.levels else { unreachable!("a tree has at least its leaves") };
        let mut descents = Vec::with_capacity(targets.len().min(SIDE_BY_SIDE));
        for targets in targets.chunks(SIDE_BY_SIDE) {
            descents.clear();
            descents.extend(targets.iter().map(|&target| Descent {
                node: 0,
                position: scale(target, total),
                expected: total,
            }));
            for height in (0..sums.len()).rev() {
                let below = if height == 0 { leaves } else { &sums[height - 1] };
                let read = |node| read(&sums[height][node as usize], Level::Sums);
                for_each(&mut descents, read, |_, descent, children| {
                    if let Some(child) = descent.choose(children) {
                        descent.node = descent.node << Self::CHILD_BITS | child as u32;
                        below[descent.node as usize].prefetch();
                    }
                });
            }
            let read = |node| read(&leaves[node as usize], Level::Leaves);
            for_each(&mut descents, read, |i, descent, children| {
                let leaf = descent.choose(children).map(|child| {
                    // Reloaded as one atomic: the leaf may have lost its units since the search.
                    let word = &leaves[descent.node as usize].words[child];
                    (child, Leaf::from_word(word.load(Ordering::Relaxed)))
                });
                match leaf {
                    Some((child, leaf)) if leaf.units() > 0 => {
                        out.push(SampledLeaf::new(descent.node << Self::CHILD_BITS | child as u32, leaf))
                    }
                    _ => missed.push(targets[i]),
                }
            });
        }
        // Pairs with the Release in `activate`: writes from before a sampled leaf went live are seen from here.
        fence(Ordering::Acquire);
        missed
    }

    /// Samples from one scan of the leaves, without relying on the sums above. Returns the total that it saw.
    #[cold]
    fn scan(&self, targets: &[f64], out: &mut Vec<SampledLeaf>) -> u64 {
        let mut total = 0u64;
        let mut running = Vec::new();
        for (slot, leaf) in self.leaves().filter(|(_, leaf)| leaf.units() > 0) {
            total = total.wrapping_add(leaf.units());
            running.push((total, SampledLeaf::new(slot, leaf)));
        }
        // As in `descend`.
        fence(Ordering::Acquire);
        if total > 0 {
            out.extend(targets.iter().map(|&target| {
                let position = scale(target, total);
                running[running.partition_point(|&(sum, _)| sum <= position)].1
            }));
        }
        total
    }
}

impl Descent {
    /// Descends to the child that the position falls in, within the sum that the children have now. `None`, now
    /// and on every level below, when that is 0.
    #[inline(always)]
    fn choose(&mut self, children: &impl ChildSums) -> Option<usize> {
        let sum = children.sum();
        if sum != self.expected || sum == 0 {
            self.adjust(sum);
            if self.expected == 0 {
                return None;
            }
        }
        let (child, position, units) = children.find(self.position);
        self.position = position;
        self.expected = units;
        Some(child)
    }

    /// The node has changed since its parent was read. To scale the position, rather than to start again where
    /// it lies beyond, keeps every child's chance close to its share of the node: otherwise the last children of
    /// a node that others update would be sampled too rarely.
    #[cold]
    fn adjust(&mut self, sum: u64) {
        if self.expected != 0 {
            let fraction = self.position as f64 / self.expected as f64;
            self.position = scale(fraction, sum);
            self.expected = sum;
        }
    }
}

/// Visits descents with the sums of their nodes. A node is read once for neighbours that go through it together:
/// the upper ones, where targets ascend.
#[inline(always)]
fn for_each<R: ChildSums>(
    descents: &mut [Descent],
    read: impl Fn(u32) -> R,
    mut visit: impl FnMut(usize, &mut Descent, &R),
) {
    let Some(first) = descents.first() else {
        return;
    };
    let mut node = first.node;
    let mut children = read(node);
    for (i, descent) in descents.iter_mut().enumerate() {
        if descent.node != node {
            node = descent.node;
            children = read(node);
        }
        visit(i, descent, &children);
    }
}

/// A position below `sum` for a fraction in [0, 1). Clamps rounding errors and fractions out of range.
#[inline(always)]
fn scale(fraction: f64, sum: u64) -> u64 {
    ((fraction * sum as f64) as u64).min(sum.saturating_sub(1))
}

/// A number in [0, 1) that looks independent of `target` and follows from it (the mixer of SplitMix64: Steele,
/// Lea and Flood, 2014), so that a seed gives the same samples again.
fn another_target(target: f64) -> f64 {
    let mut bits = target.to_bits().wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A new mass for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    pub slot: u32,
    pub generation: u32,
    /// The mass in units, at most [`SumTree::MAX_UNITS`].
    pub units: u64,
}

/// A pending change of a level: a difference (modulo 2^64) for one of its words.
#[derive(Clone, Copy)]
struct Change {
    index: u32,
    difference: u64,
}

/// Prefetch distance in words. An atomic change stalls the thread until its word is in the cache.
const AHEAD: usize = 16;

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Sets many priorities; the last one of a repeated item counts. Returns the number of updates whose item was live.
    /// O(n depth), with at most one atomic add per update and level: one per word of a level that has fewer words than there
    /// are changes, and one per run of neighbouring changes on the others.
    pub fn set_batch(&self, updates: &[Update]) -> usize {
        let mut applied = 0;
        let mut mass = 0;
        let mut changes = Vec::with_capacity(updates.len());
        let ask = |update: &Update| {
            if let Some(word) = self.leaf(update.slot) {
                prefetch(word);
            }
        };
        for_each_ahead(updates, ask, |update| {
            if let Some((old, new)) = self.replace(update.slot, update.generation, update.units) {
                applied += 1;
                if old != new {
                    mass += mass_change(old, new);
                    changes.push(Change { index: update.slot, difference: difference(old, new) });
                }
            }
        });
        let sums = &self.levels[1..];
        let (wide, narrow) = sums.split_at(sums.partition_point(|level| level.len() * FANOUT > changes.len()));
        for level in wide {
            merge_neighbours(&mut changes, Self::CHILD_BITS);
            for_each_ahead(
                &changes,
                |change| prefetch(Self::word(level, change.index as usize)),
                |change| self.add(level, change.index as usize, change.difference),
            );
        }
        self.add_to_all(narrow, &changes);
        self.count_mass(mass);
        applied
    }

    /// Adds changes of the level below to `levels`, the first of which has no more words than there are changes.
    fn add_to_all(&self, levels: &[Box<[Node<FANOUT>]>], changes: &[Change]) {
        let Some(first) = levels.first() else {
            return;
        };
        let mut differences = vec![0u64; first.len() * FANOUT];
        for change in changes {
            let sum = &mut differences[change.index as usize >> Self::CHILD_BITS];
            *sum = sum.wrapping_add(change.difference);
        }
        for level in levels {
            for (index, &difference) in differences.iter().enumerate() {
                if difference != 0 {
                    self.add(level, index, difference);
                }
            }
            let sum = |sum: u64, &difference: &u64| sum.wrapping_add(difference);
            let children = differences.chunks(FANOUT);
            differences = children.map(|children| children.iter().fold(0, sum)).collect();
        }
    }
}

fn difference(old: Leaf, new: Leaf) -> u64 {
    new.units().wrapping_sub(old.units())
}

/// Moves changes one level up, and merges neighbours that fall on one word.
fn merge_neighbours(changes: &mut Vec<Change>, child_bits: u32) {
    let mut merged: usize = 0;
    for i in 0..changes.len() {
        let Change { index, difference } = changes[i];
        let index = index >> child_bits;
        match changes[..merged].last_mut() {
            // The last entry already has an index of this level.
            Some(last) if last.index == index => {
                last.difference = last.difference.wrapping_add(difference);
            }
            _ => {
                changes[merged] = Change { index, difference };
                merged += 1;
            }
        }
    }
    changes.truncate(merged);
}

/// Calls `work` on each entry, and `ask`, which prefetches, on entries ahead of it.
#[inline(always)]
fn for_each_ahead<T>(all: &[T], ask: impl Fn(&T), mut work: impl FnMut(&T)) {
    let mut next = all.chunks(AHEAD);
    next.next().into_iter().flatten().for_each(&ask);
    for part in all.chunks(AHEAD) {
        next.next().into_iter().flatten().for_each(&ask);
        part.iter().for_each(&mut work);
    }
}

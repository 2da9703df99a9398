//! Draws: many descents side by side, level by level, so that the cache misses of one level overlap.

use crate::sync::{Ordering, fence};

use super::SumTree;
use super::leaf::Leaf;
use super::node::{Found, Level, find};

/// A drawn leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drawn {
    /// The leaf.
    pub slot: u32,
    /// The generation of the item in it.
    pub generation: u32,
    /// Its priority in units when it was drawn: above zero.
    pub units: u64,
}

/// Descents that go side by side: enough to hide the misses, few enough that what they fetch stays in the
/// first-level cache.
const SIDE_BY_SIDE: usize = 64;

/// How often a draw starts again before the leaves are scanned. A restart needs a node to have lost all of its
/// mass since its parent was read.
const RESTARTS: usize = 8;

/// One descent on its way down.
#[derive(Clone, Copy)]
struct Descent {
    /// The node to read next, on the level at hand.
    node: u32,
    /// The position to find within it, in units.
    position: u64,
    /// What its parent said it holds; 0 once the descent has missed.
    expected: u64,
}

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Draws one leaf for each target in [0, 1), with a probability in proportion to its units, into `out`
    /// (cleared first), and returns the total that a probability refers to: the root's at the start. A target
    /// that met with no change is drawn in its turn: ascending targets give ascending slots.
    ///
    /// Nothing is drawn, and 0 returned, when no leaf has mass. Fewer than asked for are drawn when the mass goes
    /// while drawing. A leaf whose priority rises while drawing may have more units than the total.
    /// O(n depth); O(capacity + n log n) when restarts did not help.
    pub fn draw_batch(&self, targets: &[f64], out: &mut Vec<Drawn>) -> u64 {
        out.clear();
        out.reserve(targets.len());
        let total = self.total();
        if total == 0 && self.live_with_mass() == 0 {
            return 0;
        }
        let mut missed = Vec::new();
        self.descend(targets, total, out, &mut missed);
        for _ in 0..RESTARTS {
            if missed.is_empty() {
                return total;
            }
            let again: Vec<f64> = missed.drain(..).map(another_target).collect();
            self.descend(&again, self.total(), out, &mut missed);
        }
        let scanned = self.scan(&missed, out);
        if total == 0 { scanned } else { total }
    }

    fn descend(&self, targets: &[f64], total: u64, out: &mut Vec<Drawn>, missed: &mut Vec<f64>) {
        let mut descents = [Descent {
            node: 0,
            position: 0,
            expected: 0,
        }; SIDE_BY_SIDE];
        let [leaves, sums @ ..] = &*self.levels else {
            unreachable!("a tree has at least its leaves")
        };
        for targets in targets.chunks(SIDE_BY_SIDE) {
            let descents = &mut descents[..targets.len()];
            for (descent, &target) in descents.iter_mut().zip(targets) {
                *descent = Descent {
                    node: 0,
                    position: scale(target, total),
                    expected: total,
                };
            }
            for height in (0..sums.len()).rev() {
                let below = if height == 0 {
                    leaves
                } else {
                    &sums[height - 1]
                };
                for descent in &mut *descents {
                    let words = sums[height][descent.node as usize].load();
                    let found = descent.find_in(Level::Sums, &words);
                    let Some(found) = found else { continue };
                    descent.node = descent.node << Self::CHILD_BITS | found.child as u32;
                    descent.position = found.position;
                    descent.expected = (words[found.child] as i64).max(0) as u64;
                    below[descent.node as usize].prefetch();
                }
            }
            for (descent, &target) in descents.iter_mut().zip(targets) {
                let words = leaves[descent.node as usize].load();
                match descent.find_in(Level::Leaves, &words) {
                    Some(found) => {
                        let leaf = Leaf::from_word(words[found.child]);
                        out.push(Drawn {
                            slot: descent.node << Self::CHILD_BITS | found.child as u32,
                            generation: leaf.generation(),
                            units: leaf.units(),
                        });
                    }
                    None => missed.push(target),
                }
            }
        }
        // Pairs with the Release in `activate`: what was written before a drawn leaf went live is seen from here.
        fence(Ordering::Acquire);
    }

    /// Draws from one look at every leaf: right whatever the sums above say. Returns the total of what it saw.
    #[cold]
    fn scan(&self, targets: &[f64], out: &mut Vec<Drawn>) -> u64 {
        let mut total = 0u64;
        let mut running = Vec::new();
        for (slot, leaf) in self.leaves().filter(|(_, leaf)| leaf.units() > 0) {
            total = total.wrapping_add(leaf.units());
            running.push((
                total,
                Drawn {
                    slot,
                    generation: leaf.generation(),
                    units: leaf.units(),
                },
            ));
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
    /// Finds the position among the children, within the sum that `words` have now. `None`, also ever after,
    /// when that is 0.
    #[inline(always)]
    fn find_in<const FANOUT: usize>(
        &mut self,
        level: Level,
        words: &[u64; FANOUT],
    ) -> Option<Found> {
        let found = find(level, words, self.position);
        if found.sum == self.expected && self.expected != 0 {
            return Some(found);
        }
        self.find_in_changed(level, words, found.sum)
    }

    /// The node has changed since its parent was read. To scale the position, rather than to start again where
    /// it lies beyond, keeps every child's chance close to its share of the node: otherwise the last children of
    /// a node that others update would be drawn too rarely.
    #[cold]
    fn find_in_changed<const FANOUT: usize>(
        &mut self,
        level: Level,
        words: &[u64; FANOUT],
        sum: u64,
    ) -> Option<Found> {
        if self.expected == 0 || sum == 0 {
            self.expected = 0;
            return None;
        }
        let fraction = self.position as f64 / self.expected as f64;
        Some(find(level, words, scale(fraction, sum)))
    }
}

/// A position below `sum` for a fraction in [0, 1). Rounding, and a fraction outside, end at the nearest position.
#[inline(always)]
fn scale(fraction: f64, sum: u64) -> u64 {
    ((fraction * sum as f64) as u64).min(sum.saturating_sub(1))
}

/// A number in [0, 1) that looks independent of `target` and follows from it (the mixer of SplitMix64: Steele,
/// Lea and Flood, 2014), so that a seed gives the same draws again.
fn another_target(target: f64) -> f64 {
    let mut bits = target.to_bits().wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

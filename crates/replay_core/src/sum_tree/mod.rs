//! A sum tree that many threads sample from and write to at the same time, without a lock.
//!
//! Priorities are unsigned fixed point. With a fan-out of 16, a million leaves make five levels:
//!
//! ```text
//!   root             [ sum sum .. sum ]                1 node: 16 sums, 128 bytes
//!                      /             \
//!   ..         [ sum .. sum ]  ..  [ sum .. sum ]     16, 256, 4096 nodes
//!                /
//!   leaves [ 39 bits units | 25 bits generation, .. ] 65536 nodes of 16 leaves
//! ```
//!
//! A change of a priority is a compare-and-exchange of the leaf, then one atomic add of the difference for each
//! level above. Adds commute, so at rest every sum is exactly the sum of its children, whatever the order was;
//! integers do not drift. No step waits for another thread: with a writer stopped between any two of them, the
//! others finish their samples and updates.
//!
//! Intermediate states that a reader may see, and its answer to each:
//!
//! - A sum lags behind its children, even below zero. It is read as signed and a negative one counts as 0.
//! - The children of a node do not add up to their sum in the parent. A sample continues within the sum that it has just
//!   read, never the parent's: its position is scaled to it. Where nothing is left, the sample starts again with
//!   another number, a bounded number of times, and then falls back to a scan of the leaves.
//! - The leaf that was sampled changes afterwards. A sample returns the units and the generation of one word.
//!
//! # Metadata of a slot
//!
//! The owner of a dead slot writes the item's metadata beside the tree, then calls [`SumTree::activate`]. A sample of
//! the slot sees that metadata, or a later owner's: metadata are atomics, stored after a `Release` fence, and a reader
//! calls [`SumTree::is_live`] with the sampled generation after it has loaded them. True means that everything it loaded
//! belongs to the sampled item. [`crate::table::items`] follows this.
//!
//! # Invariant
//!
//! At rest every node is exactly the sum of its children. No thread waits for another; an empty leaf is never
//! returned.

mod batches;
mod node;

use crate::error::{Error, Result};
use crate::processor::filled;
use crate::sync::{AtomicU64, Ordering, fence};
use base::allocation::check_size;
use base::planted;
use node::{ChildSums, Leaf, Level, Node};

pub use batches::{SampledLeaf, Strata, Update};

/// Most leaves of one batch of samples.
pub const MAX_SAMPLES: u32 = 1 << 16;

/// Checks the size of a batch of samples.
///
/// # Errors
/// [`Error::Config`] for 0, [`Error::TooLarge`] for more than [`MAX_SAMPLES`].
pub fn check_samples(count: u32) -> Result<()> {
    if count == 0 {
        return Err(Error::Config(format!("batch_size is 1 to {MAX_SAMPLES}, got 0")));
    }
    Ok(check_size("batch_size", u64::from(count), u64::from(MAX_SAMPLES), "sample fewer items at a time")?)
}

/// Counters that many threads write, on cache lines of their own.
#[repr(align(128))]
#[derive(Debug)]
struct Counter(AtomicU64);

/// The tree. `FANOUT` is a power of two; 16 fills two cache lines.
#[derive(Debug)]
pub struct SumTree<const FANOUT: usize = 16> {
    /// From the leaves up; the last level is the root alone.
    levels: Box<[Box<[Node<FANOUT>]>]>,
    capacity: u32,
    units_per_one: f64,
    /// Leaves with units, modulo 2^64: transiently "negative", as a sum is.
    with_mass: Counter,
    saturated: Counter,
    rounded_up: Counter,
}

impl<const FANOUT: usize> SumTree<FANOUT> {
    /// Most leaves: sums of 2^24 masses of 39 bits stay under 2^63.
    pub const MAX_CAPACITY: u32 = 1 << 24;

    /// The largest mass in units; greater ones are cut to it and counted.
    pub const MAX_UNITS: u64 = Leaf::MAX_UNITS;

    const CHILD_BITS: u32 = {
        assert!(FANOUT.is_power_of_two() && FANOUT >= 2);
        FANOUT.trailing_zeros()
    };

    /// A tree of `capacity` dead leaves (1 to [`SumTree::MAX_CAPACITY`]) with a unit of 2^`unit_log2`.
    ///
    /// # Panics
    /// When `capacity` is out of range.
    pub fn new(capacity: u32, unit_log2: i32) -> Self {
        Self::dead(capacity, unit_log2, 0)
    }

    /// As [`SumTree::new`], with leaves of `generation`, an even number below 2^25: the first item of each has the next.
    ///
    /// # Panics
    /// As [`SumTree::new`], and for another generation.
    pub(crate) fn dead(capacity: u32, unit_log2: i32, generation: u32) -> Self {
        Self::filled(capacity, unit_log2, Leaf::dead(generation))
    }

    /// A tree whose leaves are all live, of generation 1 and without units: an index of slots whose items are never
    /// replaced.
    ///
    /// # Panics
    /// As [`SumTree::new`].
    pub fn live(capacity: u32, unit_log2: i32) -> Self {
        Self::filled(capacity, unit_log2, Leaf::from_word(Leaf::birth(0)))
    }

    fn filled(capacity: u32, unit_log2: i32, leaf: Leaf) -> Self {
        assert!((1..=Self::MAX_CAPACITY).contains(&capacity), "a sum tree has 1 to 2^24 leaves, not {capacity}");
        let level = |(height, nodes): (usize, usize)| {
            let word = if height == 0 { leaf.word() } else { 0 };
            filled(nodes, |_| Node::filled(word))
        };
        let sizes = Self::level_sizes(capacity).enumerate();
        SumTree {
            levels: sizes.map(level).collect(),
            capacity,
            units_per_one: f64::from(-unit_log2).exp2(),
            with_mass: Counter(AtomicU64::new(0)),
            saturated: Counter(AtomicU64::new(0)),
            rounded_up: Counter(AtomicU64::new(0)),
        }
    }

    /// Bytes that a tree of `capacity` leaves allocates.
    pub fn bytes(capacity: u32) -> u64 {
        let nodes: usize = Self::level_sizes(capacity).sum();
        (nodes * size_of::<Node<FANOUT>>()) as u64
    }

    /// Nodes of each level, from the leaves up to the root alone.
    fn level_sizes(capacity: u32) -> impl Iterator<Item = usize> {
        let above = |&nodes: &usize| (nodes > 1).then(|| nodes.div_ceil(FANOUT));
        std::iter::successors(Some((capacity as usize).div_ceil(FANOUT)), above)
    }

    /// A sum in units as a mass.
    pub fn from_units(&self, units: u64) -> f64 {
        units as f64 / self.units_per_one
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// A mass, finite and not negative, in units: rounded to the nearest. A positive one below one unit is rounded
    /// up to it and counted, see [`SumTree::rounded_up`]; one above [`SumTree::MAX_UNITS`] is cut to it and counted, see
    /// [`SumTree::saturated`].
    #[inline]
    pub fn units_of(&self, mass: f64) -> u64 {
        let exact = mass * self.units_per_one;
        if exact > Self::MAX_UNITS as f64 {
            self.saturated.0.fetch_add(1, Ordering::Relaxed);
            return Self::MAX_UNITS;
        }
        if exact < 1.0 && mass > 0.0 {
            self.rounded_up.0.fetch_add(1, Ordering::Relaxed);
            return 1;
        }
        // Rounds half up inline; `round` would be a call.
        (exact + 0.5) as i64 as u64
    }

    /// Makes a dead slot live with `units` (at most [`SumTree::MAX_UNITS`]) and returns its generation. Only the
    /// one owner of the dead slot may call it. Publishes the caller's earlier writes: see the module. O(depth).
    ///
    /// # Panics
    /// When `slot` is not below the capacity or is live.
    pub fn activate(&self, slot: u32, units: u64) -> u32 {
        let word = self.leaf(slot).expect("activate: no such slot");
        let units = units.min(Self::MAX_UNITS);
        // Release: pairs with the Acquire fences of `descend` and `scan`. Later changes of the word are
        // read-modify-writes, which carry this release on.
        let publication = if planted!(RelaxedPublication) { Ordering::Relaxed } else { Ordering::Release };
        let dead = Leaf::from_word(word.fetch_add(Leaf::birth(units), publication));
        assert!(!dead.is_live(), "activate: slot {slot} is live");
        self.spread(slot, units);
        self.count_mass(i64::from(units > 0));
        dead.next_generation(units).generation()
    }

    /// Ends the item in `slot` and removes its priority. True for exactly one caller, which then owns the slot and
    /// may free it for reuse; false when `generation` has passed. O(depth).
    pub fn kill(&self, slot: u32, generation: u32) -> bool {
        // Acquire: pairs with the Release in `activate`, so that the winner sees the item's metadata.
        let Some((live, dead)) = self.exchange(slot, generation, Ordering::Acquire, |live| live.next_generation(0))
        else {
            return false;
        };
        self.spread(slot, live.units().wrapping_neg());
        self.count_mass(mass_change(live, dead));
        true
    }

    /// Whether the item is still there, after everything the caller has loaded so far.
    pub fn is_live(&self, slot: u32, generation: u32) -> bool {
        // A reader that has loaded a later owner's metadata has to find the slot dead or taken: this fence pairs
        // with the Release fence before the metadata were stored (`Items::insert`), and the kill came before that.
        fence(Ordering::Acquire);
        // Acquire: pairs with the Release in `activate`, for reads of metadata after this check.
        self.leaf(slot).is_some_and(|word| Leaf::from_word(word.load(Ordering::Acquire)).holds(generation))
    }

    /// Mass of an item in units, `None` when it has gone.
    pub fn units(&self, slot: u32, generation: u32) -> Option<u64> {
        let leaf = Leaf::from_word(self.leaf(slot)?.load(Ordering::Relaxed));
        leaf.holds(generation).then(|| leaf.units())
    }

    /// Sets the mass of an item in units (at most [`SumTree::MAX_UNITS`]); false when `generation` has
    /// passed. O(depth).
    pub fn set(&self, slot: u32, generation: u32, units: u64) -> bool {
        let Some((old, new)) = self.replace(slot, generation, units) else {
            return false;
        };
        self.spread(slot, new.units().wrapping_sub(old.units()));
        self.count_mass(mass_change(old, new));
        true
    }

    /// Sum of all masses in units, as the root has it at this instant. O(1).
    pub fn total(&self) -> u64 {
        match &*self.levels {
            [leaves] => leaves[0].read(Level::Leaves).sum(),
            [.., root] => root[0].read(Level::Sums).sum(),
            [] => unreachable!("a tree has at least its leaves"),
        }
    }

    /// The smallest positive mass in units, `None` without one. Scans the leaves, except of nodes whose sum is 0, which may lag: O(capacity).
    pub fn min_positive(&self) -> Option<u64> {
        let sums = self.levels.get(1);
        let is_empty =
            |i: usize| sums.is_some_and(|sums| sums[i / FANOUT].words[i % FANOUT].load(Ordering::Relaxed) == 0);
        // Less one, so that none are the most, without a branch. The children of a node are independent minima.
        let mut least = [u64::MAX; FANOUT];
        for (_, node) in self.levels[0].iter().enumerate().filter(|&(i, _)| !is_empty(i)) {
            for (least, word) in least.iter_mut().zip(&node.words) {
                let units = Leaf::from_word(word.load(Ordering::Relaxed)).units();
                *least = units.wrapping_sub(1).min(*least);
            }
        }
        least.into_iter().min().map(|units| units.wrapping_add(1)).filter(|&units| units > 0)
    }

    /// Priorities that were cut to [`SumTree::MAX_UNITS`] so far.
    pub fn saturated(&self) -> u64 {
        self.saturated.0.load(Ordering::Relaxed)
    }

    /// Positive priorities below one unit, which were rounded up to it, so far.
    pub fn rounded_up(&self) -> u64 {
        self.rounded_up.0.load(Ordering::Relaxed)
    }

    /// Live leaves with a priority above zero: exact at rest.
    pub fn live_with_mass(&self) -> u64 {
        let count = self.with_mass.0.load(Ordering::Relaxed);
        (count as i64).max(0) as u64
    }

    /// Checks the tree at rest (no writer under way): every sum is exactly the sum of its children, and the count
    /// of leaves with mass is right. O(capacity).
    pub fn check_at_rest(&self) -> Result<()> {
        let with_mass = self.leaves().filter(|(_, leaf)| leaf.units() > 0).count();
        if with_mass as u64 != self.live_with_mass() {
            return Err(Error::Internal(format!(
                "{with_mass} leaves have a priority, {} are counted",
                self.live_with_mass()
            )));
        }
        for (height, pair) in self.levels.windows(2).enumerate() {
            let level = if height == 0 { Level::Leaves } else { Level::Sums };
            for (index, node) in pair[0].iter().enumerate() {
                let children = node.read(level).sum();
                let sum = pair[1][index / FANOUT].words[index % FANOUT].load(Ordering::Relaxed);
                if sum != children {
                    return Err(Error::Internal(format!(
                        "sum {index} over level {height} is {}, its children's {children}",
                        sum as i64
                    )));
                }
            }
        }
        Ok(())
    }

    /// Changes the leaf while it holds the item; `None` when the item has gone. Lock-free: another round means
    /// that another thread has changed the leaf.
    #[inline]
    fn exchange(
        &self,
        slot: u32,
        generation: u32,
        success: Ordering,
        change: impl Fn(Leaf) -> Leaf,
    ) -> Option<(Leaf, Leaf)> {
        let word = self.leaf(slot)?;
        let mut old = Leaf::from_word(word.load(Ordering::Relaxed));
        loop {
            if !old.holds(generation) {
                return None;
            }
            let new = change(old);
            if planted!(BlindUpdate) {
                word.store(new.word(), Ordering::Release);
                return Some((old, new));
            }
            match word.compare_exchange_weak(old.word(), new.word(), success, Ordering::Relaxed) {
                Ok(_) => return Some((old, new)),
                Err(now) => old = Leaf::from_word(now),
            }
        }
    }

    /// Relaxed: an update publishes nothing of its own, and as a read-modify-write it carries on the release of
    /// `activate`.
    #[inline]
    fn replace(&self, slot: u32, generation: u32, units: u64) -> Option<(Leaf, Leaf)> {
        let units = units.min(Self::MAX_UNITS);
        self.exchange(slot, generation, Ordering::Relaxed, |old| old.with_units(units))
    }

    /// Adds a difference (modulo 2^64) to every sum above a leaf. Relaxed: sums guide a sample, the leaf decides.
    fn spread(&self, slot: u32, difference: u64) {
        if difference == 0 {
            return;
        }
        let mut index = slot as usize;
        for (height, level) in self.levels.iter().enumerate().skip(1) {
            index >>= Self::CHILD_BITS;
            if planted!(LostDelta) && height == 1 {
                continue;
            }
            self.add(level, index, difference);
        }
    }

    #[inline(always)]
    fn add(&self, level: &[Node<FANOUT>], index: usize, difference: u64) {
        Self::word(level, index).fetch_add(difference, Ordering::Relaxed);
    }

    #[inline(always)]
    fn word(level: &[Node<FANOUT>], index: usize) -> &AtomicU64 {
        &level[index >> Self::CHILD_BITS].words[index % FANOUT]
    }

    fn count_mass(&self, change: i64) {
        if change != 0 {
            self.with_mass.0.fetch_add(change as u64, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn leaf(&self, slot: u32) -> Option<&AtomicU64> {
        (slot < self.capacity).then(|| Self::word(&self.levels[0], slot as usize))
    }

    fn leaves(&self) -> impl Iterator<Item = (u32, Leaf)> + '_ {
        let words = self.levels[0].iter().flat_map(|node| &node.words);
        (0..).zip(words.map(|word| Leaf::from_word(word.load(Ordering::Relaxed))))
    }
}

/// Change of the number of leaves with mass.
fn mass_change(old: Leaf, new: Leaf) -> i64 {
    i64::from(new.units() > 0) - i64::from(old.units() > 0)
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    /// Every state that a writer may leave behind when it stops between two steps of taking 7 from, or giving 7
    /// to, the first leaf of three levels: the leaf, then the sums from below.
    fn stopped_writers() -> impl Iterator<Item = SumTree<2>> {
        [(7, 0), (0, 7)].into_iter().flat_map(|(before, after)| {
            (0..=2).map(move |steps| {
                let tree = SumTree::new(8, 0);
                tree.activate(0, before);
                tree.replace(0, 1, after).expect("the item is live");
                let mut index = 0;
                for level in tree.levels.iter().skip(1).take(steps) {
                    index >>= 1;
                    tree.add(level, index, after.wrapping_sub(before));
                }
                tree
            })
        })
    }

    const TARGETS: [f64; 5] = [0.0, 0.3, 0.6, 0.9, 0.99];

    #[test]
    fn others_finish_while_a_writer_is_stopped() {
        for tree in stopped_writers() {
            let mut sampled = Vec::new();
            let units = tree.units(0, 1).expect("the item is live");
            tree.sample_batch(&TARGETS, &mut sampled);
            assert!(sampled.iter().all(|item| (item.slot, item.units) == (0, units)));
            // Beside it, in its node, and in the other half of the tree.
            for slot in [1, 6] {
                let generation = tree.activate(slot, 5);
                assert!(tree.set(slot, generation, 4));
            }
            tree.sample_batch(&TARGETS, &mut sampled);
            assert_eq!(sampled.len(), TARGETS.len());
            assert!(sampled.iter().all(|item| item.units == 4 || item.slot == 0 && item.units == 7));
            assert!(tree.kill(0, 1) && tree.kill(1, 1));
            tree.sample_batch(&TARGETS, &mut sampled);
            assert_eq!(sampled.len(), TARGETS.len());
            assert!(sampled.iter().all(|item| item.slot == 6));
        }
    }

    #[test]
    fn a_root_below_its_leaves_does_not_hide_their_mass() {
        let tree = SumTree::<2>::new(8, 0);
        tree.activate(1, 5);
        // One writer has given the first leaf 7 and stopped; another takes them away.
        tree.activate(0, 0);
        tree.replace(0, 1, 7).expect("the item is live");
        assert!(tree.set(0, 1, 0));
        assert_eq!(tree.total(), 0);
        let mut sampled = Vec::new();
        assert_eq!(tree.sample_batch(&TARGETS, &mut sampled), 5);
        assert!(sampled.len() == TARGETS.len() && sampled.iter().all(|item| item.slot == 1));
    }
}

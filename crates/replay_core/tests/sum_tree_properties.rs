//! The sum tree against a naive one: a list of priorities that is summed afresh.
#![cfg(not(feature = "model"))]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use proptest::collection::vec;
use proptest::prelude::*;
use replay_core::Error;
use replay_core::replay::check_priorities;
use replay_core::sum_tree::{SampledLeaf, SumTree, Update};

/// What is asked of both trees. Slots beyond the capacity and generations that have passed are part of it.
#[derive(Debug, Clone)]
enum Step {
    Activate(u32, u64),
    Kill(u32, u32),
    Set(u32, u32, u64),
    SetBatch(Vec<(u32, u32, u64)>),
}

fn slot() -> impl Strategy<Value = u32> {
    0..48u32
}

fn generation() -> impl Strategy<Value = u32> {
    0..8u32
}

fn units() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 1..100u64, Just(SumTree::<16>::MAX_UNITS)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (slot(), units()).prop_map(|(slot, units)| Step::Activate(slot, units)),
        1 => (slot(), generation()).prop_map(|(slot, generation)| Step::Kill(slot, generation)),
        3 => (slot(), generation(), units()).prop_map(|(s, g, units)| Step::Set(s, g, units)),
        2 => vec((slot(), generation(), units()), 0..40).prop_map(Step::SetBatch),
    ]
}

/// Generation (odd is live) and units of each slot.
struct Naive(Vec<(u32, u64)>);

impl Naive {
    fn set(&mut self, slot: u32, generation: u32, units: u64) -> bool {
        match self.0.get_mut(slot as usize) {
            Some(leaf) if leaf.0 == generation && generation % 2 == 1 => {
                leaf.1 = units;
                true
            }
            _ => false,
        }
    }

    fn kill(&mut self, slot: u32, generation: u32) -> bool {
        let live = self.set(slot, generation, 0);
        if live {
            self.0[slot as usize].0 += 1;
        }
        live
    }

    fn total(&self) -> u64 {
        self.0.iter().map(|leaf| leaf.1).sum()
    }

    /// The first leaf whose running sum passes the position that a target stands for.
    fn sample(&self, target: f64) -> SampledLeaf {
        let mut position = (target * self.total() as f64) as u64;
        position = position.min(self.total() - 1);
        for (slot, &(generation, units)) in (0..).zip(&self.0) {
            if position < units {
                return SampledLeaf { slot, generation, units };
            }
            position -= units;
        }
        unreachable!("the position is below the total")
    }
}

fn agree<const FANOUT: usize>(capacity: u32, steps: &[Step], targets: &[f64]) -> Result<(), TestCaseError> {
    let tree = SumTree::<FANOUT>::new(capacity, 0);
    let mut naive = Naive(vec![(0, 0); capacity as usize]);
    let mut sampled = Vec::new();
    for step in steps {
        match step {
            &Step::Activate(slot, units) => {
                // Only the owner of a dead slot may: the naive tree says which are.
                if let Some(leaf) = naive.0.get_mut(slot as usize).filter(|leaf| leaf.0 % 2 == 0) {
                    *leaf = (leaf.0 + 1, units);
                    prop_assert_eq!(tree.activate(slot, units), leaf.0);
                }
            }
            &Step::Kill(slot, generation) => {
                prop_assert_eq!(tree.kill(slot, generation), naive.kill(slot, generation));
            }
            &Step::Set(slot, generation, units) => {
                prop_assert_eq!(tree.set(slot, generation, units), naive.set(slot, generation, units));
            }
            Step::SetBatch(updates) => {
                let applied = updates.iter().filter(|&&(s, g, units)| naive.set(s, g, units));
                let applied = applied.count();
                let updates: Vec<_> =
                    updates.iter().map(|&(slot, generation, units)| Update { slot, generation, units }).collect();
                prop_assert_eq!(tree.set_batch(&updates), applied);
            }
        }
        prop_assert!(tree.check_at_rest().is_ok());
        prop_assert_eq!(tree.total(), naive.total());
        let positive = || naive.0.iter().map(|leaf| leaf.1).filter(|&units| units > 0);
        prop_assert_eq!(tree.live_with_mass(), positive().count() as u64);
        prop_assert_eq!(tree.min_positive(), positive().min());
        prop_assert_eq!(tree.sample_batch(targets, &mut sampled), naive.total());
        if naive.total() == 0 {
            prop_assert!(sampled.is_empty());
        } else {
            let expected: Vec<_> = targets.iter().map(|&target| naive.sample(target)).collect();
            prop_assert_eq!(&sampled, &expected);
        }
    }
    for (slot, &(generation, units)) in (0..).zip(&naive.0) {
        let live = generation % 2 == 1;
        prop_assert_eq!(tree.is_live(slot, generation), live);
        prop_assert_eq!(tree.units(slot, generation), live.then_some(units));
    }
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_a_naive_sum(
        capacity in 1..40u32,
        steps in vec(step(), 1..60),
        targets in vec(0.0..1.0f64, 0..150),
    ) {
        agree::<16>(capacity, &steps, &targets)?;
        agree::<4>(capacity, &steps, &targets)?;
        agree::<2>(capacity, &steps, &targets)?;
    }

    #[test]
    fn a_priority_becomes_the_nearest_units(priority in 1e-9..1e5f64, unit_log2 in -30..=0i32) {
        let tree: SumTree = SumTree::new(1, unit_log2);
        let units = tree.units_of(priority);
        let exact = priority / f64::from(unit_log2).exp2();
        prop_assert!(units >= 1);
        if exact >= SumTree::<16>::MAX_UNITS as f64 {
            prop_assert_eq!(units, SumTree::<16>::MAX_UNITS);
        } else if exact >= 0.5 {
            prop_assert!((units as f64 - exact).abs() <= 0.5);
        } else {
            prop_assert_eq!(units, 1);
        }
    }
}

#[test]
fn a_priority_that_is_no_number_or_negative_is_refused() {
    let tree: SumTree = SumTree::new(1, -19);
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-300] {
        match check_priorities(&[value]) {
            Err(Error::Priority { value: refused, .. }) => {
                assert_eq!(refused.to_bits(), value.to_bits())
            }
            other => panic!("{value} gave {other:?}"),
        }
    }
    assert_eq!(tree.units_of(-0.0), 0);
}

#[test]
fn a_positive_priority_has_at_least_one_unit() {
    let tree: SumTree = SumTree::new(1, -19);
    assert_eq!(tree.units_of(0.0), 0);
    assert_eq!(tree.units_of(f64::MIN_POSITIVE), 1);
    assert_eq!(tree.units_of(1.0), 1 << 19);
}

#[test]
fn a_priority_too_large_is_cut_and_counted() {
    let tree: SumTree = SumTree::new(1, -19);
    assert_eq!(tree.units_of(1e6), 1_000_000 << 19);
    assert_eq!(tree.saturated(), 0);
    for value in [1.1e6, f64::MAX] {
        assert_eq!(tree.units_of(value), SumTree::<16>::MAX_UNITS);
    }
    assert_eq!(tree.saturated(), 2);
}

#[test]
fn the_last_of_two_updates_of_one_item_counts() {
    let tree: SumTree = SumTree::new(100, 0);
    for slot in 0..100 {
        tree.activate(slot, 1);
    }
    let update = |slot, units| Update { slot, generation: 1, units };
    let updates = [update(7, 50), update(90, 4), update(7, 0), update(7, 3)];
    assert_eq!(tree.set_batch(&updates), 4);
    assert_eq!((tree.units(7, 1), tree.units(90, 1)), (Some(3), Some(4)));
    assert_eq!(tree.total(), 98 + 7);
    tree.check_at_rest().unwrap();
}

#[test]
fn the_largest_tree_holds_the_largest_priorities() {
    let tree: SumTree = SumTree::new(SumTree::<16>::MAX_CAPACITY, 0);
    for slot in 0..tree.capacity() {
        tree.activate(slot, SumTree::<16>::MAX_UNITS);
    }
    assert_eq!(tree.total(), SumTree::<16>::MAX_UNITS << 24);
    let mut sampled = Vec::new();
    tree.sample_batch(&[0.0, 0.5, 1.0], &mut sampled);
    let slots: Vec<_> = sampled.iter().map(|item| item.slot).collect();
    assert_eq!(slots, [0, 1 << 23, (1 << 24) - 1]);
}

/// Threads that insert, update, evict and sample at once: nothing is lost and nothing is counted twice.
#[test]
fn mass_is_conserved_when_threads_are_done() {
    const SLOTS: u32 = 300;
    const WRITERS: u32 = 3;
    const ROUNDS: u32 = 4_000;
    /// Rounds after which a writer ends although nothing was sampled meanwhile: the test then fails.
    const MOST_ROUNDS: u32 = 1_000_000;
    let tree: SumTree = SumTree::new(SLOTS, 0);
    // Each slot's present generation, for who wants to update or evict its item: it may have passed when it is used.
    let generations: Vec<_> = (0..SLOTS).map(|_| AtomicU64::new(0)).collect();
    let dead = Mutex::new((0..SLOTS).collect::<Vec<_>>());
    let sampled_beside = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (tree, generations, dead) = (&tree, &generations, &dead);
                let sampled_beside = &sampled_beside;
                scope.spawn(move || {
                    let mut numbers = Numbers(u64::from(writer) + 1);
                    for round in 0..MOST_ROUNDS {
                        if round >= ROUNDS && sampled_beside.load(Ordering::Relaxed) {
                            break;
                        }
                        let slot = numbers.below(SLOTS);
                        let generation = generations[slot as usize].load(Ordering::Relaxed) as u32;
                        let units = u64::from(numbers.below(50));
                        match round % 4 {
                            0 => {
                                let Some(slot) = dead.lock().unwrap().pop() else {
                                    continue;
                                };
                                let generation = tree.activate(slot, units);
                                generations[slot as usize].store(generation.into(), Ordering::Relaxed);
                            }
                            1 => {
                                if tree.kill(slot, generation) {
                                    dead.lock().unwrap().push(slot);
                                }
                            }
                            2 => {
                                tree.set(slot, generation, units);
                            }
                            _ => {
                                let updates: Vec<_> = (slot..slot + 20)
                                    .map(|slot| slot % SLOTS)
                                    .map(|slot| Update {
                                        slot,
                                        generation: generations[slot as usize].load(Ordering::Relaxed) as u32,
                                        units: u64::from(numbers.below(50)),
                                    })
                                    .collect();
                                tree.set_batch(&updates);
                            }
                        }
                    }
                })
            })
            .collect();
        let mut sampled = Vec::new();
        let mut numbers = Numbers(99);
        while writers.iter().any(|writer| !writer.is_finished()) {
            let targets: Vec<_> = (0..70).map(|_| numbers.unit()).collect();
            tree.sample_batch(&targets, &mut sampled);
            assert!(sampled.iter().all(|item| item.units > 0 && item.generation % 2 == 1));
            sampled_beside.fetch_or(!sampled.is_empty(), Ordering::Relaxed);
        }
    });
    assert!(sampled_beside.into_inner(), "something was sampled meanwhile");
    tree.check_at_rest().unwrap();
    let live: u64 = (0..SLOTS)
        .filter_map(|slot| {
            let generation = generations[slot as usize].load(Ordering::Relaxed) as u32;
            tree.units(slot, generation)
        })
        .sum();
    assert_eq!(tree.total(), live);
}

/// A small generator (xorshift64*, Vigna, 2016), so that threads need no shared one.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.unit() * f64::from(bound)) as u32
    }
}

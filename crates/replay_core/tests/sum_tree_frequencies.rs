//! How often leaves are sampled, against the distribution they have to follow.
#![cfg(not(feature = "model"))]

#[path = "support/frequencies.rs"]
mod frequencies;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use frequencies::{assert_follows, chi_square, one_in_a_million};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::sum_tree::{SampledLeaf, SumTree, Update};

type Tree = SumTree;

fn targets(rng: &mut StdRng, n: usize) -> Vec<f64> {
    (0..n).map(|_| rng.random()).collect()
}

#[test]
fn the_test_itself_refuses_a_wrong_distribution() {
    let tree = Tree::new(64, 0);
    for slot in 0..64 {
        tree.activate(slot, 100);
    }
    let mut sampled = Vec::new();
    tree.sample_batch(&targets(&mut StdRng::seed_from_u64(1), 200_000), &mut sampled);
    let mut counts = vec![0; 64];
    sampled.iter().for_each(|item| counts[item.slot as usize] += 1);
    let mut shares = vec![100.0; 64];
    assert_follows(&counts, &shares);
    // 25% off in one leaf of 64.
    shares[63] = 125.0;
    let (statistic, degrees) = chi_square(&counts, &shares);
    assert!(statistic > one_in_a_million(degrees));
}

#[test]
fn leaves_are_sampled_in_proportion_to_their_units() {
    // One level, a node that is not full, several levels, and five of them with cells of many leaves.
    for capacity in [2, 16, 17, 300, 5_000, 70_000] {
        let mut rng = StdRng::seed_from_u64(capacity.into());
        let tree = Tree::new(capacity, 0);
        let cells = capacity.min(512) as usize;
        let mut shares = vec![0.0; cells];
        for slot in 0..capacity {
            // Every seventh has none; the others differ by a factor of 50.
            let units = if slot % 7 == 3 { 0 } else { rng.random_range(20..1_000) };
            tree.activate(slot, units);
            shares[slot as usize % cells] += units as f64;
        }
        let mut counts = vec![0; cells];
        let mut sampled = Vec::new();
        for _ in 0..400 {
            let total = tree.sample_batch(&targets(&mut rng, 1_000), &mut sampled);
            assert_eq!(total as f64, shares.iter().sum::<f64>());
            for item in &sampled {
                assert_ne!(item.slot % 7, 3, "a leaf without units was sampled");
                counts[item.slot as usize % cells] += 1;
            }
        }
        let (counts, shares): (Vec<_>, Vec<_>) =
            counts.into_iter().zip(shares).filter(|&(_, share)| share > 0.0).unzip();
        assert_follows(&counts, &shares);
    }
}

#[test]
fn leaves_that_stay_are_sampled_in_proportion_while_their_neighbours_change() {
    // Small enough for most descents to meet a change.
    const LEAVES: u32 = 512;
    // The first and the last leaf of each node stay; those between them change all the time.
    let stays = |slot: u32| [0, 15].contains(&(slot % 16));
    let units = |slot: u32| u64::from(500 + slot);
    let tree = Tree::new(LEAVES, 0);
    for slot in 0..LEAVES {
        tree.activate(slot, units(slot));
    }
    // A cell is an end of the nodes and one of eight parts of the tree: a bias for places would show.
    let cell = |slot: u32| (slot / 64 * 2 + slot % 2) as usize;
    let mut shares = [0.0; 16];
    for slot in (0..LEAVES).filter(|&slot| stays(slot)) {
        shares[cell(slot)] += units(slot) as f64;
    }
    let mut counts = [0; 16];
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for writer in 0..2 {
            let (tree, done) = (&tree, &done);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(writer);
                let mut updates = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    updates.clear();
                    updates.extend((0..16).map(|_| {
                        let slot = rng.random_range(0..LEAVES / 16) * 16 + rng.random_range(1..15);
                        Update { slot, generation: 1, units: rng.random_range(0..1_000) }
                    }));
                    assert_eq!(tree.set_batch(&updates), 16);
                    let one = updates[0];
                    assert!(tree.set(one.slot, 1, rng.random_range(0..1_000)));
                }
            });
        }
        let mut rng = StdRng::seed_from_u64(7);
        let mut sampled = Vec::new();
        for _ in 0..2_000 {
            tree.sample_batch(&targets(&mut rng, 256), &mut sampled);
            assert_eq!(sampled.len(), 256);
            for item in sampled.iter().filter(|item| stays(item.slot)) {
                assert_eq!(item.units, units(item.slot));
                counts[cell(item.slot)] += 1;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    tree.check_at_rest().unwrap();
    assert_follows(&counts, &shares);
}

#[test]
fn the_ends_of_the_range_sample_the_first_and_the_last_leaf_with_mass() {
    let below_one = 1.0 - f64::EPSILON / 2.0;
    for capacity in [1, 16, 100, 5_000] {
        let tree = Tree::new(capacity, 0);
        for slot in 0..capacity {
            let inside = slot > 0 && slot + 1 < capacity;
            tree.activate(slot, if inside || capacity == 1 { 1 } else { 0 });
        }
        let mut sampled = Vec::new();
        // What lies outside [0, 1) ends at the nearest leaf.
        let outside = [-1.0, f64::NAN, 1.0, f64::INFINITY];
        let targets = [&[0.0, below_one][..], &outside].concat();
        tree.sample_batch(&targets, &mut sampled);
        let first = u32::from(capacity > 1);
        let last = capacity.saturating_sub(2);
        let slots: Vec<_> = sampled.iter().map(|item| item.slot).collect();
        assert_eq!(slots, [first, last, first, first, last, last]);
    }
}

#[test]
fn nothing_is_sampled_without_mass() {
    let tree = Tree::new(1_000, 0);
    let mut sampled = vec![SampledLeaf { slot: 1, generation: 1, units: 1 }];
    assert_eq!(tree.sample_batch(&[0.5; 10], &mut sampled), 0);
    assert!(sampled.is_empty());
    let generation = tree.activate(3, 0);
    assert_eq!(tree.sample_batch(&[0.5; 10], &mut sampled), 0);
    assert!(sampled.is_empty());
    assert!(tree.set(3, generation, 2));
    assert_eq!(tree.sample_batch(&[0.5; 10], &mut sampled), 2);
    assert!(sampled.len() == 10 && sampled.iter().all(|item| item.slot == 3));
    assert!(tree.kill(3, generation));
    assert_eq!(tree.sample_batch(&[0.5; 10], &mut sampled), 0);
    assert!(sampled.is_empty());
}

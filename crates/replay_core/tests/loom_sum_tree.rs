//! The sum tree under loom: every interleaving, within the bound below, of two writers and a sampler on a tree of
//! three levels with a fan-out of 2. `cargo test -p replay_core --features loom --test loom_sum_tree`.
//!
//! Each property is checked as it is, and again with a fault put in that has to break it.
#![cfg(feature = "loom")]
// Loom's cells are not `Sync`: loom itself checks how they are shared.
#![allow(clippy::arc_with_non_send_sync)]

use std::sync::Arc;

use base::planted::plant;
use replay_core::sum_tree::{SampledLeaf, SumTree, Update};
use replay_core::sync::{Ordering, UnsafeCell, thread};

type Tree = SumTree<2>;

/// Eight leaves in four nodes, four sums, two sums.
const LEAVES: u32 = 8;

/// Runs a model whose threads are spawned in a certain order: writers first, samplers last, and the main thread only
/// joins them. Loom finds that two accesses race by looking back from the later one to the last one before it: a
/// load that has run too early is hidden by a writer's own load of the same word.
///
/// Loom switches away from a thread that could continue at most `preemptions` times in one execution. The faults below,
/// and every ordering and fence of the tree when it was weakened in turn (the fence of `is_live`: see `loom_items.rs`),
/// show with two; three takes minutes where a
/// sampler reads a dozen words.
fn model(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

/// A tree in which the given slots are live, and their generation.
fn tree_with(items: &[(u32, u64)]) -> Arc<Tree> {
    let tree = Tree::new(LEAVES, 0);
    for &(slot, units) in items {
        assert_eq!(tree.activate(slot, units), 1);
    }
    Arc::new(tree)
}

/// Runs `run` on the tree in a thread of its own.
fn spawn(tree: &Arc<Tree>, run: impl FnOnce(&Tree) + 'static) -> thread::JoinHandle<()> {
    let tree = Arc::clone(tree);
    thread::spawn(move || run(&tree))
}

/// Samples once.
fn sample(tree: &Tree) -> Option<SampledLeaf> {
    let mut sampled = Vec::new();
    tree.sample_batch(&[0.6], &mut sampled);
    sampled.pop()
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Writers in one node, one of them with a batch that names its item twice, while a sampler samples: a sampled leaf has
/// a priority that some writer gave it, and at rest every sum is the sum of its children.
fn sums_are_conserved() {
    model(2, || {
        let tree = tree_with(&[(0, 3), (1, 5)]);
        join([
            spawn(&tree, |tree| assert!(tree.set(0, 1, 1))),
            spawn(&tree, |tree| {
                let update = |slot, units| Update { slot, generation: 1, units };
                let updates = [update(1, 7), update(1, 2)];
                assert_eq!(tree.set_batch(&updates), 2);
            }),
            spawn(&tree, |tree| {
                let item = sample(tree).expect("there is mass at all times");
                let given: &[u64] = [&[3, 1][..], &[5, 7, 2]][item.slot as usize];
                assert!(given.contains(&item.units) && item.generation == 1);
            }),
        ]);
        tree.check_at_rest().unwrap();
        assert_eq!((tree.units(0, 1), tree.units(1, 1)), (Some(1), Some(2)));
        assert_eq!(tree.total(), 3);
    });
}

/// The same without a sampler, where more can be explored: a batch that is merged at every level above the leaves,
/// an item that ends, and one that comes.
fn batches_are_conserved() {
    model(3, || {
        let tree = tree_with(&[(0, 3), (1, 5), (4, 2)]);
        join([
            spawn(&tree, |tree| {
                let updates = [(0, 1), (4, 8), (1, 2)].map(|(slot, units)| Update { slot, generation: 1, units });
                let applied = tree.set_batch(&updates);
                assert!(applied == 3 || applied == 2 && !tree.is_live(1, 1));
            }),
            spawn(&tree, |tree| {
                assert!(tree.kill(1, 1));
                tree.activate(5, 9);
            }),
        ]);
        tree.check_at_rest().unwrap();
        assert_eq!(tree.total(), 1 + 8 + 9);
    });
}

/// A sampler that samples a leaf sees what was written before the leaf went live, also when another writer has
/// changed the leaf since.
fn a_sampled_leaf_is_published() {
    model(2, || {
        let tree = tree_with(&[]);
        let metadata = Arc::new(UnsafeCell::new(0));
        join([
            spawn(&tree, {
                let metadata = Arc::clone(&metadata);
                move |tree| {
                    // SAFETY: nobody reads before the leaf is live; loom checks it.
                    metadata.with_mut(|metadata| unsafe { *metadata = 42 });
                    tree.activate(5, 3);
                }
            }),
            spawn(&tree, |tree| {
                tree.set(5, 1, 4);
            }),
            spawn(&tree, move |tree| {
                if let Some(item) = sample(tree) {
                    assert_eq!(item.slot, 5);
                    // SAFETY: nobody writes after the leaf is live; loom checks it.
                    assert_eq!(metadata.with(|metadata| unsafe { *metadata }), 42);
                }
            }),
        ]);
        tree.check_at_rest().unwrap();
    });
}

/// An update that comes after the item's end never reaches the next item in its slot.
fn a_late_update_fails() {
    model(3, || {
        let tree = tree_with(&[(2, 3)]);
        join([
            spawn(&tree, |tree| {
                assert!(tree.kill(2, 1));
                assert_eq!(tree.activate(2, 6), 3);
            }),
            spawn(&tree, |tree| {
                if !tree.set(2, 1, 100) {
                    assert!(!tree.is_live(2, 1));
                }
            }),
        ]);
        assert!(!tree.set(2, 1, 100));
        assert_eq!((tree.units(2, 1), tree.units(2, 3)), (None, Some(6)));
        tree.check_at_rest().unwrap();
        assert_eq!(tree.total(), 6);
    });
}

#[test]
fn at_rest_every_sum_is_the_sum_of_its_children() {
    sums_are_conserved();
    batches_are_conserved();
}

#[test]
#[should_panic = "its children's"]
fn a_lost_delta_is_found() {
    plant(Some("LostDelta"));
    sums_are_conserved();
}

#[test]
fn metadata_is_seen_by_who_samples_the_leaf() {
    a_sampled_leaf_is_published();
}

#[test]
#[should_panic = "Causality violation"]
fn a_relaxed_publication_is_found() {
    plant(Some("RelaxedPublication"));
    a_sampled_leaf_is_published();
}

/// A sample begins while the tree has no mass, and a restart finds the first.
fn mass_arrives_during_a_sample() {
    model(2, || {
        let tree = tree_with(&[(0, 0)]);
        join([
            spawn(&tree, |tree| assert!(tree.set(0, 1, 5))),
            spawn(&tree, |tree| {
                let mut sampled = Vec::new();
                let total = tree.sample_batch(&[0.6], &mut sampled);
                assert!(sampled.is_empty() || total == 5, "a leaf of no total");
            }),
        ]);
    });
}

#[test]
fn a_sample_returns_the_total_of_its_leaves() {
    mass_arrives_during_a_sample();
}

#[test]
#[should_panic = "a leaf of no total"]
fn a_total_of_before_the_restart_is_found() {
    plant(Some("StaleTotal"));
    mass_arrives_during_a_sample();
}

#[test]
fn an_update_of_an_evicted_item_does_not_hit_the_newcomer() {
    a_late_update_fails();
}

#[test]
#[should_panic = "its children's"]
fn a_blind_update_is_found() {
    plant(Some("BlindUpdate"));
    a_late_update_fails();
}

#[test]
fn one_caller_ends_an_item() {
    model(3, || {
        let tree = tree_with(&[(0, 3), (1, 1)]);
        let ended = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let end = |ended: &Arc<std::sync::atomic::AtomicU32>| {
            let ended = Arc::clone(ended);
            move |tree: &Tree| {
                ended.fetch_add(u32::from(tree.kill(0, 1)), Ordering::Relaxed);
            }
        };
        let set = |tree: &Tree| {
            tree.set(0, 1, 9);
        };
        join([spawn(&tree, end(&ended)), spawn(&tree, end(&ended)), spawn(&tree, set)]);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        tree.check_at_rest().unwrap();
        assert_eq!(tree.total(), 1);
    });
}

/// Who ends an item, or finds it live, sees its metadata.
#[test]
fn metadata_is_seen_by_who_ends_the_item() {
    for ends in [true, false] {
        model(3, move || {
            let tree = tree_with(&[]);
            let metadata = Arc::new(UnsafeCell::new(0));
            join([
                spawn(&tree, {
                    let metadata = Arc::clone(&metadata);
                    move |tree| {
                        // SAFETY: nobody reads before the leaf is live; loom checks it.
                        metadata.with_mut(|metadata| unsafe { *metadata = 42 });
                        tree.activate(5, 3);
                    }
                }),
                spawn(&tree, move |tree| {
                    let seen = if ends { tree.kill(5, 1) } else { tree.is_live(5, 1) };
                    if seen {
                        // SAFETY: nobody writes after the leaf is live; loom checks it.
                        assert_eq!(metadata.with(|metadata| unsafe { *metadata }), 42);
                    }
                }),
            ]);
        });
    }
}

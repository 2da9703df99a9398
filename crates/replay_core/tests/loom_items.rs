//! The items of a table under loom: sample, pin and check against the end and the reuse of a slot.
//! `cargo test -p replay_core --features loom --test loom_items`.
//!
//! Each property is checked as it is, and again with every fault put in that has to break it.
#![cfg(feature = "loom")]
// Loom's cells are not `Sync`: loom itself checks how they are shared.
#![allow(clippy::arc_with_non_send_sync)]

use std::sync::Arc;

use base::planted::plant;
use replay_core::slab::{Handle, Slab};
use replay_core::sync::thread;
use replay_core::table::ids::{IdSpace, ItemId};
use replay_core::table::items::{Claim, ItemRows, Items};

/// Loom switches away from a thread that could continue at most this often in one execution. The faults below
/// show with two.
const PREEMPTIONS: usize = 2;

/// Runs a model in which readers are spawned last: what that is good for is said in `loom_sum_tree.rs`.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

/// One slot for items, and a chunk for each of the two that take it in turn: the item of generation 1, then that of
/// generation 3. All about an item is its generation: the chunk's value, the first row, the step of its birth.
struct Memory {
    items: Items,
    chunks: Slab<u64>,
    handles: [Handle; 2],
}

const OLD: ItemId = ItemId { slot: 0, generation: 1 };
const NEW: ItemId = ItemId { slot: 0, generation: 3 };

impl Memory {
    /// Without an item. The chunks are there from the start, so that the publication of a chunk does not help that of an item.
    fn new(max_times_sampled: u32) -> Self {
        let chunks = Slab::new(2);
        Memory {
            items: Items::new(IdSpace::of(0, 0), 1, 0, max_times_sampled),
            handles: [OLD, NEW].map(|id| chunks.insert(id.generation.into()).unwrap()),
            chunks,
        }
    }

    fn with_the_old_item(max_times_sampled: u32) -> Arc<Self> {
        let memory = Memory::new(max_times_sampled);
        assert!(memory.insert(OLD));
        Arc::new(memory)
    }

    /// Makes the item that is to have this id; false when the slot is not free.
    fn insert(&self, id: ItemId) -> bool {
        let oldest = self.handles[usize::from(id == NEW)];
        let rows = ItemRows { first_row: id.generation, before: 0, after: 0 };
        let inserted = self.items.insert(oldest, rows, id.generation.into(), 0, 1);
        assert!(inserted.is_none_or(|inserted| inserted == id));
        inserted.is_some()
    }

    /// Samples once, in the order of steps of `table/sample.rs`: all words are of the sampled item.
    fn take(&self) -> Option<(ItemId, Claim)> {
        let mut sampled = Vec::new();
        self.items.tree.sample_batch(&[0.0], &mut sampled);
        let leaf = sampled.pop()?;
        let id = ItemId { slot: leaf.slot, generation: leaf.generation };
        let metadata = self.items.metadata(id.slot);
        let chunk = self.chunks.pin(metadata.oldest)?;
        if !self.items.confirm(id) {
            return None;
        }
        let taken = [metadata.rows.first_row.into(), metadata.born, *chunk];
        assert_eq!(taken, [u64::from(id.generation); 3], "of another item");
        let claim = self.items.claim(id, &metadata, leaf.units)?;
        Some((id, claim))
    }
}

fn spawn<R: 'static>(memory: &Arc<Memory>, run: impl FnOnce(&Memory) -> R + 'static) -> thread::JoinHandle<R> {
    let memory = Arc::clone(memory);
    thread::spawn(move || run(&memory))
}

/// An item is evicted, a newcomer takes its slot, and then its chunk goes, while a reader samples.
fn a_slot_is_reused_under_a_sample() {
    model(|| {
        let memory = Memory::with_the_old_item(0);
        let evictor = spawn(&memory, |memory| {
            assert!(memory.items.kill(OLD));
            assert!(memory.insert(NEW));
            assert!(memory.chunks.retire(memory.handles[0]));
        });
        let reader = spawn(&memory, |memory| memory.take().map(|(id, _)| id));
        evictor.join().unwrap();
        let earlier = u32::from(reader.join().unwrap() == Some(NEW));
        let (_, claim) = memory.take().expect("the newcomer is live");
        assert_eq!(claim.times_sampled, earlier + 1, "samples of another item");
    });
}

#[test]
fn what_a_sample_takes_is_all_of_the_sampled_item() {
    a_slot_is_reused_under_a_sample();
}

#[test]
#[should_panic = "of another item"]
fn metadata_in_no_order_are_found() {
    plant(Some("UnorderedMetadata"));
    a_slot_is_reused_under_a_sample();
}

#[test]
#[should_panic = "of another item"]
fn a_pin_without_the_check_after_it_is_found() {
    plant(Some("UnconfirmedPin"));
    a_slot_is_reused_under_a_sample();
}

#[test]
#[should_panic = "of another item"]
fn a_relaxed_publication_is_found() {
    plant(Some("RelaxedPublication"));
    a_slot_is_reused_under_a_sample();
}

#[test]
#[should_panic = "samples of another item"]
fn a_claim_that_counts_for_the_newcomer_is_found() {
    plant(Some("ForeignClaim"));
    a_slot_is_reused_under_a_sample();
}

/// The reader that takes an item's last sample ends it, and hands its slot to a writer in another thread.
fn the_last_sample_frees_the_slot() {
    model(|| {
        let memory = Memory::with_the_old_item(1);
        let writer = spawn(&memory, |memory| memory.insert(NEW));
        let readers = [(); 2].map(|()| {
            spawn(&memory, |memory| {
                memory.take().map(|(id, claim)| {
                    memory.items.settle(&claim);
                    id
                })
            })
        });
        let inserted = writer.join().unwrap();
        let taken = readers.map(|reader| reader.join().unwrap());
        assert!(taken.contains(&Some(OLD)));
        assert_ne!(taken[0], taken[1], "an item was sampled twice");
        let left = u64::from(inserted && !taken.contains(&Some(NEW)));
        assert_eq!(memory.items.live(), left);
        assert_eq!(memory.take().is_some(), left == 1);
    });
}

#[test]
fn a_slot_is_handed_on_by_its_last_sample() {
    the_last_sample_frees_the_slot();
}

/// A reader that has reserved a sample finds its mass in the tree.
fn a_reserved_sample_has_its_mass() {
    model(|| {
        let memory = Arc::new(Memory::new(1));
        let writer = spawn(&memory, |memory| assert!(memory.insert(OLD)));
        let reader = spawn(&memory, |memory| {
            if memory.items.reserve_samples(1, false).is_ok() {
                assert!(memory.take().is_some(), "a sample without mass");
            }
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn mass_is_seen_by_who_reserves_a_sample() {
    a_reserved_sample_has_its_mass();
}

#[test]
#[should_panic = "a sample without mass"]
fn samples_that_come_before_their_mass_are_found() {
    plant(Some("EarlySamples"));
    a_reserved_sample_has_its_mass();
}

/// A batch takes an item's last sample, with its mass, and gives it back.
fn a_batch_is_undone() {
    model(|| {
        let memory = Memory::with_the_old_item(1);
        let batch = spawn(&memory, |memory| {
            let Memory { items, .. } = memory;
            items.begin_batch();
            let claim = items.claim(OLD, &items.metadata(OLD.slot), 1).unwrap();
            items.undo(&claim);
            items.end_batch();
        });
        let other = spawn(&memory, |memory| {
            assert!(!memory.items.without_mass(0), "the batch has the mass");
        });
        batch.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn mass_that_a_batch_may_give_back_is_not_missed() {
    a_batch_is_undone();
}

#[test]
#[should_panic = "the batch has the mass"]
fn a_batch_that_begins_between_the_looks_is_found() {
    plant(Some("OneLook"));
    a_batch_is_undone();
}

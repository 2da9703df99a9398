//! The order of insertion under loom: one writer appends over ids that readers walk and drop.
//! `cargo test -p replay_core --features loom --test loom_order`.
//!
//! Each property is checked as it is, and again with every fault put in that has to break it.
#![cfg(feature = "loom")]

use std::sync::Arc;

use replay_core::sync::fault::{Fault, inject};
use replay_core::sync::{AtomicU64, Ordering, thread};
use replay_core::table::ids::ItemId;
use replay_core::table::order::InsertionOrder;

/// Runs a model whose readers are spawned last; `loom_sum_tree.rs` gives the reason.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

/// A ring of two positions, and the number of the first ids that are dead. The id at a position is of the slot of that
/// number.
struct Memory {
    order: InsertionOrder,
    dead: AtomicU64,
}

fn id(position: u64) -> ItemId {
    ItemId { slot: position as u32, generation: 1 }
}

impl Memory {
    fn with_ids(ids: u64) -> Arc<Self> {
        let order = InsertionOrder::new(1);
        (0..ids).for_each(|position| order.append(id(position)));
        Arc::new(Memory { order, dead: AtomicU64::new(0) })
    }

    fn is_live(&self, id: ItemId) -> bool {
        // The word of a position that was never written is of no item.
        id.generation == 1 && u64::from(id.slot) >= self.dead.load(Ordering::Acquire)
    }

    fn first(&self) -> Option<(u64, ItemId)> {
        self.order.first_live(0, |id| self.is_live(id))
    }

    /// Appends the id at `position`, if there is room.
    fn append(&self, position: u64) -> bool {
        let room = self.order.has_room(1, |id| self.is_live(id));
        if room {
            self.order.append(id(position));
        }
        room
    }
}

fn spawn(memory: &Arc<Memory>, run: impl FnOnce(&Memory) + 'static) -> thread::JoinHandle<()> {
    let memory = Arc::clone(memory);
    thread::spawn(move || run(&memory))
}

fn read(memory: &Memory) {
    if let Some((position, found)) = memory.first() {
        assert_eq!(found, id(position), "the id of another position");
    }
}

/// The first id dies, and another is written over it, while a reader looks for the first live one.
fn a_position_is_reused_under_a_reader() {
    model(|| {
        let memory = Memory::with_ids(2);
        let writer = spawn(&memory, |memory| {
            memory.dead.store(1, Ordering::Release);
            assert!(memory.append(2));
        });
        let reader = spawn(&memory, read);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(memory.first(), Some((1, id(1))));
    });
}

/// Readers drop a dead id from the front while a live one is appended behind it.
fn keys_are_dropped_and_appended() {
    model(|| {
        let memory = Memory::with_ids(1);
        memory.dead.store(1, Ordering::Release);
        let writer = spawn(&memory, |memory| assert!(memory.append(1)));
        let readers = [(); 2].map(|()| spawn(&memory, read));
        writer.join().unwrap();
        readers.into_iter().for_each(|r| r.join().unwrap());
        assert_eq!(memory.first(), Some((1, id(1))), "a live id was dropped");
    });
}

#[test]
fn a_reader_finds_the_key_of_its_position() {
    a_position_is_reused_under_a_reader();
}

#[test]
#[should_panic = "the id of another position"]
fn a_key_without_the_check_after_it_is_found() {
    inject(Fault::StaleHead);
    a_position_is_reused_under_a_reader();
}

#[test]
fn only_dead_keys_are_dropped() {
    keys_are_dropped_and_appended();
}

#[test]
#[should_panic = "a live id was dropped"]
fn an_end_that_is_published_before_its_key_is_found() {
    inject(Fault::EarlyTail);
    keys_are_dropped_and_appended();
}

#[test]
#[should_panic = "a live id was dropped"]
fn two_readers_that_drop_one_key_are_found() {
    inject(Fault::BlindSkip);
    keys_are_dropped_and_appended();
}

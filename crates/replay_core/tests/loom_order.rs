//! The order of insertion under loom: one writer appends over keys that readers walk and drop.
//! `cargo test -p replay_core --features loom --test loom_order`.
//!
//! Each property is checked as it is, and again with every fault put in that has to break it.
#![cfg(feature = "loom")]

use std::sync::Arc;

use replay_core::sync::fault::{Fault, inject};
use replay_core::sync::{AtomicU64, Ordering, thread};
use replay_core::table::keys::ItemKey;
use replay_core::table::order::InsertionOrder;

/// Runs a model whose readers are spawned last; `loom_sum_tree.rs` gives the reason.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

/// A ring of two positions, and the number of the first keys that are dead. The key at a position is of the slot of that
/// number.
struct Memory {
    order: InsertionOrder,
    dead: AtomicU64,
}

fn key(position: u64) -> ItemKey {
    ItemKey {
        slot: position as u32,
        generation: 1,
    }
}

impl Memory {
    fn with_keys(keys: u64) -> Arc<Self> {
        let order = InsertionOrder::new(1);
        (0..keys).for_each(|position| order.append(key(position)));
        Arc::new(Memory {
            order,
            dead: AtomicU64::new(0),
        })
    }

    fn is_live(&self, key: ItemKey) -> bool {
        // The word of a position that was never written is of no item.
        key.generation == 1 && u64::from(key.slot) >= self.dead.load(Ordering::Acquire)
    }

    fn first(&self) -> Option<(u64, ItemKey)> {
        self.order.first_live(0, |key| self.is_live(key))
    }

    /// Appends the key at `position`, if there is room.
    fn append(&self, position: u64) -> bool {
        let room = self.order.has_room(1, |key| self.is_live(key));
        if room {
            self.order.append(key(position));
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
        assert_eq!(found, key(position), "the key of another position");
    }
}

/// The first key dies, and another is written over it, while a reader looks for the first live one.
fn a_position_is_reused_under_a_reader() {
    model(|| {
        let memory = Memory::with_keys(2);
        let writer = spawn(&memory, |memory| {
            memory.dead.store(1, Ordering::Release);
            assert!(memory.append(2));
        });
        let reader = spawn(&memory, read);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(memory.first(), Some((1, key(1))));
    });
}

/// Readers drop a dead key from the front while a live one is appended behind it.
fn keys_are_dropped_and_appended() {
    model(|| {
        let memory = Memory::with_keys(1);
        memory.dead.store(1, Ordering::Release);
        let writer = spawn(&memory, |memory| assert!(memory.append(1)));
        let readers = [(); 2].map(|()| spawn(&memory, read));
        writer.join().unwrap();
        readers.into_iter().for_each(|r| r.join().unwrap());
        assert_eq!(memory.first(), Some((1, key(1))), "a live key was dropped");
    });
}

#[test]
fn a_reader_finds_the_key_of_its_position() {
    a_position_is_reused_under_a_reader();
}

#[test]
#[should_panic = "the key of another position"]
fn a_key_without_the_check_after_it_is_found() {
    inject(Fault::StaleHead);
    a_position_is_reused_under_a_reader();
}

#[test]
fn only_dead_keys_are_dropped() {
    keys_are_dropped_and_appended();
}

#[test]
#[should_panic = "a live key was dropped"]
fn an_end_that_is_published_before_its_key_is_found() {
    inject(Fault::EarlyTail);
    keys_are_dropped_and_appended();
}

#[test]
#[should_panic = "a live key was dropped"]
fn two_readers_that_drop_one_key_are_found() {
    inject(Fault::BlindSkip);
    keys_are_dropped_and_appended();
}

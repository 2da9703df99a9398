//! The slab under loom: pins against the end and the reuse of a slot.
//! `cargo test -p replay_core --features loom --test loom_slab`.
#![cfg(feature = "loom")]

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use base::planted::plant;
use replay_core::slab::{Handle, Slab};
use replay_core::sync::{Ordering, UnsafeCell, thread};

/// Loom switches away from a thread that could continue at most this often in one execution. Every ordering and every
/// exchange of the slab that was weakened in turn showed with two; three takes minutes with three threads.
const PREEMPTIONS: usize = 2;

/// Runs a model in which readers are spawned last and the main thread only joins: what that is good for is said in
/// `loom_sum_tree.rs`.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

/// A value that loom watches: reading it while, or after, it is dropped is a causality violation.
struct Watched {
    content: UnsafeCell<u32>,
    drops: Arc<AtomicU32>,
}

impl Watched {
    fn new(content: u32, drops: &Arc<AtomicU32>) -> Self {
        Watched { content: UnsafeCell::new(content), drops: Arc::clone(drops) }
    }

    fn read(&self) -> u32 {
        // SAFETY: the content is written by `drop` alone; loom checks that no read is concurrent with it.
        self.content.with(|content| unsafe { *content })
    }
}

// SAFETY: what the models share is only read until it is dropped; loom checks it.
unsafe impl Sync for Watched {}

impl Drop for Watched {
    fn drop(&mut self) {
        // A model that has failed is gone when its values are dropped.
        if !std::thread::panicking() {
            // SAFETY: a value is dropped by who has it alone; loom checks it.
            self.content.with_mut(|content| unsafe { *content = u32::MAX });
            self.drops.fetch_add(1, Ordering::Relaxed);
        }
    }
}

type Chunks = Arc<Slab<Watched>>;

fn spawn<R: 'static>(slab: &Chunks, run: impl FnOnce(&Chunks) -> R + 'static) -> thread::JoinHandle<R> {
    let slab = Arc::clone(slab);
    thread::spawn(move || run(&slab))
}

/// Reads the value if it can be pinned.
fn read(slab: &Chunks, handle: Handle) -> Option<u32> {
    slab.pin(handle).map(|value| value.read())
}

/// A pinned value stays while its slot is retired and its place is wanted for another.
fn a_pin_keeps_the_value() {
    model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let slab = Arc::new(Slab::new(1));
        let old = slab.insert(Watched::new(7, &drops)).ok().unwrap();
        let evictor = spawn(&slab, {
            let drops = Arc::clone(&drops);
            move |slab| {
                assert!(slab.retire(old));
                slab.insert(Watched::new(8, &drops)).ok()
            }
        });
        let reader = spawn(&slab, move |slab| read(slab, old));
        let seen = reader.join().unwrap();
        assert!([None, Some(7)].contains(&seen), "read another value");
        let new = evictor.join().unwrap();
        assert_eq!(read(&slab, old), None);
        if let Some(new) = new {
            assert_ne!(new, old);
            assert_eq!(read(&slab, new), Some(8));
        }
        drop(slab);
        // The old value, and the new one: handed back by a full slab, or dropped with it.
        assert_eq!(drops.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn a_pinned_value_outlives_its_slot() {
    a_pin_keeps_the_value();
}

#[test]
#[should_panic = "read another value"]
fn a_pin_counted_after_the_look_is_found() {
    plant(Some("LateCount"));
    a_pin_keeps_the_value();
}

#[test]
fn the_last_of_several_pins_drops_the_value_once() {
    model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let slab = Arc::new(Slab::new(1));
        let handle = slab.insert(Watched::new(7, &drops)).ok().unwrap();
        let evictor = spawn(&slab, move |slab| assert!(slab.retire(handle)));
        let readers = [(); 2].map(|()| spawn(&slab, move |slab| read(slab, handle)));
        evictor.join().unwrap();
        for reader in readers {
            assert!([None, Some(7)].contains(&reader.join().unwrap()));
        }
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        // The slot is free again.
        assert!(slab.insert(Watched::new(8, &drops)).is_ok());
    });
}

#[test]
fn one_caller_retires_a_value() {
    model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let slab = Arc::new(Slab::new(1));
        let handle = slab.insert(Watched::new(7, &drops)).ok().unwrap();
        let others = [(); 2].map(|()| spawn(&slab, move |slab| slab.retire(handle)));
        let retired = others.map(|other| other.join().unwrap());
        assert_ne!(retired[0], retired[1]);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

/// Who pins a value sees it whole, however it came by the handle.
#[test]
fn a_pinned_value_is_published() {
    model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let slab = Arc::new(Slab::new(1));
        // Handles are guessed, so that nothing but the pin orders the reader after the writer.
        let handle = Handle { slot: 0, generation: 0 };
        let writer = spawn(&slab, move |slab| {
            assert_eq!(slab.insert(Watched::new(7, &drops)).ok(), Some(handle));
        });
        let reader = spawn(&slab, move |slab| read(slab, handle));
        writer.join().unwrap();
        assert!([None, Some(7)].contains(&reader.join().unwrap()));
        assert_eq!(read(&slab, handle), Some(7));
    });
}

/// Slots go back and forth between two threads: none is lost and none has two owners, also where one leaves the
/// list of free slots and comes back to its head while another thread is about to take it.
#[test]
fn free_slots_change_hands() {
    model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let slab = Arc::new(Slab::new(2));
        let user = |retires_first: bool| {
            let drops = Arc::clone(&drops);
            move |slab: &Chunks| {
                let insert = || slab.insert(Watched::new(1, &drops)).ok();
                let (first, second) = (insert(), insert());
                if let Some(first) = first.filter(|_| retires_first) {
                    assert!(slab.retire(first));
                }
                if let Some(second) = second {
                    assert_eq!(read(slab, second), Some(1));
                }
            }
        };
        let users = [spawn(&slab, user(true)), spawn(&slab, user(false))];
        for user in users {
            user.join().unwrap();
        }
        drop(slab);
        assert_eq!(drops.load(Ordering::Relaxed), 4);
    });
}

//! Several threads on one table: what they read is right, what they count adds up.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use replay_core::TableConfig;
use replay_core::replay::SampleRequest;
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Turn};

use crate::support::*;

/// How often something is done: less often in Miri, which takes some thousand times as long.
const fn rounds(most: u64) -> u64 {
    if cfg!(miri) { most / 50 } else { most }
}

/// Pushes of stream 0 to 3 with windows that span chunks, one for each of `rounds`.
fn write(actor: &mut Actor, rounds: std::ops::Range<u64>) {
    for round in rounds {
        let (first, rows) = (round * 5, 5);
        let mut body = (0..4).fold(Body::default(), |body, s| body.chunk(s, first, rows));
        for stream in 0..4 {
            for anchor in first.saturating_sub(3)..first + 2 {
                let before = anchor.min(3) as u16;
                body = body.window(stream, anchor, (before, 3), Some((anchor % 9) as f32));
            }
        }
        while let Attempt::Blocked(_) = actor.try_push(body.clone()).unwrap() {
            thread::yield_now();
        }
    }
}

#[test]
fn batches_stay_right_while_the_table_turns_over_under_them() {
    // A few hundred steps: the table is replaced many times while batches are held.
    let table = table(&TableConfig { capacity_bytes: 60_000, ..config(300) });
    let done = AtomicBool::new(false);
    let sampled = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let asked = SampleRequest { before: 3, after: 3, ..request(16) };
                    let mut held = std::collections::VecDeque::new();
                    let mut sampled = 0;
                    // On a busy machine the writers may end before this thread has begun.
                    while sampled == 0 || !done.load(Ordering::Acquire) {
                        match table.try_sample(&asked, false, &mut Turn::default()) {
                            Ok(Attempt::Ready(batch)) => {
                                sampled += windows(&batch).len();
                                held.push_back(batch);
                            }
                            // What the readers hold may be all that the limit allows: then nothing is live.
                            Ok(Attempt::Blocked(_)) => drop(held.pop_front()),
                            Err(error) => panic!("{error}"),
                        }
                        if held.len() > 3 {
                            let old = held.pop_front().unwrap();
                            windows(&old);
                            let n = old.items.len();
                            table.update_priorities(&ids(&old), &vec![2.0; n]).unwrap();
                        }
                    }
                    held.iter().for_each(|batch| drop(windows(batch)));
                    sampled
                })
            })
            .collect();
        let writers: Vec<_> = (1..=2)
            .map(|writer| {
                let table = &table;
                scope.spawn(move || write(&mut Actor::open(table, writer), 0..rounds(400)))
            })
            .collect();
        writers.into_iter().for_each(|w| w.join().unwrap());
        done.store(true, Ordering::Release);
        readers.into_iter().map(|r| r.join().unwrap()).sum::<usize>()
    });
    assert_eq!(stat(&table, "inserted_steps"), 2 * rounds(400) * 20);
    assert_eq!(stat(&table, "sampled_items"), sampled as u64);
    assert_eq!(stat(&table, "pinned_bytes"), 0);
    assert!(stat(&table, "bytes") <= 60_000);
    table.check_at_rest().unwrap();
}

#[test]
fn a_key_names_one_item_however_fast_its_slot_is_used_again() {
    // Eight slots that go to a new item with every push.
    let table = table(&config(8));
    let named = Mutex::new(HashMap::new());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                // On a busy machine the writer may end before this thread has begun: one more sample follows its end.
                let (mut last, mut sampled) = (false, 0);
                while !last {
                    last = done.load(Ordering::Acquire);
                    let Attempt::Ready(batch) = table.try_sample(&request(64), false, &mut Turn::default()).unwrap()
                    else {
                        continue;
                    };
                    sampled += 1;
                    let mut named = named.lock().unwrap();
                    for (item, step) in batch.items.iter().zip(anchors(&batch)) {
                        let known = *named.entry(item.id).or_insert(step);
                        assert_eq!(known, step, "what id {:#x} names", item.id);
                    }
                }
                assert!(sampled > 0);
            });
        }
        let mut actor = Actor::open(&table, 1);
        for _ in 0..if cfg!(miri) { 40 } else { 20_000 } {
            // Blocked while the readers hold more than the table may.
            while let Attempt::Blocked(_) = actor.try_push(actor.next(1)).unwrap() {
                thread::yield_now();
            }
            actor.next_step += 1;
        }
        done.store(true, Ordering::Release);
    });
    table.check_at_rest().unwrap();
}

#[test]
fn no_item_is_sampled_more_often_than_it_may_be() {
    const MOST: u32 = 3;
    const ITEMS: u32 = rounds(500) as u32;
    for sampler in [
        Sampler::Prioritized,
        Sampler::Uniform,
        Sampler::Fifo,
        Sampler::Lifo,
        Sampler::MaxHeap,
        Sampler::MinHeap,
        Sampler::RankBased,
    ] {
        let table = table(&TableConfig { sampler, max_times_sampled: MOST, ..config(u64::from(2 * ITEMS)) });
        let counts = Mutex::new(HashMap::new());
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    // A reader that finds no sample left is done.
                    while stat(&table, "sampled_items") < u64::from(ITEMS * MOST) {
                        let asked = SampleRequest { allow_short: true, ..request(7) };
                        let Attempt::Ready(mut batch) = table.try_sample(&asked, true, &mut Turn::default()).unwrap()
                        else {
                            thread::yield_now();
                            continue;
                        };
                        deliver(&mut batch);
                        // Some have a sample left.
                        let priorities: Vec<_> = (0..batch.items.len()).map(|i| 1.0 + i as f64).collect();
                        table.update_priorities(&ids(&batch), &priorities).unwrap();
                        let mut counts = counts.lock().unwrap();
                        for (item, step) in batch.items.iter().zip(anchors(&batch)) {
                            assert!(item.times_sampled <= MOST);
                            *counts.entry(step).or_insert(0u32) += 1;
                        }
                    }
                });
            }
            let mut actor = Actor::open(&table, 1);
            (0..ITEMS / 10).for_each(|_| actor.push_next(10));
        });
        let counts = counts.into_inner().unwrap();
        assert_eq!(counts.len(), ITEMS as usize);
        assert!(counts.values().all(|&n| n == MOST), "{sampler:?}");
        assert_eq!(stat(&table, "items"), 0);
        table.check_at_rest().unwrap();
    }
}

#[test]
fn a_table_is_emptied_under_its_writers_and_readers() {
    let table_memory = memory();
    let table = table_memory.create_table(&config(300)).unwrap();
    let (written, done) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let asked = SampleRequest { before: 3, after: 3, ..request(8) };
            // The last sample is of a table that is emptied no more.
            let (mut last, mut sampled) = (false, 0);
            while !last {
                last = done.load(Ordering::Acquire);
                // The few items there are may all have priority 0.
                if let Ok(Attempt::Ready(batch)) = table.try_sample(&asked, false, &mut Turn::default()) {
                    sampled += windows(&batch).len();
                }
            }
            assert!(sampled > 0);
        });
        let emptier = scope.spawn(|| {
            let mut last = false;
            while !last {
                last = written.load(Ordering::Acquire);
                table_memory.empty_table("t").unwrap();
                thread::yield_now();
            }
        });
        let mut actor = Actor::open(&table, 1);
        write(&mut actor, 0..rounds(300));
        written.store(true, Ordering::Release);
        emptier.join().unwrap();
        write(&mut actor, rounds(300)..rounds(300) + 10);
        done.store(true, Ordering::Release);
    });
    table.check_at_rest().unwrap();
    table_memory.empty_table("t").unwrap();
    assert_eq!((stat(&table, "items"), stat(&table, "bytes")), (0, 0));
    table.check_at_rest().unwrap();
}

//! Whole tables under random schedules: `cargo test -p replay_core --features shuttle --test schedules`.
//!
//! Each test runs `INNET_SCHEDULES` schedules (2,000), half of them random, half by PCT (Burckhardt et al., 2010), which finds a mistake
//! that takes few preemptions with a known probability. A failure prints its schedule; `INNET_SCHEDULE='...'` runs that one alone.
#![cfg(feature = "shuttle")]

#[allow(dead_code, reason = "the tests of the memory use more of it")]
#[path = "memory/support.rs"]
mod support;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::planted::plant;
use base::wait::Wait;
use bytes::Bytes;
use replay_core::memory::Memory;
use replay_core::replay::{ChangeLease, OpenWriter, PushChannel, Replay, SampleRequest, Sampled};
use replay_core::schema::Sampler;
use replay_core::slab::Slab;
use replay_core::sync::thread::{self, JoinHandle};
use replay_core::table::{Attempt, Table, Turn};
use replay_core::{Error, Result, TableConfig, snapshot};
use safetensors::tensor::TensorView;
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, Runner};

use support::*;

/// Preemptions that PCT looks for.
const DEPTH: usize = 3;

fn schedules() -> usize {
    let set = std::env::var("INNET_SCHEDULES").ok();
    set.map_or(2000, |count| count.parse().expect("INNET_SCHEDULES is a number"))
}

/// Runs a model under many schedules, or under the one of `INNET_SCHEDULE`.
fn check(model: fn()) {
    if let Ok(schedule) = std::env::var("INNET_SCHEDULE") {
        return run(ReplayScheduler::new_from_encoded(&schedule), model);
    }
    let half = schedules() / 2;
    run(RandomScheduler::new(half), model);
    run(PctScheduler::new(DEPTH, half), model);
}

fn run(scheduler: impl Scheduler + 'static, model: fn()) {
    Runner::new(scheduler, configuration()).run(model);
}

fn configuration() -> Config {
    let mut config = Config::new();
    config.stack_size = 1 << 18;
    config.silence_warnings = true;
    config
}

/// The model fails with the fault.
fn finds(mistake: &'static str, model: fn()) {
    plant(Some(mistake));
    let checked = catch_unwind(|| {
        let mut config = configuration();
        config.failure_persistence = shuttle::FailurePersistence::None;
        Runner::new(RandomScheduler::new_from_seed(7, 20_000), config).run(model)
    });
    assert!(checked.is_err(), "{mistake} is not found");
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What each id named, and steps that may no longer be sampled.
#[derive(Default)]
struct Ledger {
    named: Mutex<HashMap<u64, (u32, u64)>>,
    /// Steps pushed by writers 1 and 2.
    pushed: [AtomicU64; 2],
    /// First steps that may be sampled: those before were removed.
    first: [AtomicU64; 2],
}

impl Ledger {
    /// First steps that a sample may have which begins now.
    fn first(&self) -> [u64; 2] {
        [0, 1].map(|writer| self.first[writer].load(Ordering::SeqCst))
    }

    /// A sampled batch has what its ids have always named, and no removed step.
    fn check(&self, sampled: &Sampled, first: [u64; 2]) {
        let mut named = self.named.lock().unwrap();
        for (item, window) in sampled.items.iter().zip(windows(sampled)) {
            let (stream, step) = window[usize::from(item.before)];
            let known = *named.entry(item.id).or_insert((stream, step));
            assert_eq!(known, (stream, step), "what id {:#x} names", item.id);
            assert!(step >= first[stream as usize - 1], "{stream} {step} was removed");
        }
    }
}

/// A writer of single steps: a small table has no room for windows.
fn open_one(writer: u64) -> OpenWriter {
    OpenWriter { window_before: 0, window_after: 0, ..open(writer) }
}

/// Pushes `steps` steps of the stream that has the writer's number, one at a time.
fn write(table: &Arc<Table>, writer: u64, steps: u64, ledger: &Ledger) {
    let opened = table.open_writer(&open_one(writer)).unwrap();
    let mut actor = Actor { table: table.clone(), writer, epoch: opened.epoch, sequence: 0, next_step: 0 };
    let stream = writer as u32;
    for step in 0..steps {
        let body = Body::default().chunk(stream, step, 1).item(stream, step, 1.0 + step as f32);
        let mut turn = Turn::default();
        // Blocked while readers hold more than the table may.
        while let Attempt::Blocked(_) = actor.try_push_in_turn(body.clone(), &mut turn).unwrap() {
            thread::yield_now();
        }
        ledger.pushed[writer as usize - 1].store(step + 1, Ordering::SeqCst);
    }
}

/// Samples, checks and sets priorities.
fn read(table: &Arc<Table>, batches: u32, ledger: &Ledger) {
    for _ in 0..batches {
        let first = ledger.first();
        if let Attempt::Ready(mut sampled) = table.try_sample(&request(2), false, &mut Turn::default()).unwrap() {
            ledger.check(&sampled, first);
            deliver(&mut sampled);
            table.update_priorities(&ids(&sampled), &[3.0, 2.0]).unwrap();
        }
    }
}

/// Two writers, two readers and an operator who empties the table.
fn turn_over(config: TableConfig) {
    let memory = memory();
    let table = memory.create_table(&config).unwrap();
    let ledger = Arc::new(Ledger::default());
    let writers = [1, 2].map(|writer| {
        let (table, ledger) = (table.clone(), ledger.clone());
        thread::spawn(move || write(&table, writer, 4, &ledger))
    });
    let readers = [3, 3].map(|batches| {
        let (table, ledger) = (table.clone(), ledger.clone());
        thread::spawn(move || read(&table, batches, &ledger))
    });
    let operator = {
        let (memory, ledger) = (memory.clone(), ledger.clone());
        thread::spawn(move || {
            let pushed = [0, 1].map(|writer| ledger.pushed[writer].load(Ordering::SeqCst));
            memory.empty_table("t").unwrap();
            for (first, pushed) in ledger.first.iter().zip(pushed) {
                first.store(pushed, Ordering::SeqCst);
            }
        })
    };
    join(writers.into_iter().chain(readers).chain([operator]));
    assert_eq!(stat(&table, "inserted_steps"), 8);
    assert_eq!(stat(&table, "pinned_bytes"), 0);
    table.check_at_rest().unwrap();
}

fn small() -> TableConfig {
    config(4)
}

fn of(sampler: Sampler) -> TableConfig {
    let max_times_sampled = if sampler == Sampler::Fifo { 2 } else { 0 };
    TableConfig { sampler, max_times_sampled, ..small() }
}

#[test]
fn a_prioritized_table_turns_over() {
    check(|| turn_over(small()));
}

#[test]
fn a_uniform_table_turns_over() {
    check(|| turn_over(of(Sampler::Uniform)));
}

#[test]
fn a_queue_turns_over() {
    check(|| turn_over(of(Sampler::Fifo)));
}

#[test]
fn a_heap_turns_over() {
    check(|| turn_over(of(Sampler::MaxHeap)));
}

#[test]
fn a_table_by_rank_turns_over() {
    check(|| turn_over(of(Sampler::RankBased)));
}

/// Waits without end: a notification that is lost is a deadlock.
fn push_waiting(memory: &Arc<Memory>, writer: u64, steps: u64) -> Result<()> {
    push_steps(memory.open_writer("t", open_one(writer), &Wait::forever())?, writer as u32, steps)
}

fn push_steps(mut channel: Box<dyn PushChannel>, stream: u32, steps: u64) -> Result<()> {
    let wait = Wait::forever();
    for step in 0..steps {
        let body = Body::default().chunk(stream, step, 1).item(stream, step, 1.0);
        channel.push(body.build(), &wait)?;
    }
    channel.close(&wait)
}

fn sample_waiting(memory: &Memory, request: &SampleRequest) -> Result<Sampled> {
    Replay::<Error>::sample(memory, "t", request, &Wait::forever())
}

/// Two writers and two readers, held to one sample an item; each item is sampled at most `times`.
fn hold_the_ratio(times: u32) {
    let memory = memory();
    let table = memory
        .create_table(&TableConfig { samples_per_insert: 1.0, slack: 2.0, max_times_sampled: times, ..config(16) })
        .unwrap();
    let sampled = Arc::new(Mutex::new(Vec::new()));
    let writers = [1, 2].map(|writer| {
        let memory = memory.clone();
        thread::spawn(move || push_waiting(&memory, writer, 3).unwrap())
    });
    let readers = [0; 2].map(|_| {
        let (memory, sampled) = (memory.clone(), sampled.clone());
        thread::spawn(move || {
            for _ in 0..3 {
                let mut batch = sample_waiting(&memory, &request(1)).unwrap();
                deliver(&mut batch);
                sampled.lock().unwrap().extend(ids(&batch));
            }
        })
    });
    join(writers.into_iter().chain(readers));
    let sampled = sampled.lock().unwrap();
    assert_eq!(sampled.len(), 6);
    if times == 1 {
        assert_eq!(sampled.iter().collect::<HashSet<_>>().len(), 6);
    }
    assert_eq!(stat(&table, "sampled_items"), 6);
    table.check_at_rest().unwrap();
}

#[test]
fn the_limiter_lets_everybody_through_in_the_end() {
    check(|| hold_the_ratio(0));
}

#[test]
fn items_that_are_sampled_once_are_all_sampled() {
    check(|| hold_the_ratio(1));
}

/// Two writers of a small queue and two readers, of which one leaves its first batch: each item is acknowledged once.
fn read_a_queue() {
    let memory = memory();
    let queue = TableConfig { sampler: Sampler::Fifo, max_times_sampled: 1, queue_size: 2, ..small() };
    let table = memory.create_table(&queue).unwrap();
    let acknowledged = Arc::new(Mutex::new(HashSet::new()));
    let writers = [1, 2].map(|writer| {
        let memory = memory.clone();
        thread::spawn(move || push_waiting(&memory, writer, 3).unwrap())
    });
    let readers = [vec![3], vec![0, 3]].map(|channels| {
        let (memory, acknowledged) = (memory.clone(), acknowledged.clone());
        thread::spawn(move || {
            let (replay, wait): (&dyn Replay<Error>, _) = (&*memory, Wait::forever());
            let leased = SampleRequest { lease_ms: SampleRequest::NO_END, ..request(1) };
            for count in channels {
                let mut channel = replay.samples("t", leased, 0).unwrap();
                for batch in 0..count.max(1) {
                    let mut sampled = channel.next(&wait).unwrap();
                    deliver(&mut sampled);
                    let change = |begin| replay.change_lease("t", ChangeLease { lease: sampled.lease, begin }, &wait);
                    change(true).unwrap();
                    if batch < count {
                        change(false).unwrap();
                        assert!(acknowledged.lock().unwrap().insert(ids(&sampled)[0]), "an item comes again");
                    }
                }
            }
        })
    });
    join(writers.into_iter().chain(readers));
    assert_eq!((acknowledged.lock().unwrap().len(), stat(&table, "items")), (6, 0));
    assert_eq!(stat(&table, "evicted_items"), 0);
    table.check_at_rest().unwrap();
}

#[test]
fn items_of_a_queue_are_acknowledged_once() {
    check(read_a_queue);
}

#[test]
fn waiting_calls_end_when_their_table_is_dropped() {
    check(|| {
        let memory = memory();
        memory.create_table(&small()).unwrap();
        let readers = [0; 2].map(|_| {
            let memory = memory.clone();
            thread::spawn(move || {
                let ended = sample_waiting(&memory, &request(1)).err();
                assert!(matches!(ended, Some(Error::UnknownTable { .. })), "{ended:?}");
            })
        });
        let operator = {
            let memory = memory.clone();
            thread::spawn(move || memory.drop_table("t").unwrap())
        };
        join(readers.into_iter().chain([operator]));
    });
}

#[test]
fn an_emptied_table_lets_waiting_pushes_through() {
    check(|| {
        let memory = memory();
        let table = memory.create_table(&TableConfig { samples_per_insert: 1.0, slack: 2.0, ..config(16) }).unwrap();
        // The third push waits until the counts begin anew.
        let writer = {
            let memory = memory.clone();
            thread::spawn(move || push_waiting(&memory, 1, 5).unwrap())
        };
        let operator = {
            let (memory, table) = (memory.clone(), table.clone());
            thread::spawn(move || {
                while stat(&table, "inserted_steps") < 3 {
                    thread::yield_now();
                }
                memory.empty_table("t").unwrap();
            })
        };
        join([writer, operator]);
        table.check_at_rest().unwrap();
    });
}

#[test]
fn a_writer_waits_for_newer_parameters() {
    check(|| {
        let memory = memory();
        let lag = TableConfig { max_version_lag: 1, ..config(16) };
        let table = memory.create_table(&lag).unwrap();
        let publish = |memory: &Memory| {
            memory.parameters().put("policy", 0, tensors()).unwrap();
        };
        let take = |memory: &Memory| {
            memory.get_parameters("policy", 0, Some((&memory.table("t").unwrap(), 1))).unwrap();
        };
        publish(&memory);
        let channel = memory.open_writer("t", open_one(1), &Wait::forever()).unwrap();
        take(&memory);
        let writer = thread::spawn(move || push_steps(channel, 1, 3).unwrap());
        // The version after the next one stops the writer, until its process takes it.
        let learner = {
            let memory = memory.clone();
            thread::spawn(move || {
                publish(&memory);
                publish(&memory);
                take(&memory);
            })
        };
        join([writer, learner]);
        assert_eq!(stat(&table, "inserted_steps"), 3);
    });
}

/// Samples meet the same old items as others, while a writer evicts some and parameters are put.
fn expire(sampler: Sampler) {
    let memory = memory();
    let config = TableConfig { parameters: Some("policy".into()), max_sample_lag: 1, sampler, ..config(6) };
    let table = memory.create_table(&config).unwrap();
    let newest = |memory: &Memory| memory.parameters().version("policy");
    let mut actor = Actor::open_as(&table, &open_one(1));
    for version in 1..=6 {
        actor.push(actor.next(1).version(version));
        actor.next_step += 1;
    }
    let learner = |memory: Arc<Memory>, table: Arc<Table>| {
        move || {
            for _ in 0..2 {
                let least = newest(&memory).saturating_sub(1);
                if let Attempt::Ready(sampled) = table.try_sample(&request(2), false, &mut Turn::default()).unwrap() {
                    assert!(sampled.items.iter().all(|item| item.version >= least));
                }
            }
        }
    };
    let learners = [(); 2].map(|()| thread::spawn(learner(memory.clone(), table.clone())));
    let publisher = thread::spawn(move || {
        for _ in 0..5 {
            memory.parameters().put("policy", 0, tensors()).unwrap();
        }
    });
    let writer = thread::spawn(move || {
        for _ in 0..2 {
            // Blocked while readers hold more than the table may.
            if let Attempt::Ready(_) = actor.try_push(actor.next(1).version(6)).unwrap() {
                actor.next_step += 1;
            }
        }
    });
    join(learners.into_iter().chain([publisher, writer]));
    table.check_at_rest().unwrap();
    let left = ["items", "evicted_items", "expired_items"].map(|name| stat(&table, name));
    assert_eq!(left.iter().sum::<u64>(), stat(&table, "inserted_items"));
}

#[test]
fn an_item_expires_once() {
    check(|| expire(Sampler::Prioritized));
}

#[test]
fn an_item_of_an_order_expires_once() {
    check(|| expire(Sampler::MinHeap));
}

/// One tensor, as a safetensors file.
fn tensors() -> Bytes {
    let view = TensorView::new(safetensors::Dtype::U8, vec![1], &[0]).unwrap();
    safetensors::serialize([("w", view)], None).unwrap().into()
}

/// A server's snapshot has the first steps of each writer, up to the sequence number that the reopened writer gets.
#[test]
fn a_snapshot_has_a_prefix_of_each_writer() {
    check(|| {
        let memory = memory();
        let table = memory.create_table(&config(6)).unwrap();
        let ledger = Arc::new(Ledger::default());
        let writers = [1, 2].map(|writer| {
            let (table, ledger) = (table.clone(), ledger.clone());
            thread::spawn(move || write(&table, writer, 4, &ledger))
        });
        let operator = {
            let (memory, ledger) = (memory.clone(), ledger.clone());
            thread::spawn(move || {
                let pushed = [0, 1].map(|writer| ledger.pushed[writer].load(Ordering::SeqCst));
                let mut bytes = Vec::new();
                snapshot::save_server(&memory, &mut bytes).unwrap();
                restored(&bytes, pushed, &ledger);
            })
        };
        join(writers.into_iter().chain([operator]));
        table.check_at_rest().unwrap();
    });
}

fn restored(bytes: &[u8], pushed: [u64; 2], ledger: &Ledger) {
    let memory = memory();
    restore(&memory, bytes).unwrap();
    let table = memory.table("t").unwrap();
    table.check_at_rest().unwrap();
    for writer in [1, 2] {
        // A writer that had not begun is unknown.
        let told = table.resume_writer(&open_one(writer)).map_or(0, |opened| opened.last_sequence);
        let acknowledged = pushed[writer as usize - 1];
        assert!(told >= acknowledged, "{told} of {acknowledged}");
    }
    if let Attempt::Ready(sampled) = table.try_sample(&request(4), false, &mut Turn::default()).unwrap() {
        ledger.check(&sampled, [0, 0]);
    }
}

thread_local! {
    /// Values of slabs that were dropped. All threads of a model run on its test's own.
    static DROPS: Cell<u64> = const { Cell::new(0) };
}

/// A value that shows its drop.
struct Watched(AtomicU64);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
        DROPS.set(DROPS.get() + 1);
    }
}

/// Readers hold values for a while, and a writer retires them and needs their slots.
fn hold_values() {
    const VALUES: u64 = 4;
    DROPS.set(0);
    let slab = Arc::new(Slab::new(2));
    let newest = Arc::new(Mutex::new(None));
    let readers = [3, 3].map(|values| {
        let (slab, newest) = (slab.clone(), newest.clone());
        thread::spawn(move || {
            for _ in 0..values {
                let seen = *newest.lock().unwrap();
                if let Some((handle, number)) = seen
                    && let Some(value) = slab.pin(handle)
                {
                    let value: &Watched = &value;
                    for _ in 0..4 {
                        assert_eq!(value.0.load(Ordering::SeqCst), number);
                        thread::yield_now();
                    }
                }
            }
        })
    });
    let writer = thread::spawn({
        let slab = slab.clone();
        move || {
            for number in 0..VALUES {
                let mut value = Watched(AtomicU64::new(number));
                // Refused while readers hold the values of both slots.
                let handle = loop {
                    match slab.insert(value) {
                        Ok(handle) => break handle,
                        Err(refused) => value = refused,
                    }
                    thread::yield_now();
                };
                let before = newest.lock().unwrap().replace((handle, number));
                if let Some((before, _)) = before {
                    assert!(slab.retire(before));
                }
            }
            let (last, _) = newest.lock().unwrap().take().unwrap();
            assert!(slab.retire(last));
        }
    });
    join(readers.into_iter().chain([writer]));
    assert_eq!(DROPS.get(), VALUES, "each value is dropped once");
}

#[test]
fn a_value_stays_while_readers_hold_it() {
    check(hold_values);
}

#[test]
fn planted_faults_are_found() {
    finds("LateCount", hold_values);
    finds("BlindUpdate", || turn_over(small()));
    finds("BlindUpdate", || turn_over(of(Sampler::Fifo)));
    // A tree of one level has no sums.
    finds("LostDelta", || turn_over(config(40)));
}

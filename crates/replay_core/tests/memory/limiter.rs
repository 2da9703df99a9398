//! Blocking: who waits for whom, credits, deadlines, interruption. Waits end by events, never by the clock.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use event_listener::Listener;
use replay_core::memory::Memory;
use replay_core::replay::{OpenWriter, PushBody, SampleRequest};
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Turn};
use replay_core::{Error, Replay, TableConfig};

use crate::support::*;

fn limited() -> TableConfig {
    TableConfig { samples_per_insert: 2.0, slack: 8.0, min_size: 4, ..config(100) }
}

#[test]
fn the_slack_is_derived_from_the_ratio_min_size_and_capacity() {
    let slack = |samples_per_insert, min_size, capacity, slack| {
        let table = TableConfig { samples_per_insert, min_size, slack, ..config(capacity) };
        let derived = table.effective_slack();
        // It is also valid as a setting.
        TableConfig { slack: derived, ..table }.validate().unwrap();
        derived
    };
    assert_eq!(slack(8.0, 1, 1 << 20, 0.0), 8.0 * 1024.0);
    assert_eq!(slack(8.0, 50_000, 1 << 20, 0.0), 8.0 * 5000.0);
    assert_eq!(slack(0.25, 1, 1 << 20, 0.0), 4096.0);
    // Writers run ahead by no more items than fit beside min_size, and by at least one item.
    assert_eq!(slack(8.0, 60, 100, 0.0), 8.0 * 40.0);
    assert_eq!(slack(8.0, 100, 100, 0.0), 8.0);
    assert_eq!(slack(0.5, 100, 100, 0.0), 1.0);
    assert_eq!(slack(8.0, 1, 1 << 20, 9.5), 9.5);
    assert_eq!(slack(0.0, 1, 1 << 20, 0.0), 0.0);
}

fn one_try() -> Wait<'static> {
    Wait::until(Some(Instant::now()))
}

fn body(first: u64, rows: u32) -> PushBody {
    let body = Body::default().chunk(0, first, rows);
    (first..first + u64::from(rows)).fold(body, |body, step| body.item(0, step, 1.0)).build()
}

fn deadline(result: replay_core::Result<impl Sized>) -> String {
    match refusal(result) {
        Error::Deadline { waited_for } => waited_for.to_string(),
        other => panic!("expected the deadline, got {other}"),
    }
}

#[test]
fn a_push_that_fails_wakes_the_calls_that_wait() {
    let table = table(&limited());
    let mut actor = Actor::open(&table, 1);
    let mut turn = Turn::default();
    blocked(table.try_sample(&request(1), false, &mut turn));
    let changed = turn.changed().unwrap();
    // Admitted, then refused: the stream has no such step.
    let missing = Body::default().item(0, 3, 1.0);
    assert!(actor.try_push(missing).is_err());
    assert!(changed.wait_timeout(Duration::ZERO).is_some());
}

#[test]
fn inserts_and_samples_wait_for_each_other() {
    let memory = memory_with(&limited());
    let mut writer = replay(&memory).open_writer("t", open(1), &one_try()).unwrap();
    let text = deadline(replay(&memory).sample("t", &request(1), &one_try()));
    assert!(text.contains("holds 0 items of the 4"), "{text}");
    writer.push(body(0, 4), &one_try()).unwrap();
    // 8 sampled items are due after 4 inserts; the slack lets writers run 8 ahead: 4 more inserts.
    (4..8).for_each(|step| writer.push(body(step, 1), &one_try()).unwrap());
    let text = deadline(writer.push(body(8, 1), &one_try()));
    assert!(text.contains("waits until 2 more are sampled"), "{text}");
    // Down to 8 behind.
    let batch = replay(&memory).sample("t", &request(14), &one_try()).unwrap();
    let text = deadline(replay(&memory).sample("t", &request(4), &one_try()));
    assert!(text.contains("waits for writers to insert 1 more"), "{text}");
    writer.push(body(8, 1), &one_try()).unwrap();

    // A batch that nobody received is taken back.
    let table = memory.table("t").unwrap();
    assert_eq!(stat(&table, "limiter_sampled"), 14);
    drop(batch);
    assert_eq!(stat(&table, "limiter_sampled"), 0);
    let batch = replay(&memory).sample("t", &request(14), &one_try()).unwrap();
    batch.credit.unwrap().delivered();
    assert_eq!(stat(&table, "limiter_sampled"), 14);
}

#[test]
fn steps_without_items_are_not_limited() {
    let table = table(&limited());
    let mut actor = Actor::open(&table, 1);
    actor.push_next(8);
    blocked(actor.try_push(actor.next(1)));
    actor.push(Body::default().chunk(0, 8, 4));
    actor.sequence = 0;
    actor.push(actor.next(1));
    assert_eq!(stat(&table, "limiter_inserted"), 8, "a push sent again does not count");
}

#[test]
fn a_sample_larger_than_the_slack_allows_is_an_error_unless_it_may_be_short() {
    let table = table(&limited());
    Actor::open(&table, 1).push_next(8);
    let error = refusal(table.try_sample(&request(15), false, &mut Turn::default()));
    assert!(error.to_string().contains("a slack of 9"), "{error}");
    let asked = SampleRequest { allow_short: true, ..request(100) };
    blocked(table.try_sample(&asked, false, &mut Turn::default()));
    let memory = memory_with(&limited());
    let mut writer = replay(&memory).open_writer("t", open(1), &one_try()).unwrap();
    writer.push(body(0, 8), &one_try()).unwrap();
    assert_eq!(replay(&memory).sample("t", &asked, &one_try()).unwrap().items.len(), 16);
}

/// The memory as its users in this process have it.
fn replay(memory: &Memory) -> &dyn Replay {
    memory
}

fn memory_with(config: &TableConfig) -> Arc<Memory> {
    let memory = memory();
    memory.create_table(config).unwrap();
    memory
}

#[test]
fn a_blocked_sample_goes_on_when_a_push_comes() {
    let memory = memory_with(&limited());
    let mut writer = replay(&memory).open_writer("t", open(1), &one_try()).unwrap();
    thread::scope(|scope| {
        let sample = scope.spawn(|| replay(&memory).sample("t", &request(4), &Wait::forever()).unwrap());
        (0..4).for_each(|step| writer.push(body(step, 1), &Wait::forever()).unwrap());
        assert_eq!(anchors(&sample.join().unwrap()).len(), 4);
    });
}

#[test]
fn actors_and_learner_take_turns_to_the_end() {
    let memory = memory_with(&limited());
    const ITEMS: u64 = 500;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = replay(&memory).open_writer("t", open(1), &Wait::forever()).unwrap();
            (0..ITEMS).for_each(|step| writer.push(body(step, 1), &Wait::forever()).unwrap());
        });
        let mut batches = replay(&memory).samples("t", request(4), 1).unwrap();
        // All but the slack: 2 * 500 items.
        for _ in 0..(2 * ITEMS - 8) / 4 {
            let batch = batches.next(&Wait::forever()).unwrap();
            assert_eq!(anchors(&batch).len(), 4);
            batch.credit.unwrap().delivered();
        }
    });
    let table = memory.table("t").unwrap();
    assert_eq!(stat(&table, "limiter_inserted"), ITEMS);
    assert_eq!(stat(&table, "limiter_sampled"), 2 * ITEMS - 8);
}

#[test]
fn writers_at_the_same_time_overshoot_by_one_push() {
    const WRITERS: u64 = 4;
    const ITEMS: u32 = 5;
    let table = table(&TableConfig { samples_per_insert: 2.0, slack: 30.0, ..config(1000) });
    let mut actors: Vec<_> = (1..=WRITERS).map(|w| Actor::open(&table, w)).collect();
    // centre is 2; the first item of a push has to stay within the slack.
    let most = 2.0 + 30.0 + 2.0 * f64::from(ITEMS - 1);
    for round in 0..200 {
        let start = Barrier::new(WRITERS as usize);
        thread::scope(|scope| {
            for actor in &mut actors {
                scope.spawn(|| {
                    start.wait();
                    while let Attempt::Ready(_) = actor.try_push(actor.next(ITEMS)).unwrap() {
                        actor.next_step += u64::from(ITEMS);
                    }
                });
            }
        });
        let lead = 2.0 * stat(&table, "limiter_inserted") as f64 - stat(&table, "limiter_sampled") as f64;
        assert!(lead <= most, "round {round}: {lead}");
        sample(&table, 12).credit.unwrap().delivered();
    }
}

#[test]
fn a_push_that_is_refused_gives_its_admission_back() {
    let table = table(&limited());
    let mut actor = Actor::open(&table, 1);
    actor.push_next(7);
    // The last push that is admitted, but for a chunk whose steps go back.
    let error = refusal(actor.try_push(Body::default().chunk(0, 0, 1).item(0, 0, 1.0)));
    assert!(matches!(error, Error::Schema { .. }), "{error}");
    actor.push_next(1);
    blocked(actor.try_push(actor.next(1)));
}

#[test]
fn samples_that_went_with_evicted_items_do_not_stop_the_table() {
    // The slack lets writers run further ahead than the table holds.
    let limited = TableConfig { max_times_sampled: 1, samples_per_insert: 1.0, slack: 64.0, ..config(8) };
    for allow_short in [false, true] {
        let table = table(&limited);
        let mut actor = Actor::open(&table, 1);
        let asked = SampleRequest { allow_short, ..request(6) };
        let mut sampled = 0;
        for _ in 0..400 {
            let sample = table.try_sample(&asked, false, &mut Turn::default()).unwrap();
            if let Attempt::Ready(batch) = sample {
                batch.credit.unwrap().delivered();
                sampled += 1;
            } else if let Attempt::Blocked(waits) = actor.try_push(actor.next(7)).unwrap() {
                panic!("both sides wait: {waits}");
            } else {
                actor.next_step += 7;
            }
        }
        assert!(sampled > 180, "{sampled}");
    }

    let table = table(&limited);
    let error = refusal(table.try_sample(&request(9), false, &mut Turn::default()));
    assert!(matches!(error, Error::Config(_)), "{error}");
    assert!(error.to_string().contains("capacity of 8"), "{error}");
}

#[test]
fn a_derived_slack_keeps_the_items_of_a_queue_until_they_are_read() {
    let queue = TableConfig { sampler: Sampler::Fifo, max_times_sampled: 1, samples_per_insert: 1.0, ..config(40) };
    // Rollouts of four steps, which arrive one by one, and a reader that comes when the writer has to wait.
    let rollouts = table(&queue);
    let one_stream = |window_after| OpenWriter { streams: 1, window_before: 0, window_after, ..open(1) };
    let mut actor = Actor::open_as(&rollouts, &one_stream(3));
    let (mut read, mut waits) = (0, 0);
    let take = |count| {
        let asked = SampleRequest { allow_short: true, ..request(count) };
        match rollouts.try_sample(&asked, true, &mut Turn::default()).unwrap() {
            Attempt::Ready(mut sampled) => {
                deliver(&mut sampled);
                sampled.items.len()
            }
            Attempt::Blocked(waits) => panic!("blocked: {waits}"),
        }
    };
    for step in 0..400 {
        let mut push = || {
            let body = Body::default().chunk(0, step, 1);
            actor.try_push(if step % 4 == 3 { body.window(0, step - 3, (0, 3), None) } else { body }).unwrap()
        };
        while let Attempt::Blocked(_) = push() {
            read += take(4);
            waits += 1;
        }
    }
    read += take(20);
    assert!(waits > 0);
    assert_eq!((read, stat(&rollouts, "evicted_unread_items")), (100, 0));

    // Single steps fill the whole capacity.
    let steps = table(&queue);
    let mut actor = Actor::open_as(&steps, &one_stream(0));
    (0..4).for_each(|_| actor.push_next(10));
    blocked(actor.try_push(actor.next(1)));
    // Of the oldest chunk, which would be evicted as a whole, one half is read.
    assert_eq!(sample(&steps, 5).items.len(), 5);
    blocked(actor.try_push(actor.next(10)));
    assert_eq!(sample(&steps, 35).items.len(), 35);
    actor.push_next(10);
    assert_eq!(stat(&steps, "evicted_unread_items"), 0);
}

#[test]
fn samples_of_items_without_mass_do_not_stop_the_table() {
    let table = table(&TableConfig { max_times_sampled: 1, samples_per_insert: 1.0, slack: 12.0, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    let mut push = |step: u64| {
        let priority = if step.is_multiple_of(3) { 1.0 } else { 0.0 };
        actor.try_push(Body::default().chunk(0, step, 1).item(0, step, priority))
    };
    let sample = || table.try_sample(&request(6), false, &mut Turn::default());
    (0..13).for_each(|step| assert!(matches!(push(step), Ok(Attempt::Ready(_))), "{step}"));
    blocked(push(13));
    // Five of them have mass. Without more no batch is full, and no sample lets the limiter go on.
    for step in 13..16 {
        blocked(sample());
        assert!(matches!(push(step), Ok(Attempt::Ready(_))), "{step}");
    }
    let Ok(Attempt::Ready(batch)) = sample() else { panic!("six items have mass") };
    assert_eq!(batch.items.len(), 6);
    batch.credit.unwrap().delivered();
    // From here on the limiter alone decides.
    (16..19).for_each(|step| assert!(matches!(push(step), Ok(Attempt::Ready(_))), "{step}"));
    blocked(push(19));
}

#[test]
fn more_samples_for_each_item_than_it_has_are_refused() {
    let config =
        |max_times_sampled| TableConfig { max_times_sampled, samples_per_insert: 2.0, slack: 64.0, ..config(100) };
    assert!(config(0).validate().is_ok() && config(2).validate().is_ok());
    let error = refusal(config(1).validate()).to_string();
    assert!(error.contains("samples_per_insert 2 is more than max_times_sampled 1"), "{error}");
}

#[test]
fn a_waiting_call_can_be_interrupted_and_ends_when_its_table_is_dropped() {
    let memory = memory_with(&limited());
    let asked = AtomicU32::new(0);
    let interrupted = || asked.fetch_add(1, Ordering::Relaxed) > 0;
    let wait = Wait { interrupted: &interrupted, ..Wait::forever() };
    assert!(matches!(refusal(replay(&memory).sample("t", &request(1), &wait)), Error::Interrupted));

    let waiting = AtomicBool::new(false);
    let say_so = || {
        waiting.store(true, Ordering::Release);
        false
    };
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            let wait = Wait { interrupted: &say_so, ..Wait::forever() };
            replay(&memory).sample("t", &request(1), &wait).map(drop)
        });
        while !waiting.load(Ordering::Acquire) {
            thread::yield_now();
        }
        memory.drop_table("t").unwrap();
        assert!(matches!(refusal(call.join().unwrap()), Error::UnknownTable { .. }));
    });
}

#[test]
fn a_deadline_in_the_future_returns_what_there_is_when_it_may_be_short() {
    let memory = memory_with(&TableConfig { max_times_sampled: 1, ..config(100) });
    let mut writer = replay(&memory).open_writer("t", open(1), &one_try()).unwrap();
    writer.push(body(0, 3), &one_try()).unwrap();
    writer.flush(&one_try()).unwrap();
    writer.close(&one_try()).unwrap();
    let soon = Wait::until(Some(Instant::now() + Duration::from_millis(1)));
    let asked = SampleRequest { allow_short: true, ..request(4) };
    let mut batch = replay(&memory).sample("t", &asked, &soon).unwrap();
    deliver(&mut batch);
    assert_eq!(batch.items.len(), 3);
    let soon = Wait::until(Some(Instant::now() + Duration::from_millis(1)));
    let text = deadline(replay(&memory).sample("t", &asked, &soon));
    assert!(text.contains("holds 0 items"), "{text}");
}

#[test]
fn a_push_that_waits_is_passed_by_no_later_one() {
    let table = table(&limited());
    let [mut first, mut second] = [1, 2].map(|number| Actor::open(&table, number));
    while let Attempt::Ready(_) = first.try_push(first.next(1)).unwrap() {
        first.next_step += 1;
    }
    let (mut early, mut late) = (Turn::default(), Turn::default());
    blocked(first.try_push_in_turn(first.next(1), &mut early));
    sample(&table, 8).credit.unwrap().delivered();
    let text = blocked(second.try_push_in_turn(second.next(1), &mut late));
    assert!(text.starts_with("1 earlier calls wait: table"), "{text}");
    let empty = second.try_push(Body::default().chunk(1, 0, 1)).unwrap();
    assert!(matches!(empty, Attempt::Ready(1)), "a push without items is not limited");
    let woken = late.changed().unwrap();
    assert!(second.try_push_in_turn(second.next(1), &mut late).is_ok());
    let pushed = first.try_push_in_turn(first.next(1), &mut early).unwrap();
    assert!(matches!(pushed, Attempt::Ready(_)));
    drop(early);
    assert!(woken.wait_timeout(Duration::ZERO).is_some());
    let pushed = second.try_push_in_turn(second.next(1), &mut late).unwrap();
    assert!(matches!(pushed, Attempt::Ready(_)));

    let writers = &table.stats()["by_writer"];
    for (writer, steps) in [("actor 1", first.next_step + 1), ("actor 2", 2)] {
        let found = writers.as_array().unwrap().iter();
        let found = found.filter(|found| found["name"] == writer);
        let [found] = found.collect::<Vec<_>>()[..] else { panic!("{writers}") };
        assert_eq!((&found["steps"], &found["blocked_pushes"]), (&steps.into(), &1.into()));
        assert!(found["waited_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_sample_that_waits_is_passed_by_no_later_one() {
    let table = table(&limited());
    let mut actor = Actor::open(&table, 1);
    actor.push_next(4);
    let (mut early, mut late) = (Turn::default(), Turn::default());
    blocked(table.try_sample(&request(14), false, &mut early));
    let text = blocked(table.try_sample(&request(1), true, &mut late));
    assert!(text.starts_with("1 earlier calls wait: table"), "{text}");
    assert!(late.is_behind() && !early.is_behind());
    drop(early);
    let sampled = table.try_sample(&request(1), false, &mut late).unwrap();
    assert!(matches!(sampled, Attempt::Ready(_)));
}

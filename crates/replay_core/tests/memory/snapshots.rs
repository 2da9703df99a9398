//! Snapshots: what was saved comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use replay_core::memory::Memory;
use replay_core::replay::{SampleRequest, Sampled};
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Table, Turn};
use replay_core::{Error, TableConfig};

use crate::support::*;

/// A memory with one table.
pub struct Case {
    pub memory: Arc<Memory>,
    pub table: Arc<Table>,
}

impl Case {
    pub fn new(config: &TableConfig) -> Self {
        let memory = memory();
        Case { table: memory.create_table(config).unwrap(), memory }
    }

    pub fn save(&self) -> Vec<u8> {
        saved(&self.memory)
    }

    /// The table after a restart of the process, with this definition.
    fn again_as(&self, config: &TableConfig) -> Arc<Table> {
        let memory = memory();
        let table = memory.create_table(config).unwrap();
        restore(&memory, &self.save()).unwrap();
        table.check_at_rest().unwrap();
        table
    }

    fn again(&self) -> Arc<Table> {
        self.again_as(self.table.config())
    }
}

/// Pushes of two streams whose windows span chunks, more than a table of `config(60)` holds.
fn play(table: &Arc<Table>) {
    let mut actor = Actor::open(table, 1);
    for round in 0..12 {
        let (first, rows) = (round * 4, 4);
        let mut body = (0..2).fold(Body::default(), |body, s| body.chunk(s, first, rows));
        for stream in 0..2 {
            for anchor in first.saturating_sub(3)..first + 1 {
                let before = anchor.min(3) as u16;
                body = body.window(stream, anchor, (before, 3), Some((anchor % 5) as f32));
            }
        }
        actor.push(body);
    }
}

pub fn wide(count: u32) -> SampleRequest {
    SampleRequest { before: 3, after: 3, ..request(count) }
}

/// Everything of a batch but its ids.
fn content(sampled: &Sampled) -> (Vec<String>, Vec<u8>, Vec<u8>) {
    windows(sampled);
    let items = sampled.items.iter().map(|item| {
        let item = replay_core::replay::SampledItem { id: 0, ..*item };
        format!("{item:?}")
    });
    let blobs = sampled.blobs.iter().flat_map(|blob| blob.as_ref().to_vec());
    (items.collect(), sampled.rows.to_vec(), blobs.collect())
}

/// Statistics that a snapshot keeps.
fn kept(table: &Table) -> serde_json::Value {
    let mut stats = table.stats();
    let object = stats.as_object_mut().unwrap();
    // Chunks of one push share a buffer, which counts as a whole; restored ones have their own.
    for bytes in ["bytes", "live_bytes", "pinned_bytes"] {
        object.remove(bytes);
    }
    object.retain(|name, _| !name.contains("writer") && name != "last_push_s");
    for of_the_process in ["streams", "saturated_priorities", "sample_age", "version_lag"] {
        object.remove(of_the_process);
    }
    stats
}

#[test]
fn batches_go_on_byte_for_byte() {
    for sampler in [Sampler::Prioritized, Sampler::Uniform] {
        let case = Case::new(&TableConfig { sampler, priority_exponent: 0.7, ..config(60) });
        play(&case.table);
        for round in 0..5 {
            let batch = sample_as(&case.table, &wide(16));
            let priorities: Vec<_> = (0..16).map(|i| f64::from(i * 3 + round)).collect();
            let ids = ids(&batch);
            case.table.update_priorities(&ids, &priorities).unwrap();
        }
        assert!(stat(&case.table, "evicted_steps") > 0);
        let again = case.again();
        assert_eq!(kept(&again), kept(&case.table));
        for _ in 0..5 {
            let (old, new) = (sample_as(&case.table, &wide(16)), sample_as(&again, &wide(16)));
            assert_eq!(content(&new), content(&old));
            for (table, batch) in [(&case.table, old), (&again, new)] {
                table.update_priorities(&ids(&batch), &[9.5; 16]).unwrap();
            }
        }
        assert_eq!(kept(&again), kept(&case.table));
    }
}

#[test]
fn items_are_sampled_as_often_as_their_priorities_say() {
    let case = Case::new(&config(8));
    let mut actor = Actor::open(&case.table, 1);
    let body = (0..8).fold(Body::default().chunk(0, 0, 8), |body, step| body.item(0, step, step as f32));
    actor.push(body);
    let again = case.again();
    let mut sampled = [0.0; 8];
    const SAMPLES: u32 = 28_000;
    for step in anchors(&sample(&again, SAMPLES)) {
        sampled[step as usize] += 1.0;
    }
    for (step, sampled) in sampled.into_iter().enumerate() {
        let expected = f64::from(SAMPLES) * step as f64 / 28.0;
        assert!((sampled - expected).abs() <= 2.0, "step {step}: {sampled}");
    }
}

#[test]
fn a_queue_goes_on_in_its_order() {
    let case = Case::new(&TableConfig { sampler: Sampler::Fifo, max_times_sampled: 2, ..config(100) });
    let mut actor = Actor::open(&case.table, 1);
    (0..4).for_each(|_| actor.push_next(5));
    // Two items are gone, one has one sample left.
    assert_eq!(anchors(&sample(&case.table, 5)), [0, 0, 1, 1, 2]);
    let again = case.again();
    for table in [&case.table, &again] {
        assert_eq!(stat(table, "items"), 18);
        assert_eq!(anchors(&sample(table, 4)), [2, 3, 3, 4]);
        let rest: Vec<_> = anchors(&sample(table, 31));
        assert_eq!((rest[0], rest[30]), (4, 19));
        assert_eq!(stat(table, "items"), 0);
        table.check_at_rest().unwrap();
    }
}

#[test]
fn the_rate_limiter_goes_on() {
    let limited = TableConfig { samples_per_insert: 2.0, slack: 10.0, min_size: 5, ..config(100) };
    let case = Case::new(&limited);
    let mut actor = Actor::open(&case.table, 1);
    actor.push_next(10);
    for _ in 0..2 {
        let mut batch = sample(&case.table, 8);
        batch.credit.take().unwrap().delivered();
    }
    // 20 are due and centre - slack is 0: four more may be sampled.
    let again = case.again();
    for table in [&case.table, &again] {
        assert!(blocked(table.try_sample(&request(5), false, &mut Turn::default())).contains("insert"));
        assert!(matches!(table.try_sample(&request(4), false, &mut Turn::default()).unwrap(), Attempt::Ready(_)));
    }
    // Where the ratio is another one now, neither side has to catch up with the whole past.
    let other = case.again_as(&TableConfig { samples_per_insert: 20.0, slack: 30.0, ..limited });
    // 200 are due, centre + slack is 130: 70 count as sampled.
    assert_eq!((stat(&other, "limiter_inserted"), stat(&other, "limiter_sampled")), (10, 70));
}

#[test]
fn the_newest_steps_are_kept_where_there_is_less_room() {
    let case = Case::new(&config(60));
    play(&case.table);
    let small = case.again_as(&config(20));
    assert_eq!(stat(&small, "steps"), 20);
    let batch = sample_as(&small, &wide(64));
    assert!(windows(&batch).iter().flatten().all(|&(_, step)| step >= 36));
    let bytes = 3 * steps_bytes(12, 4);
    let tight = case.again_as(&TableConfig { capacity_bytes: bytes, ..config(60) });
    assert!(stat(&tight, "bytes") <= bytes && stat(&tight, "steps") >= 8);
    // Nothing fits: nothing is kept.
    let none = case.again_as(&config(3));
    assert_eq!((stat(&none, "steps"), stat(&none, "items")), (0, 0));
    // Writers continue in all of them.
    for table in [small, tight] {
        play(&table);
        table.check_at_rest().unwrap();
    }
}

#[test]
fn what_readers_hold_of_evicted_chunks_is_not_saved() {
    let case = Case::new(&config(8));
    let mut actor = Actor::open(&case.table, 1);
    actor.push_next(8);
    let held = sample(&case.table, 4);
    actor.push_next(4);
    assert!(stat(&case.table, "pinned_bytes") > 0);
    let again = case.again();
    assert_eq!(stat(&again, "steps"), 4);
    // What a push of it counts for.
    assert_eq!(stat(&again, "bytes"), steps_bytes(8, 4));
    assert_eq!(stat(&again, "pinned_bytes"), 0);
    assert!(anchors(&sample(&again, 16)).iter().all(|&step| step >= 8));
    windows(&held);
}

#[test]
fn keys_of_before_name_nothing_and_the_largest_priority_is_remembered() {
    let case = Case::new(&config(8));
    Actor::open(&case.table, 1).push_next(4);
    let before = ids(&sample(&case.table, 4));
    let priorities = [100.0, 1.0, 1.0, 1.0];
    case.table.update_priorities(&before, &priorities).unwrap();
    let bytes = case.save();
    case.memory.empty_table("t").unwrap();
    restore(&case.memory, &bytes).unwrap();
    assert_eq!(stat(&case.table, "items"), 4);
    let receipt = case.table.update_priorities(&before, &[7.0; 4]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 4));

    let again = case.again();
    let mut actor = Actor::open(&again, 1);
    actor.push(Body::default().chunk(0, 0, 1).window(0, 0, (0, 0), None));
    assert_eq!(again.stats()["total_mass"], 203.0);
}

#[test]
fn tables_that_are_not_there_are_made_and_a_failure_leaves_none() {
    let old = memory();
    for name in ["a", "t"] {
        let named = TableConfig { name: name.into(), ..config(100) };
        Actor::open(&old.create_table(&named).unwrap(), 1).push_next(10);
    }
    let bytes = saved(&old);
    let new = memory();
    restore(&new, &bytes).unwrap();
    assert_eq!(new.table("a").unwrap().config(), old.table("a").unwrap().config());
    assert_eq!(stat(&new.table("a").unwrap(), "items"), 10);

    // Of two tables the second is refused: by its definition, and by what it has.
    let other = memory();
    let alpha = TableConfig { priority_exponent: 0.5, ..config(100) };
    other.create_table(&alpha).unwrap();
    let error = refusal(restore(&other, &bytes));
    assert!(matches!(error, Error::TableDiffers { .. }));
    assert!(other.table("a").is_err(), "it was made for nothing");
    let used = memory();
    let first = used.create_table(&TableConfig { name: "a".into(), ..config(50) }).unwrap();
    Actor::open(&used.create_table(&config(100)).unwrap(), 1).push_next(1);
    let error = refusal(restore(&used, &bytes));
    assert!(matches!(error, Error::NotEmpty { steps: 1, .. }), "{error}");
    assert_eq!(stat(&first, "steps"), 0);
    first.check_at_rest().unwrap();
}

#[test]
fn another_definition_is_refused_with_the_difference() {
    let case = Case::new(&config(8));
    let bytes = case.save();
    let mut columns = config(8).columns;
    columns[0].name = "lane".into();
    for (changed, part) in [
        (TableConfig { columns, ..config(8) }, "columns is [lane: "),
        (TableConfig { sampler: Sampler::Uniform, ..config(8) }, "sampler is uniform, in the snapshot prioritized"),
        (TableConfig { priority_exponent: 0.25, ..config(8) }, "priority_exponent is 0.25, in the snapshot 1.0"),
        (TableConfig { priority_unit_log2: -10, ..config(8) }, "priority_unit_log2 is -10, in the snapshot -19"),
    ] {
        let memory = memory();
        memory.create_table(&changed).unwrap();
        let error = refusal(restore(&memory, &bytes));
        assert!(matches!(error, Error::TableDiffers { .. }));
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn columns_that_may_be_infinite_are_restored_as_such_and_a_table_keeps_its_own() {
    let mut open = config(8);
    open.columns[0].finite = false;
    for (saved, there, kept) in
        [(&open, None, false), (&open, Some(config(8)), true), (&config(8), Some(open.clone()), false)]
    {
        let case = Case::new(saved);
        let bytes = case.save();
        let memory = memory();
        if let Some(config) = there {
            memory.create_table(&config).unwrap();
        }
        restore(&memory, &bytes).unwrap();
        let table = memory.table("t").unwrap();
        assert_eq!(table.config().columns[0].finite, kept);
    }
}

#[test]
fn a_table_that_readers_still_hold_bytes_of_is_not_empty() {
    let case = Case::new(&config(8));
    Actor::open(&case.table, 1).push_next(4);
    let bytes = case.save();
    let held = sample(&case.table, 1);
    case.memory.empty_table("t").unwrap();
    let error = refusal(restore(&case.memory, &bytes));
    assert!(matches!(error, Error::NotEmpty { steps: 0, .. }), "{error}");
    drop(held);
    restore(&case.memory, &bytes).unwrap();
    case.table.check_at_rest().unwrap();
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn snapshots_of_a_table_in_use_are_consistent() {
    // A few hundred steps within tight bytes: the table is replaced many times, and pins have to be short.
    let config = TableConfig { capacity_bytes: 12_000, ..config(300) };
    let case = Case::new(&config);
    let done = AtomicBool::new(false);
    let sampled = AtomicU64::new(0);
    thread::scope(|scope| {
        // Also after a failed assertion, so that the threads end.
        let end = SetOnDrop(&done);
        let writers: Vec<_> = (1..=2)
            .map(|writer| {
                let table = &case.table;
                let done = &done;
                scope.spawn(move || {
                    let mut actor = Actor::open(table, writer);
                    while !done.load(Ordering::Acquire) {
                        let first = actor.next_step;
                        let mut body = Body::default().chunk(0, first, 4).chunk(3, first, 4);
                        for anchor in first.saturating_sub(3)..first + 1 {
                            let before = anchor.min(3) as u16;
                            for stream in [0, 3] {
                                body = body.window(stream, anchor, (before, 3), Some(1.5));
                            }
                        }
                        while let Attempt::Blocked(_) = actor.try_push(body.clone()).unwrap() {
                            thread::yield_now();
                        }
                        actor.next_step += 4;
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                if let Ok(Attempt::Ready(batch)) = case.table.try_sample(&wide(16), false, &mut Turn::default()) {
                    let priorities = vec![2.0; batch.items.len()];
                    let ids = ids(&batch);
                    case.table.update_priorities(&ids, &priorities).unwrap();
                    sampled.fetch_add(ids.len() as u64, Ordering::Relaxed);
                }
            }
        });
        let (mut items, begun) = (0, Instant::now());
        for round in 0.. {
            if round >= 60 && sampled.load(Ordering::Relaxed) > 0 && items > 0 {
                break;
            }
            let reason = "the reader has sampled nothing, or no snapshot has an item";
            assert!(begun.elapsed() < Duration::from_secs(60), "{reason}");
            let again = case.again();
            items += stat(&again, "items");
            if stat(&again, "items") > 0 {
                windows(&sample_as(&again, &wide(32)));
            }
            assert!(stat(&again, "bytes") <= 12_000);
        }
        drop(end);
        writers.into_iter().for_each(|w| w.join().unwrap());
        reader.join().unwrap();
    });
    case.table.check_at_rest().unwrap();
    // At rest it comes back whole.
    let again = case.again();
    assert_eq!(kept(&again), kept(&case.table));
}

//! Versions of sampled items, and `max_sample_lag`: an item that is too old is removed at its draw.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use replay_core::memory::Memory;
use replay_core::replay::{ReadSteps, Replay, SampleRequest, Sampled};
use replay_core::schema::{Column, Dtype, Sampler};
use replay_core::snapshot::save_server;
use replay_core::table::{Attempt, Table, Turn};
use replay_core::view::{ViewSpec, Window};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};
use replay_core::{Error, TableConfig};

use crate::parameters::file;
use crate::snapshots::wide;
use crate::support::*;
use base::wait::Wait;

const LAG: u32 = 2;

fn limited(capacity: u64) -> TableConfig {
    TableConfig { parameters: Some("policy".into()), max_sample_lag: LAG, ..config(capacity) }
}

/// Puts versions up to this one.
fn publish(memory: &Memory, version: u64) {
    while memory.parameters().version("policy") < version {
        memory.parameters().put("policy", 0, file(1, 4)).unwrap();
    }
}

/// Pushes a chunk of `rows` steps of this version, each an item.
fn push(actor: &mut Actor, version: u64, rows: u32) {
    actor.push(actor.next(rows).version(version));
    actor.next_step += u64::from(rows);
}

/// A table of `rows` items of each of these versions, in turns.
fn filled(memory: &Memory, config: &TableConfig, versions: &[u64], rows: u32) -> (Arc<Table>, Actor) {
    let table = memory.create_table(config).unwrap();
    let mut actor = Actor::open(&table, 1);
    versions.iter().for_each(|&version| push(&mut actor, version, rows));
    (table, actor)
}

fn versions(sampled: &Sampled) -> Vec<u64> {
    sampled.items.iter().map(|item| item.version).collect()
}

#[test]
fn an_item_has_the_smallest_version_of_the_rows_that_are_read() {
    let memory = memory();
    let table = memory.create_table(&TableConfig { max_sample_lag: 0, ..limited(100) }).unwrap();
    let mut actor = Actor::open(&table, 1);
    for (first, version) in [(0, 5), (2, 3), (4, 7), (6, 0)] {
        actor.push(Body::default().chunk(0, first, 2).version(version));
    }
    actor.push(Body::default().window(0, 3, (2, 2), Some(1.0)));
    let read = |before, after| {
        let sampled = sample_as(&table, &SampleRequest { before, after, ..request(1) });
        windows(&sampled);
        sampled.items[0].version
    };
    assert_eq!([read(2, 2), read(0, 2), read(0, 0)], [3, 3, 3]);
    actor.push(Body::default().window(0, 4, (0, 3), Some(1e6)));
    assert_eq!([read(0, 1), read(0, 0)], [7, 7]);
    assert_eq!(read(0, 3), 0, "with a row of an unknown version");
    // A table that names no parameters reports none.
    let plain = memory.create_table(&TableConfig { name: "plain".into(), ..config(100) }).unwrap();
    push(&mut Actor::open(&plain, 1), 9, 2);
    assert_eq!(versions(&sample(&plain, 2)), [0, 0]);
    assert_eq!(plain.stats()["sample_lag"]["count"], 0);
}

#[test]
fn every_sampler_removes_what_is_too_old_and_samples_the_rest() {
    for sampler in [
        Sampler::Prioritized,
        Sampler::Uniform,
        Sampler::Fifo,
        Sampler::Lifo,
        Sampler::MaxHeap,
        Sampler::MinHeap,
        Sampler::RankBased,
    ] {
        for most in [1, 0] {
            if sampler == Sampler::Fifo && most == 0 {
                continue;
            }
            let memory = memory();
            let definition =
                TableConfig { sampler, max_times_sampled: most, live_max_priority: most == 0, ..limited(100) };
            let (table, mut actor) = filled(&memory, &definition, &[1, 3, 2, 0, 5, 4], 4);
            publish(&memory, 3);
            // All are young enough: as many samples as there are items.
            let all = table.try_sample(&request(24), false, &mut Turn::default()).unwrap();
            assert!(matches!(&all, Attempt::Ready(all) if all.items.len() == 24), "{sampler}");
            // Undelivered, they are there again.
            drop(all);
            publish(&memory, 5);
            let sampled = sample(&table, 16);
            let found: BTreeSet<_> = versions(&sampled).into_iter().collect();
            assert!(found.is_subset(&[0, 3, 4, 5].into()), "{sampler}: {found:?}");
            let (expired, items) = (stat(&table, "expired_items"), stat(&table, "items"));
            match most {
                // Each item once: all 16 that are young enough.
                1 => {
                    assert_eq!((found.len(), items), (4, 8 - expired), "{sampler}");
                    // The order has met them, or a draw; those that no sample has met are there.
                    assert!(expired <= 8, "{sampler}");
                }
                _ => assert_eq!(items + expired, 24, "{sampler}"),
            }
            assert_eq!(stat(&table, "evicted_items"), 0);
            table.check_at_rest().unwrap();
            // A new item takes the place of an old one.
            push(&mut actor, 5, 1);
            assert!(versions(&sample(&table, 1)).iter().all(|&version| version != 1 && version != 2), "{sampler}");
            table.check_at_rest().unwrap();
        }
    }
}

#[test]
fn nothing_expires_without_parameters_a_lag_or_versions() {
    for (definition, puts) in [(limited(100), 0), (TableConfig { max_sample_lag: 0, ..limited(100) }, 9)] {
        let memory = memory();
        publish(&memory, puts);
        let (table, _) = filled(&memory, &definition, &[1, 0], 4);
        assert!(versions(&sample(&table, 64)).contains(&1));
        assert_eq!((stat(&table, "items"), stat(&table, "expired_items")), (8, 0));
    }
    let memory = memory();
    // Of another name.
    memory.parameters().put_version("other", 0, 1000, file(1, 4)).unwrap();
    publish(&memory, 3);
    let (table, _) = filled(&memory, &limited(100), &[1, 0], 4);
    sample(&table, 64);
    publish(&memory, 9);
    assert!(versions(&sample(&table, 64)).iter().all(|&version| version == 0));
    assert_eq!((stat(&table, "items"), stat(&table, "expired_items")), (4, 4));
    let refused = |definition: TableConfig| definition.validate().unwrap_err().to_string();
    let unnamed = refused(TableConfig { parameters: None, ..limited(100) });
    assert!(unnamed.contains("max_sample_lag 2 counts versions of parameters: name them"), "{unnamed}");
    let empty = refused(TableConfig { parameters: Some(String::new()), ..limited(100) });
    assert!(empty.contains("parameters has 1 to 128 bytes"), "{empty}");
}

/// Items of equal priority, three quarters of them too old.
#[test]
fn the_items_of_a_batch_have_the_probabilities_of_those_that_are_left() {
    let memory = memory();
    let (table, _) = filled(&memory, &limited(1000), &[1, 9, 1, 1], 100);
    publish(&memory, 9);
    while stat(&table, "expired_items") < 300 {
        let sampled = sample(&table, 64);
        assert_eq!(versions(&sampled), [9; 64]);
        let probability = sampled.items[0].probability;
        assert!(sampled.items.iter().all(|item| (item.probability / probability - 1.0).abs() < 1e-9));
        // Of the items that are left, and those that expired in the last round.
        assert!((1.0 / 400.0..=1.0 / 100.0 + 1e-9).contains(&probability), "{probability}");
    }
    let sampled = sample(&table, 100);
    assert!(sampled.items.iter().all(|item| (item.probability * 100.0 - 1.0).abs() < 1e-9));
    assert_eq!(anchors(&sampled).into_iter().collect::<BTreeSet<_>>().len(), 100, "stratified: each once");
    let lag = &table.stats()["sample_lag"];
    assert_eq!((lag["count"].as_u64(), lag["sum"].as_f64()), (Some(stat(&table, "sampled_items")), Some(0.0)));
}

#[test]
fn a_sample_goes_on_when_more_have_expired_than_one_attempt_removes() {
    let memory = memory();
    let definition = TableConfig { max_times_sampled: 1, ..limited(60_000) };
    let (table, mut actor) = filled(&memory, &definition, &[1; 50], 1000);
    publish(&memory, 9);
    push(&mut actor, 9, 10);
    let wait = Wait::until(Some(std::time::Instant::now() + Duration::from_secs(60)));
    let sampled: Result<Sampled, Error> = memory.sample("t", &request(10), &wait);
    assert_eq!(versions(&sampled.unwrap()), [9; 10]);
    assert!(stat(&table, "expired_items") > 1 << 14);
    table.check_at_rest().unwrap();
}

#[test]
fn writers_that_wait_for_samples_go_on_when_their_items_have_expired() {
    let memory = memory();
    let definition = TableConfig { samples_per_insert: 1.0, slack: 8.0, min_size: 4, ..limited(100) };
    let (table, mut actor) = filled(&memory, &definition, &[1; 12], 1);
    let mut turn = Turn::default();
    let text = blocked(actor.try_push_in_turn(actor.next(1).version(9), &mut turn));
    assert!(text.contains("until 1 more are sampled"), "{text}");
    publish(&memory, 9);
    let text = blocked(table.try_sample(&request(4), false, &mut Turn::default()));
    assert!(text.contains("; 12 items have expired so far, more than max_sample_lag 2 versions old"), "{text}");
    assert_eq!(stat(&table, "items"), 0);
    for _ in 0..4 {
        assert!(matches!(actor.try_push_in_turn(actor.next(1).version(9), &mut turn), Ok(Attempt::Ready(_))));
        actor.next_step += 1;
        turn = Turn::default();
    }
    assert_eq!(versions(&sample(&table, 4)), [9; 4]);
}

#[test]
fn versions_survive_a_restart_as_versions() {
    for server in [true, false] {
        let memory = memory();
        let (table, _) = filled(&memory, &limited(100), &[4, 0, 5], 4);
        publish(&memory, 6);
        let lags = |table: &Table| table.stats()["sample_lag"].clone();
        sample(&table, 32);
        let mut bytes = Vec::new();
        match server {
            true => save_server(&memory, &mut bytes).unwrap(),
            false => bytes = saved(&memory),
        }
        let again = self::memory();
        restore(&again, &bytes).unwrap();
        let table_again = again.table("t").unwrap();
        assert_eq!(lags(&table_again), lags(&table));
        // What a snapshot of a program's own memory has is the number alone.
        assert_eq!(again.parameters().version("policy"), if server { 6 } else { 0 });
        assert!(versions(&sample(&table_again, 64)).contains(&4));
        publish(&again, 7);
        assert_eq!(again.parameters().version("policy"), 7);
        sample(&table_again, 64);
        assert_eq!((stat(&table_again, "expired_items"), stat(&table_again, "items")), (4, 8));
        let read = table_again.read_steps(&ReadSteps { from: Default::default(), bytes: 1 << 20 }).unwrap();
        assert_eq!(read.chunks.iter().map(|chunk| chunk.version).collect::<Vec<_>>(), [4, 0, 5]);

        let third = self::memory();
        restore(&third, &saved(&again)).unwrap();
        assert_eq!(stat(&third.table("t").unwrap(), "expired_items"), 4);
        assert_eq!(third.parameters().put("policy", 0, file(1, 4)).unwrap(), 8);
    }
}

#[test]
fn a_batch_of_wide_windows_over_a_new_version_is_as_old_as_its_first_rows() {
    let memory = memory();
    let table = memory.create_table(&limited(100)).unwrap();
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 4).version(1));
    actor.push(Body::default().chunk(0, 4, 4).version(4).window(0, 3, (3, 3), Some(1.0)));
    publish(&memory, 3);
    assert_eq!(versions(&sample_as(&table, &wide(1))), [1]);
    publish(&memory, 4);
    let text = blocked(table.try_sample(&wide(1), false, &mut Turn::default()));
    assert!(text.contains("1 items have expired"), "{text}");
}

/// Rows of two streams with one column, by a writer whose steps have these versions.
#[test]
fn a_new_version_begins_new_chunks() {
    let memory = memory();
    let columns = vec![Column::new("value", Dtype::Uint8, vec![])];
    let definition = TableConfig { parameters: Some("policy".into()), ..TableConfig::new("t", columns, 1000) };
    memory.create_table(&definition).unwrap();
    let wait = Wait::forever();
    let view = ViewSpec::Window(Window { before: 1, after: 0 });
    let options = WriterOptions { chunk_steps: 3, ..WriterOptions::default() };
    let mut writer: Writer = Writer::open(&*memory, "t", 2, &view, options, &wait).unwrap();
    for (row, version) in (0..).zip([0, 0, 2, 2, 2, 2, 7, 7, 3]) {
        let values = [row, 100 + row];
        let columns = [("value", Values::new(Dtype::Uint8, &[2], &values))];
        writer.append(&StepBatch { version, ..StepBatch::new(&columns) }, &wait).unwrap();
    }
    writer.close(&wait).unwrap();
    let table = memory.table("t").unwrap();
    let read = table.read_steps(&ReadSteps { from: Default::default(), bytes: 1 << 20 }).unwrap();
    let of_stream = |stream| read.chunks.iter().filter(move |chunk| chunk.stream == stream);
    for stream in 0..2 {
        let chunks: Vec<_> = of_stream(stream).map(|chunk| (chunk.version, chunk.first_step, chunk.rows)).collect();
        assert_eq!(chunks, [(0, 0, 2), (2, 2, 3), (2, 5, 1), (7, 6, 2), (3, 8, 1)]);
    }
    // Windows of two rows: the older one decides.
    let sampled = sample_as(&table, &SampleRequest { before: 1, ..request(64) });
    let mut rows = sampled.rows.chunks(2);
    for item in &sampled.items {
        let anchor = usize::from(rows.nth(usize::from(item.before)).unwrap()[1] % 100);
        assert_eq!(item.version, [0, 0, 0, 2, 2, 2, 2, 7, 3][anchor]);
    }

    let plain = TableConfig { name: "plain".into(), parameters: None, ..definition };
    memory.create_table(&plain).unwrap();
    let mut writer: Writer = Writer::open(&*memory, "plain", 2, &view, WriterOptions::default(), &wait).unwrap();
    let columns = [("value", Values::new(Dtype::Uint8, &[2], &[1, 2]))];
    let step = StepBatch { version: 5, ..StepBatch::new(&columns) };
    let error = writer.append(&step, &wait).unwrap_err().to_string();
    assert!(error.contains("version 5 of parameters, and the table names none"), "{error}");
    assert_eq!(writer.counters().steps, 0);
}

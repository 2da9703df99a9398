//! The oldest chunks go first, by steps and by bytes; what readers hold counts and stays valid; tables are
//! emptied, dropped, and bounded together.

use std::time::Duration;

use base::allocation::MemoryLeft;
use event_listener::Listener;
use replay_core::memory::{Memory, MemoryLimits, MemoryShare};
use replay_core::replay::SampleRequest;
use replay_core::schema::Sampler;
use replay_core::table::{Table, Turn};
use replay_core::{Error, TableConfig};

use crate::support::*;

#[test]
fn the_oldest_chunks_make_room_for_steps() {
    let table = table(&config(10));
    let mut actor = Actor::open(&table, 1);
    (0..5).for_each(|_| actor.push_next(3));
    assert_eq!((stat(&table, "steps"), stat(&table, "items")), (9, 9));
    assert_eq!(stat(&table, "evicted_steps"), 6);
    assert_eq!(stat(&table, "evicted_items"), 6);
    let mut sampled = anchors(&sample(&table, 9));
    sampled.sort_unstable();
    assert!(sampled.into_iter().eq(6..15), "equal strata sample each item once");
    table.check_at_rest().unwrap();
}

#[test]
fn items_evicted_before_their_last_sample_are_counted() {
    let counts = |sampler, max_times_sampled| {
        let table = table(&TableConfig { sampler, max_times_sampled, ..config(10) });
        let mut actor = Actor::open(&table, 1);
        actor.push_next(5);
        // The first item twice and the second once, or the first three times.
        sample(&table, 3);
        actor.push_next(10);
        ["evicted_items", "evicted_unread_items"].map(|name| stat(&table, name))
    };
    assert_eq!(counts(Sampler::Fifo, 2), [4, 4]);
    assert_eq!(counts(Sampler::Fifo, 3), [4, 4]);
    assert_eq!(counts(Sampler::Fifo, 1), [2, 2]);
    assert_eq!(counts(Sampler::Prioritized, 0), [5, 0]);
}

#[test]
fn an_item_dies_with_the_oldest_chunk_of_its_window() {
    let table = table(&config(10));
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 5));
    actor.push(Body::default().chunk(0, 5, 5).window(0, 5, (1, 0), None).window(0, 6, (1, 0), None));
    actor.push(Body::default().chunk(1, 0, 1));
    assert_eq!(stat(&table, "items"), 1);
    let wide = SampleRequest { before: 1, ..request(1) };
    assert_eq!(windows(&sample_as(&table, &wide)), [[(0, 5), (0, 6)]]);
}

#[test]
fn the_oldest_chunks_make_room_for_bytes() {
    let three = steps_bytes(0, 3) + steps_bytes(3, 3) + steps_bytes(6, 3);
    let table = table(&TableConfig { capacity_bytes: three, ..config(1000) });
    let mut actor = Actor::open(&table, 1);
    (0..3).for_each(|_| actor.push_next(3));
    assert_eq!(stat(&table, "bytes"), three);
    actor.push_next(3);
    assert_eq!(stat(&table, "steps"), 6, "one more is longer than one of the three");
    assert!(stat(&table, "bytes") <= three);
    for _ in 0..50 {
        actor.push_next(3);
        assert!(stat(&table, "bytes") <= three);
        assert_eq!(stat(&table, "pinned_bytes"), 0);
    }
    table.check_at_rest().unwrap();
}

#[test]
fn pinned_bytes_count_until_the_reader_lets_go() {
    let chunk = steps_bytes(0, 16);
    let table = table(&TableConfig { capacity_bytes: 2 * chunk, ..config(1000) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(16);
    let first = sample(&table, 1);
    actor.push_next(16);
    let mut turn = Turn::default();
    let text = blocked(actor.try_push_in_turn(actor.next(16), &mut turn));
    assert!(text.contains("sampled batches still hold"), "{text}");
    // The first chunk is evicted but read: the second would leave the table empty.
    assert_eq!((stat(&table, "steps"), stat(&table, "pinned_bytes")), (16, chunk));
    assert_eq!(stat(&table, "blocked_pushes"), 0, "a call without time makes one attempt");
    for _ in 0..2 {
        blocked(actor.try_push_in_turn(actor.next(16), &mut turn));
    }
    assert_eq!(stat(&table, "blocked_pushes"), 1);

    let changed = turn.changed().unwrap();
    assert!(anchors(&first)[0] < 16);
    drop(first);
    let heard = changed.wait_timeout(Duration::ZERO).is_some();
    assert!(heard, "the blocked push hears of it");
    drop(turn);
    actor.push_next(16);
    assert_eq!((stat(&table, "steps"), stat(&table, "pinned_bytes")), (32, 0));
}

#[test]
fn a_reader_makes_a_table_smaller_by_a_quarter_at_most() {
    const CHUNKS: u64 = 12;
    let chunk = steps_bytes(0, 16);
    let table = table(&TableConfig { capacity_bytes: CHUNKS * chunk, ..config(1000) });
    let mut actor = Actor::open(&table, 1);
    (0..CHUNKS).for_each(|_| actor.push_next(16));
    // Equal strata sample each item once.
    let all = sample(&table, CHUNKS as u32 * 16);
    let mut turn = Turn::default();
    blocked(actor.try_push_in_turn(actor.next(16), &mut turn));
    assert_eq!(stat(&table, "pinned_bytes"), (CHUNKS / 4 + 1) * chunk);
    assert_eq!(stat(&table, "steps"), (CHUNKS - CHUNKS / 4 - 1) * 16);
    drop(turn);
    drop(all);
    // All of it is there again.
    (0..=CHUNKS / 4).for_each(|_| actor.push_next(16));
    assert_eq!(stat(&table, "steps"), CHUNKS * 16);
    table.check_at_rest().unwrap();
}

#[test]
fn a_push_whose_chunks_are_all_gone_but_one_counts_whole() {
    let push = |step| Body::default().chunk(0, step, 4).chunk(1, step, 4).item(1, step, 1.0);
    let table = table(&config(16));
    let mut actor = Actor::open(&table, 1);
    actor.push(push(0));
    let bytes = stat(&table, "bytes");
    let held = sample(&table, 1);
    actor.push(push(4));
    actor.push(push(8));
    // The chunks of a push share one buffer: a reader of one holds all of it.
    assert_eq!(stat(&table, "pinned_bytes"), bytes);
    drop(held);
    assert_eq!(stat(&table, "pinned_bytes"), 0);
}

#[test]
fn an_emptied_table_starts_again_and_its_writers_go_on() {
    let memory = memory();
    let table = memory.create_table(&TableConfig { samples_per_insert: 1.0, slack: 4.0, ..config(100) }).unwrap();
    let mut actor = Actor::open(&table, 1);
    actor.push_next(4);
    let old = sample(&table, 4);
    memory.empty_table("t").unwrap();
    assert_eq!((stat(&table, "steps"), stat(&table, "items")), (0, 0));
    assert_eq!((stat(&table, "limiter_sampled"), stat(&table, "limiter_inserted")), (0, 0));
    assert_eq!(anchors(&old).len(), 4, "a sampled batch stays whole");
    assert_eq!(table.update_priorities(&ids(&old), &[1.0; 4]).unwrap().stale, 4);
    drop(old);
    assert_eq!(stat(&table, "limiter_sampled"), 0, "an old credit is void");
    assert_eq!(stat(&table, "bytes"), 0);

    // Step numbers continue; a window does not reach back over the emptying.
    actor.push(Body::default().chunk(0, 4, 4).window(0, 4, (1, 0), None).window(0, 5, (1, 0), None));
    assert_eq!((stat(&table, "items"), stat(&table, "late_items")), (1, 1));
    table.check_at_rest().unwrap();
    assert!(matches!(refusal(memory.empty_table("other")), Error::UnknownTable { .. }));
}

#[test]
fn a_dropped_table_is_unknown_and_its_bytes_come_back() {
    let index = Table::index_bytes(&config(100));
    let limits = MemoryLimits { max_bytes: index + 1000, receive_bytes: 100, ..MemoryLimits::default() };
    let memory = Memory::new(limits);
    let with_bytes = |name: &str, bytes| TableConfig { name: name.into(), capacity_bytes: bytes, ..config(100) };
    let refused = |config| refusal(memory.create_table(&config)).to_string();
    for (bytes, advice) in [(901, "lower capacity_bytes to at most 900"), (0, "set capacity_bytes to at most 900")] {
        let error = refused(with_bytes("t", bytes));
        let left = format!("there are {} left: {advice}", index + 900);
        assert!(error.contains(&left) && error.contains("max_bytes"), "{error}");
    }
    let table = memory.create_table(&with_bytes("t", 900)).unwrap();
    let error = refused(with_bytes("u", 1));
    assert!(error.contains("there are 0 left: lower capacity, or raise"), "{error}");

    let mut actor = Actor::open(&table, 1);
    actor.push_next(10);
    let held = sample(&table, 2);
    memory.drop_table("t").unwrap();
    let error = refusal(memory.table("t"));
    assert!(error.to_string().contains("the memory has no tables"), "{error}");
    for error in [
        refusal(actor.try_push(actor.next(1))),
        refusal(table.try_sample(&request(1), false, &mut Turn::default())),
        refusal(table.update_priorities(&[1], &[1.0])),
        refusal(table.open_writer(&open(2))),
        refusal(memory.drop_table("t")),
    ] {
        assert!(matches!(error, Error::UnknownTable { .. }), "{error}");
    }
    drop((actor, table));
    assert!(memory.create_table(&with_bytes("u", 900)).is_err(), "a reader still holds its bytes");
    assert_eq!(anchors(&held).len(), 2);
    drop(held);
    memory.create_table(&with_bytes("u", 900)).unwrap();
}

#[test]
fn an_error_at_a_limit_that_nobody_set_says_where_it_comes_from() {
    let share = MemoryShare { percent: 80, of: MemoryLeft { bytes: 1_000_000, whose: "of the machine" } };
    let limits =
        MemoryLimits { max_bytes: share.bytes(), receive_bytes: 0, share: Some(share), ..MemoryLimits::default() };
    let memory = Memory::new(limits);
    let large = TableConfig { capacity_bytes: 900_000, ..config(100) };
    let error = refusal(memory.create_table(&large)).to_string();
    for part in [
        "its steps up to 900000",
        "of the 800000 for tables and parameters (max_bytes is not set, and by default 80 % of the 1000000 bytes of the machine)",
        "lower capacity_bytes to at most",
        "or raise the memory's max_bytes",
    ] {
        assert!(error.contains(part), "{part} in: {error}");
    }
}

#[test]
fn the_same_table_again_is_fine_and_another_one_shows_the_difference() {
    let memory = memory();
    memory.create_table(&config(100)).unwrap();
    memory.create_table(&config(100)).unwrap();
    let error = refusal(memory.create_table(&TableConfig { min_size: 5, ..config(200) }));
    assert!(matches!(error, Error::TableDiffers { .. }));
    let text = error.to_string();
    assert!(text.contains("capacity is 100, asked for 200"), "{text}");
    assert!(text.contains("min_size is 1, asked for 5"), "{text}");
    let mut infinite = config(100);
    infinite.columns[0].finite = false;
    let text = refusal(memory.create_table(&infinite)).to_string();
    assert!(text.contains("finite=False"), "{text}");
    assert!(matches!(
        refusal(memory.create_table(&TableConfig { name: "u".into(), ..config(0) })),
        Error::Table { .. }
    ));
    let stats = memory.stats();
    assert_eq!(stats["incarnation"], format!("{:016x}", memory.incarnation()));
    assert_eq!(stats["tables"]["t"]["capacity"], 100);
}

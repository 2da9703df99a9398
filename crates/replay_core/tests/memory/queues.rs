//! Queues: what a push waits for, and that every item is read once, with all of its steps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::replay::OpenWriter;
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Turn, WriterConnection};
use replay_core::{Error, TableConfig};

use crate::support::*;

pub fn queue(size: u32, capacity: u64) -> TableConfig {
    TableConfig { sampler: Sampler::Fifo, max_times_sampled: 1, queue_size: size, ..config(capacity) }
}

/// A writer of one stream whose items have up to `after` steps after their anchor.
fn one_stream(writer: u64, after: u16) -> OpenWriter {
    OpenWriter { streams: 1, window_before: 0, window_after: after, ..open(writer) }
}

#[test]
fn a_push_to_a_full_queue_waits_in_its_turn_and_says_why() {
    let table = table(&queue(4, 100));
    let [mut first, mut second] = [1, 2].map(|writer| Actor::open(&table, writer));
    first.push_next(3);
    // A push is applied as a whole.
    first.push_next(2);
    let mut turns = [(); 2].map(|()| Turn::default());
    let reason = blocked(first.try_push_in_turn(first.next(1), &mut turns[0]));
    assert!(reason.contains("is full: 5 of its items") && reason.contains("queue_size is 4"), "{reason}");
    let reason = blocked(second.try_push_in_turn(second.next(1), &mut turns[1]));
    assert!(reason.starts_with("1 earlier calls wait: table \"t\" is full"), "{reason}");
    // Steps of a later item pass no other call either.
    blocked(second.try_push(Body::default().chunk(0, 0, 1)));
    sample(&table, 1);
    blocked(first.try_push_in_turn(first.next(1), &mut turns[0]));
    sample(&table, 1);
    blocked(second.try_push_in_turn(second.next(1), &mut turns[1]));
    assert!(matches!(first.try_push_in_turn(first.next(1), &mut turns[0]), Ok(Attempt::Ready(_))));
    turns[0] = Turn::default();
    blocked(second.try_push_in_turn(second.next(1), &mut turns[1]));
    assert_eq!(sample(&table, 4).items.len(), 4);
    assert!(matches!(second.try_push_in_turn(second.next(1), &mut turns[1]), Ok(Attempt::Ready(_))));
    // A sample that waits for more items than there may be would wait for ever.
    let error = refusal(table.try_sample(&request(5), false, &mut Turn::default()));
    assert!(error.to_string().contains("queue_size of 4 gives 4"), "{error}");
    assert_eq!(table.stats()["queue_size"], 4);
}

#[test]
fn a_waiting_sample_does_not_overfill_a_queue() {
    let table = table(&queue(4, 100));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(3);
    let mut waits = Turn::default();
    blocked(table.try_sample(&request(4), false, &mut waits));
    actor.push_next(1);
    blocked(actor.try_push(actor.next(1)));
    assert!(matches!(table.try_sample(&request(4), false, &mut waits), Ok(Attempt::Ready(_))));
}

#[test]
fn a_definition_that_would_block_both_sides_is_refused() {
    for wrong in [
        TableConfig { sampler: Sampler::Lifo, ..queue(4, 100) },
        TableConfig { samples_per_insert: 1.0, ..queue(4, 100) },
        TableConfig { min_size: 5, ..queue(4, 100) },
        queue(101, 100),
    ] {
        let error = refusal(wrong.validate());
        assert!(matches!(&error, Error::Table { reason, .. } if reason.contains("queue_size")), "{error}");
    }
}

/// What one stream has written.
#[derive(Default)]
struct Written {
    next: u64,
    /// Anchor of the next item.
    anchor: u64,
}

/// Writers with windows over several chunks and readers in any order of calls: items come in the order of insertion, each once, with
/// all of its steps, although the table has no room for many.
#[test]
fn items_of_several_chunks_come_once_and_whole() {
    const AFTER: u64 = 3;
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        let size = random.random_range(1..12);
        let table = table(&queue(size, 100));
        let mut actors = [1, 2].map(|writer| Actor::open(&table, writer));
        let mut streams: Vec<Written> = (0..4).map(|_| Written::default()).collect();
        let mut unread: VecDeque<Vec<(u32, u64)>> = VecDeque::new();
        let mut read = 0;
        for _ in 0..400 {
            // Writer 1 has the first two streams.
            let stream = random.random_range(0..4);
            let (actor, written) = (&mut actors[stream / 2], &mut streams[stream]);
            let rows = random.random_range(1..6);
            let mut body = Body::default().chunk(stream as u32, written.next, rows);
            let (end, mut anchor, mut items) = (written.next + u64::from(rows), written.anchor, Vec::new());
            while anchor + AFTER < end {
                let before = anchor.min(3);
                body = body.window(stream as u32, anchor, (before as u16, AFTER as u16), None);
                items.push((anchor - before..=anchor + AFTER).map(|step| (stream as u32, step)).collect());
                anchor += 1;
            }
            while let Attempt::Blocked(_) = actor.try_push(body.clone()).unwrap() {
                let count = random.random_range(1..=unread.len().min(size as usize));
                let sampled = sample_as(&table, &crate::snapshots::wide(count as u32));
                for window in windows(&sampled) {
                    assert_eq!(Some(window), unread.pop_front(), "seed {seed}");
                    read += 1;
                }
            }
            (written.next, written.anchor) = (end, anchor);
            unread.extend(items);
            table.check_at_rest().unwrap();
        }
        assert!(read > 500, "{read}");
        while let Some(window) = unread.pop_front() {
            assert_eq!(windows(&sample_as(&table, &crate::snapshots::wide(1))), [window]);
        }
        for lost in ["evicted_items", "late_items", "items"] {
            assert_eq!(stat(&table, lost), 0, "{lost}");
        }
        // The chunks that later items may reach into.
        assert!(stat(&table, "steps") <= 4 * 15, "{}", stat(&table, "steps"));
        let stats = table.stats();
        let [bytes, live] = ["bytes", "live_bytes"].map(|name| stats[name].as_u64().unwrap());
        assert_eq!(bytes, live, "what is read is freed");
    }
}

#[test]
fn an_item_in_the_making_holds_up_no_other_and_stays() {
    let table = table(&queue(10, 40));
    let mut slow = Actor::open_as(&table, &one_stream(1, 3));
    slow.push(Body::default().chunk(0, 0, 2));
    let mut quick = Actor::open_as(&table, &one_stream(2, 0));
    for _ in 0..100 {
        quick.push_next(3);
        assert_eq!(sample(&table, 3).items.len(), 3);
    }
    slow.push(Body::default().chunk(0, 2, 2).window(0, 0, (0, 3), None));
    let wide = sample_as(&table, &replay_core::replay::SampleRequest { after: 3, ..request(1) });
    assert_eq!(windows(&wide), [vec![(0, 0), (0, 1), (0, 2), (0, 3)]]);
}

#[test]
fn room_is_what_a_push_waits_for_and_what_writers_leave_is_freed() {
    let table = table(&queue(10, 20));
    let mut gone = Actor::open_as(&table, &one_stream(1, 15));
    let connection = Arc::<WriterConnection>::default();
    table.writers().attach(1, &connection);
    gone.push(Body::default().chunk(0, 0, 12));
    let mut stays = Actor::open_as(&table, &one_stream(2, 0));
    stays.push_next(8);
    let reason = blocked(stays.try_push(stays.next(1)));
    assert!(reason.contains("take 20 of its capacity of 20 steps"), "{reason}");
    connection.end(Instant::now());
    stays.push_next(1);
    assert_eq!((stat(&table, "steps"), stat(&table, "evicted_items")), (9, 0));
    let numbers: Vec<_> = (0..9).map(|step| vec![(0, step)]).collect();
    assert_eq!(windows(&sample(&table, 9)), numbers);
}

#[test]
fn a_queue_of_a_snapshot_goes_on() {
    let before = memory();
    let table = before.create_table(&queue(6, 100)).unwrap();
    let mut actor = Actor::open_as(&table, &one_stream(1, 3));
    actor.push(Body::default().chunk(0, 0, 4).window(0, 0, (0, 3), None));
    actor.push(Body::default().chunk(0, 4, 5).window(0, 4, (0, 3), None));
    sample(&table, 1);
    // A batch on its way was not delivered.
    let Ok(Attempt::Ready(on_its_way)) = table.try_sample(&request(1), false, &mut Turn::default()) else {
        panic!("an item is left")
    };
    let bytes = saved(&before);
    drop(on_its_way);
    let after = memory();
    let table = after.create_table(&queue(6, 100)).unwrap();
    restore(&after, &bytes).unwrap();
    assert_eq!(windows(&sample(&table, 1)), [vec![(0, 4)]]);
    let mut actor = Actor::open_as(&table, &one_stream(2, 0));
    for _ in 0..50 {
        actor.push_next(6);
        assert_eq!(sample(&table, 6).items.len(), 6);
    }
    assert!(stat(&table, "steps") < 10, "read steps of the snapshot are freed: {}", stat(&table, "steps"));
}

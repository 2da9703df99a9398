//! Pushes apply once, in order, as a whole or not at all; windows are found wherever their rows lie.

use base::allocation::TooLarge;
use replay_core::Error;
use replay_core::replay::{OpenWriter, SampleRequest};
use replay_core::table::Turn;

use crate::support::*;

#[test]
fn a_refused_push_leaves_nothing_behind() {
    let table = table(&config(100));
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 10).item(0, 3, 1.0));
    // The time of a writer's last try is not part of what is stored.
    let stored = || {
        let mut stats = table.stats();
        let object = stats.as_object_mut().unwrap();
        object.retain(|name, _| !["by_writer", "last_push_s"].contains(&name.as_str()));
        stats
    };
    let before = stored();

    let good = || Body::default().chunk(0, 10, 5).chunk(1, 0, 5);
    let edit = |edit: fn(&mut Body)| {
        let mut body = good().item(0, 12, 2.0);
        edit(&mut body);
        body
    };
    let cases: Vec<(&str, Body)> = vec![
        ("two chunks", good().chunk(0, 15, 5)),
        ("opened with 4", good().chunk(4, 0, 1)),
        ("do not go back", Body::default().chunk(0, 9, 1)),
        ("at least one step", edit(|b| b.chunks[0].rows = 0)),
        ("do not fit a chunk", edit(|b| b.chunks[0].rows = 90)),
        ("more than the payload", edit(|b| b.chunks[1].bytes += 1)),
        ("bytes more than its chunks", edit(|b| b.payload.push(0))),
        (
            "rows and blobs take",
            edit(|b| {
                b.chunks[0].bytes -= 1;
                b.chunks[1].bytes += 1;
            }),
        ),
        ("unknown flags", edit(|b| b.payload[0] = 128)),
        ("for column \"frame\"", edit(|b| b.payload[13] = 17)),
        ("do not go back", edit(|b| b.chunks[0].first_step = u64::MAX)),
        ("a stream that", good().item(9, 0, 1.0)),
        ("exclusive", good().item(0, 15, 1.0)),
        ("exclusive", good().window(0, 14, (0, 1), None)),
        ("no stream has", good().window(0, 2, (3, 0), None)),
        ("no stream has", good().window(0, u64::MAX, (0, 1), None)),
        ("opened with 3 and 3", good().window(0, 10, (4, 0), None)),
        ("opened with 3 and 3", good().window(0, 10, (0, 4), None)),
        ("gap before step 12", Body::default().chunk(0, 12, 5).window(0, 12, (3, 0), None)),
        ("not negative", good().item(0, 12, f32::NAN)),
        ("not negative", good().item(0, 12, -1.0)),
        ("not negative", good().item(0, 12, f32::INFINITY)),
        ("in steps", good().chunk(2, 0, 91)),
    ];
    for (message, body) in cases {
        let error = refusal(actor.try_push(body)).to_string();
        assert!(error.contains(message), "{error:?} should say {message:?}");
        assert_eq!(stored(), before, "after {error:?}");
    }
    let steps = actor.push(good().item(0, 12, 2.0));
    assert_eq!(steps, 20, "the sequence number was not used up");
    assert_eq!(stat(&table, "items"), 2);
    table.check_at_rest().unwrap();
}

#[test]
fn a_push_larger_than_the_table_is_refused_before_it_evicts() {
    let table = table(&replay_core::TableConfig { capacity_bytes: 1000, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(10);
    let wide = Body::default().chunk(0, 10, 60);
    let error = refusal(actor.try_push(wide));
    assert!(matches!(error, Error::TooLarge(TooLarge { limit: 1000, .. })), "{error}");
    let items = (0..101).fold(Body::default(), |body, _| body.item(0, 3, 1.0));
    let error = refusal(actor.try_push(items));
    assert!(matches!(error, Error::TooLarge(TooLarge { limit: 100, size: 101, .. })), "{error}");
    assert_eq!(stat(&table, "steps"), 10);
}

#[test]
fn a_push_sent_again_is_answered_and_not_applied() {
    let table = table(&config(100));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(10);
    actor.sequence = 0;
    assert_eq!(actor.push(actor.next(10)), 10);
    assert_eq!(stat(&table, "inserted_steps"), 10);
    actor.sequence = 5;
    assert!(matches!(refusal(actor.try_push(actor.next(5))), Error::Misuse(_)));
    let mut stranger = Actor { writer: 2, ..Actor::open(&table, 1) };
    assert!(matches!(refusal(stranger.try_push(stranger.next(5))), Error::Expired { .. }));
}

#[test]
fn a_second_connection_goes_on_where_the_first_is_fenced_off() {
    let table = table(&config(100));
    let mut first = Actor::open(&table, 1);
    first.push_next(10);
    let mut second = Actor::open(&table, 1);
    second.next_step = 10;
    assert_eq!(second.sequence, 1);
    second.push_next(10);
    assert!(matches!(refusal(first.try_push(first.next(10))), Error::Fenced { .. }));
    assert!(table.writers().close(1, first.epoch).is_err());
    table.writers().close(1, second.epoch).unwrap();
    assert!(matches!(refusal(second.try_push(second.next(10))), Error::Expired { .. }));
    assert_eq!(stat(&table, "steps"), 20, "what it wrote stays");
}

#[test]
fn windows_span_chunks_and_are_clipped_to_what_is_wanted() {
    let table = table(&config(100));
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 3).chunk(2, 0, 3));
    actor.push(Body::default().chunk(0, 3, 1));
    actor.push(Body::default().chunk(2, 3, 9).chunk(0, 4, 4));
    actor.push(Body::default().window(0, 4, (3, 2), None));
    let sample = |before, after| {
        let request = SampleRequest { before, after, ..request(1) };
        windows(&sample_as(&table, &request)).remove(0)
    };
    let rows = |steps: std::ops::Range<u64>| steps.map(|s| (0, s)).collect::<Vec<_>>();
    assert_eq!(sample(3, 3), rows(1..7));
    assert_eq!(sample(3, 0), rows(1..5));
    assert_eq!(sample(1, 1), rows(3..6));
    assert_eq!(sample(0, 3), rows(4..7));
    assert_eq!(sample(0, 0), rows(4..5));
}

#[test]
fn a_request_wider_than_the_writers_window_is_an_error_and_takes_nothing() {
    let table = table(&replay_core::TableConfig { max_times_sampled: 2, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(1);
    for (before, after) in [(4, 0), (0, 4)] {
        let request = SampleRequest { before, after, ..request(1) };
        let error = refusal(table.try_sample(&request, false, &mut Turn::default()));
        assert!(matches!(error, Error::View { window_before: 3, window_after: 3, .. }), "{error}");
    }
    assert_eq!(sample(&table, 2).items.len(), 2, "both samples are left");
}

#[test]
fn no_window_crosses_a_gap() {
    let table = table(&config(100));
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 4).window(0, 2, (2, 1), None));
    let across = Body::default().chunk(0, 6, 4).window(0, 7, (3, 0), None);
    assert!(refusal(actor.try_push(across)).to_string().contains("gap before step 6"));
    let inside = Body::default().chunk(0, 6, 4).window(0, 7, (1, 2), None);
    actor.push(inside);
    let sampled = sample_as(&table, &SampleRequest { before: 3, after: 3, ..request(2) });
    assert_eq!(windows(&sampled), [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 6), (0, 7), (0, 8), (0, 9)]]);
}

#[test]
fn an_item_that_comes_after_its_rows_went_is_skipped_and_counted() {
    let table = table(&config(10));
    let mut actor = Actor::open(&table, 1);
    actor.push(Body::default().chunk(0, 0, 5));
    actor.push(Body::default().chunk(0, 5, 5));
    // This push itself evicts steps 0 to 4.
    actor.push(Body::default().chunk(0, 10, 5).window(0, 5, (1, 0), None).window(0, 6, (1, 0), None));
    assert_eq!((stat(&table, "items"), stat(&table, "late_items")), (1, 1));
    actor.push(Body::default().window(0, 1, (0, 0), None));
    assert_eq!((stat(&table, "items"), stat(&table, "late_items")), (1, 2));
    assert_eq!(anchors(&sample(&table, 1)), [6]);
}

#[test]
fn writers_are_refused_without_streams_or_with_too_many() {
    let table = table(&config(10));
    let with = |streams| OpenWriter { streams, ..open(1) };
    assert!(matches!(refusal(table.open_writer(&with(0))), Error::Misuse { .. }));
    assert!(matches!(refusal(table.open_writer(&with(u32::MAX))), Error::TooLarge { .. }));
    table.open_writer(&with(4)).unwrap();
    assert!(matches!(refusal(table.open_writer(&with(5))), Error::Misuse { .. }));
}

#[test]
fn a_window_that_the_table_cannot_hold_is_refused_when_the_writer_opens() {
    let table = table(&config(6));
    let error = refusal(table.open_writer(&open(1)));
    assert!(matches!(error, replay_core::Error::Config(_)), "{error}");
    let text = error.to_string();
    for part in ["7 steps (3 before the anchor, 3 after it)", "holds 6"] {
        assert!(text.contains(part), "{text}");
    }
    let narrower = replay_core::replay::OpenWriter { window_after: 2, ..open(1) };
    table.open_writer(&narrower).unwrap();
}

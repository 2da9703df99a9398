//! Keys outlive their items and then name nothing.

use replay_core::{Error, ErrorCode};

use crate::support::*;

#[test]
fn updates_of_batches_in_flight_skip_what_was_evicted_since() {
    let table = table(&config(8));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(4);
    actor.push_next(4);
    let batches = [sample(&table, 8), sample(&table, 8), sample(&table, 8)];
    // Newcomers take the evicted items' slots.
    actor.push_next(4);
    for batch in &batches {
        let receipt = table.update_priorities(&keys(batch), &[50.0; 8]).unwrap();
        assert_eq!((receipt.applied, receipt.stale), (4, 4));
    }
    assert_eq!(stat(&table, "stale_updates"), 12);
    assert_eq!(stat(&table, "updated_priorities"), 12);
    let batch = sample(&table, 64);
    let total = 4.0 * 50.0 + 4.0;
    (4..8).for_each(|step| assert_eq!(item_of(&batch, step).probability, 50.0 / total));
    assert!(
        batch
            .items
            .iter()
            .zip(anchors(&batch))
            .all(|(i, s)| s < 8 || i.probability == 1.0 / total),
        "no newcomer got an old item's priority"
    );
    table.check_at_rest().unwrap();
}

#[test]
fn the_last_priority_of_a_key_that_stands_twice_counts() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(2);
    let batch = sample(&table, 2);
    let [a, b] = keys(&batch)[..] else {
        panic!("two items")
    };
    let receipt = table
        .update_priorities(&[a, b, a], &[9.0, 1.0, 3.0])
        .unwrap();
    assert_eq!((receipt.applied, receipt.stale), (3, 0));
    assert_eq!(sample(&table, 1).live_items, 2);
    assert_eq!(item_of(&sample(&table, 8), 0).probability, 0.75);
}

#[test]
fn keys_from_elsewhere_are_stale() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(1);
    let key = sample(&table, 1).items[0].key;
    let strange = [
        key | 1 << 49,
        key + 1,
        key ^ 2,
        1 << 30,
        u64::MAX,
        (1 << 49) - 1,
    ];
    let receipt = table.update_priorities(&strange, &[9.0; 6]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 6));
    assert_eq!(table.stats()["total_priority"], 1.0);
    assert!(
        strange
            .iter()
            .all(|&key| table.report_corrupt(key, "").is_none())
    );
}

#[test]
fn a_bad_priority_among_good_ones_changes_nothing() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(2);
    let keys = keys(&sample(&table, 2));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-300] {
        let error = refusal(table.update_priorities(&keys, &[5.0, bad]));
        assert!(matches!(error, Error::Priority { .. }), "{error}");
    }
    let error = refusal(table.update_priorities(&keys, &[5.0]));
    assert_eq!(error.code(), ErrorCode::Schema);
    assert_eq!(table.stats()["total_priority"], 2.0);
    assert_eq!(table.stats()["max_priority"], 1.0);
    // Beyond what a priority can be is cut and counted; next to nothing stays drawable.
    table
        .update_priorities(&keys, &[f64::MAX, f64::MIN_POSITIVE])
        .unwrap();
    assert_eq!(stat(&table, "saturated_priorities"), 1);
    assert_eq!(stat(&table, "items_with_mass"), 2);
}

#[test]
fn a_corrupt_item_is_removed_once_and_its_writer_named() {
    let table = table(&config(8));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(2);
    let key = item_of(&sample(&table, 2), 0).key;
    assert_eq!(
        table.report_corrupt(key, "bad block").as_deref(),
        Some("actor 1")
    );
    assert_eq!(table.report_corrupt(key, "bad block"), None);
    assert_eq!(
        (stat(&table, "corrupt_items"), stat(&table, "items")),
        (1, 1)
    );
    assert_eq!(anchors(&sample(&table, 4)), [1; 4]);
    // Its slot is used again, and its chunk's end does not touch the newcomer.
    (0..3).for_each(|_| actor.push_next(3));
    table.check_at_rest().unwrap();
}

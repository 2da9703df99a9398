//! Ids outlive their items and then name nothing.

use replay_core::Error;
use replay_core::memory::Memory;
use replay_core::table::Table;

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
        let receipt = table.update_priorities(&ids(batch), &[50.0; 8]).unwrap();
        assert_eq!((receipt.applied, receipt.stale), (4, 4));
    }
    assert_eq!(stat(&table, "stale_updates"), 12);
    assert_eq!(stat(&table, "updated_priorities"), 12);
    let batch = sample(&table, 64);
    let total = 4.0 * 50.0 + 4.0;
    (4..8).for_each(|step| assert_eq!(item_of(&batch, step).probability, 50.0 / total));
    assert!(
        batch.items.iter().zip(anchors(&batch)).all(|(i, s)| s < 8 || i.probability == 1.0 / total),
        "no newcomer got an old item's priority"
    );
    table.check_at_rest().unwrap();
}

#[test]
fn the_last_priority_of_a_key_that_stands_twice_counts() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(2);
    let batch = sample(&table, 2);
    let [a, b] = ids(&batch)[..] else { panic!("two items") };
    let receipt = table.update_priorities(&[a, b, a], &[9.0, 1.0, 3.0]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (3, 0));
    assert_eq!(sample(&table, 1).live_items, 2);
    assert_eq!(item_of(&sample(&table, 8), 0).probability, 0.75);
}

#[test]
fn keys_from_elsewhere_are_stale() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(1);
    let id = sample(&table, 1).items[0].id;
    let strange = [id ^ 1 << 48, id ^ 1 << 63, id + 1, id ^ 2, 1 << 30, u64::MAX, (1 << 49) - 1];
    let receipt = table.update_priorities(&strange, &[9.0; 7]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 7));
    assert_eq!(table.stats()["total_mass"], 1.0);
    assert!(strange.iter().all(|&id| table.report_corrupt(id, "").is_none()));
}

/// Tables of the same layout, each with one step and its item in the first slot.
fn first_key(table: &std::sync::Arc<Table>) -> u64 {
    Actor::open(table, 1).push_next(1);
    sample(table, 1).items[0].id
}

fn assert_stale(table: &Table, id: u64) {
    let before = table.stats()["total_mass"].clone();
    let receipt = table.update_priorities(&[id], &[9.0]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 1));
    assert_eq!(table.report_corrupt(id, ""), None);
    assert_eq!(table.stats()["total_mass"], before);
    assert_eq!(stat(table, "stale_updates"), 1);
}

#[test]
fn keys_of_other_tables_and_memories_are_stale() {
    let (memory, other) = (memory(), memory());
    let make = |memory: &Memory, name: &str| {
        let config = replay_core::TableConfig { name: name.into(), ..config(8) };
        memory.create_table(&config).unwrap()
    };
    let table = make(&memory, "t");
    let old = first_key(&table);
    let beside = make(&memory, "u");
    let beside_key = {
        let opened = beside.open_writer(&open(1)).unwrap();
        assert_eq!(opened.epoch, 1);
        let body = Body::default().chunk(0, 0, 1).item(0, 0, 1.0).build();
        let push = replay_core::replay::Push { writer: 1, epoch: 1, sequence: 1, body };
        beside.try_push(&push, &mut replay_core::table::Turn::default()).unwrap();
        sample(&beside, 1).items[0].id
    };
    assert_stale(&table, beside_key);
    assert_stale(&beside, old);

    // The same seed and definition, in another memory.
    let elsewhere = make(&other, "t");
    first_key(&elsewhere);
    assert_stale(&elsewhere, old);

    // The same name again.
    memory.drop_table("t").unwrap();
    let again = make(&memory, "t");
    first_key(&again);
    assert_stale(&again, old);
}

#[test]
fn keys_from_before_a_restore_are_stale() {
    let old = memory();
    let table = old.create_table(&config(8)).unwrap();
    let mut actor = Actor::open(&table, 1);
    (0..3).for_each(|_| actor.push_next(1));
    let bytes = saved(&old);
    let oldest = item_of(&sample(&table, 64), 0).id;

    // A smaller table keeps the newest steps alone, in the first slots.
    let smaller = memory();
    let table = smaller.create_table(&config(7)).unwrap();
    restore(&smaller, &bytes).unwrap();
    assert_stale(&table, oldest);

    // The table itself, emptied and restored.
    old.empty_table("t").unwrap();
    restore(&old, &bytes).unwrap();
    assert_stale(&old.table("t").unwrap(), oldest);
}

#[test]
fn a_bad_priority_among_good_ones_changes_nothing() {
    let table = table(&config(8));
    Actor::open(&table, 1).push_next(2);
    let ids = ids(&sample(&table, 2));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-300] {
        let error = refusal(table.update_priorities(&ids, &[5.0, bad]));
        assert!(matches!(error, Error::Priority { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("priority 1 of 2 is "), "{text}");
    }
    let error = refusal(table.update_priorities(&ids, &[5.0]));
    assert!(matches!(error, Error::Schema { .. }));
    assert_eq!(table.stats()["total_mass"], 2.0);
    assert_eq!(table.stats()["max_priority"], 1.0);
    // Beyond what a priority can be is cut and counted; next to nothing stays drawable.
    table.update_priorities(&ids, &[f64::MAX, f64::MIN_POSITIVE]).unwrap();
    assert_eq!(stat(&table, "saturated_priorities"), 1);
    assert_eq!(stat(&table, "items_with_mass"), 2);
}

#[test]
fn a_corrupt_item_is_removed_once_and_its_writer_named() {
    let table = table(&config(8));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(2);
    let id = item_of(&sample(&table, 2), 0).id;
    assert_eq!(table.report_corrupt(id, "bad block").as_deref(), Some("actor 1"));
    assert_eq!(table.report_corrupt(id, "bad block"), None);
    assert_eq!((stat(&table, "corrupt_items"), stat(&table, "items")), (1, 1));
    assert_eq!(anchors(&sample(&table, 4)), [1; 4]);
    // Its slot is used again, and its chunk's end does not touch the newcomer.
    (0..3).for_each(|_| actor.push_next(3));
    table.check_at_rest().unwrap();
}

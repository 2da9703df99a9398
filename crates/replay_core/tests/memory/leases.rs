//! Leases: items that stay with their reader until it acknowledges them, or return to where they were.

use std::sync::Arc;

use replay_core::replay::{BatchShare, ChangeLease, Replay, SampleChannel, SampleRequest, Sampled};
use replay_core::table::leases::Reader;
use replay_core::table::{Attempt, Table, Turn};
use replay_core::{Error, TableConfig};

use crate::queues::queue;
use crate::support::*;

fn leased(count: u32, lease_ms: u32) -> SampleRequest {
    SampleRequest { lease_ms, ..request(count) }
}

fn change(table: &Table, lease: u64, begin: bool) -> Result<(), Error> {
    table.change_lease(ChangeLease { lease, begin })
}

/// A batch that waits for its caller.
fn held(table: &Arc<Table>, request: &SampleRequest, reader: &Reader) -> Sampled {
    match table.try_sample(request, false, &mut Turn::default()).unwrap() {
        Attempt::Ready(sampled) => table.hold(request, sampled, reader),
        Attempt::Blocked(waits) => panic!("blocked: {waits}"),
    }
}

/// A batch that its caller has.
fn lease(table: &Arc<Table>, request: &SampleRequest, reader: &Reader) -> Sampled {
    let mut sampled = held(table, request, reader);
    deliver(&mut sampled);
    change(table, sampled.lease, true).unwrap();
    sampled
}

fn steps_of(sampled: &Sampled) -> Vec<u64> {
    windows(sampled).iter().map(|window| window[0].1).collect()
}

/// A full queue of steps 0 to 5.
fn full() -> (Arc<Table>, Actor) {
    let table = table(&queue(6, 100));
    let mut actor = Actor::open(&table, 1);
    actor.push_next(6);
    (table, actor)
}

const NO_END: u32 = SampleRequest::NO_END;

#[test]
fn leased_items_keep_their_places_until_they_are_acknowledged() {
    let (table, mut actor) = full();
    let [one, two] = ["one", "two"].map(Reader::from);
    let first = lease(&table, &leased(2, NO_END), &one);
    let second = held(&table, &leased(3, 60_000), &two);
    assert_eq!((steps_of(&first), steps_of(&second)), (vec![0, 1], vec![2, 3, 4]));
    let reason = blocked(actor.try_push(actor.next(1)));
    assert!(reason.contains("reader \"one\" has 2 leased, for"), "{reason}");
    assert!(reason.contains("3 are on their way to reader \"two\""), "{reason}");
    let reason = blocked(table.try_sample(&request(2), false, &mut Turn::default()));
    assert!(reason.contains("has 1 samples left") && reason.contains("reader \"one\" has 2 leased"), "{reason}");
    let stats = table.stats();
    assert_eq!((&stats["leased_items"], stats["leases"].as_array().unwrap().len()), (&2.into(), 2));
    let of_one = stats["leases"].as_array().unwrap().iter().find(|lease| lease["reader"] == "one").unwrap();
    assert_eq!(of_one["items"], 2);
    assert!(of_one["since_s"].as_f64().unwrap() >= 0.0);

    change(&table, first.lease, false).unwrap();
    assert_eq!((stat(&table, "items"), stat(&table, "leased_items")), (4, 0));
    actor.push_next(2);
    // Ahead of its caller, a batch ends with its reader, too.
    table.return_leases(&two);
    drop(second);
    assert_eq!(steps_of(&sample(&table, 6)), [2, 3, 4, 5, 6, 7]);
    assert_eq!((stat(&table, "items"), stat(&table, "evicted_items")), (0, 0));
    table.check_at_rest().unwrap();
}

#[test]
fn items_of_a_reader_that_is_gone_are_where_they_were() {
    let (table, _) = full();
    let [one, two] = ["one", "two"].map(Reader::from);
    let first = lease(&table, &leased(3, NO_END), &one);
    let second = lease(&table, &leased(1, NO_END), &two);
    table.return_leases(&one);
    assert_eq!(steps_of(&lease(&table, &leased(2, NO_END), &two)), [0, 1]);
    let late = refusal(change(&table, first.lease, false));
    assert!(matches!(&late, Error::Lease { .. }), "{late}");
    assert_eq!(stat(&table, "leased_items"), 3);
    change(&table, second.lease, false).unwrap();
    let again = refusal(change(&table, second.lease, false)).to_string();
    assert!(again.contains("\"t\" has no lease: it was acknowledged before"), "{again}");
    table.return_leases(&two);
    assert_eq!(steps_of(&sample(&table, 5)), [0, 1, 2, 4, 5]);
    table.check_at_rest().unwrap();
}

#[test]
fn the_time_of_a_lease_begins_with_its_delivery_and_ends_it() {
    let (table, mut actor) = full();
    let reader = Reader::from("slow");
    let mut ahead = held(&table, &leased(2, 1), &reader);
    deliver(&mut ahead);
    let given = lease(&table, &leased(2, 1), &reader);
    // A push or a sample that may wait for it looks at the time.
    while stat(&table, "leased_items") > 0 {}
    assert!(matches!(change(&table, given.lease, false), Err(Error::Lease { .. })));
    assert_eq!(steps_of(&sample(&table, 2)), [2, 3], "the others have not begun");
    change(&table, ahead.lease, true).unwrap();
    while let Attempt::Blocked(_) = table.try_sample(&request(4), false, &mut Turn::default()).unwrap() {}
    assert_eq!(steps_of(&sample(&table, 4)), [0, 1, 4, 5]);
    actor.push_next(6);
    lease(&table, &leased(6, 1), &reader);
    while let Attempt::Blocked(_) = actor.try_push(actor.next(1)).unwrap() {
        // Its items return, and fill the queue.
        if stat(&table, "leased_items") == 0 {
            break;
        }
    }
    assert_eq!(sample(&table, 6).items.len(), 6);
}

#[test]
fn a_snapshot_has_leased_items_as_unread() {
    let before = memory();
    let table = before.create_table(&queue(6, 100)).unwrap();
    Actor::open(&table, 1).push_next(6);
    let reader = Reader::from("one");
    let kept = lease(&table, &leased(2, NO_END), &reader);
    let done = lease(&table, &leased(2, NO_END), &reader);
    change(&table, done.lease, false).unwrap();
    let bytes = saved(&before);
    let after = memory();
    let restored = after.create_table(&queue(6, 100)).unwrap();
    restore(&after, &bytes).unwrap();
    assert_eq!(steps_of(&sample(&restored, 4)), [0, 1, 4, 5]);
    assert!(change(&restored, kept.lease, false).is_err(), "the number of another memory");
}

#[test]
fn tables_whose_items_do_not_end_and_shares_have_no_leases() {
    let endless = table(&config(10));
    Actor::open(&endless, 1).push_next(4);
    let (queue, _) = full();
    let share = SampleRequest { share: Some(BatchShare { take: 1 }), ..leased(1, 5) };
    for (table, request) in [(&endless, leased(1, 5)), (&queue, share)] {
        let error = refusal(table.try_sample(&request, false, &mut Turn::default()));
        assert!(matches!(&error, Error::Config(reason) if reason.contains("acknowledge=True")), "{error}");
    }
    // Any table whose items end has leases.
    let twice = table(&TableConfig { max_times_sampled: 2, ..config(10) });
    Actor::open(&twice, 1).push_next(1);
    let reader = Reader::from("one");
    let [first, second] = [(); 2].map(|()| lease(&twice, &leased(1, NO_END), &reader));
    for lease in [first.lease, second.lease] {
        change(&twice, lease, false).unwrap();
    }
    assert_eq!(stat(&twice, "items"), 0);
}

#[test]
fn an_iterator_of_this_process_returns_its_leases_at_its_end() {
    let memory = memory();
    let table = memory.create_table(&queue(6, 100)).unwrap();
    Actor::open(&table, 1).push_next(6);
    let replay: &dyn Replay<Error> = &*memory;
    let wait = base::wait::Wait::forever();
    let mut channel: Box<dyn SampleChannel<Error>> = replay.samples("t", leased(2, NO_END), 0).unwrap();
    let mut next = || {
        let mut sampled = channel.next(&wait).unwrap();
        deliver(&mut sampled);
        sampled.lease
    };
    let (done, kept) = (next(), next());
    for (number, begin) in [(done, true), (kept, true), (done, false)] {
        replay.change_lease("t", ChangeLease { lease: number, begin }, &wait).unwrap();
    }
    drop(channel);
    assert_eq!(steps_of(&sample(&table, 4)), [2, 3, 4, 5]);
}

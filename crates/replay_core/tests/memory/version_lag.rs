//! `max_version_lag`: pushes of writers whose parameters are too old.

use std::time::Duration;

use event_listener::Listener;
use replay_core::TableConfig;
use replay_core::table::{Attempt, Turn};

use crate::parameters::file;
use crate::support::*;

#[test]
fn a_push_that_becomes_outdated_in_the_line_lets_later_ones_pass() {
    let memory = memory();
    let config = TableConfig { samples_per_insert: 2.0, slack: 8.0, min_size: 4, max_version_lag: 1, ..config(100) };
    let table = memory.create_table(&config).unwrap();
    let publish = || memory.parameters().put("policy", 0, file(1, 4)).unwrap();
    let get = |writer: u64| memory.get_parameters("policy", 0, Some((&table, writer))).unwrap().version;
    let [mut slow, mut other] = [1, 2].map(|number| Actor::open(&table, number));
    publish();
    assert_eq!((get(1), get(2)), (1, 1));
    while let Attempt::Ready(_) = slow.try_push(slow.next(1)).unwrap() {
        slow.next_step += 1;
    }
    let (mut early, mut late) = (Turn::default(), Turn::default());
    let text = blocked(slow.try_push_in_turn(slow.next(1), &mut early));
    assert!(text.contains("samples_per_insert"), "{text}");
    let text = blocked(other.try_push_in_turn(other.next(1), &mut late));
    assert!(text.starts_with("1 earlier calls wait: table"), "{text}");

    publish();
    publish();
    assert_eq!(get(2), 3);
    sample(&table, 8).credit.unwrap().delivered();
    let (in_line, woken) = (early.positions(), late.changed().unwrap());
    let text = blocked(slow.try_push_in_turn(slow.next(1), &mut early));
    let expected =
        "writer \"actor 1\" of table \"t\" makes its steps with version 1 of \"policy\", and version 3 is the newest";
    assert!(text.starts_with(expected), "{text}");
    assert!(early.positions() > in_line && !early.is_behind());
    assert!(woken.wait_timeout(Duration::ZERO).is_some());
    let pushed = other.try_push_in_turn(other.next(1), &mut late).unwrap();
    assert!(matches!(pushed, Attempt::Ready(1)));
    drop(late);
    let stats = table.stats();
    assert_eq!((&stats["outdated_pushes"], &stats["waiting_pushes"]), (&1.into(), &1.into()));

    let woken = early.changed().unwrap();
    assert_eq!(get(1), 3);
    assert!(woken.wait_timeout(Duration::ZERO).is_some());
    let pushed = slow.try_push_in_turn(slow.next(1), &mut early).unwrap();
    assert!(matches!(pushed, Attempt::Ready(_)));
    drop(early);
    let stats = table.stats();
    assert_eq!((&stats["outdated_pushes"], &stats["waiting_pushes"]), (&0.into(), &0.into()));
}

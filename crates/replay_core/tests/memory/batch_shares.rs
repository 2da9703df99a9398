//! A memory's part of a batch that is sampled from several memories.

use replay_core::replay::{BatchShare, SampleRequest, ShareState};
use replay_core::table::{Attempt, Turn};
use replay_core::{TableConfig, snapshot};

use crate::parameters::file;
use crate::support::*;

fn part(count: u32, take: u32) -> SampleRequest {
    SampleRequest { share: Some(BatchShare { take }), ..request(count) }
}

#[test]
fn a_part_takes_what_the_limiter_admits_and_does_not_wait_for_min_size() {
    let table = table(&TableConfig { samples_per_insert: 2.0, slack: 8.0, min_size: 4, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(2);
    let whole = table.try_sample(&request(1), false, &mut Turn::default());
    assert!(blocked(whole).contains("min_size"));

    // Two items allow 2 * (2 - 4) + 8 samples.
    let state = sample_as(&table, &part(0, 0)).state.unwrap();
    let expected = ShareState {
        number: state.number,
        total_mass: 2.0,
        items: 2,
        taken: 0,
        allowance: 4.0,
        holds_pushes: false,
        min_size: 4,
        samples_per_insert: 2.0,
        max_times_sampled: 0,
    };
    assert_eq!(state, expected);
    let mut sampled = sample_as(&table, &part(3, 1));
    assert_eq!(sampled.items.len(), 3);
    assert_eq!(sampled.state, Some(ShareState { taken: 1, allowance: 3.0, ..expected }));
    deliver(&mut sampled);
    assert_eq!(table.stats()["limiter_sampled"], 1);

    // Items of this memory, samples of others' limiters; and the other way round.
    assert_eq!(sample_as(&table, &part(8, 0)).state.unwrap().allowance, 3.0);
    let mut last = sample_as(&table, &part(0, 5));
    assert_eq!(last.state, Some(ShareState { taken: 3, allowance: 0.0, ..expected }));
    deliver(&mut last);
    assert_eq!(sample_as(&table, &part(2, 1)).state, last.state.map(|state| ShareState { taken: 0, ..state }));
    assert_eq!(table.stats()["limiter_sampled"], 4);
    // Not delivered.
    actor.push_next(1);
    drop(sample_as(&table, &part(0, 2)));
    assert_eq!(table.stats()["limiter_sampled"], 4);
}

#[test]
fn a_part_takes_nothing_from_samples_that_wait() {
    let table = table(&TableConfig { samples_per_insert: 2.0, slack: 8.0, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(2);
    let mut turn = Turn::default();
    assert!(blocked(table.try_sample(&request(12), false, &mut turn)).contains("samples_per_insert"));
    let state = sample_as(&table, &part(2, 2)).state.unwrap();
    assert_eq!((state.taken, state.allowance), (0, 0.0));
    drop(turn);
    assert_eq!(sample_as(&table, &part(2, 2)).state.unwrap().taken, 2);
}

#[test]
fn a_part_says_that_pushes_wait_and_lets_them_in() {
    let table = table(&TableConfig { samples_per_insert: 2.0, slack: 8.0, ..config(100) });
    let mut actor = Actor::open(&table, 1);
    actor.push_next(4);
    assert!(!sample_as(&table, &part(0, 0)).state.unwrap().holds_pushes);
    actor.push_next(1);
    assert!(sample_as(&table, &part(0, 0)).state.unwrap().holds_pushes);
    let mut turn = Turn::default();
    let push = actor.next(1);
    assert!(blocked(actor.try_push_in_turn(push, &mut turn)).contains("sample"));
    let mut taken = sample_as(&table, &part(0, 2));
    deliver(&mut taken);
    let push = actor.next(1);
    assert!(matches!(actor.try_push_in_turn(push, &mut turn).unwrap(), Attempt::Ready(_)));
}

#[test]
fn a_table_without_a_ratio_allows_any_number() {
    let table = table(&config(100));
    Actor::open(&table, 1).push_next(3);
    let state = sample_as(&table, &part(5, 5)).state.unwrap();
    assert_eq!((state.items, state.taken, state.allowance), (3, 0, f64::INFINITY));
}

#[test]
fn a_part_has_what_a_memory_can_give_and_counts_no_more_than_a_batch() {
    let table = table(&TableConfig { max_times_sampled: 1, ..config(8) });
    assert_eq!(sample_as(&table, &part(50, 50)).items.len(), 0);
    Actor::open(&table, 1).push_next(3);
    let mut all = sample_as(&table, &part(50, 50));
    assert_eq!(all.items.len(), 3);
    deliver(&mut all);
    assert_eq!(sample_as(&table, &part(50, 50)).items.len(), 0);
    let whole = refusal(table.try_sample(&request(50), false, &mut Turn::default()));
    assert!(whole.to_string().contains("never has the 50 samples"), "{whole}");
    let beyond = refusal(table.try_sample(&part(1, u32::MAX), false, &mut Turn::default()));
    assert!(matches!(beyond, replay_core::Error::TooLarge { .. }), "{beyond}");
}

#[test]
fn parameters_are_stored_as_the_version_that_all_memories_have() {
    let memory = memory();
    let store = memory.parameters();
    assert_eq!(store.put_version("policy", 1, 5, file(1, 4)).unwrap(), 5);
    // Sent again, and older than the newest.
    assert_eq!(store.put_version("policy", 1, 5, file(1, 4)).unwrap(), 5);
    assert_eq!(store.put_version("policy", 2, 3, file(2, 4)).unwrap(), 6);
    assert_eq!(store.put("policy", 3, file(3, 4)).unwrap(), 7);
    // Copies of another memory's versions: the newest one here, an older one, a newer one.
    for (version, newest) in [(7, 7), (6, 7), (9, 9)] {
        assert_eq!(store.put_version("policy", 0, version, file(version as u8, 4)).unwrap(), newest);
    }
    assert_eq!(store.get("policy", 0).unwrap().bytes, file(9, 4));
    // A snapshot with such a version would not be restored.
    let unreached = refusal(store.put_version("policy", 4, 1 << 46, file(4, 4)));
    assert!(unreached.to_string().contains("is out of range"), "{unreached}");
    let highest = store.put_version("policy", 4, (1 << 46) - 1, file(4, 4)).unwrap();
    assert_eq!(store.put("policy", 5, file(5, 4)).unwrap(), highest + 1);
    let mut bytes = Vec::new();
    snapshot::save_server(&memory, &mut bytes).unwrap();
    restore(&crate::support::memory(), &bytes).unwrap();
}

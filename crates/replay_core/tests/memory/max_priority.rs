//! The priority of items that are pushed without one, after a priority that was far too large.

use std::sync::Arc;

use replay_core::TableConfig;
use replay_core::memory::Memory;
use replay_core::table::Table;

use crate::support::{Actor, Body, config, ids, memory, restore, sample, saved};

const TOO_LARGE: f64 = 1e300;

/// Pushes a step whose item has no priority, and returns the total mass of the table after it.
fn newcomer(actor: &mut Actor) -> f64 {
    let step = actor.next_step;
    let body = Body::default().chunk(0, step, 1);
    actor.push(body.window(0, step, (0, 0), None));
    actor.next_step += 1;
    total(&actor.table)
}

fn total(table: &Table) -> f64 {
    table.stats()["total_mass"].as_f64().unwrap()
}

fn largest(table: &Table) -> Option<f64> {
    table.stats()["max_priority"].as_f64()
}

struct Case {
    memory: Arc<Memory>,
    table: Arc<Table>,
    actor: Actor,
    /// The item whose priority is too large.
    id: u64,
}

fn poisoned(config: &TableConfig) -> Case {
    let memory = memory();
    let table = memory.create_table(config).unwrap();
    let mut actor = Actor::open(&table, 1);
    assert_eq!(newcomer(&mut actor), 1.0);
    let id = ids(&sample(&table, 1))[0];
    table.update_priorities(&[id], &[TOO_LARGE]).unwrap();
    assert_eq!(largest(&table), Some(TOO_LARGE));
    Case { memory, table, actor, id }
}

fn live(capacity: u64) -> TableConfig {
    TableConfig { live_max_priority: true, ..config(capacity) }
}

#[test]
fn an_emptied_table_forgets_its_largest_priority() {
    for config in [config(8), live(8)] {
        let mut case = poisoned(&config);
        case.memory.empty_table("t").unwrap();
        assert_eq!(largest(&case.table), None);
        assert_eq!(newcomer(&mut case.actor), 1.0);
        assert_eq!(largest(&case.table), Some(1.0));
    }
}

#[test]
fn the_largest_priority_ever_held_outlives_its_item_unless_live_ones_alone_count() {
    for (config, expected) in [(config(8), TOO_LARGE), (live(8), 3.0)] {
        let case = poisoned(&config);
        case.table.update_priorities(&[case.id], &[3.0]).unwrap();
        assert_eq!(largest(&case.table), Some(expected));
    }
}

#[test]
fn of_live_items_a_priority_counts_until_its_item_is_gone() {
    let Case { table, mut actor, id, .. } = poisoned(&live(8));
    table.update_priorities(&[id], &[3.0]).unwrap();
    assert_eq!(newcomer(&mut actor), 6.0);
    table.update_priorities(&[id], &[5.0]).unwrap();
    for _ in 0..6 {
        let step = actor.next_step;
        actor.push(Body::default().chunk(0, step, 1).item(0, step, 2.0));
        actor.next_step += 1;
    }
    assert_eq!(largest(&table), Some(5.0));
    // The step of the largest is the oldest, and goes.
    let before = total(&table);
    let step = actor.next_step;
    actor.push(Body::default().chunk(0, step, 1).item(0, step, 2.0));
    actor.next_step += 1;
    assert_eq!(total(&table), before - 5.0 + 2.0);
    assert_eq!(largest(&table), Some(3.0));
    newcomer(&mut actor);
    assert_eq!(largest(&table), Some(3.0), "the newcomer has it");
    table.check_at_rest().unwrap();
}

#[test]
fn a_restored_table_of_live_items_forgets_what_they_do_not_have() {
    let case = poisoned(&config(8));
    case.table.update_priorities(&[case.id], &[4.0]).unwrap();
    let bytes = saved(&case.memory);
    for (config, expected) in [(config(8), TOO_LARGE), (live(8), 4.0)] {
        let memory = memory();
        let table = memory.create_table(&config).unwrap();
        restore(&memory, &bytes).unwrap();
        assert_eq!(largest(&table), Some(expected));
        let mut actor = Actor::open(&table, 2);
        if expected < TOO_LARGE {
            assert_eq!(newcomer(&mut actor), 8.0);
        }
    }
}

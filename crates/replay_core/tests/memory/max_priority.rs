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
    table.stats()["total_priority"].as_f64().unwrap()
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

#[test]
fn an_emptied_table_forgets_its_largest_priority() {
    let mut case = poisoned(&config(8));
    case.memory.empty_table("t").unwrap();
    assert_eq!(largest(&case.table), None);
    assert_eq!(newcomer(&mut case.actor), 1.0);
    assert_eq!(largest(&case.table), Some(1.0));
}

#[test]
fn the_largest_priority_ever_held_outlives_its_item_and_a_restart() {
    let case = poisoned(&config(8));
    case.table.update_priorities(&[case.id], &[3.0]).unwrap();
    assert_eq!(largest(&case.table), Some(TOO_LARGE));
    let memory = memory();
    let table = memory.create_table(&config(8)).unwrap();
    restore(&memory, &saved(&case.memory)).unwrap();
    assert_eq!(largest(&table), Some(TOO_LARGE));
}

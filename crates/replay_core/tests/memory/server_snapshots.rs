//! Snapshots of servers: writers, ids and parameters continue in the restored memory.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::snapshot::save_server;
use replay_core::table::Table;
use replay_core::view::{ViewSpec, Window};
use replay_core::{Error, TableConfig};

use crate::parameters::file;
use crate::support::*;

struct Server {
    memory: Arc<Memory>,
    table: Arc<Table>,
}

impl Server {
    fn new(config: &TableConfig) -> Self {
        let memory = memory();
        Server { table: memory.create_table(config).unwrap(), memory }
    }

    fn save(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        save_server(&self.memory, &mut bytes).unwrap();
        bytes
    }

    /// The server after a restart, with this definition of the table.
    fn again_as(&self, config: &TableConfig) -> Server {
        let again = Server::new(config);
        restore(&again.memory, &self.save()).unwrap();
        again.table.check_at_rest().unwrap();
        again
    }

    fn again(&self) -> Server {
        self.again_as(self.table.config())
    }
}

/// The writer over a connection to the server that was started again.
fn resumed(actor: &Actor, server: &Server) -> Actor {
    let opened = server.table.resume_writer(&open(actor.writer)).unwrap();
    assert_eq!(opened.epoch, actor.epoch + 1);
    Actor { table: server.table.clone(), epoch: opened.epoch, sequence: opened.last_sequence, ..*actor }
}

#[test]
fn writers_continue_and_no_push_is_applied_twice() {
    let mut server = Server::new(&config(100));
    let mut actor = Actor::open(&server.table, 7);
    actor.push(Body::default().chunk(0, 0, 3).chunk(2, 0, 2));
    let second = Body::default().chunk(0, 3, 2);
    actor.push(second.clone().window(0, 2, (2, 2), Some(3.0)));
    for round in 0..2 {
        server = server.again();
        let opened = server.table.resume_writer(&open(7)).unwrap();
        assert_eq!((opened.last_sequence, opened.steps), (2, 7), "{round}");
        actor = Actor { table: server.table.clone(), epoch: opened.epoch, ..actor };
        // The acknowledgement of the second push was lost.
        actor.sequence = 1;
        actor.push(second.clone().window(0, 2, (2, 2), Some(3.0)));
        assert_eq!((stat(&server.table, "steps"), stat(&server.table, "items")), (7, 1));
    }
    // Its windows span the chunks from before: two before the anchor, one behind it.
    actor.push(Body::default().chunk(0, 5, 1).window(0, 4, (2, 1), Some(1.0)));
    // An item without steps, of a stream without new ones.
    actor.push(Body::default().window(2, 1, (1, 0), Some(1.0)));
    let request = crate::snapshots::wide(32);
    let batch = sample_as(&server.table, &request);
    let mut anchors: Vec<_> =
        windows(&batch).iter().zip(&batch.items).map(|(window, item)| window[usize::from(item.before)]).collect();
    anchors.sort_unstable();
    anchors.dedup();
    assert_eq!(anchors, [(0, 2), (0, 4), (2, 1)]);
    assert_eq!(stat(&server.table, "late_items"), 0);

    let unknown = server.table.resume_writer(&open(8)).unwrap_err();
    assert!(matches!(unknown, Error::Expired { .. }));
}

#[test]
fn a_writer_continues_whose_chunks_were_evicted() {
    let server = Server::new(&config(8));
    let mut idle = Actor::open(&server.table, 1);
    idle.push_next(4);
    let mut busy = Actor::open(&server.table, 2);
    busy.push_next(8);
    let again = server.again();
    let mut idle = resumed(&idle, &again);
    // Of evicted steps: late, and no error.
    idle.push(Body::default().item(0, 3, 1.0));
    assert_eq!(stat(&again.table, "late_items"), 1);
    idle.next_step = 4;
    idle.push_next(2);
    // A table that keeps only the newest steps keeps the writers.
    let small = again.again_as(&config(2));
    assert_eq!(stat(&small.table, "steps"), 2);
    let opened = small.table.resume_writer(&open(2)).unwrap();
    assert_eq!((opened.last_sequence, opened.steps), (1, 8));
}

/// By which clients of several servers know a copy of a snapshot.
#[test]
fn a_memory_keeps_its_identity() {
    let server = Server::new(&config(8));
    let other = Server::new(&config(8));
    assert_ne!(server.memory.identity(), other.memory.identity());
    let again = server.again().again();
    assert_eq!(again.memory.identity(), server.memory.identity());
    assert_ne!(again.memory.incarnation(), server.memory.incarnation());
    // A snapshot of a program's own memory has no ids, and no identity.
    let own = memory();
    restore(&own, &saved(&server.memory)).unwrap();
    assert_ne!(own.identity(), server.memory.identity());
}

#[test]
fn another_view_that_items_have_too_few_steps_for_is_refused() {
    let with_view =
        |before, after| TableConfig { view: Some(ViewSpec::Window(Window { before, after })), ..config(100) };
    let server = Server::new(&with_view(1, 1));
    // The windows of its writer are wider: three steps.
    Actor::open(&server.table, 1).push_next(4);
    server.again_as(&with_view(3, 3));
    for (before, after) in [(4, 0), (0, 4)] {
        let again = Server::new(&with_view(before, after));
        let refused = restore(&again.memory, &server.save()).unwrap_err();
        assert!(matches!(refused, Error::TableDiffers { .. }), "{refused}");
        let text = refused.to_string();
        let wanted =
            format!("asked for Window(before={before}, after={after}), and 4 of 4 items have too few steps for it");
        assert!(text.contains(&wanted), "{text}");
        assert_eq!(stat(&again.table, "steps"), 0);
    }
    // Writers may name views of their own: only a change is refused.
    let narrow = Server::new(&with_view(4, 0));
    Actor::open(&narrow.table, 1).push_next(4);
    narrow.again();
    // Items that are gone do not matter.
    server.memory.empty_table("t").unwrap();
    let writers = |view| stat(&server.again_as(&view).table, "resumable_writers");
    // Their writers open again, or they would make more of them.
    assert_eq!((writers(with_view(3, 3)), writers(with_view(4, 4))), (1, 0));
}

#[test]
fn ids_from_before_name_their_items_and_no_newcomer() {
    let server = Server::new(&config(8));
    let mut actor = Actor::open(&server.table, 1);
    actor.push_next(4);
    let before = sample(&server.table, 64);
    let again = server.again();
    // Lost: the server was killed after the snapshot. The items took the next free slots.
    actor.push_next(4);
    let all = sample(&server.table, 256);
    let id = |step| item_of(&all, step).id;
    let lost: Vec<u64> = (4..8).map(id).collect();

    let mut actor = resumed(&actor, &again);
    actor.next_step = 4;
    actor.push_next(4);
    let receipt = again.table.update_priorities(&lost, &[9.0; 4]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 4));
    let third = item_of(&before, 3).id;
    let receipt = again.table.update_priorities(&[third], &[93.0]).unwrap();
    assert_eq!(receipt.applied, 1);
    let batch = sample(&again.table, 64);
    assert_eq!(item_of(&batch, 3).probability, 0.93);
    assert_eq!(item_of(&batch, 3).id, third, "an item has one id");
    // Once it is evicted, another item has its slot.
    actor.push_next(8);
    let receipt = again.table.update_priorities(&[third], &[9.0]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 1));
    again.table.check_at_rest().unwrap();
}

/// Ids of the live items, by step.
fn ids_by_step(server: &Server) -> BTreeMap<u64, u64> {
    let batch = sample(&server.table, 1024);
    let ids = batch.items.iter().map(|item| item.id);
    anchors(&batch).into_iter().zip(ids).collect()
}

/// Gives each of these items the mass of its step; the other ids name nothing.
fn assert_names_its_item(server: &Server, live: &BTreeMap<u64, u64>, gone: &[u64]) {
    let receipt = server.table.update_priorities(gone, &vec![1e6; gone.len()]).unwrap();
    assert_eq!((receipt.applied, receipt.stale as usize), (0, gone.len()));
    for (&step, &id) in live {
        let receipt = server.table.update_priorities(&[id], &[step as f64 + 1.0]);
        assert_eq!(receipt.unwrap().applied, 1, "step {step}");
    }
    let total: u64 = live.keys().map(|step| step + 1).sum();
    let batch = sample(&server.table, 1024);
    for (&step, &id) in live {
        let item = item_of(&batch, step);
        assert_eq!(item.id, id, "step {step}");
        assert_eq!(item.probability, (step + 1) as f64 / total as f64);
    }
    server.table.check_at_rest().unwrap();
}

#[test]
fn ids_survive_any_number_of_restarts() {
    let mut server = Server::new(&config(8));
    let mut actor = Actor::open(&server.table, 1);
    (0..8).for_each(|_| actor.push_next(1));
    let mut live = ids_by_step(&server);
    let mut gone = Vec::new();
    for _ in 0..5 {
        // Slots of evicted items are used again, by items with ids of this server.
        (0..3).for_each(|_| actor.push_next(1));
        for (step, id) in ids_by_step(&server) {
            assert!(live.insert(step, id).is_none_or(|known| known == id));
            assert!(!gone.contains(&id));
        }
        let newer = live.split_off(&(actor.next_step - 8));
        gone.extend(std::mem::replace(&mut live, newer).into_values());
        assert_names_its_item(&server, &live, &gone);
        server = server.again();
        assert_names_its_item(&server, &live, &gone);
        actor = resumed(&actor, &server);
    }
    // Another snapshot without anything between.
    server = server.again();
    assert_names_its_item(&server, &live, &gone);
    // A smaller table, then a larger one.
    server = server.again_as(&config(5));
    let newer = live.split_off(&(actor.next_step - 5));
    gone.extend(std::mem::replace(&mut live, newer).into_values());
    assert_names_its_item(&server, &live, &gone);
    server = server.again_as(&config(50));
    assert_names_its_item(&server, &live, &gone);
    resumed(&actor, &server).push_next(4);
    assert_eq!(ids_by_step(&server).len(), 9);
    let ids: HashSet<_> = ids_by_step(&server).into_values().collect();
    assert!(live.values().all(|id| ids.contains(id)) && gone.iter().all(|id| !ids.contains(id)));
}

#[test]
fn without_memory_for_their_ids_restored_items_get_new_ones() {
    let server = Server::new(&config(8));
    Actor::open(&server.table, 1).push_next(8);
    let before = ids_by_step(&server);
    let limits = |max_bytes| MemoryLimits { max_bytes, receive_bytes: 0, ..MemoryLimits::default() };
    let definition = config(8);
    let table_bytes = definition.effective_capacity_bytes() + Table::index_bytes(&definition);
    let memory = Memory::new(limits(table_bytes));
    restore(&memory, &server.save()).unwrap();
    let small = Server { table: memory.table("t").unwrap(), memory };
    let new = ids_by_step(&small);
    let gone: Vec<_> = before.into_values().collect();
    assert_names_its_item(&small, &new, &gone);
    assert_names_its_item(&small.again(), &new, &gone);
}

#[test]
fn parameters_continue_with_their_versions() {
    let server = Server::new(&config(8));
    let store = server.memory.parameters();
    store.put("policy", 5, file(1, 4)).unwrap();
    assert_eq!(store.put("policy", 6, file(2, 4)).unwrap(), 2);
    let again = server.again();
    let store = again.memory.parameters();
    let newest = store.get("policy", 1).unwrap();
    assert_eq!((newest.version, newest.bytes), (2, file(2, 4)));
    // Sent again, as its answer was lost.
    assert_eq!(store.put("policy", 5, file(1, 4)).unwrap(), 1);
    assert_eq!(store.put("policy", 7, file(3, 4)).unwrap(), 3);
    let reserved = |server: &Server| server.memory.stats()["reserved_bytes"].clone();
    assert_eq!(reserved(&again), reserved(&server));
}

#[test]
fn a_snapshot_of_two_tables_leaves_no_writers_if_the_second_is_in_use() {
    let saved = memory();
    for name in ["a", "b"] {
        let table = saved.create_table(&TableConfig { name: name.into(), ..config(50) }).unwrap();
        Actor::open(&table, 1).push_next(3);
    }
    let mut bytes = Vec::new();
    save_server(&saved, &mut bytes).unwrap();
    let used = memory();
    let tables: Vec<_> =
        ["a", "b"].map(|name| used.create_table(&TableConfig { name: name.into(), ..config(50) }).unwrap()).into();
    Actor::open(&tables[1], 1).push_next(1);
    assert!(matches!(refusal(restore(&used, &bytes)), Error::NotEmpty { steps: 1, .. }));
    let before = memory().create_table(&TableConfig { name: "a".into(), ..config(50) }).unwrap();
    for counter in ["resumable_writers", "inserted_steps", "inserted_items"] {
        assert_eq!(stat(&tables[0], counter), stat(&before, counter), "{counter}");
    }
}

#[test]
fn a_damaged_snapshot_leaves_neither_writers_nor_parameters() {
    let server = Server::new(&config(20));
    let mut actor = Actor::open(&server.table, 1);
    actor.push(Body::default().chunk(0, 0, 3).item(0, 1, 1.0));
    server.memory.parameters().put("policy", 5, file(1, 4)).unwrap();
    let bytes = server.save();
    let target = Server::new(&config(20));
    let refused = |bytes: &[u8], what: &str| {
        let error = refusal(restore(&target.memory, bytes));
        assert!(matches!(error, Error::Snapshot { .. }), "{what}: {error}");
        assert!(target.memory.parameters().list().is_empty());
        let stats = target.table.stats();
        assert_eq!((&stats["resumable_writers"], &stats["steps"]), (&0.into(), &0.into()));
    };
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        refused(&flipped, &format!("flipped at {at}"));
        refused(&bytes[..at], &format!("cut at {at}"));
    }
}

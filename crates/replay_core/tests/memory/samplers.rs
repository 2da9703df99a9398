//! Samplers that keep an order of items (`fifo`, `lifo`, `max_heap`, `min_heap`, `rank_based`), against a naive list of items.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;
use replay_core::replay::{BatchShare, SampleRequest, Sampled};
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Table, Turn};
use replay_core::{Error, TableConfig};

use crate::support::*;

const CAPACITY: u64 = 12;

/// Only ranks are raised to it.
const EXPONENT: f64 = 0.7;

fn ordered(sampler: Sampler, max_times_sampled: u32) -> TableConfig {
    TableConfig { sampler, max_times_sampled, ..config(CAPACITY) }
}

/// A table with one item for each priority, at steps 0, 1, ...
fn filled(sampler: Sampler, max_times_sampled: u32, priorities: &[f32]) -> Actor {
    let mut actor = Actor::open(&table(&ordered(sampler, max_times_sampled)), 1);
    actor.push(chunk(0, priorities));
    actor
}

fn chunk(first: u64, priorities: &[f32]) -> Body {
    let body = Body::default().chunk(0, first, priorities.len() as u32);
    let with_items = |body: Body, (step, &p): (u64, &f32)| body.item(0, step, p);
    (first..).zip(priorities).fold(body, with_items)
}

fn sampled_anchors(table: &Arc<Table>, count: u32) -> Vec<u64> {
    anchors(&sample(table, count))
}

#[test]
fn the_sum_of_priorities_is_after_the_exponent_and_none_for_an_order() {
    let total = |sampler, priority_exponent| {
        let config = TableConfig { priority_exponent, ..ordered(sampler, 1) };
        let mut actor = Actor::open(&table(&config), 1);
        actor.push(chunk(0, &[4.0, 9.0, 0.0]));
        let stats = actor.table.stats()["total_mass"].clone();
        if let Sampler::Prioritized | Sampler::Uniform | Sampler::RankBased = sampler {
            let part = SampleRequest { share: Some(BatchShare { take: 0 }), ..request(0) };
            let state = sample_as(&actor.table, &part).state.unwrap();
            assert_eq!(Some(state.total_mass), stats.as_f64(), "{sampler:?}");
        }
        stats.as_f64()
    };
    assert_eq!(total(Sampler::Prioritized, 1.0), Some(13.0));
    assert_eq!(total(Sampler::Prioritized, 0.5), Some(5.0));
    // 0 to the power of 0 is 1, as each item is sampled alike.
    assert_eq!(total(Sampler::Prioritized, 0.0), Some(3.0));
    // Ranks 1, 2 and 3, whatever the priorities are.
    let ranks = total(Sampler::RankBased, 1.0).unwrap();
    assert!((ranks - (1.0 + 0.5 + 1.0 / 3.0)).abs() < 1e-9, "{ranks}");
    for exponent in [0.0, 0.6, 1.0] {
        assert_eq!(total(Sampler::Uniform, exponent), Some(3.0));
        for sampler in [Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap, Sampler::MinHeap] {
            assert_eq!(total(sampler, exponent), None, "{sampler:?}");
        }
    }
}

#[test]
fn the_newest_the_highest_or_the_lowest_comes_first() {
    let priorities = [3.0, 5.0, 0.0, 5.0, 0.0];
    for (sampler, expected) in
        [(Sampler::Lifo, [4, 3, 2, 1, 0]), (Sampler::MaxHeap, [1, 3, 0, 2, 4]), (Sampler::MinHeap, [2, 4, 0, 1, 3])]
    {
        let actor = filled(sampler, 1, &priorities);
        let asked = SampleRequest { min_probability: true, ..request(5) };
        let batch = sample_as(&actor.table, &asked);
        assert_eq!(anchors(&batch), expected, "{sampler:?}");
        assert!(batch.items.iter().all(|item| item.probability == 1.0));
        assert_eq!((batch.live_items, batch.min_probability), (5, Some(1.0)));
        assert_eq!(stat(&actor.table, "items"), 0);
        actor.table.check_at_rest().unwrap();
    }
}

#[test]
fn without_a_limit_an_item_is_sampled_until_another_one_comes_first() {
    let mut actor = filled(Sampler::MaxHeap, 0, &[1.0, 3.0, 2.0]);
    let batch = sample(&actor.table, 4);
    assert_eq!(anchors(&batch), [1; 4]);
    let times: Vec<_> = batch.items.iter().map(|i| i.times_sampled).collect();
    assert_eq!(times, [1, 2, 3, 4]);
    let id = batch.items[0].id;
    actor.table.update_priorities(&[id], &[0.5]).unwrap();
    assert_eq!(sampled_anchors(&actor.table, 2), [2; 2]);
    // Equal priorities: the one that was updated last comes last.
    actor.table.update_priorities(&[id], &[2.0]).unwrap();
    assert_eq!(sampled_anchors(&actor.table, 1), [2]);
    actor.push(chunk(3, &[7.0]));
    assert_eq!(sampled_anchors(&actor.table, 1), [3]);

    let mut newest = filled(Sampler::Lifo, 0, &[1.0, 3.0]);
    assert_eq!(sampled_anchors(&newest.table, 3), [1; 3]);
    newest.push(chunk(2, &[0.0]));
    assert_eq!(sampled_anchors(&newest.table, 1), [2]);
    let error = refusal(ordered(Sampler::Fifo, 0).validate());
    assert!(error.to_string().contains("max_times_sampled"), "{error}");
}

#[test]
fn a_sample_that_fails_gives_its_items_back_in_their_order() {
    for sampler in [Sampler::Fifo, Sampler::MaxHeap] {
        let mut actor = filled(sampler, 1, &[9.0, 8.0]);
        let narrow = replay_core::replay::OpenWriter { window_before: 0, ..open(2) };
        actor.table.open_writer(&narrow).unwrap();
        actor.writer = 2;
        actor.sequence = 0;
        actor.push(chunk(0, &[7.0]));
        // The third item has no row before its anchor to show.
        let wide = SampleRequest { before: 1, ..request(3) };
        let error = refusal(actor.table.try_sample(&wide, false, &mut Turn::default()));
        assert!(matches!(error, Error::View { .. }), "{error}");
        assert_eq!(sampled_anchors(&actor.table, 3), [0, 1, 0], "{sampler:?}");
        actor.table.check_at_rest().unwrap();
    }
}

#[derive(Debug, Clone)]
enum Step {
    Push(Vec<u8>),
    Sample(u32),
    /// The priority of a sampled item.
    Update(usize, u8),
    /// A sampled item is reported as corrupt.
    Remove(usize),
    /// Into a snapshot and back.
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    let priority = 0..4u8;
    prop_oneof![
        4 => prop::collection::vec(priority.clone(), 1..5).prop_map(Step::Push),
        4 => (1..4u32).prop_map(Step::Sample),
        3 => (any::<usize>(), priority).prop_map(|(item, p)| Step::Update(item, p)),
        1 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Restore),
    ]
}

#[derive(Debug, Clone)]
struct Item {
    step: u64,
    priority: u8,
    /// Number of its insertion or last update.
    change: u64,
    times_sampled: u32,
}

struct Model {
    sampler: Sampler,
    max_times_sampled: u32,
    /// Steps of each chunk.
    chunks: VecDeque<std::ops::Range<u64>>,
    items: Vec<Item>,
    changes: u64,
}

impl Model {
    fn push(&mut self, first: u64, priorities: &[u8]) {
        let end = first + priorities.len() as u64;
        self.chunks.push_back(first..end);
        while end - self.chunks[0].start > CAPACITY {
            let evicted = self.chunks.pop_front().unwrap();
            self.items.retain(|item| !evicted.contains(&item.step));
        }
        for (step, &priority) in (first..).zip(priorities) {
            self.changes += 1;
            self.items.push(Item { step, priority, change: self.changes, times_sampled: 0 });
        }
    }

    /// Steps of the sampled items; `None` where the sample has to wait.
    fn sample(&mut self, count: u32) -> Option<Vec<u64>> {
        if self.has_to_wait(count) {
            return None;
        }
        let sampled = (0..count).map(|_| {
            let first = self.items.iter().enumerate().min_by_key(|(_, item)| {
                let priority = i64::from(item.priority);
                match self.sampler {
                    Sampler::Fifo => (0, item.step),
                    Sampler::Lifo => (0, u64::MAX - item.step),
                    Sampler::MaxHeap => (-priority, item.change),
                    Sampler::MinHeap => (priority, item.change),
                    Sampler::Prioritized | Sampler::Uniform | Sampler::RankBased => {
                        unreachable!("not in an order")
                    }
                }
            });
            let (index, _) = first.expect("there is an item with a sample left");
            let item = &mut self.items[index];
            item.times_sampled += 1;
            let step = item.step;
            if item.times_sampled == self.max_times_sampled {
                self.items.remove(index);
            }
            step
        });
        Some(sampled.collect())
    }

    fn has_to_wait(&self, count: u32) -> bool {
        let samples_of = |item: &Item| match self.max_times_sampled {
            0 => count,
            most => most - item.times_sampled,
        };
        self.items.iter().map(samples_of).sum::<u32>() < count
    }

    /// Takes the items of a batch that `RankBased` has sampled at these ranks; it is of one item where samples are limited.
    fn take(&mut self, batch: &Sampled) {
        self.items.sort_by_key(|item| (std::cmp::Reverse(item.priority), item.change));
        let shares = (1..=self.items.len()).map(|rank| (rank as f64).powf(-EXPONENT));
        let shares: Vec<_> = shares.collect();
        let total: f64 = shares.iter().sum();
        let is_share = |p: f64, rank: usize| (p / (shares[rank] / total) - 1.0).abs() < 1e-9;
        assert!(is_share(batch.min_probability.unwrap(), shares.len() - 1));
        assert_eq!(batch.live_items, self.items.len() as u64);
        for (sampled, step) in batch.items.iter().zip(anchors(batch)) {
            let rank = self.items.iter().position(|item| item.step == step);
            let rank = rank.expect("only live items are sampled");
            assert!(is_share(sampled.probability, rank));
            self.items[rank].times_sampled += 1;
        }
        let most = self.max_times_sampled;
        self.items.retain(|item| most == 0 || item.times_sampled < most);
    }

    /// Whether the item of that step is live, and changes its priority.
    fn update(&mut self, step: u64, priority: u8) -> bool {
        self.changes += 1;
        let found = self.items.iter_mut().find(|item| item.step == step);
        found.is_some_and(|item| {
            (item.priority, item.change) = (priority, self.changes);
            true
        })
    }

    fn remove(&mut self, step: u64) -> bool {
        let before = self.items.len();
        self.items.retain(|item| item.step != step);
        self.items.len() < before
    }
}

fn restored(actor: &Actor, memory: &replay_core::memory::Memory) -> Arc<replay_core::memory::Memory> {
    let bytes = saved(memory);
    let again = support_memory(actor.table.config());
    restore(&again, &bytes).unwrap();
    again
}

fn support_memory(config: &TableConfig) -> Arc<replay_core::memory::Memory> {
    let memory = memory();
    memory.create_table(config).unwrap();
    memory
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn each_order_is_that_of_a_naive_list(
        sampler in prop::sample::select(vec![
            Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap, Sampler::MinHeap, Sampler::RankBased,
        ]),
        max_times_sampled in 0..3u32,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let most = if sampler == Sampler::Fifo { max_times_sampled.max(1) } else { max_times_sampled };
        let config = TableConfig { priority_exponent: EXPONENT, ..ordered(sampler, most) };
        let mut memory = support_memory(&config);
        let mut actor = Actor::open(&memory.table("t").unwrap(), 1);
        let mut model = Model {
            sampler,
            max_times_sampled: most,
            chunks: VecDeque::new(),
            items: Vec::new(),
            changes: 0,
        };
        // Ids of sampled items, and their steps.
        let mut known: HashMap<u64, u64> = HashMap::new();
        let nth = |known: &HashMap<u64, u64>, n: usize| {
            let mut known: Vec<_> = known.iter().map(|(&id, &step)| (step, id)).collect();
            known.sort_unstable();
            known.get(n % known.len().max(1)).copied()
        };
        for step in steps {
            match step {
                Step::Push(priorities) => {
                    let floats: Vec<_> = priorities.iter().map(|&p| f32::from(p)).collect();
                    actor.push(chunk(actor.next_step, &floats));
                    model.push(actor.next_step, &priorities);
                    actor.next_step += priorities.len() as u64;
                }
                Step::Sample(count) => {
                    let is_random = sampler == Sampler::RankBased;
                    let asked = SampleRequest {
                        min_probability: is_random,
                        ..request(if is_random && most > 0 { 1 } else { count })
                    };
                    let sampled = match actor.table.try_sample(&asked, false, &mut Turn::default()).unwrap() {
                        Attempt::Ready(mut batch) => {
                            deliver(&mut batch);
                            known.extend(ids(&batch).into_iter().zip(anchors(&batch)));
                            Some(batch)
                        }
                        Attempt::Blocked(_) => None,
                    };
                    match (is_random, sampled) {
                        (false, sampled) => prop_assert_eq!(sampled.as_ref().map(anchors), model.sample(count)),
                        (true, Some(batch)) => model.take(&batch),
                        (true, None) => prop_assert!(model.has_to_wait(asked.count)),
                    }
                }
                Step::Update(item, priority) => {
                    if let Some((step, id)) = nth(&known, item) {
                        let table = &actor.table;
                        let receipt = table.update_priorities(&[id], &[f64::from(priority)]).unwrap();
                        prop_assert_eq!(receipt.applied == 1, model.update(step, priority));
                    }
                }
                Step::Remove(item) => {
                    if let Some((step, id)) = nth(&known, item) {
                        let removed = actor.table.report_corrupt(id, "a test").is_some();
                        prop_assert_eq!(removed, model.remove(step));
                    }
                }
                Step::Restore => {
                    memory = restored(&actor, &memory);
                    let next_step = actor.next_step;
                    actor = Actor::open(&memory.table("t").unwrap(), 1);
                    actor.next_step = next_step;
                    known.clear();
                }
            }
            prop_assert_eq!(stat(&actor.table, "items"), model.items.len() as u64);
        }
        actor.table.check_at_rest().unwrap();
    }
}

#[test]
fn samples_that_did_not_reach_their_reader_can_be_sampled_again() {
    for sampler in
        [Sampler::Prioritized, Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap, Sampler::MinHeap, Sampler::RankBased]
    {
        let actor = filled(sampler, 1, &[4.0, 2.0, 3.0, 1.0]);
        let table = &actor.table;
        let sample = |count| match table.try_sample(&request(count), false, &mut Turn::default()).unwrap() {
            Attempt::Ready(batch) => batch,
            Attempt::Blocked(waits) => panic!("blocked: {waits}"),
        };
        let (first, second) = (sample(2), sample(2));
        let order = [anchors(&first), anchors(&second)].concat();
        let mut all = order.clone();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3], "{sampler:?}: on their way once each");
        blocked(table.try_sample(&request(1), false, &mut Turn::default()));
        drop((first, second));
        let mut again = sample(4);
        match sampler {
            Sampler::Prioritized | Sampler::RankBased => assert_eq!(again.items.len(), 4),
            _ => assert_eq!(anchors(&again), order, "{sampler:?}"),
        }
        assert_eq!(stat(table, "items"), 4);
        deliver(&mut again);
        assert_eq!(stat(table, "items"), 0);
        blocked(table.try_sample(&request(1), false, &mut Turn::default()));
        table.check_at_rest().unwrap();
    }
}

#[test]
fn an_update_gives_no_mass_to_an_item_without_a_sample_left() {
    let table = table(&TableConfig { max_times_sampled: 1, ..config(8) });
    Actor::open(&table, 1).push_next(2);
    let sampled = || match table.try_sample(&request(1), false, &mut Turn::default()) {
        Ok(Attempt::Ready(sampled)) => sampled,
        _ => panic!("an item has a sample left"),
    };
    let under_way = sampled();
    let receipt = table.update_priorities(&ids(&under_way), &[5.0]).unwrap();
    assert_eq!((receipt.applied, receipt.stale), (0, 1));
    assert_eq!(sampled().items[0].probability, 1.0);
    drop(under_way);
    assert_eq!(table.stats()["total_mass"], 2.0);
    table.check_at_rest().unwrap();
}

#[test]
fn an_item_that_is_evicted_on_its_way_stays_evicted() {
    let mut actor = filled(Sampler::Fifo, 1, &[1.0; 4]);
    let capacity = actor.table.config().capacity;
    let under_way = actor.table.try_sample(&request(2), false, &mut Turn::default()).unwrap();
    actor.push(chunk(4, &vec![1.0; capacity as usize]));
    drop(under_way);
    assert_eq!(stat(&actor.table, "items"), capacity);
    assert_eq!(anchors(&sample(&actor.table, 1)), [4]);
    actor.table.check_at_rest().unwrap();
}

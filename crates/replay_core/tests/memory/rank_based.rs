//! How often `rank_based` samples each item: in proportion to 1 / rank^exponent, and as often as its batches tell.

use std::collections::HashMap;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::TableConfig;
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Table, Turn};

use crate::frequencies::assert_follows;
use crate::support::*;

/// More than the items that two blocks of the order hold.
const CAPACITY: u32 = 3_000;
const EXPONENT: f64 = 0.7;

fn config() -> TableConfig {
    TableConfig { sampler: Sampler::RankBased, priority_exponent: EXPONENT, ..crate::support::config(CAPACITY.into()) }
}

/// The rows of a batch: step, id and probability.
fn draw(table: &Arc<Table>, count: u32) -> Vec<(u64, u64, f64)> {
    let batch = sample(table, count);
    let rows = anchors(&batch).into_iter().zip(&batch.items);
    rows.map(|(step, item)| (step, item.id, item.probability)).collect()
}

/// Samples often, and compares each item's count with the rank of its priority, both summed over groups of neighbouring ranks.
fn assert_follows_ranks(table: &Arc<Table>, priorities: &HashMap<u64, f64>) {
    let mut by_rank: Vec<_> = priorities.iter().map(|(&step, &p)| (step, p)).collect();
    by_rank.sort_by(|a, b| b.1.total_cmp(&a.1));
    let ranks: HashMap<_, _> = (1..).zip(&by_rank).map(|(rank, &(step, _))| (step, rank)).collect();
    let share = |rank: usize| (rank as f64).powf(-EXPONENT);
    let total: f64 = (1..=ranks.len()).map(share).sum();
    // The first ranks alone, then ever more of them.
    let group = |rank: usize| match rank {
        1..=16 => rank - 1,
        _ => 8 * (rank.ilog2() as usize - 2) + (rank >> (rank.ilog2() - 3)) % 8,
    };
    let mut shares = vec![0.0; group(ranks.len()) + 1];
    (1..=ranks.len()).for_each(|rank| shares[group(rank)] += share(rank));
    // One item of a batch, and batches of one of each range.
    for (batches, count) in [(40_000, 1), (1_000, 64)] {
        let mut counts = vec![0; shares.len()];
        for _ in 0..batches {
            for (step, _, probability) in draw(table, count) {
                let rank = ranks[&step];
                assert!((probability / (share(rank) / total) - 1.0).abs() < 1e-9);
                counts[group(rank)] += 1;
            }
        }
        let drawn = shares.iter().zip(&counts).filter(|(s, _)| **s > 0.0);
        let (shares, counts): (Vec<_>, Vec<_>) = drawn.map(|(&s, &c)| (s, c)).unzip();
        assert_follows(&counts, &shares);
    }
}

#[test]
fn items_are_sampled_by_rank_after_updates_evictions_and_a_restore() {
    let memory = memory();
    let table = memory.create_table(&config()).unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    let mut priorities = HashMap::new();
    let mut actor = Actor::open(&table, 1);
    let mut push = |priorities: &mut HashMap<u64, f64>, chunks: u64| {
        for _ in 0..chunks {
            let first = actor.next_step;
            let mut body = Body::default().chunk(0, first, 10);
            for step in first..first + 10 {
                let priority: f32 = rng.random_range(0.0..1e3);
                body = body.item(0, step, priority);
                priorities.insert(step, priority.into());
            }
            actor.push(body);
            actor.next_step += 10;
            let oldest = actor.next_step.saturating_sub(CAPACITY.into());
            priorities.retain(|&step, _| step >= oldest);
        }
    };
    push(&mut priorities, 200);
    assert_follows_ranks(&table, &priorities);

    // Evictions among all ranks, and updates, of the same items several times.
    push(&mut priorities, 250);
    assert_eq!(priorities.len(), CAPACITY as usize);
    for round in 0..40 {
        let drawn = draw(&table, 100);
        let changed: Vec<_> =
            (0..).map(|n| f64::from(n * 37 + round) * 1.37 + 0.01 * f64::from(round)).zip(&drawn).collect();
        let ids: Vec<_> = changed.iter().map(|(_, row)| row.1).collect();
        let new: Vec<_> = changed.iter().map(|&(priority, _)| priority).collect();
        table.update_priorities(&ids, &new).unwrap();
        priorities.extend(changed.iter().map(|&(priority, row)| (row.0, priority)));
    }
    // Their ranks would differ.
    let distinct: std::collections::HashSet<_> = priorities.values().map(|p| p.to_bits()).collect();
    assert_eq!(distinct.len(), priorities.len(), "no two are equal");
    assert_follows_ranks(&table, &priorities);

    let again = crate::support::memory();
    again.create_table(&config()).unwrap();
    restore(&again, &saved(&memory)).unwrap();
    assert_follows_ranks(&again.table("t").unwrap(), &priorities);
    table.check_at_rest().unwrap();
}

#[test]
fn a_batch_has_one_item_of_each_range_of_equal_probability() {
    let table = table(&config());
    let mut actor = Actor::open(&table, 1);
    // The first steps have the first ranks.
    actor.push_next(100);
    let share = |rank: u64| (rank as f64).powf(-EXPONENT);
    let total: f64 = (1..=100).map(share).sum();
    let up_to = |rank: u64| (1..=rank).map(share).sum::<f64>() / total;
    for count in [1, 7, 64, 300] {
        let mut steps: Vec<_> = draw(&table, count).into_iter().map(|(step, _, _)| step).collect();
        // A batch comes in random order.
        steps.sort_unstable();
        for (n, step) in steps.into_iter().enumerate() {
            let (begin, end) = (n as f64 / f64::from(count), (n + 1) as f64 / f64::from(count));
            let rank = step + 1;
            assert!(up_to(rank) > begin - 1e-9 && up_to(rank - 1) < end + 1e-9);
        }
    }
}

#[test]
fn between_two_sorts_the_first_rank_is_exact_and_probabilities_are_those_of_the_samples() {
    const ITEMS: u64 = 1_000;
    let table = table(&config());
    let mut actor = Actor::open(&table, 1);
    let body = Body::default().chunk(0, 0, ITEMS as u32);
    actor.push((0..ITEMS).fold(body, |body, step| body.item(0, step, 2_000.0 - step as f32)));
    // Sorts the items, of which fewer than one in 16 change then.
    let sampled: HashMap<u64, u64> = draw(&table, 60).into_iter().map(|(step, id, _)| (id, step)).collect();
    let (ids, steps): (Vec<_>, Vec<_>) = sampled.into_iter().unzip();
    let priorities: Vec<_> = (0..ids.len()).map(|n| 3_000.0 + n as f64).collect();
    table.update_priorities(&ids, &priorities).unwrap();

    let mut drawn: HashMap<u64, (u64, f64)> = HashMap::new();
    for _ in 0..2_000 {
        for (step, _, probability) in draw(&table, 64) {
            let (count, known) = drawn.entry(step).or_insert((0, probability));
            *count += 1;
            assert_eq!(*known, probability, "nothing changes");
        }
    }
    let mut shares: Vec<_> = drawn.values().map(|&(_, probability)| probability).collect();
    let counts: Vec<_> = drawn.values().map(|&(count, _)| count).collect();
    assert_follows(&counts, &shares);
    // Each item has a rank of its own, and the highest priority the first.
    shares.sort_by(|a, b| b.total_cmp(a));
    let total: f64 = (1..=ITEMS).map(|rank| (rank as f64).powf(-EXPONENT)).sum();
    assert_eq!(shares.len() as u64, ITEMS);
    for (rank, share) in (1..).zip(&shares) {
        assert!((share * total / f64::from(rank).powf(-EXPONENT) - 1.0).abs() < 1e-9);
    }
    assert_eq!(drawn[steps.last().unwrap()].1, shares[0]);
}

#[test]
fn an_item_that_dies_or_is_updated_on_its_way_to_a_reader() {
    let once = TableConfig { max_times_sampled: 1, capacity: 8, ..config() };
    let total = |table: &Table| table.stats()["total_mass"].as_f64().unwrap();
    let of_ranks = |ranks: u32| {
        let shares = (1..=ranks).map(|rank| f64::from(rank).powf(-EXPONENT));
        shares.sum::<f64>()
    };
    let table = table(&once);
    let mut actor = Actor::open(&table, 1);
    actor.push_next(4);
    let under_way = table.try_sample(&request(3), false, &mut Turn::default());
    assert!((total(&table) - of_ranks(1)).abs() < 1e-9);
    // All four give way to one: the last samples that are taken back have no item.
    let body = Body::default().chunk(0, 4, 8).item(0, 4, 1.0);
    actor.push(body);
    drop(under_way);
    assert!((total(&table) - of_ranks(1)).abs() < 1e-9);

    let body = Body::default().chunk(0, 12, 3);
    actor.push((12..15).fold(body, |body, step| body.item(0, step, step as f32)));
    let Ok(Attempt::Ready(batch)) = table.try_sample(&request(3), false, &mut Turn::default()) else {
        panic!("three items have a sample left");
    };
    let (updated, id) = (anchors(&batch)[2], ids(&batch)[2]);
    table.update_priorities(&[id], &[99.0]).unwrap();
    assert!(total(&table) < 1e-9, "all of them are on their way");
    drop(batch);
    assert!((total(&table) - of_ranks(3)).abs() < 1e-9);
    // The first of three ranges is less than the first rank.
    let drawn = draw(&table, 3);
    let &(_, _, probability) = drawn.iter().find(|(step, ..)| *step == updated).unwrap();
    assert!((probability * of_ranks(3) - 1.0).abs() < 1e-9);
    table.check_at_rest().unwrap();
}

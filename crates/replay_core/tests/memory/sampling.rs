//! Which items are sampled, how often, and what is said about them.

use std::collections::BTreeMap;

use base::allocation::TooLarge;
use replay_core::replay::SampleRequest;
use replay_core::schema::Sampler;
use replay_core::table::{Attempt, Turn};
use replay_core::{Error, TableConfig};

use crate::support::*;

/// A table with one item for each priority, at steps 0, 1, ...
fn filled(config: &TableConfig, priorities: &[f32]) -> Actor {
    let mut actor = Actor::open(&table(config), 1);
    let body = Body::default().chunk(0, 0, priorities.len() as u32);
    let with_items = |body: Body, (step, &p): (usize, &f32)| body.item(0, step as u64, p);
    actor.push(priorities.iter().enumerate().fold(body, with_items));
    actor
}

/// How often each step is sampled in `batches` batches of `count`.
fn frequencies(actor: &Actor, batches: u32, count: u32) -> BTreeMap<u64, u32> {
    let mut sampled = BTreeMap::new();
    for _ in 0..batches {
        for step in anchors(&sample(&actor.table, count)) {
            *sampled.entry(step).or_default() += 1;
        }
    }
    sampled
}

/// Pearson's statistic of counts against expected shares.
fn chi_square(sampled: &BTreeMap<u64, u32>, shares: &[f64]) -> f64 {
    let total: u32 = sampled.values().sum();
    shares
        .iter()
        .enumerate()
        .map(|(step, share)| {
            let expected = share * f64::from(total);
            let seen = f64::from(sampled.get(&(step as u64)).copied().unwrap_or(0));
            (seen - expected).powi(2) / expected
        })
        .sum()
}

#[test]
fn items_are_sampled_in_proportion_to_their_priority() {
    let actor = filled(&config(100), &[1.0, 2.0, 3.0, 4.0, 0.0, 10.0]);
    let sampled = frequencies(&actor, 20_000, 1);
    assert!(!sampled.contains_key(&4), "priority 0 is never sampled");
    // 99.99 % of such samples stay below 23.5 with 4 degrees of freedom.
    let statistic = chi_square(
        &sampled.into_iter().map(|(s, n)| (if s == 5 { 4 } else { s }, n)).collect(),
        &[0.05, 0.1, 0.15, 0.2, 0.5],
    );
    assert!(statistic < 23.5, "{statistic}");
}

#[test]
fn uniform_tables_and_exponent_0_ignore_priorities() {
    let uniform = TableConfig { sampler: Sampler::Uniform, ..config(100) };
    let exponent_0 = TableConfig { priority_exponent: 0.0, ..config(100) };
    for config in [uniform, exponent_0] {
        let actor = filled(&config, &[0.0, 1.0, 1e9, 5.0]);
        let batch = sample(&actor.table, 4);
        assert_eq!(anchors(&batch).len(), 4);
        assert!(batch.items.iter().all(|i| i.probability == 0.25));
        let receipt = actor.table.update_priorities(&ids(&batch), &[9.0, 0.0, 1.0, 1.0]).unwrap();
        assert_eq!((receipt.applied, receipt.stale), (4, 0));
        let statistic = chi_square(&frequencies(&actor, 10_000, 1), &[0.25; 4]);
        // 99.99 % stay below 21.1 with 3 degrees of freedom.
        assert!(statistic < 21.1, "{statistic}");
    }
}

#[test]
fn the_exponent_is_applied_once_at_birth_and_at_updates() {
    let config = TableConfig { priority_exponent: 0.5, ..config(100) };
    let actor = filled(&config, &[4.0, 16.0, 100.0]);
    let shares = |batch: &replay_core::replay::Sampled| [0, 1, 2].map(|step| item_of(batch, step).probability);
    let close = |have: [f64; 3], want: [f64; 3]| have.iter().zip(want).all(|(h, w)| (h - w).abs() < 1e-5);
    let batch = sample(&actor.table, 64);
    assert!(close(shares(&batch), [0.125, 0.25, 0.625]), "{:?}", shares(&batch));
    let id = item_of(&batch, 2).id;
    actor.table.update_priorities(&[id], &[4.0]).unwrap();
    let batch = sample(&actor.table, 64);
    assert!(close(shares(&batch), [0.25, 0.5, 0.25]), "{:?}", shares(&batch));
}

#[test]
fn a_batch_samples_once_from_each_equal_range_of_mass() {
    let actor = filled(&config(100), &[1.0; 50]);
    for _ in 0..20 {
        let mut sampled = anchors(&sample(&actor.table, 50));
        assert!(!sampled.is_sorted(), "every part of a batch is as good a sample as the whole");
        sampled.sort_unstable();
        assert!(sampled.into_iter().eq(0..50));
    }
}

#[test]
fn as_the_current_maximum_is_the_largest_priority_ever_held() {
    let mut actor = Actor::open(&table(&config(7)), 1);
    let newest = |actor: &mut Actor, step: u64| {
        actor.push(Body::default().chunk(0, step, 1).window(0, step, (0, 0), None));
        let batch = sample(&actor.table, 64);
        let total = actor.table.stats()["total_mass"].as_f64().unwrap();
        (item_of(&batch, step).id, item_of(&batch, step).probability * total)
    };
    let (first, priority) = newest(&mut actor, 0);
    assert_eq!(priority, 1.0, "1 while it has held none");
    actor.table.update_priorities(&[first], &[7.0]).unwrap();
    actor.table.update_priorities(&[first], &[0.5]).unwrap();
    assert_eq!(newest(&mut actor, 1).1, 7.0);
    for step in 2..8 {
        newest(&mut actor, step);
    }
    actor.table.update_priorities(&[first], &[99.0]).unwrap();
    assert_eq!(newest(&mut actor, 8).1, 7.0, "a stale update was never held");
    assert_eq!(actor.table.stats()["max_priority"], 7.0);
}

#[test]
fn a_table_without_mass_says_so() {
    let actor = filled(&config(100), &[0.0, 0.0]);
    let error = refusal(actor.table.try_sample(&request(1), false, &mut Turn::default()));
    assert!(matches!(error, Error::NoMass { items: 2, .. }), "{error}");
    let fresh = table(&config(100));
    let text = blocked(fresh.try_sample(&request(1), false, &mut Turn::default()));
    assert!(text.contains("holds 0 items of the 1"), "{text}");
}

#[test]
fn probabilities_ages_and_counts_are_told() {
    let mut actor = filled(&config(100), &[1.0, 3.0]);
    actor.push(Body::default().chunk(0, 2, 8));
    let asked = SampleRequest { min_probability: true, ..request(4) };
    let batch = sample_as(&actor.table, &asked);
    assert_eq!(batch.live_items, 2);
    assert_eq!(batch.min_probability, Some(0.25));
    let rows = anchors(&batch).into_iter().zip(&batch.items);
    let mut rows: Vec<_> = rows.map(|(step, item)| (step, item.times_sampled, item.age, item.probability)).collect();
    rows.sort_by_key(|&(step, times, ..)| (step, times));
    assert_eq!(rows, [(0, 1, 8, 0.25), (1, 1, 8, 0.75), (1, 2, 8, 0.75), (1, 3, 8, 0.75)]);
    assert_eq!(stat(&actor.table, "sampled_items"), 4);
    assert_eq!(sample(&actor.table, 1).min_probability, None);
}

#[test]
fn fifo_samples_in_the_order_of_insertion_as_often_as_it_may() {
    let fifo = TableConfig { sampler: Sampler::Fifo, max_times_sampled: 2, ..config(10) };
    let mut actor = Actor::open(&table(&fifo), 1);
    actor.push_next(4);
    let sample = |actor: &Actor, n| anchors(&sample(&actor.table, n));
    assert_eq!(sample(&actor, 3), [0, 0, 1]);
    assert_eq!(sample(&actor, 3), [1, 2, 2]);
    let text = blocked(actor.table.try_sample(&request(3), false, &mut Turn::default()));
    assert!(text.contains("has 2 samples left of the 3"), "{text}");
    actor.push_next(4);
    assert_eq!(sample(&actor, 4), [3, 3, 4, 4]);
    // Many times around the ring of order, with the eviction of what is not sampled.
    for round in 0..100 {
        actor.push_next(5);
        let oldest = sample(&actor, 2);
        assert_eq!(oldest[0], oldest[1], "round {round}");
        assert!(oldest[0] >= actor.next_step - 10);
    }
    actor.table.check_at_rest().unwrap();
    let endless = TableConfig { max_times_sampled: 0, ..fifo };
    assert!(refusal(endless.validate()).to_string().contains("max_times_sampled"));
}

#[test]
fn an_item_leaves_with_its_last_sample() {
    let limited = TableConfig { max_times_sampled: 3, ..config(100) };
    let actor = filled(&limited, &[1e-3, 1.0, 1000.0]);
    let mut sampled = anchors(&sample(&actor.table, 8));
    sampled.sort_unstable();
    assert_eq!(sampled.len(), 8);
    assert!((0..3).all(|step| sampled.iter().filter(|&&s| s == step).count() <= 3));
    blocked(actor.table.try_sample(&request(2), false, &mut Turn::default()));
    assert_eq!(sample(&actor.table, 1).items[0].times_sampled, 3);
    assert_eq!(stat(&actor.table, "items"), 0);
    actor.table.check_at_rest().unwrap();
}

#[test]
fn a_short_sample_takes_what_is_left_on_the_last_try_only() {
    let limited = TableConfig { max_times_sampled: 1, ..config(100) };
    let actor = filled(&limited, &[1.0, 1.0, 1.0]);
    let asked = SampleRequest { allow_short: true, ..request(5) };
    blocked(actor.table.try_sample(&asked, false, &mut Turn::default()));
    let Attempt::Ready(mut batch) = actor.table.try_sample(&asked, true, &mut Turn::default()).unwrap() else {
        panic!("three items can be sampled");
    };
    deliver(&mut batch);
    assert_eq!(batch.items.len(), 3);
    blocked(actor.table.try_sample(&asked, true, &mut Turn::default()));
}

#[test]
fn items_without_mass_do_not_make_a_limited_sample_fail_as_massless() {
    let limited = TableConfig { max_times_sampled: 1, ..config(100) };
    let actor = filled(&limited, &[1.0, 0.0]);
    let text = blocked(actor.table.try_sample(&request(2), false, &mut Turn::default()));
    assert!(text.contains("1 items to sample"), "{text}");
    assert_eq!(anchors(&sample(&actor.table, 1)), [0], "the sample came back");
    let error = refusal(actor.table.try_sample(&request(1), false, &mut Turn::default()));
    assert!(matches!(error, Error::NoMass { items: 1, .. }), "{error}");
}

#[test]
fn a_sample_of_too_many_pieces_is_refused_before_it_is_made() {
    const STEPS: u64 = 4000;
    let table = table(&TableConfig { max_times_sampled: 1000, ..config(STEPS) });
    let wide = replay_core::replay::OpenWriter { window_before: 0, window_after: (STEPS - 1) as u16, ..open(1) };
    table.open_writer(&wide).unwrap();
    let mut actor = Actor { table: table.clone(), writer: 1, epoch: 1, sequence: 0, next_step: 0 };
    for step in 0..STEPS - 1 {
        actor.push(Body::default().chunk(0, step, 1));
    }
    let last = Body::default().chunk(0, STEPS - 1, 1);
    actor.push(last.window(0, 0, (0, (STEPS - 1) as u16), Some(1.0)));
    let asked = |count| SampleRequest { after: (STEPS - 1) as u16, ..request(count) };
    // Of two million pieces, each a chunk of one step: 524 windows.
    let error = refusal(table.try_sample(&asked(600), false, &mut Turn::default()));
    assert!(matches!(error, Error::TooLarge(TooLarge { limit, .. }) if limit == 1 << 21));
    assert!(error.to_string().contains("chunk_steps"), "{error}");
    let batch = sample_as(&table, &asked(3));
    assert_eq!(windows(&batch)[2].len(), STEPS as usize);
    assert_eq!(batch.items[2].times_sampled, 3, "nothing else was sampled");
}

#[test]
fn the_same_seed_samples_the_same_items() {
    let samples = || {
        let actor = filled(&config(100), &[1.0, 2.0, 3.0, 4.0]);
        (0..20).map(|_| anchors(&sample(&actor.table, 3))).collect::<Vec<_>>()
    };
    let first = samples();
    assert_eq!(first, samples());
    assert!(first.iter().any(|batch| *batch != first[0]));
}

#[test]
fn samples_of_nothing_and_of_too_much_are_refused() {
    let actor = filled(&config(100), &[1.0]);
    let refused = |count| refusal(actor.table.try_sample(&request(count), false, &mut Turn::default()));
    assert!(matches!(refused(0), Error::Config(_)));
    assert!(matches!(refused(u32::MAX), Error::TooLarge { .. }));
}

//! Worlds of the first 200 seeds. The environment variable `INNET_WORLD_SEEDS` has another number of them or a range (`500..600`);
//! `INNET_WORLD_SEED` repeats one. `INNET_WORLD_MISTAKE` names the only mistake to plant.

use std::env;
use std::ops::Range;
use std::panic::catch_unwind;

use base::mistake::{Mistake, plant};

/// Threads that share the seeds.
const PARTS: u64 = 4;

/// # Panics
/// For a variable that is no number and no range.
fn seeds() -> Range<u64> {
    let number = |text: &str| -> u64 { text.parse().expect("a seed is a number") };
    if let Ok(one) = env::var("INNET_WORLD_SEED") {
        return number(&one)..number(&one) + 1;
    }
    let Ok(several) = env::var("INNET_WORLD_SEEDS") else {
        return 0..200;
    };
    match several.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => 0..number(&several),
    }
}

/// Runs each fourth world, from number `part` on.
///
/// # Panics
/// When one breaks a promise.
fn run_part(part: u64) {
    for seed in seeds().filter(|seed| seed % PARTS == part) {
        let outcome = catch_unwind(|| world::run(seed));
        let outcome = outcome.unwrap_or_else(|_| panic!("world {seed} failed: `make world SEED={seed}` repeats it"));
        eprintln!("{seed}: {outcome:?}");
    }
}

#[test]
fn no_world_breaks_a_promise_0() {
    run_part(0);
}

#[test]
fn no_world_breaks_a_promise_1() {
    run_part(1);
}

#[test]
fn no_world_breaks_a_promise_2() {
    run_part(2);
}

#[test]
fn no_world_breaks_a_promise_3() {
    run_part(3);
}

#[test]
fn a_seed_always_has_the_same_events() {
    for seed in 0..10 {
        assert_eq!(world::run(seed), world::run(seed), "seed {seed}");
    }
}

/// Worlds in which a planted mistake has to show.
const SEEDS: u64 = 1_000;

/// Worlds that have found mistakes which few others find: they are tried first.
const FOUND_IN: [u64; 14] = [0, 2, 5, 6, 7, 8, 10, 13, 16, 18, 26, 49, 59, 253];

#[test]
fn every_planted_mistake_is_found() {
    // Panics are expected, and their messages only noise.
    std::panic::set_hook(Box::new(|_| {}));
    let only = env::var("INNET_WORLD_MISTAKE").ok();
    let is_asked = |mistake: &&Mistake| only.as_ref().is_none_or(|only| *only == format!("{mistake:?}"));
    let mut missed = Vec::new();
    for &mistake in Mistake::ALL.iter().filter(is_asked) {
        let failure = |seed: u64| {
            plant(Some(mistake));
            let ended = catch_unwind(|| world::run(seed));
            plant(None);
            let panic = ended.err()?;
            Some((seed, panic.downcast_ref::<String>().cloned().unwrap_or_default()))
        };
        match FOUND_IN.into_iter().chain(0..SEEDS).find_map(failure) {
            Some((seed, promise)) => eprintln!("{mistake:?}: world {seed}, {promise}"),
            None => missed.push(mistake),
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found in {SEEDS} worlds: {missed:?}");
}

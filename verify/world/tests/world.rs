//! Worlds of the first 200 seeds. The environment variable `INNET_WORLD_SEEDS` sets how many worlds run, or which (`500..600`);
//! `INNET_WORLD_SEED` repeats one. `INNET_WORLD_MISTAKE` names the only mistake to plant.

use std::collections::HashSet;
use std::env;
use std::fs;
use std::ops::Range;
use std::panic::catch_unwind;
use std::path::Path;

use base::planted::plant;

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
const FOUND_IN: [u64; 14] = [0, 2, 5, 6, 7, 8, 9, 10, 13, 16, 20, 27, 28, 59];

/// Mistakes that are planted with `planted!` in the product.
const MISTAKES: [&str; 40] = [
    // A client sends pushes again, under new numbers, that were applied before the connection broke.
    "ResentAsNew",
    // A snapshot has an earlier sequence number of each writer.
    "OldProgress",
    // A snapshot ends after two chunks.
    "ShortSnapshot",
    // A snapshot's file is not synced.
    "UnsyncedFile",
    // The folder of a new snapshot is not synced.
    "UnsyncedFolder",
    // Earlier snapshots are removed before a new one is written.
    "EarlyRemoval",
    // The memory of a received frame is not returned.
    "KeptReservation",
    // The memory of a reply is not returned.
    "KeptReply",
    // A call that has ended keeps its place in the queue.
    "KeptPlace",
    // A sampled batch keeps a chunk.
    "KeptPin",
    // A server counts a connection that has ended.
    "KeptConnection",
    // A push that has to wait is acknowledged.
    "EarlyReply",
    // A client takes no notice of acknowledged steps that its server has lost.
    "IgnoredLoss",
    // A client skips a push after a broken connection.
    "SkippedPush",
    // A client takes an acknowledgement for one push too many.
    "TakenAhead",
    // `flush` does not wait.
    "EarlyFlush",
    // A reader of frames that was interrupted forgets what it has read.
    "ForgottenBytes",
    // A batch says that a window has one row less before its anchor.
    "ShortWindow",
    // An id has no generation, so that later items of its slot have the same.
    "ForeignId",
    // A sample draws from the first nine tenths of the sum of priorities.
    "SkewedSample",
    // The rate limiter admits every sample.
    "LooseLimiter",
    // A batch of several servers has the probabilities of each alone.
    "LoneProbability",
    // Parameters are stored as version 1 again.
    "FirstVersion",
    // A writer's older connection is not fenced off.
    "UnfencedWriter",
    // The rate limiter keeps the samples of a batch that was not delivered.
    "KeptCredit",
    // Items keep the samples of a batch that was not delivered.
    "KeptSamples",
    // Parameters that are sent again are stored again.
    "RepeatedPut",
    // Priorities of a snapshot get the exponent a second time.
    "RaisedTwice",
    // A chunk is freed while one pin is left.
    "FreedPin",
    // Emptying a table wakes no waiting push.
    "SilentEmpty",
    // A batch of several servers is divided by the sums of priorities of the batch before.
    "OldTotal",
    // A timer is asked before the future that it limits.
    "TimerFirst",
    // A write of no bytes is taken for the end of its frame.
    "ZeroIsEnd",
    // Items that are too old are sampled.
    "KeptExpired",
    // Items expire one version too early.
    "EarlyExpiry",
    // A snapshot has no versions of chunks.
    "LostVersions",
    // A lease does not end with its reader.
    "KeptLease",
    // The samples of a batch that was not delivered return twice.
    "ReturnedTwice",
    // A batch is acknowledged although its lease is over.
    "LateAcknowledgement",
    // The steps of a leased item are freed.
    "FreedLease",
];

/// # Panics
/// When a folder or file cannot be read.
fn source(folder: &Path) -> String {
    let entries = fs::read_dir(folder).expect("a folder of the product").map(|entry| entry.expect("an entry").path());
    let text = entries.map(|path| match path.is_dir() {
        true => source(&path),
        false => fs::read_to_string(&path).unwrap_or_default(),
    });
    text.collect()
}

#[test]
fn every_mistake_in_the_product_is_planted_by_a_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    let planted: HashSet<String> = fs::read_dir(&crates)
        .expect("the crates")
        .flat_map(|entry| {
            let source = source(&entry.expect("a crate").path().join("src"));
            let names = source.split("planted!(").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric()));
            names.filter_map(|mut name| name.next().map(str::to_owned)).collect::<Vec<_>>()
        })
        .filter(|name| !name.is_empty())
        .collect();
    let models = source(&crates.join("replay_core/tests"));
    for name in &planted {
        let modelled = models.contains(&format!("plant(Some({name:?}))"));
        assert!(modelled || MISTAKES.contains(&name.as_str()), "{name} is planted by no test");
    }
    let unknown: Vec<_> = MISTAKES.iter().filter(|name| !planted.contains(**name)).collect();
    assert!(unknown.is_empty(), "{unknown:?} are not in the product");
}

#[test]
fn every_planted_mistake_is_found() {
    // Panics are expected, and their messages only noise.
    std::panic::set_hook(Box::new(|_| {}));
    let fails = |seed: &u64| catch_unwind(|| world::run(*seed)).is_err();
    let failed: Vec<u64> = FOUND_IN.into_iter().filter(fails).collect();
    let only = env::var("INNET_WORLD_MISTAKE").ok();
    let is_asked = |mistake: &&str| only.as_ref().is_none_or(|only| only == mistake);
    let mut missed = Vec::new();
    for mistake in MISTAKES.into_iter().filter(is_asked) {
        let failure = |seed: u64| {
            plant(Some(mistake));
            let ended = catch_unwind(|| world::run(seed));
            plant(None);
            let panic = ended.err()?;
            Some((seed, panic.downcast_ref::<String>().cloned().unwrap_or_default()))
        };
        match FOUND_IN.into_iter().chain(0..SEEDS).find_map(failure) {
            Some((seed, promise)) => eprintln!("{mistake}: world {seed}, {promise}"),
            None => missed.push(mistake),
        }
    }
    let _ = std::panic::take_hook();
    assert!(failed.is_empty(), "without a mistake, too: {failed:?}");
    assert!(missed.is_empty(), "not found in {SEEDS} worlds: {missed:?}");
}

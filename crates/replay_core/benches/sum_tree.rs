//! How long samples and updates of the sum tree take. Prints one JSON object a line:
//! `{"benchmark", "items", "batch", "threads", "value", "best", "unit"}`, where `value` is the median and `best` the
//! smallest time of one call, over repetitions. `cargo bench --bench sum_tree`; without `--bench` (as `cargo test`
//! starts it) each call is made once, to show that it works.

use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::sum_tree::{SampledLeaf, SumTree, Update};

const BATCH: usize = 512;
/// Different inputs that a benchmark goes through, so that the branch predictor and the caches cannot learn one.
const INPUTS: usize = 64;
const REPETITIONS: usize = 41;
const REPETITION: Duration = Duration::from_millis(5);

fn main() {
    let measure = std::env::args().any(|argument| argument == "--bench");
    for items in [10_000, 100_000, 1_000_000, 1 << 20] {
        let bench = Bench::new(items, measure);
        bench.samples("sample_independent", BATCH, independent);
        bench.samples("sample_stratified", BATCH, stratified);
        bench.samples("sample_single", 1, independent);
        bench.updates("update_batch", BATCH);
        bench.updates("update_single", 1);
        bench.samples_with_updates("sample_and_update_independent", independent);
        bench.samples_with_updates("sample_and_update_stratified", stratified);
        bench.samples_with_updates_on_two_threads();
    }
}

/// Targets in [0, 1), each on its own.
fn independent(rng: &mut StdRng, n: usize) -> Vec<f64> {
    (0..n).map(|_| rng.random()).collect()
}

/// One target in each of `n` equal parts of [0, 1).
fn stratified(rng: &mut StdRng, n: usize) -> Vec<f64> {
    (0..n).map(|part| (part as f64 + rng.random::<f64>()) / n as f64).collect()
}

type Targets = fn(&mut StdRng, usize) -> Vec<f64>;

struct Bench {
    tree: SumTree,
    items: u32,
    measure: bool,
}

impl Bench {
    fn new(items: u32, measure: bool) -> Self {
        let tree = SumTree::new(items, -19);
        let mut rng = StdRng::seed_from_u64(1);
        for slot in 0..items {
            tree.activate(slot, priority(&mut rng));
        }
        Bench { tree, items, measure }
    }

    fn samples(&self, name: &str, batch: usize, targets: Targets) {
        let mut rng = StdRng::seed_from_u64(2);
        let inputs: Vec<_> = (0..INPUTS).map(|_| targets(&mut rng, batch)).collect();
        let mut sampled = Vec::new();
        self.report(name, batch, 1, |turn| {
            black_box(self.tree.sample_batch(&inputs[turn % INPUTS], &mut sampled));
            assert_eq!(sampled.len(), batch);
        });
    }

    fn updates(&self, name: &str, batch: usize) {
        let mut rng = StdRng::seed_from_u64(3);
        let inputs: Vec<Vec<Update>> = (0..INPUTS)
            .map(|_| {
                let slots = (0..batch).map(|_| rng.random_range(0..self.items));
                let slots: Vec<_> = slots.collect();
                slots.into_iter().map(|slot| Update { slot, generation: 1, units: priority(&mut rng) }).collect()
            })
            .collect();
        self.report(name, batch, 1, |turn| match &inputs[turn % INPUTS][..] {
            [one] => assert!(self.tree.set(one.slot, one.generation, one.units ^ (turn / INPUTS % 2) as u64)),
            many => assert_eq!(self.tree.set_batch(many), batch),
        });
    }

    fn samples_with_updates(&self, name: &str, targets: Targets) {
        let mut step = self.step(4, targets);
        self.report(name, BATCH, 1, &mut step);
    }

    /// The time of one thread while another does the same on the same tree.
    fn samples_with_updates_on_two_threads(&self) {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut step = self.step(5, independent);
                let mut turn = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    step(turn);
                    turn += 1;
                }
            });
            let mut step = self.step(6, independent);
            self.report("sample_and_update_independent", BATCH, 2, &mut step);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    /// Samples a batch and gives every sampled item another priority.
    fn step(&self, seed: u64, targets: Targets) -> impl FnMut(usize) + '_ {
        let mut rng = StdRng::seed_from_u64(seed);
        let inputs: Vec<_> = (0..INPUTS).map(|_| targets(&mut rng, BATCH)).collect();
        let units: Vec<_> = (0..BATCH).map(|_| priority(&mut rng)).collect();
        let mut sampled: Vec<SampledLeaf> = Vec::new();
        let mut updates = Vec::new();
        move |turn| {
            black_box(self.tree.sample_batch(&inputs[turn % INPUTS], &mut sampled));
            updates.clear();
            updates.extend(sampled.iter().zip(&units).map(|(item, &units)| Update {
                slot: item.slot,
                generation: item.generation,
                units,
            }));
            assert_eq!(self.tree.set_batch(&updates), BATCH);
        }
    }

    fn report(&self, name: &str, batch: usize, threads: usize, mut call: impl FnMut(usize)) {
        let mut turn = 0;
        let mut calls = |n: usize| {
            let start = Instant::now();
            for _ in 0..n {
                call(turn);
                turn += 1;
            }
            start.elapsed()
        };
        let mut micros = Vec::new();
        if self.measure {
            let warm_up = calls(2 * INPUTS);
            let each = warm_up.as_secs_f64() / (2 * INPUTS) as f64;
            let n = (REPETITION.as_secs_f64() / each).ceil() as usize;
            micros.extend((0..REPETITIONS).map(|_| calls(n).as_secs_f64() * 1e6 / n as f64));
        } else {
            micros.push(calls(1).as_secs_f64() * 1e6);
        }
        micros.sort_unstable_by(f64::total_cmp);
        let line = serde_json::json!({
            "benchmark": format!("sum_tree/{name}"),
            "items": self.items,
            "batch": batch,
            "threads": threads,
            "value": micros[micros.len() / 2],
            "best": micros[0],
            "unit": "us",
        });
        writeln!(std::io::stdout(), "{line}").expect("the output can be written");
    }
}

/// A priority as after an exponent of 0.6, in units of 2^-19.
fn priority(rng: &mut StdRng) -> u64 {
    let td_error: f64 = rng.random_range(0.0..2.0);
    1 + (td_error.powf(0.6) * f64::from(1 << 19)) as u64
}

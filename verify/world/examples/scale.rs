//! `cargo run --release -p world --example scale -- --actors 10000 --servers 16`: a simulated job, as a line of JSON.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use clap::Parser;
use simulation::ServiceTimes;
use world::scale::{Job, run};

/// Simulates actors, servers and learners with the service times of `python -m benchmarks service_times`.
#[derive(Parser, Debug)]
struct Flags {
    /// Actors, each with one writer
    #[arg(long, default_value_t = 1_000)]
    actors: usize,
    /// Servers
    #[arg(long, default_value_t = 1)]
    servers: usize,
    /// Learners
    #[arg(long, default_value_t = 4)]
    learners: usize,
    /// Steps of an actor in a second
    #[arg(long, default_value_t = 60.0)]
    steps_per_second: f64,
    /// Steps of a push
    #[arg(long, default_value_t = 60)]
    steps_per_push: u32,
    /// Bytes of a step
    #[arg(long, default_value_t = 256)]
    step_bytes: usize,
    /// Items of a batch
    #[arg(long, default_value_t = 512)]
    batch: u32,
    /// Batches of a learner in a second
    #[arg(long, default_value_t = 20.0)]
    batches_per_second: f64,
    /// Processors of a server that serve connections
    #[arg(long, default_value_t = 4)]
    processors: usize,
    /// Gigabits per second of a server's port
    #[arg(long, default_value_t = 10.0)]
    gigabits: f64,
    /// Largest delay of the network in one direction, in microseconds
    #[arg(long, default_value_t = 100)]
    delay_us: u64,
    /// Seconds that are measured
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Kill the last server afterwards
    #[arg(long)]
    lose_server: bool,
    /// Seed of the world
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Half of a request with its reply, and a pushed or sampled byte: docs/explanation/scale.md has the costs.
const MESSAGE: Duration = Duration::from_micros(25);
const NANOSECONDS_PER_BYTE: f64 = 0.4;

fn main() {
    let flags = Flags::parse();
    let job = Job {
        actors: flags.actors,
        servers: flags.servers,
        learners: flags.learners,
        steps_per_second: flags.steps_per_second,
        steps_per_push: flags.steps_per_push,
        step_bytes: flags.step_bytes,
        batch: flags.batch,
        batches_per_second: flags.batches_per_second,
        times: ServiceTimes {
            processors: flags.processors,
            message: MESSAGE,
            nanoseconds_per_byte: NANOSECONDS_PER_BYTE,
            port_nanoseconds_per_byte: 8.0 / flags.gigabits,
        },
        delay: Duration::from_micros(flags.delay_us),
        measured: Duration::from_secs(flags.seconds),
        lose_server: flags.lose_server,
    };
    let begun = Instant::now();
    let found = run(&job, flags.seed);
    let line = serde_json::json!({
        "actors": job.actors,
        "servers": job.servers,
        "learners": job.learners,
        "steps_per_second": job.steps_per_second,
        "steps_per_push": job.steps_per_push,
        "step_bytes": job.step_bytes,
        "batch": job.batch,
        "batches_per_second": job.batches_per_second,
        "processors": job.times.processors,
        "gigabits": flags.gigabits,
        "step_share": found.step_share,
        "batch_share": found.batch_share,
        "push_ms": found.push.map(|seconds| 1e3 * seconds),
        "sample_ms": found.sample.map(|seconds| 1e3 * seconds),
        "slowest_actor": found.slowest_actor,
        "slowest_learner": found.slowest_learner,
        "busiest_server": found.busiest_server,
        "longest_pauses_s": found.pauses,
        "took_s": begun.elapsed().as_secs_f64(),
    });
    // Ignores a broken pipe (`| head`).
    let _ = writeln!(io::stdout(), "{line}");
}

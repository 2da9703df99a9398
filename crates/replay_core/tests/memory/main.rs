//! How the replay memory behaves, seen through `Memory`, `Table` and `Replay`.

#[path = "../support/frequencies.rs"]
mod frequencies;
mod support;

#[path = "../../examples/fill_sample_update.rs"]
mod example;

mod batch_shares;
mod damaged_snapshots;
mod eviction;
mod ids;
mod leases;
mod limiter;
mod max_priority;
mod parameters;
mod pushes;
mod queues;
mod rank_based;
mod sample_lag;
mod samplers;
mod sampling;
mod server_snapshots;
mod snapshots;
mod threads;
mod version_lag;

#[test]
fn the_example_of_the_library_runs() {
    example::main().unwrap();
}

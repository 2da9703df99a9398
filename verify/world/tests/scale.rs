//! Small jobs of the world at scale: what is offered is done while it fits, and a machine that is full divides its time.

use std::time::Duration;

use simulation::ServiceTimes;
use world::scale::{Job, run};

fn job() -> Job {
    Job {
        actors: 20,
        servers: 2,
        learners: 2,
        steps_per_second: 60.0,
        steps_per_push: 30,
        step_bytes: 256,
        batch: 64,
        batches_per_second: 20.0,
        times: ServiceTimes {
            processors: 2,
            message: Duration::from_micros(20),
            nanoseconds_per_byte: 0.2,
            port_nanoseconds_per_byte: 0.8,
        },
        delay: Duration::from_micros(100),
        measured: Duration::from_secs(5),
        lose_server: false,
    }
}

#[test]
fn a_job_that_fits_is_done_by_everybody() {
    let found = run(&job(), 1);
    for share in [found.step_share, found.batch_share, found.slowest_actor, found.slowest_learner] {
        assert!((0.95..1.05).contains(&share), "{found:?}");
    }
    // Of two servers, each with two processors: 20 pushes of 8 KiB, 40 states, 40 parts of batches and 40 updates, of 40 us each.
    assert!((0.001..0.01).contains(&found.busiest_server), "{found:?}");
    // At least two times 20 us and what the bytes take.
    let [median, last] = found.push;
    assert!(median > 40e-6 && last < 2e-3, "{found:?}");
}

#[test]
fn a_full_machine_is_shared_fairly() {
    let mut job = job();
    job.times.processors = 1;
    // Two messages of a push take 20 ms: a server has 50 requests a second, and is offered 40 pushes, two batches and two updates.
    job.times.message = Duration::from_millis(10);
    job.servers = 1;
    job.batches_per_second = 1.0;
    let fits = run(&job, 1);
    assert!(fits.step_share > 0.95 && fits.busiest_server > 0.7, "{fits:?}");
    job.steps_per_second = 300.0;
    let full = run(&job, 1);
    assert!(full.step_share < 0.5, "{full:?}");
    assert!((0.95..1.05).contains(&full.busiest_server), "{full:?}");
    assert!(full.slowest_actor > 0.8, "{full:?}");
    assert!(full.push[0] > 3.0 * fits.push[0], "{full:?} {fits:?}");
}

#[test]
fn a_batch_of_many_servers_waits_for_all_of_them_at_once() {
    let many = Job { servers: 16, ..job() };
    let (few, many) = (run(&job(), 1), run(&many, 1));
    // Eight times as many servers: asked one after the other, eight times as long.
    assert!(many.sample[0] < 2.0 * few.sample[0], "{many:?} {few:?}");
}

#[test]
fn programs_go_on_when_a_lost_server_is_back() {
    let job = Job { lose_server: true, ..job() };
    let [actor, learner] = run(&job, 1).pauses.expect("a server was lost");
    // It is away for 5 s. Its actors wait for it; learners take what the other one has.
    assert!((5.0..8.0).contains(&actor), "{actor}");
    assert!(learner < 8.0, "{learner}");
}

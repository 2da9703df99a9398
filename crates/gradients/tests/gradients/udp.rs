//! Sums over UDP on this machine.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use gradients::{
    AggregatorLimits, Arithmetic, Asynchronous, AsynchronousWorker, Control, Error, JobWorker, JoinJob,
    ParentAggregator, Result, RunningAggregator, Ticket, UdpTransport, Worker, udp_aggregators,
};

use crate::network::{as_f32, exact, request, whole_numbers};

/// Deadline that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

fn start() -> RunningAggregator {
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    udp_aggregators(address, 1, AggregatorLimits::default()).unwrap().remove(0)
}

fn full(request: JoinJob) -> JoinJob {
    JoinJob { segment_values: 360, deadline: LONG, ..request }
}

type UdpWorker = Worker<UdpTransport>;

fn work(request: &JoinJob, ticket: &Ticket, deadline: Duration, wait: &Wait<'_>) -> Result<UdpWorker> {
    Worker::join(UdpTransport::to(ticket.address)?, request, ticket, deadline, wait)
}

fn join(aggregator: &RunningAggregator, request: &JoinJob) -> UdpWorker {
    let ticket = aggregator.join(request, None).unwrap();
    work(request, &ticket, LONG, &Wait::forever()).unwrap()
}

/// Sums each vector with its worker, all at the same time, several rounds.
fn sum_all(workers: Vec<UdpWorker>, rounds: u64, length: usize) {
    let count = workers.len();
    thread::scope(|scope| {
        for (number, mut worker) in workers.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..rounds {
                    let vectors = whole_numbers(count, length, round);
                    let mut mine = vectors[number].clone();
                    let sum = worker.sum(&mut mine, false, LONG, &Wait::forever());
                    assert_eq!(sum.unwrap().workers, count as u32);
                    assert_eq!(mine, as_f32(&exact(&vectors)));
                }
            });
        }
    });
}

#[test]
fn workers_sum_over_udp() {
    for arithmetic in [Arithmetic::Float, Arithmetic::Fixed] {
        let aggregator = start();
        let join = |number| {
            let request = JoinJob { arithmetic, ..full(request(number, 4)) };
            join(&aggregator, &request)
        };
        sum_all((0..4).map(join).collect(), 4, 50_000);
        let counters = aggregator.aggregator().counters();
        assert_eq!(counters.counted, 4 * counters.sums);
        assert_eq!((counters.strangers, counters.malformed), (0, 0));
    }
}

#[test]
fn an_aggregator_with_a_parent_sums_over_udp() {
    let parent = start();
    let mut children = Vec::new();
    let mut workers = Vec::new();
    for rack in 0..2 {
        let child = start();
        let of_four = |number| JoinJob { world: 4, ..full(request(number, 2)) };
        let up = parent.join(&JoinJob { below: Some(2), ..of_four(rack) }, None).unwrap();
        let mut upstream = Some(ParentAggregator::new(&up, 2));
        for number in 0..2 {
            let request = of_four(number);
            let ticket = child.join(&request, upstream.take()).unwrap();
            let worker = work(&request, &ticket, LONG, &Wait::forever());
            workers.push(worker.unwrap());
        }
        children.push(child);
    }
    sum_all(workers, 3, 20_000);
    let counters = parent.aggregator().counters();
    assert_eq!(counters.counted, 2 * counters.sums);
}

#[test]
fn a_worker_whose_connection_ends_fails_the_others_at_once() {
    let aggregator = start();
    let mut worker = join(&aggregator, &full(request(0, 2)));
    let gone = aggregator.join(&full(request(1, 2)), None).unwrap();
    thread::scope(|scope| {
        let sum = scope.spawn(|| worker.sum(&mut [1.0; 10], false, LONG, &Wait::forever()));
        // Until it waits for the other one.
        let late = Instant::now() + LONG;
        while aggregator.aggregator().counters().counted == 0 {
            assert!(Instant::now() < late, "no contribution in time");
            thread::yield_now();
        }
        aggregator.aggregator().leave(gone.session);
        let error = sum.join().unwrap().unwrap_err();
        let Error::Missing { workers, reason } = error else {
            panic!("{error:?}");
        };
        assert_eq!(workers, [1]);
        assert!(reason.contains("host-1) left in the middle"), "{reason}");
    });
}

#[test]
fn a_missing_worker_is_named_at_the_jobs_deadline_and_a_reset_continues() {
    let aggregator = start();
    let soon = |number| JoinJob { deadline: Duration::from_secs(1), ..full(request(number, 2)) };
    let mut worker = join(&aggregator, &soon(0));
    let failed = worker.sum(&mut [1.0; 10], false, LONG, &Wait::forever());
    assert!(matches!(failed, Err(Error::Missing { workers, .. }) if workers == [1]));
    let mut other = join(&aggregator, &soon(1));
    for worker in [&mut worker, &mut other] {
        worker.call(Control::Reset, LONG, &Wait::forever()).unwrap();
    }
    // Workers that contribute within the deadline are summed up.
    thread::scope(|scope| {
        let sum = |worker: &mut UdpWorker| {
            let mut values = [1.0; 10];
            worker.sum(&mut values, false, LONG, &Wait::forever()).map(|_| values)
        };
        let first = scope.spawn(move || sum(&mut worker));
        let second = sum(&mut other);
        assert_eq!(first.join().unwrap().unwrap(), [2.0; 10]);
        assert_eq!(second.unwrap(), [2.0; 10]);
    });
}

#[test]
fn a_silent_aggregator_and_an_interrupt_end_a_call() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let aggregator = start();
    let request = full(request(0, 1));
    let ticket = Ticket { address: silent.local_addr().unwrap(), ..aggregator.join(&request, None).unwrap() };
    let short = Duration::from_millis(30);
    let nobody = work(&request, &ticket, short, &Wait::forever());
    assert!(matches!(nobody.err(), Some(Error::Silent { .. })));
    let begun = Instant::now();
    let interrupted = Wait { interrupted: &|| true, ..Wait::forever() };
    let ended = work(&request, &ticket, LONG, &interrupted);
    assert!(matches!(ended.err(), Some(Error::Interrupted)));
    assert!(begun.elapsed() < LONG);
}

#[test]
fn asynchronous_workers_take_the_same_means_over_udp() {
    const UPDATES: u64 = 30;
    const LENGTH: usize = 20_000;
    let aggregator = start();
    let join = |number| {
        let request = JoinJob {
            asynchronous: Some(Asynchronous { values: LENGTH as u32, threshold: 2, staleness: 3 }),
            ..full(request(number, 3))
        };
        let worker = join(&aggregator, &request);
        AsynchronousWorker::start(worker, number, request.asynchronous.unwrap(), UPDATES, LONG).unwrap()
    };
    let workers: Vec<AsynchronousWorker> = (0..3).map(join).collect();
    // Means of all updates, which every worker takes, and from which one that is too far behind continues.
    let taken: Mutex<Vec<Vec<f32>>> = Mutex::default();
    let take_all = |updates: &AsynchronousWorker, mean: &mut Vec<f32>| loop {
        let next = updates.session().take(mean);
        match next {
            Ok(None) => return,
            Ok(Some(index)) => {
                let mut taken = taken.lock().unwrap();
                match taken.get(index as usize - 1) {
                    Some(others) => assert!(others == mean, "workers took different means"),
                    None => taken.push(mean.clone()),
                }
                assert!(taken.len() as u64 >= index);
            }
            Err(Error::Behind { .. }) => updates.session().restart(taken.lock().unwrap().len() as u64, Instant::now()),
            Err(failure) => panic!("{failure}"),
        }
    };
    let train = |number: usize, updates: &AsynchronousWorker| {
        let mut mean = vec![0.0; LENGTH];
        let newest = || updates.session().index();
        while newest() < UPDATES {
            let index = newest();
            let gradient = vec![(1 + number) as f32 + index as f32; LENGTH];
            take_all(updates, &mut mean);
            while newest() < UPDATES && !updates.offer(&gradient, index).unwrap() {
                // The next `take` returns a failure.
                let _ = updates.wait(true, LONG, &Wait::forever());
                take_all(updates, &mut mean);
            }
        }
    };
    thread::scope(|scope| {
        for (number, updates) in workers.iter().enumerate() {
            let train = &train;
            scope.spawn(move || train(number, updates));
        }
    });
    assert_eq!(taken.lock().unwrap().len() as u64, UPDATES);
    let counts = workers.iter().map(|worker| worker.session().contributions());
    assert!(counts.map(|counts| counts.counted).sum::<u64>() > 0);
    let counters = aggregator.aggregator().counters();
    assert_eq!((counters.strangers, counters.malformed, counters.failed), (0, 0, 0));
}

//! Asynchronous jobs: all workers take the same means, each gradient is counted once, and none beyond the staleness bound.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use gradients::{AggregatorLimits, Asynchronous, AsynchronousSession, Error, Exchange, JoinJob, Result, Transmit};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::network::{Borrowed, Faults, Network, address, request};

/// Gradients of one worker, so few that float32 has a base-4 digit for each gradient of three workers.
const GRADIENTS: usize = 4;
const LENGTH: usize = 45;
const LONG: Duration = Duration::from_secs(1000);

fn asynchronous(worker: u16, workers: u16, threshold: u16, staleness: u16) -> JoinJob {
    JoinJob {
        deadline: LONG,
        asynchronous: Some(Asynchronous { values: LENGTH as u32, threshold, staleness }),
        ..request(worker, workers)
    }
}

/// A worker with the means it took and the gradients it offered.
struct Trainer {
    at: SocketAddr,
    session: AsynchronousSession,
    means: Vec<Vec<f32>>,
    /// Update that the weights of each gradient were of.
    offered: Vec<u64>,
    /// Update that the weights of the next gradient are of.
    computing: u64,
}

impl Trainer {
    fn join(network: &mut Network, request: &JoinJob, last: u64) -> Self {
        let worker = network.join(0, request).unwrap();
        let now = network.wire.now;
        Trainer {
            at: address(request.worker),
            session: AsynchronousSession::new(
                worker,
                request.worker,
                request.asynchronous.unwrap(),
                last,
                Duration::from_secs(10),
                now,
            ),
            means: Vec::new(),
            offered: Vec::new(),
            computing: 0,
        }
    }

    fn take_all(&mut self) {
        let mut mean = vec![0.0; LENGTH];
        while let Ok(Some(index)) = self.session.take(&mut mean) {
            self.means.push(mean.clone());
            assert_eq!(index, self.session.index());
        }
    }

    fn offer(&mut self, value: f32) -> bool {
        let taken = self.session.offer(&[value; LENGTH], self.computing).unwrap();
        if taken {
            self.offered.push(self.computing);
            self.computing = self.session.index();
        }
        taken
    }
}

fn join_all(network: &mut Network, workers: u16, threshold: u16, staleness: u16, last: u64) -> Vec<Trainer> {
    let join = |worker| {
        let request = asynchronous(worker, workers, threshold, staleness);
        Trainer::join(network, &request, last)
    };
    (0..workers).map(join).collect()
}

/// A session whose failures are left for later.
struct IgnoringFailures<'a>(&'a mut AsynchronousSession);

impl Exchange for IgnoringFailures<'_> {
    type Output = ();

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        self.0.receive(now, from, datagram, out);
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<()>> {
        let _ = self.0.poll(now, out);
        None
    }

    fn next_wake(&self) -> Instant {
        match self.0.failure() {
            None => self.0.next_wake(),
            Some(_) => Instant::now() + 10 * LONG,
        }
    }

    fn waits_for(&self, now: Instant) -> String {
        self.0.waits_for(now)
    }
}

/// Lets time pass. A worker that is too far behind takes the means of the worker that is furthest ahead.
fn pass_and_pull(network: &mut Network, trainers: &mut [Trainer], time: Duration) {
    let updates = trainers.iter_mut().map(|t| (t.at, IgnoringFailures(&mut t.session)));
    network.run_for(&mut updates.collect::<Vec<_>>(), time);
    trainers.iter_mut().for_each(Trainer::take_all);
    let furthest = trainers.iter().map(|t| &t.means).max_by_key(|m| m.len());
    let furthest = furthest.cloned().unwrap_or_default();
    for trainer in trainers {
        match trainer.session.failure() {
            None => {}
            Some(Error::Behind { .. }) => {
                trainer.means.clone_from(&furthest);
                trainer.session.restart(furthest.len() as u64, network.wire.now);
            }
            Some(other) => panic!("{other}"),
        }
    }
}

fn pass(network: &mut Network, trainers: &mut [Trainer], time: Duration) {
    let updates = trainers.iter_mut().map(|t| (t.at, Borrowed(&mut t.session)));
    network.run_for(&mut updates.collect::<Vec<_>>(), time);
}

/// Value of a gradient: one base-4 digit, so that a sum shows its gradients, and how often each is in it.
fn digit(worker: usize, number: usize) -> f32 {
    4f32.powi((worker * GRADIENTS + number) as i32)
}

fn digits(sum: f32) -> Vec<(usize, usize)> {
    let mut left = sum as u64;
    let mut found = Vec::new();
    for place in 0..3 * GRADIENTS {
        let times = left % 4;
        assert!(times <= 1, "{sum}: a contribution counted {times} times");
        if times == 1 {
            found.push((place / GRADIENTS, place % GRADIENTS));
        }
        left /= 4;
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_worker_takes_the_same_means_of_gradients_within_the_staleness_bound(
        threshold in 1u16..3,
        staleness in 0u16..4,
        seed: u64,
        loss in 0.0..0.2,
        delay_us in 1u64..3000,
    ) {
        let faults = Faults { loss, duplicate: 0.1, delay_us, straggler: 0.05 };
        let mut network = Network::new(seed, faults, AggregatorLimits { window: 3, ..AggregatorLimits::default() });
        let mut trainers = join_all(&mut network, 3, threshold, staleness, u64::MAX);
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..400 {
            pass_and_pull(&mut network, &mut trainers, Duration::from_millis(5));
            for (worker, trainer) in trainers.iter_mut().enumerate() {
                let number = trainer.offered.len();
                if number < GRADIENTS && rng.random_bool(0.1) {
                    trainer.offer(digit(worker, number));
                }
            }
        }
        for _ in 0..3 {
            pass_and_pull(&mut network, &mut trainers, Duration::from_secs(2));
        }

        let means = trainers[0].means.clone();
        let mut counted: HashMap<(usize, usize), usize> = HashMap::new();
        for trainer in &trainers {
            prop_assert_eq!(&trainer.means, &means, "workers took different means");
        }
        for (before, mean) in means.iter().enumerate() {
            for value in mean.iter().step_by(7) {
                let contributions = digits(value * f32::from(threshold));
                prop_assert_eq!(contributions.len(), usize::from(threshold));
                for (worker, number) in contributions {
                    let age = before as u64 - trainers[worker].offered[number];
                    prop_assert!(age <= u64::from(staleness), "of {} updates before", age);
                    *counted.entry((worker, number)).or_default() += 1;
                }
            }
        }
        let segments = LENGTH.div_ceil(7);
        for (worker, trainer) in trainers.iter().enumerate() {
            let counts = trainer.session.contributions();
            let times = |number| counted.get(&(worker, number)).copied().unwrap_or_default();
            let whole = (0..trainer.offered.len()).filter(|&n| times(n) == segments).count();
            prop_assert_eq!(counts.offered, trainer.offered.len() as u64);
            // More may be counted than the means have: segments of an incomplete update are in no mean yet. Fewer only if the worker was
            // behind, and did not learn whether its gradient in flight was counted.
            let behind = counts.restarts;
            prop_assert!(whole as u64 <= counts.counted + behind, "{whole} found, {counts:?}");
            prop_assert!((0..GRADIENTS).all(|n| times(n) <= segments));
            if !trainer.session.is_busy() {
                prop_assert_eq!(counts.counted + counts.dropped, counts.offered);
            }
        }
    }
}

#[test]
fn partly_counted_gradients_do_not_deadlock() {
    for seed in 0..20 {
        // Segments are reordered by up to a round; every second network loses some.
        let faults = Faults { delay_us: 2000, loss: 0.05 * (seed % 2) as f64, ..Faults::NONE };
        let mut network = Network::new(seed, faults, AggregatorLimits::default());
        let mut trainers = join_all(&mut network, 3, 2, 3, u64::MAX);
        for turn in 0.. {
            assert!(turn < 4000, "stuck, seed {seed}");
            pass_and_pull(&mut network, &mut trainers, Duration::from_millis(5));
            if trainers.iter().all(|trainer| trainer.means.len() >= 60) {
                break;
            }
            for trainer in &mut trainers {
                trainer.computing = trainer.session.index();
                trainer.offer(1.0);
            }
        }
    }
}

#[test]
fn a_gradient_beyond_the_staleness_bound_is_dropped_and_counted() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut trainers = join_all(&mut network, 2, 1, 1, u64::MAX);
    let millisecond = Duration::from_millis(1);
    pass(&mut network, &mut trainers, millisecond);
    for update in 1..=2 {
        assert!(trainers[0].offer(1.0));
        pass(&mut network, &mut trainers, millisecond);
        trainers.iter_mut().for_each(Trainer::take_all);
        assert_eq!(trainers[0].means.len(), update);
        trainers[0].computing = update as u64;
    }
    // A gradient of the first weights: two updates old, where one is allowed.
    assert!(trainers[1].offer(5.0));
    pass(&mut network, &mut trainers, millisecond);
    trainers.iter_mut().for_each(Trainer::take_all);
    let counts = trainers[1].session.contributions();
    assert_eq!((counts.offered, counts.dropped, counts.counted), (1, 1, 0));
    assert_eq!(trainers[0].means.len(), 2);
    // A gradient of the newest weights.
    trainers[1].computing = 2;
    assert!(trainers[1].offer(5.0));
    pass(&mut network, &mut trainers, millisecond);
    trainers.iter_mut().for_each(Trainer::take_all);
    assert_eq!(trainers[0].means[2], [5.0; LENGTH]);
    assert_eq!(trainers[1].session.contributions().counted, 1);
}

#[test]
fn a_worker_finds_the_sums_of_s_plus_one_rounds() {
    // With a round in flight three sums are kept, otherwise one more.
    for (missed, found) in [(3, true), (5, false)] {
        let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
        let mut trainers = join_all(&mut network, 2, 1, 2, u64::MAX);
        let millisecond = Duration::from_millis(1);
        pass(&mut network, &mut trainers, millisecond);
        network.wire.dead.insert(address(1));
        for _ in 0..missed {
            trainers[0].computing = trainers[0].session.index();
            assert!(trainers[0].offer(1.0));
            pass(&mut network, &mut trainers, millisecond);
            trainers[0].take_all();
        }
        assert_eq!(trainers[0].means.len(), missed);
        network.wire.dead.clear();
        let [first, second] = trainers.as_mut_slice() else { unreachable!() };
        if found {
            pass(&mut network, &mut trainers, Duration::from_secs(1));
            trainers[1].take_all();
            assert_eq!(trainers[1].means, trainers[0].means);
            continue;
        }
        let behind = network.drive(vec![(second.at, Borrowed(&mut second.session))]).remove(0);
        assert!(matches!(behind, Err(Error::Behind { round: 1 })), "{behind:?}");
        // It pulls the weights of the third update, and continues with the fourth.
        second.session.restart(3, network.wire.now);
        second.means = first.means[..3].to_vec();
        pass(&mut network, &mut trainers, Duration::from_secs(1));
        trainers[1].take_all();
        assert_eq!(trainers[1].means, trainers[0].means);
        assert_eq!(trainers[1].session.contributions().restarts, 1);
        trainers[1].computing = 5;
        assert!(trainers[1].offer(2.0));
        pass(&mut network, &mut trainers, Duration::from_secs(1));
        trainers.iter_mut().for_each(Trainer::take_all);
        assert_eq!(trainers[0].means[5], [2.0; LENGTH]);
    }
}

#[test]
fn a_worker_that_does_not_take_its_means_does_not_delay_others() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut trainers = join_all(&mut network, 2, 1, 2, u64::MAX);
    for _ in 0..3 {
        trainers[0].computing = trainers[0].session.index();
        assert!(trainers[0].offer(1.0));
        pass(&mut network, &mut trainers, Duration::from_secs(1));
        trainers[0].take_all();
    }
    // It has room for three, and does not query more.
    pass(&mut network, &mut trainers, Duration::from_secs(1));
    trainers[1].take_all();
    assert_eq!(trainers[1].means, trainers[0].means);
}

#[test]
fn no_contribution_goes_to_a_round_after_the_last() {
    let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
    let mut trainers = join_all(&mut network, 2, 1, 3, 1);
    for trainer in &mut trainers {
        assert!(trainer.offer(1.0));
    }
    pass(&mut network, &mut trainers, Duration::from_secs(5));
    for trainer in &mut trainers {
        trainer.take_all();
        assert_eq!(trainer.means, [[1.0; LENGTH]]);
        assert!(!trainer.session.is_busy());
    }
    let counts = trainers.iter().map(|t| t.session.contributions());
    let (dropped, counted) = counts.fold((0, 0), |(d, c), t| (d + t.dropped_segments, c + t.counted));
    // If each is in the sum of some segments, both were dropped in part.
    assert_eq!(dropped, LENGTH.div_ceil(7) as u64);
    assert!(counted <= 1);
}

#[test]
fn a_round_with_too_few_contributions_names_the_missing_workers() {
    let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
    let join = |network: &mut Network, worker| {
        let request = JoinJob { deadline: Duration::from_secs(2), ..asynchronous(worker, 3, 2, 3) };
        Trainer::join(network, &request, u64::MAX)
    };
    let mut trainers: Vec<Trainer> = (0..2).map(|w| join(&mut network, w)).collect();
    assert!(trainers[0].offer(1.0));
    let began = network.wire.now;
    let updates = trainers.iter_mut().map(|t| (t.at, Borrowed(&mut t.session)));
    for result in network.drive(updates.collect()) {
        let Err(Error::Missing { workers, reason }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(workers, [1, 2]);
        assert!(reason.contains("worker 2, which never joined"), "{reason}");
    }
    assert!(network.wire.now - began < Duration::from_secs(4));
}

#[test]
fn a_worker_without_gradients_notices_a_silent_aggregator() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut trainers = join_all(&mut network, 2, 2, 3, u64::MAX);
    pass(&mut network, &mut trainers, Duration::from_secs(60));
    network.wire.dead.insert(network.aggregators[0].0);
    let began = network.wire.now;
    let updates = trainers.iter_mut().map(|t| (t.at, Borrowed(&mut t.session)));
    for result in network.drive(updates.collect()) {
        assert!(matches!(result, Err(Error::Silent { .. })), "{result:?}");
    }
    // It queries every 50 ms, and waits 10 s for the first answer.
    assert!(network.wire.now - began <= Duration::from_millis(10_100));
}

#[test]
fn a_worker_that_restarts_does_not_disturb_the_others() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut trainers = join_all(&mut network, 3, 2, 3, u64::MAX);
    assert!(trainers[2].offer(4.0));
    pass(&mut network, &mut trainers, Duration::from_millis(100));
    trainers[2] = Trainer::join(&mut network, &asynchronous(2, 3, 2, 3), u64::MAX);
    assert!(trainers[0].offer(2.0));
    pass(&mut network, &mut trainers, Duration::from_secs(1));
    for trainer in &mut trainers {
        trainer.take_all();
        assert_eq!(trainer.means, [[3.0; LENGTH]], "its earlier contribution counts once");
    }
}

#[test]
fn weights_of_an_earlier_job_are_refused_at_once() {
    for ahead in [1, 5, 700_000] {
        let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
        let mut trainers = join_all(&mut network, 2, 2, 3, u64::MAX);
        trainers[0].session.restart(ahead, network.wire.now);
        let at = trainers[0].at;
        let result = network.drive(vec![(at, Borrowed(&mut trainers[0].session))]);
        let Some(Err(Error::Refused(reason))) = result.first() else {
            panic!("{ahead}: {result:?}");
        };
        assert!(reason.contains("a name of its own"), "{reason}");
        let answered = network.wire.now;
        assert!(trainers[1].offer(1.0));
        pass(&mut network, &mut trainers[1..], Duration::from_secs(1));
        assert!(network.wire.now - answered <= Duration::from_secs(1), "the job continues");
    }
}

#[test]
fn a_worker_without_gradients_that_is_replaced_is_told() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut older = Trainer::join(&mut network, &asynchronous(0, 2, 2, 1), 3);
    let mut running = vec![(older.at, Borrowed(&mut older.session))];
    network.run_for(&mut running, Duration::from_millis(100));
    network.join(0, &asynchronous(0, 2, 2, 1)).unwrap();
    let told = network.drive(running).remove(0).unwrap_err();
    assert!(matches!(&told, Error::Refused(text) if text.contains("has joined as worker 0")), "{told}");
}

#[test]
fn jobs_beyond_the_limits_are_refused() {
    let mut network =
        Network::new(1, Faults::NONE, AggregatorLimits { job_bytes: 10_000, ..AggregatorLimits::default() });
    let mut refused = |change: &dyn Fn(&mut JoinJob)| {
        let mut request = asynchronous(0, 2, 1, 3);
        change(&mut request);
        network.join(0, &request).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let settings = |values, threshold, staleness| Asynchronous { values, threshold, staleness };
    let large = refused(&|r| r.asynchronous = Some(settings(1000, 1, 20)));
    assert!(large.contains("staleness bound"), "{large}");
    for threshold in [0, 3] {
        let wrong = refused(&|r| r.asynchronous = Some(settings(10, threshold, 1)));
        assert!(wrong.contains("threshold"), "{wrong}");
    }
    let empty = refused(&|r| r.asynchronous = Some(settings(0, 1, 1)));
    assert!(empty.contains("values is 1 or more"), "{empty}");
    let tree = refused(&|r| r.world = 4);
    assert!(tree.contains("without a parent"), "{tree}");
    assert_eq!(refused(&|_| {}), "");
    let other = refused(&|r| r.asynchronous = None);
    assert!(other.contains("identical settings"), "{other}");
}

//! Workers that die, lag or restart: an error names them, in bounded time.

use std::time::Duration;

use gradients::{AggregatorLimits, Arithmetic, Control, Error, Exchange, JoinJob, Round, WorkerSession};

use crate::network::{ALL, Faults, Network, Port, address, as_f32, exact, request, two_levels, whole_numbers};

fn pair(network: &mut Network) -> Vec<gradients::WorkerSession> {
    network.join_all(&[request(0, 2), request(1, 2)])
}

#[test]
fn a_worker_that_dies_in_a_round_is_named_to_all_others() {
    let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
    let requests: Vec<JoinJob> = (0..3).map(|w| request(w, 3)).collect();
    let mut workers = network.join_all(&requests);
    let mut vectors = whole_numbers(3, 2000, 1);
    network.sum(&mut workers, &mut vectors, false);
    // It sends a part of the next round, then nothing.
    let mut first = vectors[2].clone();
    let now = network.wire.now;
    let begun = now;
    let mut round = Round::new(&mut workers[2], &mut first, false, now, now + Duration::from_secs(9));
    round.poll(now, &mut Port(&mut network.wire, address(2)));
    drop(round);
    network.pass(Duration::from_millis(1));
    network.wire.dead.insert(address(2));
    let results = network.sum(&mut workers[..2], &mut vectors[..2], false);
    for result in results {
        let Err(Error::Missing { workers, reason, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(workers, [2]);
        assert!(reason.contains("worker 2 (host-2), last heard"), "{reason}");
    }
    // The job's deadline is 2 s, and the first segment had arrived before it began.
    assert!(network.wire.now - begun < Duration::from_secs(3));
}

#[test]
fn a_worker_that_never_joined_is_named() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = network.join_all(&[request(0, 2)]);
    let result = network.sum(&mut workers, &mut [vec![1.0; 9]], false);
    let error = result[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("worker 1, which never joined"), "{error}");
    assert!(error.contains("waited 2000 ms"), "{error}");
}

#[test]
fn a_worker_whose_connection_breaks_fails_the_round_at_once() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let requests = [request(0, 2), request(1, 2)];
    let mut worker = network.join(0, &requests[0]).unwrap();
    let ticket = network.ticket(0, &requests[1], None).unwrap();
    let begun = network.wire.now;
    let mut values = vec![1.0; 9];
    let round = Round::new(&mut worker, &mut values, false, begun, begun + Duration::from_secs(9));
    let mut rounds = vec![(address(0), round)];
    network.run_for(&mut rounds, Duration::from_millis(4));
    network.leave(0, ticket.session);
    let result = network.drive(rounds).remove(0);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("worker 1 (host-1) left in the middle of round 1"), "{error}");
    assert!(network.wire.now - begun < Duration::from_millis(100));
}

#[test]
fn an_aggregator_that_is_gone_is_an_error_at_the_workers_deadline() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = pair(&mut network);
    let mut vectors = whole_numbers(2, 50, 1);
    network.sum(&mut workers, &mut vectors, false);
    network.wire.dead.insert(address(1000));
    let begun = network.wire.now;
    for result in network.sum(&mut workers, &mut vectors, false) {
        assert!(matches!(result, Err(Error::Silent { .. })), "{result:?}");
    }
    assert_eq!(network.wire.now - begun, Duration::from_secs(10));
    for result in network.sum(&mut workers, &mut vectors, false) {
        assert!(matches!(result, Err(Error::Broken)), "{result:?}");
    }
    assert!(matches!(network.call(0, &mut workers[0], Control::Reset), Err(Error::Silent { .. })));
}

#[test]
fn a_silent_aggregator_is_not_blamed_on_a_worker() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let patient = |worker| JoinJob { deadline: Duration::from_secs(60), ..request(worker, 2) };
    let mut workers = network.join_all(&[patient(0), patient(1)]);
    let mut values = vec![1.0; 9];
    let begun = network.wire.now;
    let round = Round::new(&mut workers[0], &mut values, false, begun, begun + Duration::from_secs(10));
    let mut rounds = vec![(address(0), round)];
    // It has named the worker that it waits for.
    network.run_for(&mut rounds, Duration::from_secs(3));
    network.wire.dead.insert(address(1000));
    let failure = network.drive(rounds).remove(0).unwrap_err();
    let Error::Silent { waited_ms, .. } = failure else {
        panic!("{failure:?}");
    };
    assert!((6900..7100).contains(&waited_ms), "{waited_ms}");
    assert_eq!(network.wire.now - begun, Duration::from_secs(10));
}

#[test]
fn after_a_failure_a_reset_by_every_worker_continues_exactly() {
    for seed in 0..20 {
        let mut network = Network::new(seed, Faults::MANY, AggregatorLimits::default());
        let mut workers = pair(&mut network);
        let mut vectors = whole_numbers(2, 400, seed);
        network.sum(&mut workers, &mut vectors, false);
        network.wire.dead.insert(address(1));
        let failed = network.sum(&mut workers[..1], &mut vectors[..1], false);
        assert!(matches!(failed[0], Err(Error::Missing { .. })));
        network.wire.dead.clear();
        let late = network.sum_at(1, &mut workers[1], &mut vectors[1]);
        assert!(late.is_err(), "the job has failed: {late:?}");
        for (port, worker) in workers.iter_mut().enumerate() {
            network.call(port as u16, worker, Control::Reset).unwrap();
        }
        assert_eq!(workers[0].next_round(), workers[1].next_round());
        for round in 0..3 {
            let mut vectors = whole_numbers(2, 400, 100 * seed + round);
            let expected = as_f32(&exact(&vectors));
            for result in network.sum(&mut workers, &mut vectors, false) {
                result.unwrap();
            }
            assert_eq!(vectors, [expected.clone(), expected]);
        }
    }
}

#[test]
fn a_worker_that_restarts_begins_with_the_others() {
    let mut network = Network::new(4, Faults::MANY, AggregatorLimits::default());
    let mut workers = pair(&mut network);
    let mut vectors = whole_numbers(2, 100, 1);
    network.sum(&mut workers, &mut vectors, false);
    let requests = [request(0, 2), request(1, 2)];
    // Both crash and restart, one after the other: their earlier contributions do not count.
    let mut workers = network.join_all(&requests);
    assert_eq!(workers[0].next_round(), workers[1].next_round());
    let mut vectors = whole_numbers(2, 100, 2);
    let expected = as_f32(&exact(&vectors));
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    assert_eq!(vectors, [expected.clone(), expected]);
}

/// A segment has 7 values: also vectors that differ only after whole segments, or in the number of their segments.
#[test]
fn vectors_of_different_lengths_are_an_error_that_has_both() {
    let lengths = [(10, 12), (7, 8), (7, 14), (14, 15), (14, 70), (700, 707), (1, 7000)];
    for arithmetic in [Arithmetic::Float, Arithmetic::Fixed] {
        for (one, two) in lengths.into_iter().flat_map(|(one, two)| [(one, two), (two, one)]) {
            for faults in [Faults::NONE, Faults::MANY] {
                let mut network = Network::new(1, faults, AggregatorLimits::default());
                let requests = [0, 1].map(|worker| JoinJob { arithmetic, ..request(worker, 2) });
                let mut workers = network.join_all(&requests);
                let begun = network.wire.now;
                let mut vectors = vec![vec![1.0; one], vec![1.0; two]];
                for result in network.sum(&mut workers, &mut vectors, false) {
                    let Err(Error::Halted(reason)) = result else {
                        panic!("{one} and {two} values: {result:?}");
                    };
                    for part in [format!("worker 0 {one} values"), format!("worker 1 sums {two} values")] {
                        let other_way = part.replace("sums ", "").replace("worker 0 ", "worker 0 sums ");
                        assert!(reason.contains(&part) || reason.contains(&other_way), "{reason}");
                    }
                }
                assert!(network.wire.now - begun < Duration::from_secs(2), "at once");
            }
        }
    }
}

#[test]
fn racks_compare_the_lengths_of_their_vectors() {
    for arithmetic in [Arithmetic::Float, Arithmetic::Fixed] {
        let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
        let mut workers = two_levels(&mut network, arithmetic, AggregatorLimits::default());
        let lengths = [14, 14, 14, 21, 21, 21];
        let mut vectors: Vec<_> = lengths.map(|length| vec![1.0; length]).into();
        for result in network.sum(&mut workers, &mut vectors, false) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("rack") && error.contains("14 values") && error.contains("21 values"), "{error}");
        }
        for (port, worker) in (0..).zip(&mut workers) {
            network.call(port, worker, Control::Reset).unwrap();
        }
        let mut vectors = vec![vec![1.0; 21]; ALL];
        for result in network.sum(&mut workers, &mut vectors, false) {
            result.unwrap();
        }
        assert_eq!(vectors, vec![vec![6.0; 21]; ALL]);
    }
}

#[test]
fn a_worker_that_left_between_two_sums_fails_the_next_at_once() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut first = network.join(0, &request(0, 2)).unwrap();
    let ticket = network.ticket(0, &request(1, 2), None).unwrap();
    let second = WorkerSession::new(&request(1, 2), &ticket);
    let mut both = vec![first, second];
    for result in network.sum(&mut both, &mut [vec![1.0; 9], vec![1.0; 9]], false) {
        result.unwrap();
    }
    first = both.remove(0);
    network.leave(0, ticket.session);
    let begun = network.wire.now;
    let failed = network.sum_at(0, &mut first, &mut [1.0; 9]);
    let Err(Error::Missing { workers, reason }) = failed else {
        panic!("{failed:?}");
    };
    assert_eq!(workers, [1]);
    assert!(reason.contains("worker 1 (host-1), which left"), "{reason}");
    assert!(network.wire.now - begun < Duration::from_millis(100), "at once");
    // It comes back.
    let mut second = network.join(0, &request(1, 2)).unwrap();
    network.call(0, &mut first, Control::Reset).unwrap();
    network.call(1, &mut second, Control::Reset).unwrap();
    for result in network.sum(&mut [first, second], &mut [vec![1.0; 9], vec![1.0; 9]], false) {
        result.unwrap();
    }
}

#[test]
fn a_worker_that_joined_another_job_is_told_so() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let other = JoinJob { job: "jbo".into(), ..request(1, 2) };
    let mut workers = network.join_all(&[request(0, 2), other]);
    let results = network.sum(&mut workers, &mut [vec![1.0; 9], vec![1.0; 9]], false);
    let errors = results.into_iter().map(|result| result.unwrap_err().to_string()).collect::<Vec<_>>();
    assert!(errors[0].contains("worker 1, which never joined \"job\" (one has joined \"jbo\""), "{errors:?}");
    assert!(errors[1].contains("worker 0, which never joined \"jbo\" (one has joined \"job\""), "{errors:?}");
}

#[test]
fn a_job_ends_with_its_last_member() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits { jobs: 1, ..AggregatorLimits::default() });
    let tickets = [0, 1].map(|worker| network.ticket(0, &request(worker, 2), None).unwrap());
    let [mut first, mut second] =
        [0, 1].map(|worker| WorkerSession::new(&request(worker, 2), &tickets[usize::from(worker)]));
    let other = JoinJob { job: "other".into(), ..request(0, 2) };
    let error = network.join(0, &other).err().unwrap().to_string();
    assert!(error.contains("gradient jobs"), "{error}");
    tickets.iter().for_each(|ticket| network.leave(0, ticket.session));
    assert_eq!(network.aggregators[0].1.jobs(), 0);
    network.join(0, &other).unwrap();
    let strangers = network.counters().strangers;
    for worker in [&mut first, &mut second] {
        network.sum_at(0, worker, &mut [1.0; 50]).unwrap_err();
    }
    assert!(network.counters().strangers > strangers, "dead sessions");
}

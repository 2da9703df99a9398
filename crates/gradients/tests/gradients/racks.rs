//! Racks and their parent: joining, and failures in other racks.

use std::time::Duration;

use gradients::packet::{Ack, PacketHeader, PacketKind, Status};
use gradients::{
    AggregatorLimits, Arithmetic, Control, Error, JoinJob, ParentAggregator, Result, Round, Sum, WorkerSession,
};

use crate::network::{
    ALL, Faults, Network, Port, address, as_f32, exact, rack_request, request, two_levels, whole_numbers,
};

fn racks(network: &mut Network) -> Vec<WorkerSession> {
    two_levels(network, Arithmetic::Float, AggregatorLimits::default())
}

/// Asserts that all other workers have an error that names the last one, the third of rack 1.
fn assert_last_is_named(results: &[Result<Sum>]) {
    assert_eq!(results.len(), ALL - 1);
    for (worker, result) in results.iter().enumerate() {
        let Err(Error::Missing { workers, reason }) = result else {
            panic!("{worker}: {result:?}");
        };
        assert_eq!(workers, &[2], "{reason}");
        assert!(reason.contains("worker 2 (host-2)"), "{reason}");
        // In the other rack with its rack.
        assert_eq!(reason.contains("in rack 1 (rack-1)"), worker < 3, "{reason}");
    }
}

#[test]
fn racks_with_different_settings_are_refused_with_the_differences() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let first = rack_request(0, 2, 2);
    network.rack_ticket(0, &first, 1, None).unwrap();
    let second = rack_request(1, 2, 7);
    let refused = network.rack_ticket(0, &second, 1, None).unwrap_err();
    assert!(refused.to_string().contains("rack 1 joins"), "{refused}");
    assert!(refused.to_string().contains("(world: 7, not 2)"), "{refused}");
    // A worker is no rack.
    let worker = network.join(0, &JoinJob { world: 2, ..first }).err().unwrap();
    assert!(worker.to_string().contains("2 (workers), not 2 (racks)"), "{worker}");
}

#[test]
fn racks_whose_workers_cannot_add_up_are_refused_before_the_first_sum() {
    // Workers of the job, workers of each rack, and the number of racks that can join.
    let cases: [(u32, &[u32], usize); 6] =
        [(4, &[2], 0), (4, &[4, 4], 0), (4, &[2, 3], 1), (4, &[2, 1], 1), (6, &[2, 2, 3], 2), (6, &[2, 2, 2], 3)];
    for (world, racks, fit) in cases {
        let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
        for (rack, &below) in (0..).zip(racks) {
            let request = rack_request(rack, racks.len() as u16, world);
            let joined = network.rack_ticket(0, &request, below, None);
            assert_eq!(joined.is_ok(), usize::from(rack) < fit, "{joined:?}");
            if let Err(error) = joined {
                let said = error.to_string();
                let part = format!("rack {rack} has {below}");
                assert!(said.contains(&part) && said.contains("--racks"), "{said}");
                break;
            }
        }
        assert_eq!(network.aggregators[0].1.jobs(), usize::from(fit > 0));
    }
}

#[test]
fn a_rack_that_restarts_is_counted_anew() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let (first, second) = (rack_request(0, 2, 4), rack_request(1, 2, 4));
    network.rack_ticket(0, &first, 1, None).unwrap();
    let ticket = network.rack_ticket(0, &second, 3, None).unwrap();
    assert!(network.rack_ticket(0, &first, 2, None).is_err());
    network.leave(0, ticket.session);
    network.rack_ticket(0, &first, 2, None).unwrap();
    network.rack_ticket(0, &second, 2, None).unwrap();
}

#[test]
fn a_worker_missing_in_one_rack_is_named_in_all_and_a_reset_continues() {
    let mut network = Network::new(3, Faults::MANY, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    let mut vectors = whole_numbers(ALL, 300, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    let begun = network.wire.now;
    let missing = address(5);
    network.wire.dead.insert(missing);
    let results = network.sum(&mut workers[..5], &mut vectors[..5], false);
    assert_last_is_named(&results);
    assert!(network.wire.now - begun < Duration::from_secs(5));
    network.wire.dead.clear();
    let mut last = vec![0.0; 300];
    let late = network.sum_at(5, &mut workers[5], &mut last);
    assert!(late.is_err(), "{late:?}");
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Control::Reset).unwrap();
    }
    for round in 0..3 {
        let mut vectors = whole_numbers(ALL, 300, 50 + round);
        let expected = as_f32(&exact(&vectors));
        for result in network.sum(&mut workers, &mut vectors, false) {
            result.unwrap();
        }
        assert!(vectors.iter().all(|vector| vector == &expected));
    }
}

#[test]
fn a_silent_parent_is_named() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    network.wire.dead.insert(address(1000));
    let mut vectors = whole_numbers(ALL, 100, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the aggregator at 10.0.0.1:1000"), "{error}");
    }
    let error = network.call(0, &mut workers[0], Control::Reset).unwrap_err().to_string();
    assert!(error.contains("the reset waited 5000 ms for the aggregator at 10.0.0.1:1000"), "{error}");
    // The rack itself.
    network.wire.dead.insert(address(1001));
    let error = network.call(0, &mut workers[0], Control::Reset).unwrap_err().to_string();
    assert!(error.contains("the aggregator at 10.0.0.1:1001 did not answer"), "{error}");
}

#[test]
fn a_reset_below_a_silent_grandparent_names_it() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let [middle, leaf] = [0; 2].map(|_| network.add_aggregator(AggregatorLimits::default()));
    let mut above = None;
    for (aggregator, racks) in [(0, 2), (middle, 1)] {
        let ticket = network.rack_ticket(aggregator, &rack_request(0, racks, 2), 1, above).unwrap();
        above = Some(ParentAggregator::new(&ticket, 1));
    }
    let request = JoinJob { world: 2, ..request(0, 1) };
    let ticket = network.ticket(leaf, &request, above).unwrap();
    let mut worker = WorkerSession::new(&request, &ticket);
    network.call(0, &mut worker, Control::Halt("out of disk".into())).unwrap();
    network.wire.dead.insert(address(1000));
    let error = network.call(0, &mut worker, Control::Reset).unwrap_err().to_string();
    let whom = "the aggregator at 10.0.0.1:1001, which waits for the aggregator at 10.0.0.1:1000";
    assert!(error.contains(whom), "{error}");
    network.wire.dead.clear();
    network.call(0, &mut worker, Control::Reset).unwrap();
}

#[test]
fn a_worker_missing_in_the_first_round_is_named_in_all_racks() {
    // Also if the other rack's report is lost, or its path validation.
    for lose in [vec![], vec![PacketKind::Halt; 2], vec![PacketKind::Join; 3]] {
        let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
        network.wire.lose = lose;
        let mut workers = racks(&mut network);
        network.wire.dead.insert(address(5));
        let begun = network.wire.now;
        let mut vectors = whole_numbers(ALL - 1, 300, 1);
        assert_last_is_named(&network.sum(&mut workers[..5], &mut vectors, false));
        // Before the parent's own deadline.
        assert!(network.wire.now - begun < Duration::from_millis(2200));
        assert!(network.wire.lose.is_empty());
    }
    for seed in 0..4 {
        let mut network = Network::new(seed, Faults::MANY, AggregatorLimits::default());
        let mut workers = racks(&mut network);
        network.wire.dead.insert(address(5));
        let mut vectors = whole_numbers(ALL - 1, 300, 1);
        assert_last_is_named(&network.sum(&mut workers[..5], &mut vectors, false));
    }
}

#[test]
fn a_rack_that_is_missing_as_a_whole_is_named() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    let mut vectors = whole_numbers(3, 300, 1);
    for result in network.sum(&mut workers[..3], &mut vectors, false) {
        let Err(Error::Missing { workers, reason }) = result else {
            panic!("{result:?}");
        };
        // Workers would take numbers for those in their own rack.
        assert!(workers.is_empty());
        assert!(reason.contains("for rack 1 (rack-1), last heard"), "{reason}");
    }
}

#[test]
fn a_suspension_reaches_all_racks() {
    let mut network = Network::new(3, Faults::MANY, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    let halt = Control::Halt("out of disk".into());
    network.call(1, &mut workers[1], halt).unwrap();
    let mut vectors = whole_numbers(ALL, 30, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        let Err(Error::Halted(reason)) = result else {
            panic!("{result:?}");
        };
        assert!(reason.contains("worker 1 suspended the job: out of disk"), "{reason}");
    }
}

#[test]
fn a_worker_that_restarts_is_an_error_in_all_racks_until_a_reset() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    let mut vectors = whole_numbers(ALL, 30, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    let again = JoinJob { world: ALL as u32, ..request(1, 3) };
    workers[1] = network.join(1, &again).unwrap();
    let begun = network.wire.now;
    for result in network.sum(&mut workers, &mut vectors, false) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("worker 1 came back as another process"), "{error}");
    }
    assert!(network.wire.now - begun < Duration::from_millis(500));
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Control::Reset).unwrap();
    }
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
}

#[test]
fn a_rack_waits_for_its_parent_once_it_is_complete() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    let begun = network.wire.now;
    let mut vectors = whole_numbers(ALL - 1, 30, 1);
    let mut rounds = workers.iter_mut().zip(&mut vectors).zip(0..);
    let mut begin = |network: &Network, count| {
        let now = network.wire.now;
        let until = now + Duration::from_secs(10);
        let rounds = rounds.by_ref().take(count);
        let rounds = rounds.map(|((worker, values), port)| {
            let round = Round::new(worker, values, false, now, until);
            (address(port), round)
        });
        rounds.collect::<Vec<_>>()
    };
    // The third worker of rack 0 is late, and so is rack 1, where one never contributes. The job's deadline is 2 s.
    let mut running = begin(&network, 2);
    network.run_for(&mut running, Duration::from_millis(1900));
    running.extend(begin(&network, 3));
    assert_last_is_named(&network.drive(running));
    assert!(network.wire.now - begun > Duration::from_millis(3800));
}

#[test]
fn a_worker_that_gives_up_first_names_the_rack_that_the_parent_waits_for() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let mut workers = racks(&mut network);
    network.deadline = Duration::from_secs(1);
    let mut vectors = whole_numbers(3, 30, 1);
    for result in network.sum(&mut workers[..3], &mut vectors, false) {
        let Err(Error::Missing { workers, reason }) = result else {
            panic!("{result:?}");
        };
        assert!(workers.is_empty());
        let whom = "the aggregator at 10.0.0.1:1000, which waits for rack 1 (rack-1)";
        assert!(reason.contains(whom), "{reason}");
    }
}

/// One rack of two, with one worker. Tests forge the datagrams of its parent.
fn lone_rack(network: &mut Network) -> (WorkerSession, u32) {
    let child = network.add_aggregator(AggregatorLimits::default());
    let ticket = network.rack_ticket(0, &rack_request(0, 2, 2), 1, None).unwrap();
    let request = JoinJob { world: 2, ..request(0, 1) };
    let upstream = ParentAggregator::new(&ticket, 1);
    let own = network.ticket(child, &request, Some(upstream)).unwrap();
    (WorkerSession::new(&request, &own), ticket.session)
}

fn receive_from_parent(network: &mut Network, session: u32, segment: u32, ack: &Ack) {
    let header = PacketHeader::new(PacketKind::Ack, session, 1, segment);
    let datagram = [header.encode().as_slice(), &ack.encode()].concat();
    let (at, rack) = &mut network.aggregators[1];
    let mut out = Port(&mut network.wire, *at);
    let now = out.0.now;
    rack.receive(now, address(1000), &datagram, &mut out);
}

#[test]
fn repeated_path_validation_has_no_effect() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let (mut worker, session) = lone_rack(&mut network);
    let mut values = [1.0; 70];
    let begun = network.wire.now;
    let round = Round::new(&mut worker, &mut values, false, begun, begun + Duration::from_secs(10));
    let mut rounds = vec![(address(0), round)];
    network.run_for(&mut rounds, Duration::from_millis(5));
    let (sent, counted) = (network.wire.sent, network.counters().counted);
    assert_eq!(counted, 10);
    receive_from_parent(&mut network, session, 0, &Ack::new(Status::Done, PacketKind::Join));
    assert_eq!(network.wire.sent, sent);
}

#[test]
fn a_late_answer_to_a_failure_does_not_end_the_report_of_the_next() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let (mut worker, session) = lone_rack(&mut network);
    let halted = |network: &Network| network.aggregators[0].1.status().next().unwrap().halted;
    network.call(0, &mut worker, Control::Halt("out of disk".into())).unwrap();
    network.pass(Duration::from_millis(5));
    assert!(halted(&network).contains("out of disk"));
    network.call(0, &mut worker, Control::Reset).unwrap();
    // The worker's datagram arrives, the rack's is lost.
    let now = network.wire.now;
    let halt = worker.call(Control::Halt("out of memory".into()), now, now + Duration::from_secs(1));
    let mut calls = vec![(address(0), halt)];
    network.run_for(&mut calls, Duration::ZERO);
    network.wire.lose = vec![PacketKind::Halt];
    for call in network.drive(calls) {
        call.unwrap();
    }
    assert!(network.wire.lose.is_empty());
    // Of the first failure, in round 1.
    receive_from_parent(&mut network, session, 1, &Ack::new(Status::Done, PacketKind::Halt));
    network.pass(Duration::from_millis(100));
    assert!(halted(&network).contains("out of memory"), "{}", halted(&network));
}

#[test]
fn a_rack_that_is_replaced_tells_its_workers() {
    let mut network = Network::new(3, Faults::NONE, AggregatorLimits::default());
    let (mut worker, _) = lone_rack(&mut network);
    let mut values = [1.0; 7];
    let begun = network.wire.now;
    let round = Round::new(&mut worker, &mut values, false, begun, begun + Duration::from_secs(10));
    let mut rounds = vec![(address(0), round)];
    network.run_for(&mut rounds, Duration::from_millis(5));
    let other = JoinJob { name: "other".into(), ..rack_request(0, 2, 2) };
    network.rack_ticket(0, &other, 1, None).unwrap();
    let told = network.drive(rounds).remove(0).unwrap_err().to_string();
    let again = network.call(0, &mut worker, Control::Reset).unwrap_err().to_string();
    for error in [told, again] {
        assert!(error.contains("above this aggregator: another process (other) has joined as rack 0"), "{error}");
    }
    assert!(network.wire.now - begun < Duration::from_secs(1));
}

//! Controls, sessions, and datagrams of others.

use std::time::Duration;

use gradients::packet::{ALL_SEGMENTS, Ack, PacketHeader, PacketKind, Status};
use gradients::{AggregatorLimits, Arithmetic, Control, Error, JoinJob, Round, Ticket, WorkerSession};

use crate::network::{Faults, Network, Port, address, request};

fn trio(network: &mut Network) -> Vec<WorkerSession> {
    let requests: Vec<JoinJob> = (0..3).map(|w| request(w, 3)).collect();
    network.join_all(&requests)
}

#[test]
fn a_lower_threshold_sums_the_first_workers_and_answers_late_ones_with_that_sum() {
    let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    network.call(0, &mut workers[0], Control::SetThreshold(2)).unwrap();
    let mut vectors = vec![vec![1.0; 20], vec![2.0; 20]];
    for result in network.sum(&mut workers[..2], &mut vectors, true) {
        assert_eq!(result.unwrap().workers, 2);
    }
    assert_eq!(vectors, [vec![1.5; 20], vec![1.5; 20]], "the mean of two");
    // The third worker is late: it gets that sum, and is not counted.
    let mut late = vec![100.0; 20];
    let result = network.sum_at(2, &mut workers[2], &mut late);
    assert_eq!(result.unwrap().workers, 2);
    assert_eq!(late, vec![3.0; 20]);
    assert!(network.counters().late >= 3);
}

#[test]
fn a_worker_too_far_behind_has_to_pull_the_weights() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    network.call(0, &mut workers[0], Control::SetThreshold(2)).unwrap();
    for _ in 0..3 {
        let mut vectors = vec![vec![1.0; 20], vec![2.0; 20]];
        for result in network.sum(&mut workers[..2], &mut vectors, false) {
            result.unwrap();
        }
    }
    let mut late = vec![100.0; 20];
    let result = network.sum_at(2, &mut workers[2], &mut late);
    assert!(matches!(result, Err(Error::Behind { round: 1 })), "{result:?}");
}

#[test]
fn a_forced_broadcast_sends_incomplete_sums() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    network.call(2, &mut workers[2], Control::Join).unwrap();
    let now = network.wire.now;
    let mut vectors = [vec![1.0; 20], vec![3.0; 20]];
    let [a, b, c] = workers.as_mut_slice() else { unreachable!() };
    let deadline = now + Duration::from_secs(1);
    let [first, second] = &mut vectors;
    let mut rounds = vec![
        (address(0), Round::new(a, first, false, now, deadline)),
        (address(1), Round::new(b, second, false, now, deadline)),
    ];
    network.run_for(&mut rounds, Duration::from_millis(5));
    network.call(2, c, Control::Force).unwrap();
    for result in network.drive(rounds) {
        assert_eq!(result.unwrap().workers, 2);
    }
    assert_eq!(vectors, [vec![4.0; 20], vec![4.0; 20]]);
}

#[test]
fn a_halted_job_returns_the_reason_until_a_reset() {
    let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    let halt = Control::Halt("out of disk".into());
    network.call(1, &mut workers[1], halt).unwrap();
    let mut vectors = vec![vec![1.0; 20]; 3];
    for result in network.sum(&mut workers, &mut vectors, false) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("worker 1 suspended the job: out of disk"), "{error}");
    }
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Control::Reset).unwrap();
    }
    let mut vectors = vec![vec![1.0; 20]; 3];
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    assert_eq!(vectors[0], vec![3.0; 20]);
}

#[test]
fn in_fixed_point_no_worker_can_be_left_out() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let fixed = JoinJob { arithmetic: Arithmetic::Fixed, ..request(0, 2) };
    let mut worker = network.join(0, &fixed).unwrap();
    for command in [Control::SetThreshold(1), Control::Force] {
        let refused = network.call(0, &mut worker, command);
        assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    }
    let mut float = network.join(0, &JoinJob { job: "float".into(), ..request(0, 2) }).unwrap();
    let refused = network.call(0, &mut float, Control::SetThreshold(3));
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
}

#[test]
fn the_last_one_that_leaves_ends_the_job() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    for (port, worker) in workers.iter_mut().enumerate() {
        assert_eq!(network.aggregators[0].1.jobs(), 1);
        network.call(port as u16, worker, Control::Leave).unwrap();
    }
    assert_eq!(network.aggregators[0].1.jobs(), 0);
}

#[test]
fn invalid_and_differing_requests_are_refused() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    network.join(0, &request(0, 2)).unwrap();
    let bad = [
        JoinJob { arithmetic: Arithmetic::Fixed, ..request(1, 2) },
        request(1, 3),
        request(2, 2),
        JoinJob { job: "x".into(), segment_values: 361, ..request(0, 1) },
        JoinJob { job: String::new(), ..request(0, 1) },
        JoinJob { job: "y".into(), ..request(0, 65) },
        JoinJob { job: "needs a parent".into(), world: 4, ..request(0, 2) },
    ];
    for request in bad {
        let refused = network.join(0, &request);
        assert!(refused.is_err(), "{request:?}");
    }
}

/// Sends the aggregator a datagram from any port.
fn inject(network: &mut Network, port: u16, datagram: &[u8]) {
    let (at, aggregator) = &mut network.aggregators[0];
    let mut out = Port(&mut network.wire, *at);
    let now = out.0.now;
    aggregator.receive(now, address(port), datagram, &mut out);
}

#[test]
fn unknown_datagrams_are_dropped_counted_and_not_answered() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let request = request(0, 1);
    let ticket = network.ticket(0, &request, None).unwrap();
    let contribution = |session: u32| {
        let header = PacketHeader::new(PacketKind::Float, session, 1, 0);
        [header.encode().as_slice(), &[0; 8]].concat()
    };
    // Not before path validation, not with another session, not from another address.
    inject(&mut network, 0, &contribution(ticket.session));
    let mut worker = WorkerSession::new(&request, &ticket);
    network.call(0, &mut worker, Control::Join).unwrap();
    let sent = network.wire.sent;
    inject(&mut network, 0, &contribution(ticket.session ^ 1));
    inject(&mut network, 7, &contribution(ticket.session));
    // Controls need the key, whatever the source.
    for kind in
        [PacketKind::Leave, PacketKind::Reset, PacketKind::SetH, PacketKind::FBcast, PacketKind::Halt, PacketKind::Join]
    {
        let header = PacketHeader::new(kind, ticket.session, 1, 0).encode();
        let mut wrong = ticket.key;
        wrong[15] ^= 1;
        inject(&mut network, 0, &[header.as_slice(), &wrong, &[0; 8]].concat());
        inject(&mut network, 0, &header);
    }
    assert_eq!(network.counters().strangers, 3 + 12);
    inject(&mut network, 0, b"GET / HTTP/1.1");
    inject(&mut network, 0, &[]);
    inject(&mut network, 0, &contribution(ticket.session)[..13]);
    assert_eq!(network.counters().malformed, 3);
    assert_eq!(network.wire.sent, sent, "nothing was answered");
    assert_eq!(network.counters().counted, 0);
}

#[test]
fn an_address_is_valid_when_the_cookie_comes_back_from_it() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let request = request(0, 1);
    let ticket = network.ticket(0, &request, None).unwrap();
    let header = PacketHeader::new(PacketKind::Join, ticket.session, 0, 0).encode();
    let proof = |cookie: [u8; 8]| [header.as_slice(), &ticket.key, &cookie].concat();
    // A sender with the key that forges its source address, and so does not receive the cookie.
    for guess in 0..100u64 {
        inject(&mut network, 5, &proof(guess.to_le_bytes()));
    }
    let contribution = PacketHeader::new(PacketKind::Float, ticket.session, 1, 0).encode();
    let contribution = [contribution.as_slice(), &[0; 8]].concat();
    let strangers = network.counters().strangers;
    inject(&mut network, 5, &contribution);
    assert_eq!(network.counters().strangers, strangers + 1);
    assert_eq!(network.counters().counted, 0);
}

#[test]
fn any_worker_resets_a_job_that_is_halted_before_its_first_sum() {
    for first in 0..2 {
        let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
        let requests = [request(0, 2), request(1, 2)];
        let mut workers = network.join_all(&requests);
        let halt = Control::Halt("not yet".into());
        network.call(0, &mut workers[0], halt).unwrap();
        let failed = network.sum_at(1, &mut workers[1], &mut [1.0; 20]);
        assert!(matches!(failed, Err(Error::Halted(_))), "{failed:?}");
        for worker in [first, 1 - first] {
            let port = worker as u16;
            network.call(port, &mut workers[worker], Control::Reset).unwrap();
        }
        let mut vectors = vec![vec![1.0; 20]; 2];
        for result in network.sum(&mut workers, &mut vectors, false) {
            result.unwrap();
        }
        assert_eq!(vectors[0], vec![2.0; 20]);
    }
}

#[test]
fn a_member_that_is_replaced_is_told() {
    for seed in 0..4 {
        let mut network = Network::new(seed, Faults::MANY, AggregatorLimits::default());
        let ticket = network.ticket(0, &request(0, 2), None).unwrap();
        let mut older = WorkerSession::new(&request(0, 2), &ticket);
        let mut values = [1.0; 20];
        let begun = network.wire.now;
        let round = Round::new(&mut older, &mut values, false, begun, begun + Duration::from_secs(10));
        let mut rounds = vec![(address(0), round)];
        network.run_for(&mut rounds, Duration::from_millis(100));
        let newer = JoinJob { name: "newer".into(), ..request(0, 2) };
        network.join(0, &newer).unwrap();
        let told = network.drive(rounds).remove(0);
        assert!(network.wire.now - begun < Duration::from_secs(1));
        let again = network.call(0, &mut older, Control::Reset);
        for error in [told.unwrap_err(), again.unwrap_err()] {
            assert!(
                matches!(&error, Error::Refused(text) if text.contains("(newer) has joined as worker 0")),
                "{error}"
            );
        }
        // The newer one is a member, also when the connection of the older one ends.
        network.leave(0, ticket.session);
        assert_eq!(network.aggregators[0].1.status().next().unwrap().joined, 1);
        let sent = network.wire.sent;
        inject(&mut network, 0, &PacketHeader::new(PacketKind::Help, ticket.session, 1, 0).encode());
        assert_eq!(network.wire.sent, sent, "its session has ended");
    }
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_controls() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = trio(&mut network);
    let [first, second, _] = workers.as_mut_slice() else { unreachable!() };
    let status = |network: &Network| network.aggregators[0].1.status().next().unwrap();
    let late = Faults { straggler: 1.0, ..Faults::NONE };
    for threshold in [2, 3] {
        // Copies of the answer are on their way when the second control is lost.
        network.wire.faults = late;
        network.call(0, first, Control::SetThreshold(1)).unwrap();
        network.wire.faults = Faults::NONE;
        network.wire.lose = vec![PacketKind::SetH];
        network.call(0, first, Control::SetThreshold(threshold)).unwrap();
        assert_eq!(status(&network).threshold, u32::from(threshold));
    }
    network.call(1, second, Control::Join).unwrap();
    network.wire.faults = late;
    network.call(0, first, Control::Reset).unwrap();
    network.wire.faults = Faults::NONE;
    network.call(1, second, Control::Halt("not yet".into())).unwrap();
    network.wire.lose = vec![PacketKind::Reset];
    network.call(0, first, Control::Reset).unwrap();
    assert_eq!(status(&network).halted, "");
}

#[test]
fn a_late_copy_of_a_threshold_does_not_undo_the_next() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let ticket = network.ticket(0, &request(0, 2), None).unwrap();
    let mut worker = WorkerSession::new(&request(0, 2), &ticket);
    network.join_all(&[request(1, 2)]);
    for threshold in [1, 2, 1] {
        network.call(0, &mut worker, Control::SetThreshold(threshold)).unwrap();
        let status = network.aggregators[0].1.status().next().unwrap();
        assert_eq!(status.threshold, u32::from(threshold));
    }
    // Numbers go round.
    let quarter = 1 << 18;
    for (number, threshold, applied) in [
        (1, 2, 1),
        (2, 2, 1),
        (quarter, 2, 2),
        (2, 1, 2),
        (2 * quarter, 1, 1),
        (3 * quarter, 2, 2),
        (ALL_SEGMENTS, 1, 1),
        (0, 2, 2),
    ] {
        let header = PacketHeader::new(PacketKind::SetH, ticket.session, 1, number).encode();
        inject(&mut network, 0, &[header.as_slice(), &ticket.key, &[threshold, 0]].concat());
        let status = network.aggregators[0].1.status().next().unwrap();
        assert_eq!(status.threshold, applied, "control {number}");
    }
}

/// Datagram of a control.
fn control(kind: PacketKind, ticket: &Ticket, round: u64, argument: &[u8]) -> Vec<u8> {
    let header = PacketHeader::new(kind, ticket.session, round, 0).encode();
    [header.as_slice(), &ticket.key, argument].concat()
}

#[test]
fn datagrams_from_before_a_reset_have_no_effect() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let requests = [request(0, 2), request(1, 2)];
    let mut workers = Vec::new();
    let mut tickets = Vec::new();
    for request in &requests {
        let ticket = network.ticket(0, request, None).unwrap();
        workers.push(WorkerSession::new(request, &ticket));
        tickets.push(ticket);
    }
    let sum = |network: &mut Network, workers: &mut [WorkerSession]| {
        let mut vectors = vec![vec![1.0; 20]; 2];
        for result in network.sum(workers, &mut vectors, false) {
            assert_eq!(result.unwrap().workers, 2);
        }
    };
    sum(&mut network, &mut workers);
    let round = workers[0].next_round();
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Control::Reset).unwrap();
    }
    // The first worker was ahead: its contributions to the next round were on their way, and controls that it sent after them.
    let reason = Ack::new(Status::Halted, PacketKind::Halt).encode();
    let contribution = PacketHeader::new(PacketKind::Float, tickets[0].session, round, 0);
    let late = [
        [contribution.encode().as_slice(), &[0; 28]].concat(),
        control(PacketKind::Halt, &tickets[0], round + 1, &reason),
        control(PacketKind::SetH, &tickets[0], round + 1, &1u16.to_le_bytes()),
        control(PacketKind::Reset, &tickets[0], round, &[]),
    ];
    let before = network.counters();
    for datagram in &late {
        inject(&mut network, 0, datagram);
    }
    let after = network.counters();
    assert_eq!(after.counted, before.counted);
    assert_eq!(after.stale, before.stale + 1);
    assert_eq!(after.failed, before.failed);
    sum(&mut network, &mut workers);
    // They do not resume a job that is suspended again, either.
    let halt = Control::Halt("not yet".into());
    network.call(0, &mut workers[0], halt).unwrap();
    inject(&mut network, 0, &late[3]);
    let refused = network.sum_at(1, &mut workers[1], &mut [1.0; 20]);
    assert!(matches!(refused, Err(Error::Halted(_))), "{refused:?}");
}

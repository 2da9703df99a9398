//! Controls, sessions and strangers.

use std::time::Duration;

use gradients::packet::{Ack, Header, Kind, Status};
use gradients::{Arithmetic, Command, Failure, JoinJob, Limits, Round, Ticket, Worker};

use crate::network::{Faults, Network, Port, address, request};

fn trio(network: &mut Network) -> Vec<Worker> {
    let requests: Vec<JoinJob> = (0..3).map(|w| request(w, 3)).collect();
    network.join_all(&requests)
}

#[test]
fn a_lower_threshold_sums_the_first_and_answers_the_late_with_their_sum() {
    let mut network = Network::new(1, Faults::MANY, Limits::default());
    let mut workers = trio(&mut network);
    network
        .call(0, &mut workers[0], Command::SetThreshold(2))
        .unwrap();
    let mut vectors = vec![vec![1.0; 20], vec![2.0; 20]];
    for result in network.sum(&mut workers[..2], &mut vectors, true) {
        assert_eq!(result.unwrap().workers, 2);
    }
    assert_eq!(vectors, [vec![1.5; 20], vec![1.5; 20]], "the mean of two");
    // The third one is late: it gets that sum, and is not counted.
    let mut late = vec![100.0; 20];
    let result = network.sum_at(2, &mut workers[2], &mut late);
    assert_eq!(result.unwrap().workers, 2);
    assert_eq!(late, vec![3.0; 20]);
    assert!(network.counters().late >= 3);
}

#[test]
fn who_is_too_far_behind_is_told_to_pull_the_weights() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let mut workers = trio(&mut network);
    network
        .call(0, &mut workers[0], Command::SetThreshold(2))
        .unwrap();
    for _ in 0..3 {
        let mut vectors = vec![vec![1.0; 20], vec![2.0; 20]];
        for result in network.sum(&mut workers[..2], &mut vectors, false) {
            result.unwrap();
        }
    }
    let mut late = vec![100.0; 20];
    let result = network.sum_at(2, &mut workers[2], &mut late);
    assert_eq!(result, Err(Failure::Behind { round: 1 }));
}

#[test]
fn a_forced_broadcast_sends_what_there_is() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let mut workers = trio(&mut network);
    network.call(2, &mut workers[2], Command::Join).unwrap();
    let now = network.wire.now;
    let mut vectors = [vec![1.0; 20], vec![3.0; 20]];
    let [a, b, c] = workers.as_mut_slice() else {
        unreachable!()
    };
    let deadline = now + Duration::from_secs(1);
    let [first, second] = &mut vectors;
    let mut rounds = vec![
        (address(0), Round::new(a, first, false, now, deadline)),
        (address(1), Round::new(b, second, false, now, deadline)),
    ];
    network.run_for(&mut rounds, Duration::from_millis(5));
    network.call(2, c, Command::Force).unwrap();
    for result in network.drive(rounds) {
        assert_eq!(result.unwrap().workers, 2);
    }
    assert_eq!(vectors, [vec![4.0; 20], vec![4.0; 20]]);
}

#[test]
fn a_halted_job_says_why_until_it_is_reset() {
    let mut network = Network::new(1, Faults::MANY, Limits::default());
    let mut workers = trio(&mut network);
    let halt = Command::Halt("out of disk".into());
    network.call(1, &mut workers[1], halt).unwrap();
    let mut vectors = vec![vec![1.0; 20]; 3];
    for result in network.sum(&mut workers, &mut vectors, false) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("worker 1 suspended the job: out of disk"),
            "{error}"
        );
    }
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Command::Reset).unwrap();
    }
    let mut vectors = vec![vec![1.0; 20]; 3];
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    assert_eq!(vectors[0], vec![3.0; 20]);
}

#[test]
fn in_fixed_point_nobody_can_be_left_out() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let fixed = JoinJob {
        arithmetic: Arithmetic::Fixed,
        ..request(0, 2)
    };
    let mut worker = network.join(0, &fixed).unwrap();
    for command in [Command::SetThreshold(1), Command::Force] {
        let refused = network.call(0, &mut worker, command);
        assert!(matches!(refused, Err(Failure::Refused(_))), "{refused:?}");
    }
    let mut float = network
        .join(
            0,
            &JoinJob {
                job: "float".into(),
                ..request(0, 2)
            },
        )
        .unwrap();
    let refused = network.call(0, &mut float, Command::SetThreshold(3));
    assert!(matches!(refused, Err(Failure::Refused(_))), "{refused:?}");
}

#[test]
fn the_last_one_that_leaves_ends_the_job() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let mut workers = trio(&mut network);
    for (port, worker) in workers.iter_mut().enumerate() {
        assert_eq!(network.aggregators[0].1.jobs(), 1);
        network.call(port as u16, worker, Command::Leave).unwrap();
    }
    assert_eq!(network.aggregators[0].1.jobs(), 0);
}

#[test]
fn requests_that_do_not_make_sense_or_differ_are_refused() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    network.join(0, &request(0, 2)).unwrap();
    let bad = [
        JoinJob {
            arithmetic: Arithmetic::Fixed,
            ..request(1, 2)
        },
        request(1, 3),
        request(2, 2),
        JoinJob {
            job: "x".into(),
            segment_values: 361,
            ..request(0, 1)
        },
        JoinJob {
            job: String::new(),
            ..request(0, 1)
        },
        JoinJob {
            job: "y".into(),
            ..request(0, 65)
        },
        JoinJob {
            job: "needs a parent".into(),
            world: 4,
            ..request(0, 2)
        },
    ];
    for request in bad {
        let refused = network.join(0, &request);
        assert!(refused.is_err(), "{request:?}");
    }
}

/// A datagram as a stranger sends it.
fn inject(network: &mut Network, port: u16, datagram: &[u8]) {
    let (at, aggregator) = &mut network.aggregators[0];
    let mut out = Port(&mut network.wire, *at);
    let now = out.0.now;
    aggregator.receive(now, address(port), datagram, &mut out);
}

#[test]
fn strangers_are_dropped_and_counted_and_get_nothing() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let request = request(0, 1);
    let (at, ticket) = network.ticket(0, &request, None).unwrap();
    let contribution = |session: u32| {
        let header = Header::new(Kind::Float, session, 1, 0);
        [header.encode().as_slice(), &[0; 8]].concat()
    };
    // Not before the path is proved, not with another session, not from elsewhere.
    inject(&mut network, 0, &contribution(ticket.session));
    let mut worker = Worker::new(at, &request, &ticket);
    network.call(0, &mut worker, Command::Join).unwrap();
    let sent = network.wire.sent;
    inject(&mut network, 0, &contribution(ticket.session ^ 1));
    inject(&mut network, 7, &contribution(ticket.session));
    // Controls need the key, whatever the source.
    for kind in [
        Kind::Leave,
        Kind::Reset,
        Kind::SetH,
        Kind::FBcast,
        Kind::Halt,
        Kind::Join,
    ] {
        let header = Header::new(kind, ticket.session, 1, 0).encode();
        let mut wrong = ticket.key;
        wrong[15] ^= 1;
        inject(
            &mut network,
            0,
            &[header.as_slice(), &wrong, &[0; 8]].concat(),
        );
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
fn a_path_is_believed_when_the_cookie_comes_back_from_it() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let request = request(0, 1);
    let (_, ticket) = network.ticket(0, &request, None).unwrap();
    let header = Header::new(Kind::Join, ticket.session, 0, 0).encode();
    let proof = |cookie: [u8; 8]| [header.as_slice(), &ticket.key, &cookie].concat();
    // Someone who knows the key, but cannot receive at the address that the datagrams seem to come from.
    for guess in 0..100u64 {
        inject(&mut network, 5, &proof(guess.to_le_bytes()));
    }
    let contribution = Header::new(Kind::Float, ticket.session, 1, 0).encode();
    let contribution = [contribution.as_slice(), &[0; 8]].concat();
    let strangers = network.counters().strangers;
    inject(&mut network, 5, &contribution);
    assert_eq!(network.counters().strangers, strangers + 1);
    assert_eq!(network.counters().counted, 0);
}

#[test]
fn a_job_that_is_halted_before_its_first_sum_is_reset_by_anybody() {
    for first in 0..2 {
        let mut network = Network::new(1, Faults::NONE, Limits::default());
        let requests = [request(0, 2), request(1, 2)];
        let mut workers = network.join_all(&requests);
        let halt = Command::Halt("not yet".into());
        network.call(0, &mut workers[0], halt).unwrap();
        let failed = network.sum_at(1, &mut workers[1], &mut [1.0; 20]);
        assert!(matches!(failed, Err(Failure::Halted(_))), "{failed:?}");
        for worker in [first, 1 - first] {
            let port = worker as u16;
            network
                .call(port, &mut workers[worker], Command::Reset)
                .unwrap();
        }
        let mut vectors = vec![vec![1.0; 20]; 2];
        for result in network.sum(&mut workers, &mut vectors, false) {
            result.unwrap();
        }
        assert_eq!(vectors[0], vec![2.0; 20]);
    }
}

/// A control as a datagram.
fn control(kind: Kind, ticket: &Ticket, round: u64, argument: &[u8]) -> Vec<u8> {
    let header = Header::new(kind, ticket.session, round, 0).encode();
    [header.as_slice(), &ticket.key, argument].concat()
}

#[test]
fn what_was_sent_before_a_reset_is_nothing_after_it() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let requests = [request(0, 2), request(1, 2)];
    let mut workers = Vec::new();
    let mut tickets = Vec::new();
    for request in &requests {
        let (at, ticket) = network.ticket(0, request, None).unwrap();
        workers.push(Worker::new(at, request, &ticket));
        tickets.push(ticket);
    }
    let sum = |network: &mut Network, workers: &mut [Worker]| {
        let mut vectors = vec![vec![1.0; 20]; 2];
        for result in network.sum(workers, &mut vectors, false) {
            assert_eq!(result.unwrap().workers, 2);
        }
    };
    sum(&mut network, &mut workers);
    let round = workers[0].next_round();
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Command::Reset).unwrap();
    }
    // The first one had gone on: its contributions to the next round were on their way, and controls of after it had sent these.
    let reason = Ack::new(Status::Halted, Kind::Halt).encode();
    let contribution = Header::new(Kind::Float, tickets[0].session, round, 0);
    let late = [
        [contribution.encode().as_slice(), &[0; 28]].concat(),
        control(Kind::Halt, &tickets[0], round + 1, &reason),
        control(Kind::SetH, &tickets[0], round + 1, &1u16.to_le_bytes()),
        control(Kind::Reset, &tickets[0], round, &[]),
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
    // A job that is suspended again stays so, too.
    let halt = Command::Halt("not yet".into());
    network.call(0, &mut workers[0], halt).unwrap();
    inject(&mut network, 0, &late[3]);
    let refused = network.sum_at(1, &mut workers[1], &mut [1.0; 20]);
    assert!(matches!(refused, Err(Failure::Halted(_))), "{refused:?}");
}

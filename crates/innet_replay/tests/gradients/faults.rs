//! No call waits longer than its deadline, whichever process is killed, and errors name the missing workers.

use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use bytes::Bytes;
use gradients::{self, Control, JoinJob};
use gradients_net::GradientWorker;
use gradients_net::error::Error;
use replay_wire::ErrorCode;

use crate::support::{LONG, Serving, join, request, requests, sum_rounds};

fn soon(request: JoinJob) -> JoinJob {
    JoinJob { deadline: Duration::from_secs(2), ..request }
}

/// Error of a sum during which `meanwhile` runs, once the aggregator has counted a contribution.
fn failing(serving: &Serving, worker: &mut GradientWorker, meanwhile: impl FnOnce() + Send) -> Error {
    let before = serving.stats()["counted"].as_u64().unwrap();
    thread::scope(|scope| {
        let sum = scope.spawn(|| worker.sum(&mut [1.0; 2000], false, &Wait::forever()));
        serving.until(|stats| stats["counted"].as_u64().unwrap() > before);
        meanwhile();
        sum.join().unwrap().unwrap_err()
    })
}

#[test]
fn a_worker_whose_connection_ends_in_a_round_is_named_at_once() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(2));
    sum_rounds(&mut workers, 1, 1000);
    let gone = workers.pop().unwrap();
    let error = failing(&serving, &mut workers[0], move || drop(gone));
    let Error::Sum(gradients::Error::Missing { workers: missing, reason }) = &error else {
        panic!("{error}");
    };
    assert_eq!(*missing, [1]);
    assert!(reason.contains("worker 1 (host-1) left in the middle of round 2"), "{reason}");
    // It joins again, and both continue.
    workers.push(serving.join(&request(1, 2)).unwrap());
    for worker in &mut workers {
        worker.call(Control::Reset, &Wait::forever()).unwrap();
    }
    sum_rounds(&mut workers, 2, 1000);
}

#[test]
fn a_missing_worker_is_named_at_the_deadline_with_advice() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(3).map(soon).take(2));
    let error = workers[0].sum(&mut [1.0; 10], false, &Wait::forever()).unwrap_err();
    let said = error.to_string();
    for part in ["worker 1 (host-1), last heard", "worker 2, which never joined", "reset the job"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(matches!(&error, Error::Sum(gradients::Error::Missing { workers, .. }) if *workers == [1, 2]));
}

#[test]
fn a_shorter_deadline_of_one_call_names_missing_workers_too() {
    let serving = Serving::start(&[]);
    let mut worker = serving.join(&request(0, 2)).unwrap();
    let wait = Wait::until(Some(Instant::now() + Duration::from_millis(500)));
    let error = worker.sum(&mut [1.0; 10], false, &wait).unwrap_err().to_string();
    assert!(error.contains("ms for worker 1, which never joined"), "{error}");
}

#[test]
fn a_server_that_is_killed_ends_every_call() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(2));
    sum_rounds(&mut workers, 1, 1000);
    let error = failing(&serving, &mut workers[0], || serving.signal(libc::SIGKILL));
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    assert!(error.to_string().contains("join again"), "{error}");
    let error = workers[1].call(Control::Reset, &Wait::forever()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    assert_eq!(serving.connect().err().unwrap().code(), ErrorCode::Connect);
}

#[test]
fn a_stopped_server_is_an_error_at_the_deadline() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(2).map(soon));
    let client = serving.client();
    let begun = Instant::now();
    let error = failing(&serving, &mut workers[0], || serving.signal(libc::SIGSTOP));
    // Which one depends on whether the aggregator had answered in this round.
    let either = matches!(&error, Error::Sum(gradients::Error::Missing { .. } | gradients::Error::Silent { .. }));
    assert!(either, "{error}");
    let error = workers[1].sum(&mut [1.0], false, &Wait::forever()).unwrap_err();
    assert!(matches!(&error, Error::Sum(gradients::Error::Silent { .. })), "{error}");
    // Joining ends at the deadline, too.
    let error = join(&client, &soon(request(0, 1)), &Wait::forever());
    let error = error.err().unwrap();
    assert!([ErrorCode::Deadline, ErrorCode::Connect].contains(&error.code()), "{error}");
    assert!(begun.elapsed() < LONG);
}

#[test]
fn the_end_of_a_server_is_not_blamed_on_a_worker() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(2));
    let error = failing(&serving, &mut workers[0], || serving.signal(libc::SIGTERM));
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
}

#[test]
fn one_connection_is_for_one_worker() {
    use gradients_net::message::write;
    use gradients_net::worker::join_job;
    use replay_client::ConnectOptions;
    use replay_client::dialer::Dialer;
    use replay_link::error::Error;

    let serving = Serving::start(&[]);
    let dialer = Dialer::new(serving.address.clone(), ConnectOptions::default()).unwrap();
    let until = Instant::now() + LONG;
    let wait = Wait::until(Some(until));
    let mut joined = join_job(&dialer, &request(0, 2), until, &wait).unwrap();
    let late = || Error::Interrupted;
    let second = write(&request(1, 2)).unwrap();
    for broken in [&b"{}"[..], b"[[[", b"\xff"] {
        let error = joined.connection.call(&Bytes::from_static(broken), until, until, &wait, late);
        let error = error.err().unwrap().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }
    let error = joined.connection.call(&second, until, until, &wait, late);
    let error = error.err().unwrap();
    assert!(error.to_string().contains("one connection for each worker"), "{error}");
    assert_eq!(serving.stats()["jobs"]["job"]["joined"], 1);
}

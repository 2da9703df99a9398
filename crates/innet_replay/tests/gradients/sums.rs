//! Sums of the command `innet-replay serve`, with and without a replay memory.

use std::thread;

use base::wait::Wait;
use gradients::{Arithmetic, Control, JoinJob};
use replay_link::Commands;
use replay_wire::{ErrorCode, RequestBody};

use crate::support::{Serving, request, requests, sum_all, sum_rounds, whole_numbers};

#[test]
fn workers_of_two_jobs_sum_at_the_same_time() {
    let serving = Serving::start(&[]);
    // They stay until the statistics are read: what comes from workers that have left counts as of strangers.
    let _workers = thread::scope(|scope| {
        let jobs = ["one", "two"].map(|job| {
            let serving = &serving;
            scope.spawn(move || {
                let requests = requests(3).map(|request| JoinJob { job: job.into(), ..request });
                let mut workers = serving.join_all(requests);
                sum_rounds(&mut workers, 4, 50_000);
                workers
            })
        });
        jobs.map(|job| job.join().unwrap())
    });
    let stats = serving.stats();
    assert_eq!(stats["counted"], 2 * 3 * 4 * 139);
    assert_eq!((&stats["strangers"], &stats["malformed"]), (&0.into(), &0.into()));
}

#[test]
fn the_membership_table_and_the_limits_are_in_the_statistics() {
    let serving = Serving::start(&["--gradients-window=8", "--gradients-job-bytes=10000"]);
    let mut workers = serving.join_all(requests(2));
    sum_rounds(&mut workers, 2, 10_000);
    let stats = serving.stats();
    let job = &stats["jobs"]["job"];
    assert_eq!((&job["workers"], &job["joined"], &job["round"]), (&2.into(), &2.into(), &2.into()));
    assert_eq!(stats["address"], serving.gradients.unwrap().to_string());
    assert!(stats["max_bytes"].as_u64().unwrap() < 16 * 2 * 8 * 1600);
    workers.pop().unwrap().leave(&Wait::forever()).unwrap();
    assert_eq!(serving.stats()["jobs"]["job"]["joined"], 1);
    workers.pop().unwrap().leave(&Wait::forever()).unwrap();
    assert_eq!(serving.stats()["jobs"].as_object().unwrap().len(), 0);
}

#[test]
fn without_a_memory_requests_for_it_are_refused() {
    let serving = Serving::start(&["--gradients-only"]);
    sum_rounds(&mut serving.join_all(requests(2)), 2, 1000);
    let error = serving.client().command(RequestBody::EmptyTable("t".into()), &Wait::forever()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Config);
    assert!(error.to_string().contains("without --gradients-only"), "{error}");
}

#[test]
fn a_server_without_gradients_names_the_option() {
    let serving = Serving::with(&["--listen=127.0.0.1:0"]);
    assert_eq!(serving.gradients, None);
    let error = serving.join(&request(0, 1)).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Config);
    assert!(error.to_string().contains("--gradients"), "{error}");
}

#[test]
fn fixed_point_sums_have_the_same_bits_in_every_order() {
    let serving = Serving::start(&[]);
    let fixed = |request| JoinJob { arithmetic: Arithmetic::Fixed, ..request };
    let mut workers = serving.join_all(requests(4).map(fixed));
    let gradients: Vec<Vec<f32>> = whole_numbers(4, 5000, 0)
        .into_iter()
        .map(|vector| vector.into_iter().map(|value| (value * 0.37).sin()).collect())
        .collect();
    let mut seen = Vec::new();
    for order in 0..3 {
        let mut vectors = gradients.clone();
        vectors.rotate_left(order);
        for sum in sum_all(&mut workers, &mut vectors) {
            sum.unwrap();
        }
        seen.extend(vectors);
    }
    let bits = |vector: &Vec<f32>| vector.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(seen.iter().all(|vector| bits(vector) == bits(&seen[0])));
    for (place, value) in seen[0].iter().enumerate() {
        let exact: f64 = gradients.iter().map(|vector| f64::from(vector[place])).sum();
        assert!((f64::from(*value) - exact).abs() < 1e-6, "{value} {exact}");
    }
}

#[test]
fn each_thread_has_a_port_and_jobs_of_its_own() {
    let serving = Serving::start(&["--gradients-threads=2"]);
    assert_eq!(serving.stats()["threads"], 2);
    let of = |job: &str| {
        let job = job.to_owned();
        requests(2).map(move |request| JoinJob { job: job.clone(), ..request })
    };
    let mut first = serving.join_all(of("first"));
    let mut second = serving.join_all(of("second"));
    thread::scope(|scope| {
        scope.spawn(|| sum_rounds(&mut first, 5, 20_000));
        scope.spawn(|| sum_rounds(&mut second, 5, 20_000));
    });
    assert_eq!(serving.stats()["counted"], 2 * 2 * 5 * 56);
}

#[test]
fn one_job_too_many_is_refused_until_another_ends() {
    let serving = Serving::start(&["--gradients-jobs=1"]);
    let first = serving.join(&request(0, 1)).unwrap();
    let other = JoinJob { job: "other".into(), ..request(0, 1) };
    let error = serving.join(&other).err().unwrap();
    assert_eq!(error.code(), ErrorCode::TooLarge);
    assert!(error.to_string().contains("--gradients-jobs"), "{error}");
    first.leave(&Wait::forever()).unwrap();
    serving.join(&other).unwrap();
}

#[test]
fn workers_with_different_settings_are_refused() {
    let serving = Serving::start(&[]);
    let _first = serving.join(&request(0, 2)).unwrap();
    for other in [request(1, 3), JoinJob { segment_values: 10, ..request(1, 2) }, request(2, 2)] {
        let error = serving.join(&other).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Config, "{error}");
    }
}

#[test]
fn controls_work_through_the_command() {
    let serving = Serving::start(&[]);
    let mut workers = serving.join_all(requests(3));
    let wait = Wait::forever();
    workers[0].call(Control::SetThreshold(2), &wait).unwrap();
    let mut vectors = vec![vec![1.0; 700]; 2];
    for sum in sum_all(&mut workers[..2], &mut vectors) {
        assert_eq!(sum.unwrap().workers, 2);
    }
    assert_eq!(vectors, [vec![2.0; 700], vec![2.0; 700]]);
    workers[1].call(Control::Halt("out of disk".into()), &wait).unwrap();
    let error = workers[0].sum(&mut [1.0; 3], false, &wait).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Extension);
    assert!(error.to_string().contains("worker 1 suspended the job: out of disk"), "{error}");
    for worker in &mut workers {
        worker.call(Control::Reset, &wait).unwrap();
    }
    workers[0].call(Control::SetThreshold(3), &wait).unwrap();
    sum_rounds(&mut workers, 2, 100);
}

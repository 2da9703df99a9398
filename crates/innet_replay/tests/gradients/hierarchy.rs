//! Servers with a parent: two levels give the sums of one.

use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use gradients::{self, Arithmetic, Control, JoinJob};
use gradients_net::error::Error;
use gradients_net::message::write;
use gradients_net::{GradientWorker, NAME};
use replay_client::ConnectOptions;
use replay_client::dialer::Dialer;
use replay_client::extension::ExtensionClient;
use replay_link::error::Error as NetError;
use replay_wire::ErrorCode;

use crate::support::{LONG, Serving, request, requests, sum_all, sum_rounds, whole_numbers};

const RACKS: u16 = 2;
const PER_RACK: u16 = 2;
const ALL: u16 = RACKS * PER_RACK;

fn below(parent: &Serving, rack: u16) -> Serving {
    above_racks(parent, rack, 0)
}

/// A server below another one, with racks that have `workers` workers.
fn above_racks(parent: &Serving, rack: u16, workers: u32) -> Serving {
    Serving::start(&[
        "--parent",
        &parent.address.to_string(),
        &format!("--rack={rack}"),
        &format!("--racks={RACKS}"),
        &format!("--rack-workers={workers}"),
    ])
}

fn in_rack(rack: u16, worker: u16) -> JoinJob {
    JoinJob { world: ALL.into(), name: format!("host-{rack}-{worker}"), ..request(worker, PER_RACK) }
}

/// Joins the workers of all racks.
fn join_all(racks: &[Serving], change: impl Fn(JoinJob) -> JoinJob) -> Vec<GradientWorker> {
    let each = racks.iter().enumerate().flat_map(|(rack, serving)| {
        let change = &change;
        (0..PER_RACK).map(move |worker| serving.join(&change(in_rack(rack as u16, worker))).unwrap())
    });
    each.collect()
}

#[test]
fn two_levels_sum_as_one() {
    let parent = Serving::start(&[]);
    let racks = [below(&parent, 0), below(&parent, 1)];
    let mut workers = join_all(&racks, |request| request);
    sum_rounds(&mut workers, 4, 30_000);
    let stats = parent.stats();
    assert_eq!(stats["counted"], 2 * stats["sums"].as_u64().unwrap());
    assert_eq!(stats["jobs"]["job"]["workers"], RACKS);
    drop(workers);
    // A rack leaves with its last worker.
    parent.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
}

#[test]
fn in_fixed_point_two_levels_have_the_bits_of_one() {
    let fixed = |request| JoinJob { arithmetic: Arithmetic::Fixed, ..request };
    let original: Vec<Vec<f32>> = whole_numbers(ALL.into(), 3000, 1)
        .into_iter()
        .map(|vector| vector.into_iter().map(|value| (value * 0.61).cos()).collect())
        .collect();
    let one = Serving::start(&[]);
    let mut flat = original.clone();
    for sum in sum_all(&mut one.join_all(requests(ALL).map(fixed)), &mut flat) {
        sum.unwrap();
    }
    let racks = [below(&one, 0), below(&one, 1)];
    let other_job = |request| JoinJob { job: "tree".into(), ..fixed(request) };
    let mut tree = original;
    for sum in sum_all(&mut join_all(&racks, other_job), &mut tree) {
        sum.unwrap();
    }
    let bits = |vector: &Vec<f32>| vector.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(tree.iter().all(|vector| bits(vector) == bits(&flat[0])));
}

#[test]
fn racks_with_different_settings_are_refused_when_a_worker_joins() {
    let parent = Serving::start(&[]);
    let racks = [below(&parent, 0), below(&parent, 1)];
    let _first = racks[0].join(&in_rack(0, 0)).unwrap();
    let refused = |request: JoinJob| racks[1].join(&request).err().unwrap().to_string();
    // A different number of workers.
    let said = refused(JoinJob { world: 7, ..in_rack(1, 0) });
    assert!(said.contains("world: 7, not 4"), "{said}");
    // The same number, to which the workers do not add up.
    let said = refused(JoinJob { workers: 3, ..in_rack(1, 0) });
    assert!(said.contains("4 workers") && said.contains("rack 0 has 2, rack 1 has 3"), "{said}");
    racks[1].join(&in_rack(1, 0)).unwrap();
}

#[test]
fn three_levels_sum_as_one() {
    let top = Serving::start(&[]);
    let [middle, single] = [above_racks(&top, 0, 2), below(&top, 1)];
    let leaves = [below(&middle, 0), below(&middle, 1)];
    let join = |world| {
        let joining = |serving: &Serving| serving.join(&JoinJob { world, ..request(0, 1) });
        thread::scope(|scope| {
            let servers = [&single, &leaves[0], &leaves[1]];
            let threads = servers.map(|serving| scope.spawn(move || joining(serving)));
            threads.map(|one| one.join().unwrap())
        })
    };
    let joined = join(4);
    let refused = joined.iter().filter_map(|joined| joined.as_ref().err());
    let refused: Vec<String> = refused.map(Error::to_string).collect();
    assert!(!refused.is_empty());
    for said in refused {
        assert!(said.contains("4 workers") && said.contains("rack 0 has 2, rack 1 has 1"), "{said}");
    }
    drop(joined);
    for serving in [&top, &middle] {
        serving.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
    }
    let mut workers = join(3).map(|joined| joined.unwrap());
    sum_rounds(&mut workers, 3, 3000);
    assert_eq!(top.stats()["jobs"]["job"]["workers"], RACKS);
    drop(workers);
    // All workers are below the middle server, so the job does not join the top one.
    top.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
    let two = |serving: &Serving| {
        let request = JoinJob { world: 2, ..request(0, 1) };
        serving.join(&request).unwrap()
    };
    let mut workers = thread::scope(|scope| {
        let [first, second] = &leaves;
        let first = scope.spawn(|| two(first));
        [two(second), first.join().unwrap()]
    });
    sum_rounds(&mut workers, 2, 1000);
    assert!(top.stats()["jobs"].as_object().unwrap().is_empty());
}

#[test]
fn a_server_between_racks_and_a_parent_has_to_know_its_workers() {
    let top = Serving::start(&[]);
    let join = |workers| {
        let middle = above_racks(&top, 0, workers);
        let leaves = [below(&middle, 0), below(&middle, 1)];
        let request = JoinJob { world: 4, ..request(0, 1) };
        let _first = leaves[0].join(&request)?;
        leaves[1].join(&request)
    };
    let said = join(0).err().unwrap().to_string();
    assert!(said.contains("start it with --rack-workers"), "{said}");
    let said = join(3).err().unwrap().to_string();
    assert!(said.contains("3 workers here") && said.contains("rack 0 has 1, rack 1 has 1"), "{said}");
    join(2).unwrap();
}

#[test]
fn a_worker_missing_in_one_rack_is_named_in_all_and_a_reset_continues() {
    let parent = Serving::start(&[]);
    let racks = [below(&parent, 0), below(&parent, 1)];
    let mut workers = join_all(&racks, |request| JoinJob { deadline: Duration::from_secs(6), ..request });
    sum_rounds(&mut workers, 1, 2000);
    let mut vectors = whole_numbers(ALL.into(), 2000, 5);
    for failed in sum_all(&mut workers[..3], &mut vectors[..3]) {
        let error = failed.unwrap_err();
        let Error::Sum(gradients::Error::Missing { workers, reason }) = &error else {
            panic!("{error}");
        };
        assert_eq!(*workers, [1]);
        assert!(reason.contains("worker 1 (host-1-1)"), "{reason}");
    }
    for worker in &mut workers {
        worker.call(Control::Reset, &Wait::forever()).unwrap();
    }
    sum_rounds(&mut workers, 2, 2000);
}

#[test]
fn a_lost_parent_is_named_at_once_and_joining_again_continues() {
    let mut parent = Serving::start(&[]);
    let port = parent.address.clone();
    let racks = [below(&parent, 0), below(&parent, 1)];
    let mut workers = join_all(&racks, |request| request);
    sum_rounds(&mut workers, 1, 2000);
    parent.signal(libc::SIGKILL);
    let error = workers[0].sum(&mut [1.0; 10], false, &Wait::forever()).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("the aggregator above this one") && said.contains("join it again"), "{said}");
    let error = workers[0].call(Control::Reset, &Wait::forever()).unwrap_err();
    assert!(error.to_string().contains("join it again"), "{error}");
    // While it is away, joining names it, too.
    drop(workers);
    let error = racks[0].join(&in_rack(0, 0)).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Extension, "{error}");
    assert!(error.to_string().contains(&format!("the parent at {port}")), "{error}");
    drop(parent);
    parent = Serving::with(&["--listen", &port.to_string(), "--gradients=127.0.0.1:0"]);
    let mut workers = join_all(&racks, |request| request);
    sum_rounds(&mut workers, 2, 2000);
    assert_eq!(parent.stats()["jobs"]["job"]["joined"], RACKS);
}

#[test]
fn a_killed_rack_ends_sums_in_all_racks_and_can_rejoin() {
    let parent = Serving::start(&[]);
    let mut racks = [below(&parent, 0), below(&parent, 1)];
    let mut workers = join_all(&racks, |request| request);
    sum_rounds(&mut workers, 1, 2000);
    let there = workers.split_off(PER_RACK.into());
    let before = parent.stats()["counted"].as_u64().unwrap();
    let failed = thread::scope(|scope| {
        let mut vectors = whole_numbers(PER_RACK.into(), 2000, 5);
        let workers = &mut workers;
        let sums = scope.spawn(move || sum_all(workers, &mut vectors));
        parent.until(|stats| stats["counted"].as_u64().unwrap() > before);
        racks[1].signal(libc::SIGKILL);
        sums.join().unwrap()
    });
    for failed in failed {
        let error = failed.unwrap_err();
        let Error::Sum(gradients::Error::Missing { workers, reason }) = &error else {
            panic!("{error}");
        };
        // Workers would take numbers for those in their own rack.
        assert!(workers.is_empty());
        assert!(reason.contains("rack 1 ") && reason.contains("left in the middle of round 2"), "{reason}");
    }
    for mut worker in there {
        let error = worker.sum(&mut [1.0; 10], false, &Wait::forever()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    }
    racks[1] = below(&parent, 1);
    let again = (0..PER_RACK).map(|worker| in_rack(1, worker));
    workers.extend(racks[1].join_all(again));
    for worker in &mut workers {
        worker.call(Control::Reset, &Wait::forever()).unwrap();
    }
    sum_rounds(&mut workers, 2, 2000);
}

/// A connection that has asked to join, and does not ask again. Its request has ended at once.
fn ask_once(serving: &Serving, job: JoinJob) -> ExtensionClient {
    let dialer = Dialer::new(serving.address.clone(), ConnectOptions::default()).unwrap();
    let until = Instant::now() + LONG;
    let mut session = ExtensionClient::open(&dialer, NAME, until, &Wait::forever()).unwrap();
    // As workers pass it.
    let job = JoinJob { deadline: job.deadline * 3 / 4, ..job };
    let message = write(&job).unwrap();
    let late = || NetError::Interrupted;
    let ended = session.call(&message, Instant::now(), until, &Wait::forever(), late);
    assert_eq!(ended.unwrap_err().code(), ErrorCode::Deadline);
    session
}

#[test]
fn a_join_that_is_abandoned_leaves_the_parent() {
    let parent = Serving::start(&[]);
    let rack = below(&parent, 0);
    let abandoned = ask_once(&rack, in_rack(0, 0));
    parent.until(|stats| stats["jobs"]["job"]["joined"] == 1);
    drop(abandoned);
    parent.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
    drop(rack.join(&in_rack(0, 0)).unwrap());
}

#[test]
fn a_job_that_waits_for_the_parent_counts_as_a_job() {
    let parent = Serving::start(&[]);
    let rack = Serving::start(&["--parent", &parent.address.to_string(), "--racks=2", "--gradients-jobs=1"]);
    parent.signal(libc::SIGSTOP);
    let _waiting = ask_once(&rack, in_rack(0, 0));
    let other = JoinJob { job: "other".into(), ..in_rack(0, 0) };
    let refused = rack.join(&other).err().unwrap();
    assert_eq!(refused.code(), ErrorCode::TooLarge, "{refused}");
    parent.signal(libc::SIGCONT);
    rack.join(&in_rack(0, 0)).unwrap();
}

#[test]
fn a_job_with_all_workers_in_one_rack_does_not_join_the_parent() {
    let parent = Serving::start(&[]);
    let rack = below(&parent, 0);
    sum_rounds(&mut rack.join_all(requests(2)), 2, 1000);
    assert_eq!(parent.stats()["received"], 0);
}

#[test]
fn a_job_with_workers_elsewhere_needs_a_parent() {
    let serving = Serving::start(&[]);
    let error = serving.join(&in_rack(0, 0)).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Config);
    assert!(error.to_string().contains("--parent"), "{error}");
}

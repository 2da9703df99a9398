//! Two levels of aggregators give the same result as one.

use std::time::Duration;

use replay_core::gradients::{Arithmetic, Command, Failure, JoinJob, Limits, Upstream, Worker};

use crate::network::{
    Faults, Network, Port, address, as_f32, exact, gradients, request, whole_numbers,
};

const RACKS: u16 = 2;
const PER_RACK: u16 = 3;
const ALL: usize = (RACKS * PER_RACK) as usize;

/// A rack as it asks its parent.
fn rack_request(rack: u16, racks: u16, world: u32) -> JoinJob {
    let request = request(rack, racks);
    JoinJob {
        world,
        name: format!("rack-{rack}"),
        // As a server's parent has it.
        deadline: request.deadline * 9 / 8,
        ..request
    }
}

/// Aggregator 0 is the parent of 1 and 2, which have three workers each.
fn two_levels(network: &mut Network, arithmetic: Arithmetic) -> Vec<Worker> {
    let mut workers = Vec::new();
    for rack in 0..RACKS {
        let child = network.add_aggregator(Limits::default());
        let up = JoinJob {
            arithmetic,
            ..rack_request(rack, RACKS, ALL as u32)
        };
        let below = PER_RACK.into();
        let (parent, ticket) = network.rack_ticket(0, &up, below, None).unwrap();
        let mut upstream = Some(Upstream::new(parent, &ticket, below));
        for worker in 0..PER_RACK {
            let request = JoinJob {
                arithmetic,
                world: ALL as u32,
                ..request(worker, PER_RACK)
            };
            let (at, ticket) = network.ticket(child, &request, upstream.take()).unwrap();
            workers.push(Worker::new(at, &request, &ticket));
        }
    }
    workers
}

#[test]
fn two_levels_sum_as_one_under_faults() {
    for seed in 0..10 {
        let mut network = Network::new(seed, Faults::MANY, Limits::default());
        let mut workers = two_levels(&mut network, Arithmetic::Float);
        for round in 0..3 {
            let mut vectors = whole_numbers(ALL, 500, 10 * seed + round);
            let expected = as_f32(&exact(&vectors));
            for result in network.sum(&mut workers, &mut vectors, false) {
                assert_eq!(result.unwrap().workers, ALL as u32);
            }
            assert!(vectors.iter().all(|vector| vector == &expected));
        }
        // The parent counts racks, and each once.
        let parent = network.counters();
        assert_eq!(parent.counted, parent.sums * u64::from(RACKS));
    }
}

#[test]
fn in_fixed_point_two_levels_have_the_bits_of_one() {
    let original = gradients(ALL, 700, 8);
    let sum = |network: &mut Network, workers: &mut [Worker]| {
        let mut vectors = original.clone();
        for result in network.sum(workers, &mut vectors, true) {
            result.unwrap();
        }
        assert!(vectors.iter().all(|vector| vector == &vectors[0]));
        vectors.swap_remove(0)
    };
    let mut flat = Network::new(1, Faults::NONE, Limits::default());
    let requests: Vec<JoinJob> = (0..ALL as u16)
        .map(|worker| JoinJob {
            arithmetic: Arithmetic::Fixed,
            ..request(worker, ALL as u16)
        })
        .collect();
    let mut workers = flat.join_all(&requests);
    let one = sum(&mut flat, &mut workers);
    let mut tree = Network::new(2, Faults::MANY, Limits::default());
    let mut workers = two_levels(&mut tree, Arithmetic::Fixed);
    let two = sum(&mut tree, &mut workers);
    let bits = |vector: Vec<f32>| vector.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(one), bits(two));
}

#[test]
fn a_worker_missing_in_one_rack_is_named_in_all_and_a_reset_goes_on() {
    let mut network = Network::new(3, Faults::MANY, Limits::default());
    let mut workers = two_levels(&mut network, Arithmetic::Float);
    let mut vectors = whole_numbers(ALL, 300, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    let begun = network.wire.now;
    let missing = address(5);
    network.wire.dead.insert(missing);
    let results = network.sum(&mut workers[..5], &mut vectors[..5], false);
    for result in &results {
        assert!(
            matches!(result, Err(Failure::Missing { .. } | Failure::Halted(_))),
            "{result:?}"
        );
    }
    let named = |result: &Result<_, Failure>| {
        let error = result.as_ref().unwrap_err().to_string();
        error.contains("worker 2 (host-2)")
    };
    assert!(results[3..].iter().all(named), "{results:?}");
    assert!(network.wire.now - begun < Duration::from_secs(5));
    network.wire.dead.clear();
    let mut last = vec![0.0; 300];
    let late = network.sum_at(5, &mut workers[5], &mut last);
    assert!(late.is_err(), "{late:?}");
    for (port, worker) in workers.iter_mut().enumerate() {
        network.call(port as u16, worker, Command::Reset).unwrap();
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
fn a_parent_that_is_gone_is_named() {
    let mut network = Network::new(3, Faults::NONE, Limits::default());
    let mut workers = two_levels(&mut network, Arithmetic::Float);
    network.wire.dead.insert(address(1000));
    let mut vectors = whole_numbers(ALL, 100, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the aggregator at 10.0.0.1:1000"), "{error}");
    }
}

#[test]
fn racks_that_differ_are_told_what_differs() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let first = rack_request(0, 2, 2);
    network.rack_ticket(0, &first, 1, None).unwrap();
    let second = rack_request(1, 2, 7);
    let refused = network.rack_ticket(0, &second, 1, None).unwrap_err();
    assert!(refused.to_string().contains("rack 1 joins"), "{refused}");
    assert!(
        refused.to_string().contains("(world: 7, not 2)"),
        "{refused}"
    );
    // A worker is no rack.
    let worker = network
        .join(0, &JoinJob { world: 2, ..first })
        .err()
        .unwrap();
    assert!(
        worker.to_string().contains("2 (workers), not 2 (racks)"),
        "{worker}"
    );
}

#[test]
fn racks_whose_workers_cannot_add_up_to_all_are_refused_before_the_first_sum() {
    // Of how many workers in all, the workers of each rack, and the racks that can come.
    let cases: [(u32, &[u32], usize); 6] = [
        (4, &[2], 0),
        (4, &[4, 4], 0),
        (4, &[2, 3], 1),
        (4, &[2, 1], 1),
        (6, &[2, 2, 3], 2),
        (6, &[2, 2, 2], 3),
    ];
    for (world, racks, fit) in cases {
        let mut network = Network::new(1, Faults::NONE, Limits::default());
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
fn a_rack_that_comes_back_is_counted_anew() {
    let mut network = Network::new(1, Faults::NONE, Limits::default());
    let (first, second) = (rack_request(0, 2, 4), rack_request(1, 2, 4));
    network.rack_ticket(0, &first, 1, None).unwrap();
    let (_, ticket) = network.rack_ticket(0, &second, 3, None).unwrap();
    assert!(network.rack_ticket(0, &first, 2, None).is_err());
    let (at, aggregator) = &mut network.aggregators[0];
    aggregator.leave(ticket.session, &mut Port(&mut network.wire, *at));
    network.rack_ticket(0, &first, 2, None).unwrap();
    network.rack_ticket(0, &second, 2, None).unwrap();
}

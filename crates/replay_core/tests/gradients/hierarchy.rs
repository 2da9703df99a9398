//! Two levels of aggregators give the same result as one.

use std::time::Duration;

use replay_core::gradients::{Arithmetic, Command, Failure, JoinJob, Limits, Upstream, Worker};

use crate::network::{Faults, Network, address, as_f32, exact, gradients, request, whole_numbers};

const RACKS: u16 = 2;
const PER_RACK: u16 = 3;
const ALL: usize = (RACKS * PER_RACK) as usize;

/// Aggregator 0 is the parent of 1 and 2, which have three workers each.
fn two_levels(network: &mut Network, arithmetic: Arithmetic) -> Vec<Worker> {
    let mut workers = Vec::new();
    for rack in 0..RACKS {
        let child = network.add_aggregator(Limits::default());
        let up = JoinJob {
            arithmetic,
            world: ALL as u32,
            name: format!("rack-{rack}"),
            ..request(rack, RACKS)
        };
        // The parent of parents has all there are.
        let (parent, ticket) = network
            .ticket(
                0,
                &JoinJob {
                    world: RACKS.into(),
                    ..up
                },
                None,
            )
            .unwrap();
        let mut upstream = Some(Upstream::new(parent, &ticket));
        for worker in 0..PER_RACK {
            let request = JoinJob {
                arithmetic,
                world: ALL as u32,
                ..request(worker, PER_RACK)
            };
            assert_eq!(
                network.aggregators[child].1.needs_parent(&request),
                upstream.is_some()
            );
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

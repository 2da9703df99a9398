//! Two levels of aggregators give the result of one.

use gradients::{AggregatorLimits, Arithmetic, JoinJob, WorkerSession};

use crate::network::{ALL, Faults, Network, RACKS, as_f32, exact, gradients, request, two_levels, whole_numbers};

#[test]
fn two_levels_sum_as_one_under_faults() {
    for seed in 0..10 {
        let mut network = Network::new(seed, Faults::MANY, AggregatorLimits::default());
        let mut workers = two_levels(&mut network, Arithmetic::Float, AggregatorLimits::default());
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
    let sum = |network: &mut Network, workers: &mut [WorkerSession]| {
        let mut vectors = original.clone();
        for result in network.sum(workers, &mut vectors, true) {
            result.unwrap();
        }
        assert!(vectors.iter().all(|vector| vector == &vectors[0]));
        vectors.swap_remove(0)
    };
    let mut flat = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let requests: Vec<JoinJob> = (0..ALL as u16)
        .map(|worker| JoinJob { arithmetic: Arithmetic::Fixed, ..request(worker, ALL as u16) })
        .collect();
    let mut workers = flat.join_all(&requests);
    let one = sum(&mut flat, &mut workers);
    let mut tree = Network::new(2, Faults::MANY, AggregatorLimits::default());
    let mut workers = two_levels(&mut tree, Arithmetic::Fixed, AggregatorLimits::default());
    let two = sum(&mut tree, &mut workers);
    let bits = |vector: Vec<f32>| vector.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(one), bits(two));
}

#[test]
fn windows_may_differ_between_the_levels() {
    for (above, below) in [(4, 8), (8, 4), (3, 256)] {
        let window = |window| AggregatorLimits { window, ..AggregatorLimits::default() };
        let mut network = Network::new(5, Faults::MANY, window(above));
        let mut workers = two_levels(&mut network, Arithmetic::Float, window(below));
        for round in 0..3 {
            let mut vectors = whole_numbers(ALL, 500, round);
            let expected = as_f32(&exact(&vectors));
            for result in network.sum(&mut workers, &mut vectors, false) {
                result.unwrap();
            }
            assert!(vectors.iter().all(|vector| vector == &expected));
        }
    }
}

#[test]
fn without_loss_a_contribution_is_sent_to_the_parent_once() {
    let mut network = Network::new(1, Faults::NONE, AggregatorLimits::default());
    let mut workers = two_levels(&mut network, Arithmetic::Float, AggregatorLimits::default());
    // So few segments that reordering does not look like loss.
    let mut vectors = whole_numbers(ALL, 8 * 7, 1);
    for result in network.sum(&mut workers, &mut vectors, false) {
        result.unwrap();
    }
    // And path validation of each rack: without the cookie, and with it.
    let parent = network.counters();
    assert_eq!(parent.counted, 8 * u64::from(RACKS));
    assert_eq!(parent.received, parent.counted + 2 * u64::from(RACKS));
}

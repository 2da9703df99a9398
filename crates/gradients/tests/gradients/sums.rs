//! Sums are exact under every fault of the network.

use std::time::Duration;

use gradients::{AggregatorLimits, Arithmetic, JoinJob};
use proptest::prelude::*;

use crate::network::{Faults, Network, as_f32, exact, gradients, request, whole_numbers};

fn requests(workers: u16, change: impl Fn(&mut JoinJob)) -> Vec<JoinJob> {
    let mut requests: Vec<JoinJob> = (0..workers).map(|w| request(w, workers)).collect();
    requests.iter_mut().for_each(change);
    requests
}

fn faults() -> impl Strategy<Value = Faults> {
    (0.0..0.25, 0.0..0.3, 1u64..2000, 0.0..0.1).prop_map(|(loss, duplicate, delay_us, straggler)| Faults {
        loss,
        duplicate,
        delay_us,
        straggler,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_worker_is_counted_once_under_any_faults(
        workers in 1u16..6,
        length in 0usize..900,
        segment_values in prop::sample::select(vec![2u16, 7, 360]),
        window in prop::sample::select(vec![1u32, 2, 5, 64]),
        seed: u64,
        faults in faults(),
    ) {
        let limits = AggregatorLimits { window, ..AggregatorLimits::default() };
        let mut network = Network::new(seed, faults, limits);
        // A window of one segment is slow.
        network.deadline = Duration::from_secs(1000);
        let deadline = network.deadline;
        let mut joined = network.join_all(&requests(workers, |r| {
            r.segment_values = segment_values;
            // Under heavy loss path validation takes long.
            r.deadline = deadline;
        }));
        // Vectors of several lengths, so entries of the window are used by other segments in each round.
        for (round, length) in [length, length / 3, length].into_iter().enumerate() {
            let mut vectors = whole_numbers(workers.into(), length, seed ^ round as u64);
            let expected = as_f32(&exact(&vectors));
            for result in network.sum(&mut joined, &mut vectors, false) {
                prop_assert_eq!(result.unwrap().workers, u32::from(workers));
            }
            for vector in &vectors {
                prop_assert_eq!(vector, &expected);
            }
        }
        let counters = network.counters();
        prop_assert_eq!(counters.counted, counters.sums * u64::from(workers));
        prop_assert_eq!((counters.failed, counters.late, counters.malformed), (0, 0, 0));
    }

    #[test]
    fn fixed_point_has_the_same_bits_in_every_order(
        workers in 1u16..6,
        length in 1usize..600,
        seed: u64,
        faults in faults(),
    ) {
        let original = gradients(workers.into(), length, seed);
        let sum = |seed, faults| {
            let mut network = Network::new(seed, faults, AggregatorLimits::default());
            // Losses in a row may take longer than the usual deadline.
            network.deadline = Duration::from_secs(1000);
            let deadline = network.deadline;
            let mut joined = network.join_all(&requests(workers, |r| {
                r.arithmetic = Arithmetic::Fixed;
                r.deadline = deadline;
            }));
            let mut vectors = original.clone();
            for result in network.sum(&mut joined, &mut vectors, false) {
                result.unwrap();
            }
            let bits = |v: &Vec<f32>| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            vectors.iter().map(bits).collect::<Vec<_>>()
        };
        let calm = sum(1, Faults::NONE);
        prop_assert_eq!(&sum(seed, faults), &calm);
        prop_assert!(calm.iter().all(|v| v == &calm[0]));
        // Within half a unit of the grid for each worker. The grid has at least 27 bits of the segment's largest value.
        for (block, sums) in exact(&original).chunks(7).zip(calm[0].chunks(7)).enumerate() {
            let values = original.iter().flat_map(|v| v[7 * block..].iter().take(7));
            let largest = values.fold(0f32, |most, value| most.max(value.abs()));
            for (exact, bits) in sums.0.iter().zip(sums.1) {
                let sum = f64::from(f32::from_bits(*bits));
                let allowed = f64::from(workers) * f64::from(largest) * 2f64.powi(-24);
                prop_assert!((sum - exact).abs() <= allowed, "{} {} {}", sum, exact, allowed);
            }
        }
    }
}

#[test]
fn a_float_sum_equals_that_of_an_all_reduce_up_to_rounding() {
    let original = gradients(4, 5000, 3);
    let mut network = Network::new(3, Faults::MANY, AggregatorLimits::default());
    let mut joined = network.join_all(&requests(4, |r| r.segment_values = 360));
    let mut vectors = original.clone();
    for result in network.sum(&mut joined, &mut vectors, false) {
        result.unwrap();
    }
    assert!(vectors.iter().all(|v| v == &vectors[0]), "all have the same bits");
    for (i, exact) in exact(&original).into_iter().enumerate() {
        let magnitude: f64 = original.iter().map(|v| f64::from(v[i].abs())).sum();
        let allowed = 3.0 * f64::from(f32::EPSILON) * magnitude;
        assert!((f64::from(vectors[0][i]) - exact).abs() <= allowed, "{i}");
    }
}

#[test]
fn two_workers_add_up_to_the_same_bits_in_either_order() {
    let original = gradients(2, 1000, 9);
    let expected: Vec<f32> = original[0].iter().zip(&original[1]).map(|(a, b)| a + b).collect();
    let mut network = Network::new(9, Faults::MANY, AggregatorLimits::default());
    let mut joined = network.join_all(&requests(2, |_| {}));
    let mut vectors = original.clone();
    network.sum(&mut joined, &mut vectors, false);
    assert_eq!(vectors, [expected.clone(), expected]);
}

#[test]
fn the_mean_is_divided_by_the_workers_once() {
    for arithmetic in [Arithmetic::Float, Arithmetic::Fixed] {
        let mut network = Network::new(1, Faults::MANY, AggregatorLimits::default());
        let mut joined = network.join_all(&requests(4, |r| r.arithmetic = arithmetic));
        let mut vectors: Vec<Vec<f32>> = (0..4).map(|w| vec![4.0 * w as f32, -2.0, 0.5]).collect();
        network.sum(&mut joined, &mut vectors, true);
        assert_eq!(vectors, vec![vec![6.0, -2.0, 0.5]; 4], "{arithmetic:?}");
    }
}

#[test]
fn hundreds_of_rounds_with_stragglers_stay_exact() {
    let mut network = Network::new(5, Faults::MANY, AggregatorLimits::default());
    let mut joined = network.join_all(&requests(2, |_| {}));
    for round in 0..600u64 {
        let mut vectors = whole_numbers(2, 20, round);
        let expected = as_f32(&exact(&vectors));
        for result in network.sum(&mut joined, &mut vectors, false) {
            result.unwrap();
        }
        assert_eq!(vectors[1], expected);
    }
    assert_eq!(joined[0].next_round(), 601);
}

#[test]
fn jobs_do_not_affect_each_other() {
    let mut network = Network::new(2, Faults::MANY, AggregatorLimits::default());
    let all: Vec<JoinJob> = (0..6).map(|i| JoinJob { job: format!("job {}", i / 2), ..request(i % 2, 2) }).collect();
    let mut joined = network.join_all(&all);
    let mut vectors = whole_numbers(6, 300, 4);
    let expected: Vec<Vec<f32>> = vectors.chunks(2).map(|pair| as_f32(&exact(pair))).collect();
    for result in network.sum(&mut joined, &mut vectors, false) {
        result.unwrap();
    }
    for (i, vector) in vectors.iter().enumerate() {
        assert_eq!(vector, &expected[i / 2]);
    }
    assert_eq!(network.aggregators[0].1.jobs(), 3);
}

#[test]
fn in_order_and_without_loss_each_contribution_is_sent_once() {
    let in_order = Faults { delay_us: 1, ..Faults::NONE };
    let mut network = Network::new(2, in_order, AggregatorLimits::default());
    let mut joined = network.join_all(&requests(4, |r| r.segment_values = 360));
    let mut vectors = whole_numbers(4, 360 * 1000, 1);
    network.sum(&mut joined, &mut vectors, false);
    let counters = network.counters();
    assert_eq!(counters.sums, 1000);
    assert_eq!((counters.counted, counters.duplicates), (4000, 0));
    // 4,000 contributions, and path validation of four workers.
    assert_eq!((counters.received, counters.helped), (4008, 0));
}

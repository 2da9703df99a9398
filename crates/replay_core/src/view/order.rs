//! The order of a batch whose parts come from several tables or servers.

use std::iter::repeat_n;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::replay::{Sampled, SampledItem};

/// The order of a batch of several parts: they are mixed at random, each in its own order. `None` for one part.
/// The seed is a hash of the sampled items: a repeated run has the same order, and `times_sampled` makes the next batch differ.
pub(super) fn mixed(sampled: &Sampled) -> Option<Vec<usize>> {
    if sampled.parts.len() < 2 {
        return None;
    }
    let parts = sampled.parts.iter().enumerate();
    let mut order: Vec<usize> = parts.flat_map(|(part, &length)| repeat_n(part, length)).collect();
    order.shuffle(&mut StdRng::seed_from_u64(sampled.items.iter().fold(0, hash)));
    let mut next: Vec<usize> = Vec::with_capacity(sampled.parts.len());
    let mut end = 0;
    for length in &sampled.parts {
        next.push(end);
        end += length;
    }
    for item in &mut order {
        let next = &mut next[*item];
        *item = *next;
        *next += 1;
    }
    Some(order)
}

/// Adds an item to a hash. Its id is left out: another run with the same seed has other ids.
fn hash(sum: u64, item: &SampledItem) -> u64 {
    let SampledItem { probability, age, times_sampled, .. } = item;
    let bits = probability.to_bits() ^ u64::from(*age) << 32 ^ u64::from(*times_sampled);
    // A multiplication carries upwards only, and the rotation brings the upper bits down.
    (sum.rotate_left(23) ^ bits).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

//! One batch from several tables, each with a fixed share of its items.
//!
//! The probability of an item is the share of its table times its probability there, so importance weights correct for both, and Q-learning
//! from demonstrations (DQfD: Hester et al., 2018; RLPD: Ball et al., 2023) keeps its weights exact.

use std::iter::repeat_n;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::error::{Error, Result};
use crate::replay::{SampleCredit, Sampled, SampledItem};
use base::allocation;
use base::notation::Number;

pub const MAX_TABLES: usize = 256;

/// Checks the shares of the tables in a batch: 1 to 256, positive, with a sum of 1.
pub fn check_shares(shares: &[f64]) -> Result<()> {
    if shares.is_empty() || shares.len() > MAX_TABLES {
        return Err(Error::Config(format!("a mix has 1 to {MAX_TABLES} tables, got {}", shares.len())));
    }
    if let Some(share) = shares.iter().find(|&&share| !(share > 0.0 && share <= 1.0)) {
        return Err(Error::Config(format!(
            "the share of a table in a mix is above 0 and at most 1, got {}",
            Number(*share)
        )));
    }
    let sum: f64 = shares.iter().sum();
    if (sum - 1.0).abs() > 1e-6 {
        return Err(Error::Config(format!("the shares of a mix add up to 1, got {}", Number(sum))));
    }
    Ok(())
}

/// Items of each table in a batch of `items`: the shares, rounded so that they add up (largest remainder). An error if a table has none.
pub fn divide(shares: &[f64], items: u32) -> Result<Vec<u32>> {
    let exact: Vec<f64> = shares.iter().map(|share| share * f64::from(items)).collect();
    // Rounding: the float 1/3 times 9 items may be just below 3.
    let mut counts: Vec<u32> = exact.iter().map(|exact| (exact + 1e-6) as u32).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    let remainder = |table: usize| exact[table] - f64::from(counts[table]);
    by_remainder.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)));
    let missing = items.saturating_sub(counts.iter().sum());
    for &table in by_remainder.iter().take(missing as usize) {
        counts[table] += 1;
    }
    match counts.iter().position(|&count| count == 0) {
        None => Ok(counts),
        Some(table) => Err(Error::Config(format!(
            "a batch of {items} items has none of a table with the share {}: sample more items, or give it a larger share",
            Number(shares[table])
        ))),
    }
}

/// One batch of the samples of several tables with the same columns, one share after the other.
pub fn combine(mut shares: Vec<Sampled>) -> Result<Sampled> {
    if shares.len() == 1 {
        return Ok(shares.remove(0));
    }
    let total: usize = shares.iter().map(|share| share.items.len()).sum();
    let mut mixed = Sampled {
        items: Vec::with_capacity(total),
        live_items: shares.iter().map(|share| share.live_items).sum(),
        ..Sampled::default()
    };
    let row_bytes = shares.iter().map(|share| share.rows.len()).sum();
    let mut rows = allocation::with_capacity("a mixed batch", row_bytes)?;
    let mut credits = Vec::new();
    let mut smallest: Option<f64> = Some(f64::INFINITY);
    for share in shares.into_iter().filter(|share| !share.items.is_empty()) {
        // In a short batch the share may differ from the one asked for.
        let fraction = share.items.len() as f64 / total as f64;
        let here = share.min_probability.map(|least| fraction * least);
        smallest = smallest.zip(here).map(|(a, b)| a.min(b));
        match share.shares.is_empty() {
            true => mixed.shares.push(share.items.len()),
            false => mixed.shares.extend(share.shares),
        }
        mixed.items.extend(share.items.into_iter().map(|mut item| {
            item.probability *= fraction;
            item
        }));
        rows.extend_from_slice(&share.rows);
        mixed.blobs.extend(share.blobs);
        credits.extend(share.credit);
    }
    mixed.min_probability = smallest.filter(|least| least.is_finite());
    mixed.rows = rows.into();
    mixed.credit = (!credits.is_empty()).then(|| Box::new(credits) as Box<dyn SampleCredit>);
    Ok(mixed)
}

impl SampleCredit for Vec<Box<dyn SampleCredit>> {
    fn delivered(self: Box<Self>) {
        self.into_iter().for_each(|credit| credit.delivered());
    }
}

/// The order of a batch of several shares: they are mixed at random, each in its own order. `None` for one share.
/// The seed is a hash of the sampled items: a repeated run has the same order, and `times_sampled` makes the next batch differ.
pub(crate) fn order(sampled: &Sampled) -> Option<Vec<usize>> {
    if sampled.shares.len() < 2 {
        return None;
    }
    let shares = sampled.shares.iter().enumerate();
    let mut order: Vec<usize> = shares.flat_map(|(share, &length)| repeat_n(share, length)).collect();
    order.shuffle(&mut StdRng::seed_from_u64(sampled.items.iter().fold(0, hash)));
    let mut next: Vec<usize> = Vec::with_capacity(sampled.shares.len());
    let mut end = 0;
    for length in &sampled.shares {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::SampledItem;

    #[test]
    fn shares_are_rounded_to_items_that_add_up() {
        assert_eq!(divide(&[0.5, 0.5], 256).unwrap(), [128, 128]);
        assert_eq!(divide(&[0.9, 0.1], 256).unwrap(), [230, 26]);
        let third = 1.0 / 3.0;
        assert_eq!(divide(&[third, third, third], 9).unwrap(), [3, 3, 3]);
        assert_eq!(divide(&[third, third, third], 8).unwrap().iter().sum::<u32>(), 8);
        let none = divide(&[0.99, 0.01], 8).unwrap_err().to_string();
        assert!(none.contains("a batch of 8 items has none"), "{none}");
    }

    #[test]
    fn shares_that_do_not_add_up_are_refused() {
        let refused = |shares: &[f64]| check_shares(shares).unwrap_err().to_string();
        assert!(check_shares(&[0.25, 0.75]).is_ok());
        assert!(refused(&[]).contains("1 to 256 tables"));
        assert!(refused(&[0.5, 0.4]).contains("add up to 1, got 0.9"));
        assert!(refused(&[1.5, -0.5]).contains("got 1.5"));
        assert!(refused(&[f64::NAN]).contains("got nan"));
    }

    #[test]
    fn probabilities_are_multiplied_by_the_shares() {
        let part = |probabilities: &[f64], least| Sampled {
            items: probabilities
                .iter()
                .map(|&probability| SampledItem { id: 1, probability, times_sampled: 1, ..SampledItem::default() })
                .collect(),
            live_items: 10,
            min_probability: Some(least),
            state: None,
            rows: vec![7; probabilities.len()].into(),
            blobs: Vec::new(),
            shares: Vec::new(),
            lease: 0,
            credit: None,
        };
        let mixed = combine(vec![part(&[0.5, 0.25, 0.25], 0.25), part(&[0.2], 0.1)]).unwrap();
        let probabilities: Vec<f64> = mixed.items.iter().map(|item| item.probability).collect();
        assert_eq!(probabilities, [0.375, 0.1875, 0.1875, 0.05]);
        assert_eq!((mixed.live_items, mixed.min_probability), (20, Some(0.025)));
        assert_eq!(mixed.rows.len(), 4);
    }
}

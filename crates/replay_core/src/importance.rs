//! Importance weights (Schaul et al., 2016, section 3.4): (N P(i))^-beta, divided by the largest.

use crate::error::{Error, Result};
use crate::power;
use base::notation::Number;

/// Divisor of the importance weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Normalization {
    /// The largest weight of the batch: the largest weight is 1 in every batch.
    #[default]
    Batch,
    /// The largest weight of any item in the memory; samples then have to request the smallest probability.
    Memory,
}

/// Largest exponent, as for priorities: 1 corrects completely, and a schedule may overshoot it.
const MAX_BETA: f64 = 4.0;

/// Checks the exponent of importance weights, before a sample waits for its items.
pub fn check_beta(beta: f64) -> Result<()> {
    if (0.0..=MAX_BETA).contains(&beta) {
        return Ok(());
    }
    Err(Error::Config(format!("the importance-sampling exponent beta is 0 to {MAX_BETA}, got {}", Number(beta))))
}

/// Weights of items from their probabilities. N, the number of live items, cancels: the largest weight belongs to the smallest probability
/// p, and (N P(i))^-beta / (N p)^-beta = (p / P(i))^beta. An item without a positive probability was not sampled at random and weighs 1.
/// [`Normalization::Memory`] needs the smallest probability.
pub(crate) fn importance_weights(
    probabilities: impl Iterator<Item = f64> + Clone,
    min_probability: Option<f64>,
    beta: f64,
    normalization: Normalization,
) -> Result<Vec<f32>> {
    check_beta(beta)?;
    let sampled = |p: f64| p > 0.0 && p.is_finite();
    let smallest = match normalization {
        // Positive floats are ordered as their bits; the compiler vectorises the integer minimum.
        Normalization::Batch => probabilities
            .clone()
            .map(|p| if sampled(p) { p } else { f64::INFINITY }.to_bits())
            .min()
            .map_or(f64::INFINITY, f64::from_bits),
        Normalization::Memory => min_probability.filter(|&p| sampled(p)).ok_or_else(|| {
            Error::Config("weights over the whole memory need a sample that asks for the smallest probability".into())
        })?,
    };
    // At most 1, though another client may have raised the smallest priority since the sample's scan.
    let ratio = |p| {
        if sampled(p) { (smallest / p).min(1.0) } else { 1.0 }
    };
    let mut weights: Vec<_> = probabilities.map(ratio).collect();
    power::raise(&mut weights, beta);
    Ok(weights.into_iter().map(|weight| weight as f32).collect())
}

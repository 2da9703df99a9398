//! Where a batch is drawn: one place in each of as many equal parts of the mass (Schaul et al., 2016, appendix
//! B.2.1).

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The random numbers of one batch, which follow from a seed and the batch's number alone: no lock between threads.
pub struct Strata(StdRng);

impl Strata {
    /// Of batch `number` under `seed`.
    pub fn new(seed: u64, number: u64) -> Self {
        let step = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Strata(StdRng::seed_from_u64(seed.wrapping_add(step)))
    }

    /// Puts `count` ascending targets in [0, 1) into `targets`, cleared first.
    pub fn fill(&mut self, count: u32, targets: &mut Vec<f64>) {
        let strata = f64::from(count);
        targets.clear();
        targets.extend((0..count).map(|stratum| {
            let target = (f64::from(stratum) + self.0.random::<f64>()) / strata;
            // Rounding may reach 1, which is outside.
            target.min(1.0 - f64::EPSILON)
        }));
    }
}

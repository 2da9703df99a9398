//! Whether counts of samples follow a distribution.

/// Pearson's statistic of counts against expected shares, and the number of cells less one.
pub fn chi_square(counts: &[u64], shares: &[f64]) -> (f64, f64) {
    let samples: u64 = counts.iter().sum();
    let total: f64 = shares.iter().sum();
    let statistic = counts.iter().zip(shares).map(|(&count, share)| {
        let expected = samples as f64 * share / total;
        (count as f64 - expected).powi(2) / expected
    });
    (statistic.sum(), (counts.len() - 1) as f64)
}

/// What a chi-square variable exceeds once in a million (Wilson and Hilferty, 1931; 4.75 standard deviations).
pub fn one_in_a_million(degrees: f64) -> f64 {
    let variance = 2.0 / (9.0 * degrees);
    degrees * (1.0 - variance + 4.75 * variance.sqrt()).powi(3)
}

#[track_caller]
pub fn assert_follows(counts: &[u64], shares: &[f64]) {
    let (statistic, degrees) = chi_square(counts, shares);
    assert!(statistic < one_in_a_million(degrees), "chi-square {statistic} with {degrees} degrees of freedom");
}

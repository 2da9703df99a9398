//! Division of a batch over the servers: items in proportion to the sums of priorities, samples by what the rate limiters admit.

/// Divides `count` in proportion to `weights`; each part is rounded up or down. With a new random `at` from 0 to 1 for each batch, the
/// expected parts are exact (systematic sampling). All parts are 0 if no weight is above 0.
pub fn divide(count: u32, weights: &[f64], at: f64) -> Vec<u32> {
    let total: f64 = weights.iter().sum();
    if total <= 0.0 {
        return vec![0; weights.len()];
    }
    let last = weights.iter().rposition(|&weight| weight > 0.0);
    let (mut sum, mut given) = (0.0, 0);
    let part = |(index, &weight): (usize, &f64)| {
        sum += weight;
        // The last part takes the rest, despite rounding errors of the sums.
        let up_to = match last == Some(index) {
            true => count,
            false => ((f64::from(count) * (sum / total) + at).floor() as u32).clamp(given, count),
        };
        let part = if weight > 0.0 { up_to - given } else { 0 };
        given += part;
        part
    };
    weights.iter().enumerate().map(part).collect()
}

/// Divides `count` samples over the limiters, in proportion to what they admit now (`allowances`). If that is not enough, takes all of it.
pub fn limiter_samples(count: u32, allowances: &[f64]) -> Vec<u32> {
    let most = f64::from(count);
    let now: Vec<f64> = allowances.iter().map(|allowed| allowed.clamp(0.0, most).floor()).collect();
    let total: f64 = now.iter().sum();
    if total < most {
        return now.iter().map(|&now| now as u32).collect();
    }
    let mut parts: Vec<u32> = now.iter().map(|allowed| (most * allowed / total).floor() as u32).collect();
    // Distributes the remainder to limiters with samples to spare.
    let mut left = count - parts.iter().sum::<u32>();
    for (part, &allowed) in parts.iter_mut().zip(&now) {
        let more = left.min(allowed as u32 - *part);
        *part += more;
        left -= more;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_their_mean_is_the_share() {
        let weights = [3.0, 0.0, 1.0, 2.5];
        let mut sums = [0_u64; 4];
        let draws = 10_000;
        for draw in 0..draws {
            let parts = divide(7, &weights, f64::from(draw) / f64::from(draws));
            assert_eq!(parts.iter().sum::<u32>(), 7);
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum += u64::from(part);
            }
        }
        for (sum, weight) in sums.into_iter().zip(weights) {
            let mean = sum as f64 / f64::from(draws);
            assert!((mean - 7.0 * weight / 6.5).abs() < 1e-3, "{mean} {weight}");
        }
        assert_eq!(divide(5, &[0.0, 0.0], 0.3), [0, 0]);
        assert_eq!(divide(5, &[0.0, 1e-300, 0.0], 0.99), [0, 5, 0]);
    }

    #[test]
    fn limiters_give_what_they_have() {
        assert_eq!(limiter_samples(8, &[4.0, 12.0]), [3, 5]);
        assert_eq!(limiter_samples(8, &[8.0, 0.0]), [8, 0]);
        assert_eq!(limiter_samples(8, &[-3.0, 2.5]), [0, 2]);
        assert_eq!(limiter_samples(3, &[1.0, 1.0, 1.0]), [1, 1, 1]);
        assert_eq!(limiter_samples(4, &[0.0, 0.0]), [0, 0]);
    }
}

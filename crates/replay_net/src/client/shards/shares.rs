//! How a batch is divided over the servers: its items in proportion to their sums of priorities, its samples for the rate limiters
//! as these have any to give.

/// Whole numbers that add up to `count`, each the floor or the ceiling of its part in proportion to `weights`. `at`, from 0 to 1 and
/// drawn anew for each batch, makes every expectation exactly the part (systematic sampling). All are 0 where no weight is above 0.
pub fn divide(count: u32, weights: &[f64], at: f64) -> Vec<u32> {
    let total: f64 = weights.iter().sum();
    if total <= 0.0 {
        return vec![0; weights.len()];
    }
    let last = weights.iter().rposition(|&weight| weight > 0.0);
    let (mut sum, mut given) = (0.0, 0);
    let part = |(index, &weight): (usize, &f64)| {
        sum += weight;
        // The last one takes the rest, whatever the sums round to.
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

/// How many of `count` samples each limiter is to admit, in proportion to what it would admit now (`allowances`): all of that where it
/// is not enough.
pub fn limiter_samples(count: u32, allowances: &[f64]) -> Vec<u32> {
    let most = f64::from(count);
    let now: Vec<f64> = allowances
        .iter()
        .map(|allowed| allowed.clamp(0.0, most).floor())
        .collect();
    let total: f64 = now.iter().sum();
    if total < most {
        return now.iter().map(|&now| now as u32).collect();
    }
    let mut parts: Vec<u32> = now
        .iter()
        .map(|allowed| (most * allowed / total).floor() as u32)
        .collect();
    // What rounding down has left goes to those with any to spare.
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

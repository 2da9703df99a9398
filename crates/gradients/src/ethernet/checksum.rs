//! Checksum of IPv4 and UDP (RFC 1071), in software.

/// One's complement sum of RFC 1071, not folded. Words are read in little-endian order, which gives the same sum with its bytes swapped.
#[inline(always)]
pub fn sum(bytes: &[u8]) -> u64 {
    // AVX2 halves the time of a whole frame. For a short one its setup costs more than it saves.
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= 128 && is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { sum_with_avx2(bytes) };
    }
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u128::from(u64::from_le_bytes(*word)));
    let words: u128 = words.sum();
    let halves = |word: u64| (word >> 32) + (word & 0xFFFF_FFFF);
    halves(words as u64) + (words >> 64) as u64 + sum_rest(rest)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_with_avx2(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let words = words.iter().map(|word| u64::from(u32::from_le_bytes(*word)));
    words.sum::<u64>() + sum_rest(rest)
}

/// Sum of fewer than eight bytes.
#[inline(always)]
fn sum_rest(rest: &[u8]) -> u64 {
    let (fours, rest) = rest.as_chunks::<4>();
    let (twos, ones) = rest.as_chunks::<2>();
    let four = fours.first().map_or(0, |four| u32::from_le_bytes(*four));
    let two = twos.first().map_or(0, |two| u16::from_le_bytes(*two));
    let one = ones.first().copied().unwrap_or(0);
    // In the order of the bytes: an odd last byte is the lower half of its word.
    u64::from(four) + u64::from(two) + u64::from(one)
}

/// Folds a [`sum`] to 16 bits. Adding the number to itself with its halves swapped leaves sum and carry in the upper half.
#[inline]
pub fn fold(sum: u64) -> u16 {
    let sum = (sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32;
    (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_standard() {
        let bytes: Vec<u8> = (0..1500).map(|i| (i * 197 + 255) as u8).collect();
        for length in (0..bytes.len()).step_by(if cfg!(miri) { 101 } else { 1 }) {
            let pairs = bytes[..length].chunks(2);
            let plain = pairs.fold(0u32, |sum, pair| {
                let low = pair.get(1).copied().unwrap_or(0);
                sum + u32::from(u16::from_be_bytes([pair[0], low]))
            });
            let plain = (plain >> 16) + (plain & 0xFFFF);
            let plain = (plain >> 16) + (plain & 0xFFFF);
            let ours = fold(sum(&bytes[..length])).swap_bytes();
            assert_eq!(u32::from(ours), plain, "{length} bytes");
        }
        assert_eq!(fold(sum(&[0xFF; 40])), u16::MAX);
    }
}

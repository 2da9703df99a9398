//! What the processor does fast: powers of many numbers at once, and hints about memory, which change the duration of an access, never its
//! result.
//!
//! The C library's `pow` computes powers one by one, which costs as much for a batch of 512
//! priorities as finding their leaves.
//!
//! x^y is 2^(y log2 x): the logarithm by the series of the inverse hyperbolic tangent, the exponential by Taylor's.
//! The code has no branch, so the compiler vectorises it, and no fused multiply-add, so all processors agree.

use std::f64::consts::{LN_2, SQRT_2};

/// Replaces each value, finite and not negative, by its power, with a relative error below 2e-13. 0 stays 0. The power of
/// a positive value is clamped to the positive normal numbers.
pub fn raise(values: &mut [f64], exponent: f64) {
    if exponent == 1.0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { raise_avx2(values, exponent) };
    }
    raise_portable(values, exponent);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn raise_avx2(values: &mut [f64], exponent: f64) {
    raise_portable(values, exponent);
}

#[inline(always)]
fn raise_portable(values: &mut [f64], exponent: f64) {
    for value in values {
        let positive = *value > 0.0;
        let power = exp2(exponent * log2(value.max(f64::MIN_POSITIVE)));
        *value = if positive { power } else { 0.0 };
    }
}

/// Added to a float below 2^51 it leaves the nearest integer in the lowest bits of the significand.
const TO_INTEGER: f64 = 1.5 * (1u64 << 52) as f64;
const SIGNIFICAND_BITS: u32 = f64::MANTISSA_DIGITS - 1;
const ONE: u64 = 1.0f64.to_bits();
/// 1/sqrt(2): significands are taken from here up to twice as much.
const LOWEST: u64 = (SQRT_2 / 2.0).to_bits();

/// 2/ln 2 / (2k + 1).
const LOG2: [f64; 10] = {
    let mut terms = [0.0; 10];
    let mut k = 0;
    while k < terms.len() {
        terms[k] = 2.0 / (LN_2 * (2 * k + 1) as f64);
        k += 1;
    }
    terms
};

/// (ln 2)^k / k!.
const EXP2: [f64; 14] = {
    let mut terms = [1.0; 14];
    let mut k = 1;
    while k < terms.len() {
        terms[k] = terms[k - 1] * LN_2 / k as f64;
        k += 1;
    }
    terms
};

/// The base-2 logarithm of a positive normal number.
#[inline(always)]
fn log2(x: f64) -> f64 {
    // x = significand * 2^exponent; the sum wraps for no positive number.
    let shifted = x.to_bits() + (ONE - LOWEST);
    let biased = shifted >> SIGNIFICAND_BITS;
    let significand = f64::from_bits((shifted & ((1 << SIGNIFICAND_BITS) - 1)) + LOWEST);
    let bias = (ONE >> SIGNIFICAND_BITS) as f64;
    let exponent = f64::from_bits(TO_INTEGER.to_bits() + biased) - TO_INTEGER - bias;
    let s = (significand - 1.0) / (significand + 1.0);
    exponent + s * polynomial(&LOG2, s * s)
}

/// 2 to the power of any number but NaN, clamped to the positive normal numbers.
#[inline(always)]
fn exp2(x: f64) -> f64 {
    let x = x.clamp(-1022.0, 1023.0);
    let shifted = x + TO_INTEGER;
    let power = polynomial(&EXP2, x - (shifted - TO_INTEGER));
    let integer = shifted.to_bits() << SIGNIFICAND_BITS;
    f64::from_bits(power.to_bits().wrapping_add(integer)).clamp(f64::MIN_POSITIVE, f64::MAX)
}

/// A polynomial, with even and odd terms apart: two chains of operations that do not wait for each other.
#[inline(always)]
fn polynomial<const N: usize>(terms: &[f64; N], x: f64) -> f64 {
    const { assert!(N.is_multiple_of(2)) };
    let square = x * x;
    let (mut even, mut odd) = (terms[N - 2], terms[N - 1]);
    for k in (0..N / 2 - 1).rev() {
        even = even * square + terms[2 * k];
        odd = odd * square + terms[2 * k + 1];
    }
    even + odd * x
}

/// Least bytes for huge pages: less memory may contain no aligned one, or not fill it.
pub const HUGE_PAGES_FROM: usize = 4 << 20;

/// Fetches the cache lines of a value ahead of its use, so that the misses of several values overlap.
#[inline(always)]
pub fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(value)).step_by(64) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = std::ptr::from_ref(value).cast::<i8>();
        // SAFETY: a prefetch is a hint and reads nothing; SSE is part of every x86_64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(offset)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Asks the system for pages of 2 MB instead of 4 KB under memory that was just allocated and not touched yet.
/// Random accesses otherwise cost a page-table walk nearly every time. Linux grants the request where
/// `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` (the usual default) or `always`.
pub fn advise_huge_pages<T>(memory: &[T]) {
    let bytes = size_of_val(memory);
    if bytes < HUGE_PAGES_FROM {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4 << 10;
        let start = memory.as_ptr() as usize;
        let first = start.next_multiple_of(PAGE);
        let last = (start + bytes) / PAGE * PAGE;
        // SAFETY: the pages lie within the slice, and the advice does not change what is in them.
        unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
    }
}

/// A slice of `len` values of `make`, on huge pages where it is large.
pub fn filled<T>(len: usize, make: impl FnMut(usize) -> T) -> Box<[T]> {
    let mut values = Vec::with_capacity(len);
    advise_huge_pages(values.spare_capacity_mut());
    values.extend((0..len).map(make));
    values.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn raised(value: f64, exponent: f64) -> f64 {
        let mut values = [value];
        raise(&mut values, exponent);
        values[0]
    }

    proptest! {
        #[test]
        fn agrees_with_the_c_library(value in proptest::num::f64::POSITIVE, exponent in 0.0..4.0f64) {
            let value = value.min(f64::MAX);
            let expected = value.powf(exponent).clamp(f64::MIN_POSITIVE, f64::MAX);
            let got = raised(value, exponent);
            // y log2 x, up to 1022, is rounded twice, to 2^-53 each: 1.6e-13 of the power. Near the limits the two are
            // clamped at different points.
            let relative = if (1e-300..1e300).contains(&expected) { 2e-13 } else { 3.0 };
            prop_assert!((got / expected - 1.0).abs() < relative, "{value}^{exponent}: {got}, not {expected}");
        }

        #[test]
        fn is_the_same_bit_for_bit_with_any_vectors(
            values in vec(0.0..1e9f64, 0..40),
            exponent in 0.0..4.0f64,
        ) {
            let (mut portable, mut one_by_one, mut detected) = (values.clone(), values.clone(), values);
            raise_portable(&mut portable, exponent);
            one_by_one.iter_mut().for_each(|value| raise_portable(std::slice::from_mut(value), exponent));
            raise(&mut detected, exponent);
            prop_assert_eq!(&portable, &one_by_one);
            if exponent != 1.0 {
                prop_assert_eq!(&portable, &detected);
            }
        }
    }

    #[test]
    fn exact_where_it_can_be() {
        for exponent in [0.3, 0.6, 1.0, 2.0] {
            assert_eq!(raised(0.0, exponent), 0.0);
            assert_eq!(raised(-0.0, exponent), 0.0);
            assert_eq!(raised(1.0, exponent), 1.0);
        }
        assert_eq!(raised(0.25, 0.5), 0.5);
        assert_eq!(raised(4.0, 1.5), 8.0);
        assert_eq!(raised(1e300, 1.0), 1e300);
    }

    #[test]
    fn stays_positive_and_finite() {
        let smallest = f64::from_bits(1);
        for (value, exponent) in [(smallest, 4.0), (smallest, 0.5), (1e-300, 4.0)] {
            assert!(raised(value, exponent) > 0.0);
        }
        for (value, exponent) in [(f64::MAX, 4.0), (1e300, 1.03)] {
            let power = raised(value, exponent);
            assert!(power.is_finite() && power > 1e300);
        }
    }
}

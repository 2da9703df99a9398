//! The running sums of 16 children with AVX2 and BMI1, where the processor has them: a node is then read with four loads and
//! searched with four comparisons.

use core::arch::asm;
use core::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_andnot_si256, _mm256_blend_epi32, _mm256_castsi256_pd, _mm256_cmpgt_epi64,
    _mm256_movemask_pd, _mm256_or_si256, _mm256_permute4x64_epi64, _mm256_set1_epi64x, _mm256_setzero_si256,
    _mm256_slli_si256, _mm256_srli_epi64, _mm256_store_si256,
};
use std::mem::MaybeUninit;

use super::node::{ChildSums, GENERATION_BITS, Level, Node};

/// Fan-out of the nodes that [`read`] supports.
pub const FANOUT: usize = 16;

/// Whether [`read`] can be used on this processor.
pub fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi1")
}

/// Running sums of 16 children: in registers for comparisons, in memory for lookups.
pub struct RunningSums {
    vectors: [__m256i; 4],
    lines: Lines,
}

/// The running sums from `FIRST` on, with a 0 before them. No store and no look-up crosses a cache line.
#[repr(align(64))]
struct Lines([MaybeUninit<u64>; FIRST + FANOUT]);

const FIRST: usize = 8;

/// The node's words as they are now. Each word is one that was stored at some time: no processor splits a word that
/// lies within a cache line. They guide a sample; the word of the leaf that it ends at is loaded again as an atomic.
#[target_feature(enable = "avx2")]
#[inline]
fn load<const N: usize>(node: &Node<N>) -> [__m256i; 4] {
    assert_eq!(N, FANOUT);
    let (a, b, c, d): (__m256i, __m256i, __m256i, __m256i);
    // SAFETY: 128 bytes are read from a node of 16 words, aligned to 128. Other threads may change them: an
    // instruction may read what a vector of atomics, which Rust does not have, could.
    unsafe {
        asm!(
            "vmovdqa {a}, [{words}]",
            "vmovdqa {b}, [{words} + 32]",
            "vmovdqa {c}, [{words} + 64]",
            "vmovdqa {d}, [{words} + 96]",
            words = in(reg) node,
            a = out(ymm_reg) a,
            b = out(ymm_reg) b,
            c = out(ymm_reg) c,
            d = lateout(ymm_reg) d,
            options(nostack, preserves_flags, readonly),
        );
    }
    [a, b, c, d]
}

/// Result of [`Node::read`] for a node of 16.
#[target_feature(enable = "avx2")]
#[inline]
pub fn read<const N: usize>(node: &Node<N>, level: Level) -> RunningSums {
    let zero = _mm256_setzero_si256();
    let mut vectors = load(node);
    match level {
        Level::Leaves => {
            vectors = vectors.map(|words| _mm256_srli_epi64::<{ GENERATION_BITS as i32 }>(words));
        }
        Level::Sums => {
            let [a, b, c, d] = vectors;
            let signs = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            if _mm256_movemask_pd(_mm256_castsi256_pd(signs)) != 0 {
                let no_less_than_0 = |words| _mm256_andnot_si256(_mm256_cmpgt_epi64(zero, words), words);
                vectors = vectors.map(no_less_than_0);
            }
        }
    }
    // Within each vector: neighbours, then the lower pair added to the upper one.
    vectors = vectors.map(|words| {
        let pairs = _mm256_add_epi64(words, _mm256_slli_si256::<8>(words));
        let lower = _mm256_permute4x64_epi64::<0b01_01_00_00>(pairs);
        _mm256_add_epi64(pairs, _mm256_blend_epi32::<0b1111_0000>(zero, lower))
    });
    let mut before = zero;
    let mut lines = Lines([MaybeUninit::uninit(); FIRST + FANOUT]);
    lines.0[FIRST - 1].write(0);
    for (part, vector) in vectors.iter_mut().enumerate() {
        let total = _mm256_permute4x64_epi64::<0b11_11_11_11>(*vector);
        *vector = _mm256_add_epi64(*vector, before);
        before = _mm256_add_epi64(before, total);
        let part_sums: &mut [_; 4] =
            lines.0[FIRST..].as_chunks_mut().0[part..].first_mut().expect("16 sums are four times four");
        // SAFETY: 32 bytes at a multiple of 32 from an address aligned to 64.
        unsafe { _mm256_store_si256(part_sums.as_mut_ptr().cast(), *vector) };
    }
    RunningSums { vectors, lines }
}

impl RunningSums {
    /// The running sum of the children before `child`, of all for [`FANOUT`].
    #[inline(always)]
    fn before(&self, child: usize) -> u64 {
        // SAFETY: `read` has written them, from the 0 on.
        unsafe { self.lines.0[FIRST - 1 + child].assume_init() }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn first_beyond(&self, position: u64) -> usize {
        let position = _mm256_set1_epi64x(position as i64);
        let beyond = self.vectors.map(|sums| {
            let greater = _mm256_cmpgt_epi64(sums, position);
            _mm256_movemask_pd(_mm256_castsi256_pd(greater)) as u32
        });
        let [a, b, c, d] = beyond;
        let last = 1 << (FANOUT - 1);
        (a | b << 4 | c << 8 | d << 12 | last).trailing_zeros() as usize
    }
}

impl ChildSums for RunningSums {
    #[inline(always)]
    fn sum(&self) -> u64 {
        self.before(FANOUT)
    }

    #[inline(always)]
    fn find(&self, position: u64) -> (usize, u64, u64) {
        // SAFETY: only `read` makes this value, and its callers have AVX2.
        let child = unsafe { self.first_beyond(position) };
        let before = self.before(child);
        (child, position - before, self.before(child + 1) - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;
    use proptest::prelude::*;

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "a node is read by assembly")]
        fn agrees_with_the_portable_form(
            words in prop::array::uniform16(prop_oneof![Just(0), 0..1000u64, (-50..0i64).prop_map(|n| n as u64), 0..1u64 << 58]),
            fractions in prop::collection::vec(0.0..1.0f64, 8),
            leaves: bool,
        ) {
            prop_assume!(is_available());
            let level = if leaves { Level::Leaves } else { Level::Sums };
            let node = Node { words: words.map(AtomicU64::new) };
            // SAFETY: the processor has AVX2.
            let vector = unsafe { read(&node, level) };
            let portable = node.read(level);
            prop_assert_eq!(vector.sum(), portable.sum());
            let inside = fractions.iter().map(|f| (f * portable.sum() as f64) as u64);
            for position in inside.chain([0, portable.sum().saturating_sub(1)]) {
                if position < portable.sum() {
                    prop_assert_eq!(vector.find(position), ChildSums::find(&portable, position));
                }
            }
        }
    }
}

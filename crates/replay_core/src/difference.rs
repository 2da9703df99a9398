//! Differences: the bytes that changed from one value, the base, to another of the same size.
//!
//! Frames of one stream differ in few places: a ball, a paddle, a digit. On Breakout a difference has 23 % of an LZ4
//! block's bytes, is made in half the time and applied in a quarter of it (`docs/explanation/decisions.md`). It is a list
//! of runs:
//!
//! ```text
//!   skip     LEB128   bytes from the end of the last run that equal the base's
//!   count    LEB128   bytes that differ
//!   bytes    count
//! ```
//!
//! After the last run, value and base are equal. The difference of equal values is empty.

use std::ops::Range;

/// Bytes compared at a time: a cache line.
const BLOCK: usize = 64;

/// Longest gap of equal bytes between two joined runs: another run's two lengths take at least as many.
const BRIDGE: usize = 2;

/// Bytes copied for a short run: one vector register.
const SHORT: usize = 16;

/// Writes the difference of `value` to `base` into `out`, and returns its length; `None` when it does not fit.
///
/// # Panics
/// When `base` and `value` are of different sizes.
pub fn encode(base: &[u8], value: &[u8], out: &mut [u8]) -> Option<usize> {
    assert_eq!(base.len(), value.len(), "a base is of the value's size");
    let mut runs = Runs { value, out, written: 0, covered: 0, open: 0..0 };
    let (base_blocks, base_rest) = base.as_chunks::<BLOCK>();
    let (blocks, rest) = value.as_chunks::<BLOCK>();
    for (number, (base, block)) in base_blocks.iter().zip(blocks).enumerate() {
        if differ(base, block) {
            let mut changed = changed_bytes(base, block);
            while changed != 0 {
                let from = changed.trailing_zeros();
                let count = (changed >> from).trailing_ones();
                let start = number * BLOCK + from as usize;
                runs.add(start..start + count as usize)?;
                // In two shifts: one of all 64 bits would overflow.
                changed &= u64::MAX << (from + count - 1) << 1;
            }
        }
    }
    let rest_at = value.len() - rest.len();
    for (index, _) in (rest_at..).zip(base_rest.iter().zip(rest)).filter(|(_, (base, byte))| base != byte) {
        runs.add(index..index + 1)?;
    }
    runs.close()?;
    Some(runs.written)
}

/// A base, and a copy to which one difference at a time is applied. Before the next one, only the changed runs are restored.
#[derive(Clone, Default)]
pub struct Patched {
    base: Vec<u8>,
    value: Vec<u8>,
    /// Runs in which `value` may differ from the base.
    changed: Vec<Range<usize>>,
}

impl Patched {
    /// Sets a base of `bytes` bytes, which `fill` writes; after an error of `fill` it is unspecified.
    pub fn set_base<E>(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        self.base.resize(bytes, 0);
        let filled = fill(&mut self.base);
        self.value.clone_from(&self.base);
        self.changed.clear();
        filled
    }

    pub fn base(&self) -> &[u8] {
        &self.base
    }

    /// The base with a difference applied. The error says that the difference ends within a run, or beyond the value.
    pub fn apply(&mut self, mut difference: &[u8]) -> Result<&[u8], &'static str> {
        const BEYOND: &str = "a difference reaches beyond its value";
        const CUT: &str = "a difference ends within a run";
        self.restore_base();
        let mut end = 0;
        while !difference.is_empty() {
            let skip = read_length(&mut difference).ok_or(CUT)?;
            let count = read_length(&mut difference).ok_or(CUT)?;
            let (bytes, later) = difference.split_at_checked(count).ok_or(CUT)?;
            let run = end + skip..end + skip + count;
            if run.end > self.value.len() {
                return Err(BEYOND);
            }
            end = run.end;
            self.changed.push(run.clone());
            match (difference.first_chunk::<SHORT>(), self.base[end..].first_chunk::<SHORT>()) {
                (Some(start), Some(after)) if count <= SHORT => {
                    // Most runs are a few bytes: two copies of a register's width are faster than a loop. The second one
                    // repairs the bytes that the first wrote beyond the run.
                    self.value[run.start..][..SHORT].copy_from_slice(start);
                    self.value[end..][..SHORT].copy_from_slice(after);
                }
                _ => self.value[run].copy_from_slice(bytes),
            }
            difference = later;
        }
        Ok(&self.value)
    }

    fn restore_base(&mut self) {
        for run in self.changed.drain(..) {
            match self.base[run.start..].first_chunk::<SHORT>() {
                // A short run is followed by the base, or by another run that is restored.
                Some(base) if run.len() <= SHORT => {
                    self.value[run.start..][..SHORT].copy_from_slice(base);
                }
                _ => self.value[run.clone()].copy_from_slice(&self.base[run]),
            }
        }
    }
}

/// Runs of a difference that is being written. The newest run stays open, since the next may be near enough to join it.
struct Runs<'a> {
    value: &'a [u8],
    out: &'a mut [u8],
    written: usize,
    /// End of the last written run.
    covered: usize,
    open: Range<usize>,
}

impl Runs<'_> {
    #[inline]
    fn add(&mut self, run: Range<usize>) -> Option<()> {
        if self.open.is_empty() {
            self.open = run;
        } else if run.start <= self.open.end + BRIDGE {
            self.open.end = run.end;
        } else {
            self.close()?;
            self.open = run;
        }
        Some(())
    }

    #[inline]
    fn close(&mut self) -> Option<()> {
        if self.open.is_empty() {
            return Some(());
        }
        let Range { start, end } = self.open.clone();
        self.write_length(start - self.covered)?;
        self.write_length(end - start)?;
        let out = &mut self.out[self.written..];
        let count = end - start;
        match (self.value.get(start..start + SHORT), out.get_mut(..SHORT)) {
            (Some(from), Some(to)) if count <= SHORT => to.copy_from_slice(from),
            _ => out.get_mut(..count)?.copy_from_slice(&self.value[start..end]),
        }
        self.written += count;
        self.covered = end;
        Some(())
    }

    #[inline]
    fn write_length(&mut self, mut length: usize) -> Option<()> {
        while length >= 0x80 {
            self.write_byte(length as u8 | 0x80)?;
            length >>= 7;
        }
        self.write_byte(length as u8)
    }

    fn write_byte(&mut self, byte: u8) -> Option<()> {
        *self.out.get_mut(self.written)? = byte;
        self.written += 1;
        Some(())
    }
}

/// Whether any byte differs. The compiler vectorises this form, and not `base != block`.
fn differ(base: &[u8; BLOCK], block: &[u8; BLOCK]) -> bool {
    let mut any = [0; 16];
    for from in (0..BLOCK).step_by(16) {
        for (lane, any) in any.iter_mut().enumerate() {
            *any |= base[from + lane] ^ block[from + lane];
        }
    }
    u128::from_ne_bytes(any) != 0
}

/// A bit set for each byte that differs, the lowest for the first byte.
fn changed_bytes(base: &[u8; BLOCK], block: &[u8; BLOCK]) -> u64 {
    const LOW: u64 = u64::from_ne_bytes([0x7f; 8]);
    /// Gathers the lowest bits of eight bytes in the highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let word = |bytes: &[u8; BLOCK], at| u64::from_le_bytes(bytes.as_chunks::<8>().0[at]);
    let mut bits = 0;
    for at in 0..BLOCK / 8 {
        let change = word(base, at) ^ word(block, at);
        // Sets the highest bit of each byte that is not zero.
        let marks = (((change & LOW) + LOW) | change) & !LOW;
        bits |= ((marks >> 7).wrapping_mul(GATHER) >> 56) << (8 * at);
    }
    bits
}

fn read_length(from: &mut &[u8]) -> Option<usize> {
    let mut length = 0;
    // Four times seven bits: a column has at most 2^28 bytes.
    for shift in [0, 7, 14, 21] {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        length |= usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(length);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn difference(base: &[u8], value: &[u8]) -> Vec<u8> {
        let mut out = vec![0; 2 * value.len() + 8];
        let length = encode(base, value, &mut out).expect("twice the value's size is enough");
        out.truncate(length);
        out
    }

    fn patched(base: &[u8]) -> Patched {
        let mut patched = Patched::default();
        let fill = |out: &mut [u8]| -> Result<(), ()> {
            out.copy_from_slice(base);
            Ok(())
        };
        patched.set_base(base.len(), fill).unwrap();
        patched
    }

    fn applied(base: &[u8], difference: &[u8]) -> Vec<u8> {
        patched(base).apply(difference).unwrap().to_vec()
    }

    #[test]
    fn equal_values_have_the_empty_difference() {
        assert!(difference(&[5; 300], &[5; 300]).is_empty());
        assert_eq!(applied(&[5; 300], &[]), [5; 300]);
        assert!(difference(&[], &[]).is_empty());
    }

    #[test]
    fn runs_are_as_documented() {
        let mut value = [0; 400];
        value[3] = 7;
        value[6] = 8;
        value[300..].fill(9);
        let mut expected = vec![3, 4, 7, 0, 0, 8, 0x80 | 37, 2, 100];
        expected.extend([9; 100]);
        // 300 - 7 = 293 = 37 + 2 * 128
        assert_eq!(difference(&[0; 400], &value), expected);
        assert_eq!(applied(&[0; 400], &expected), value);
    }

    #[test]
    fn a_difference_that_does_not_fit_is_none() {
        let value: Vec<u8> = (0..200).map(|i| u8::from(i % 10 == 0)).collect();
        let whole = difference(&[0; 200], &value);
        for room in 0..whole.len() {
            assert_eq!(encode(&[0; 200], &value, &mut vec![0; room]), None, "{room}");
        }
        assert!(encode(&[0; 200], &value, &mut vec![0; whole.len()]).is_some());
    }

    #[test]
    fn what_is_no_difference_is_refused() {
        let refused = |difference: &[u8]| patched(&[0; 10]).apply(difference).unwrap_err();
        assert!(refused(&[1]).contains("within"));
        assert!(refused(&[0x80]).contains("within"));
        assert!(refused(&[1, 2, 3]).contains("within"));
        assert!(refused(&[0xff, 0xff, 0xff, 0xff, 1, 0]).contains("within"));
        assert!(refused(&[11, 0]).contains("beyond"));
        assert!(refused(&[9, 2, 1, 1]).contains("beyond"));
        assert!(refused(&[5, 5, 1, 1, 1, 1, 1, 1, 0]).contains("beyond"));
    }

    proptest! {
        #[test]
        fn whatever_changed_comes_back(
            base in proptest::collection::vec(any::<u8>(), 0..700),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 1..90usize, any::<u8>()), 0..12),
        ) {
            let mut patched = patched(&base);
            let mut value = base.clone();
            for (at, count, byte) in changes {
                if !value.is_empty() {
                    let start = at.index(value.len());
                    let end = value.len().min(start + count);
                    value[start..end].fill(byte);
                }
                prop_assert_eq!(patched.apply(&difference(&base, &value)), Ok(value.as_slice()));
            }
        }

        #[test]
        fn any_bytes_are_applied_or_refused(
            bytes in proptest::collection::vec(prop_oneof![3 => 0u8..9, 1 => any::<u8>()], 0..60),
            size in 0usize..100,
        ) {
            let base = vec![7; size];
            let mut patched = patched(&base);
            let _ = patched.apply(&bytes);
            prop_assert_eq!(patched.apply(&[]), Ok(base.as_slice()));
        }
    }
}

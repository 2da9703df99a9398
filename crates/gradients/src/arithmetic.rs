//! Number formats of sums: float32, added up in the order of arrival, or block-floating fixed point, whose sums do not depend on the order.
//!
//! In fixed point each segment is a block with one exponent. A first round finds the exponent of the largest value of all workers. Then
//! each worker scales its values by it to integers, small enough that their sum fits 32 bits. Maxima and integer sums have the same bits in
//! every order and over every tree of aggregators.

use zerocopy::IntoBytes;

use super::packet::PacketKind;

/// Number format of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arithmetic {
    /// float32, in the order of arrival.
    #[default]
    Float,
    /// Block-floating fixed point: the same bits in every order. A value has 31 bits, less the bits of the number of workers.
    Fixed,
}

impl Arithmetic {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::Float => "float32",
            Arithmetic::Fixed => "fixed",
        }
    }

    /// Whether contributions of `kind` are in this format.
    pub fn has(self, kind: PacketKind) -> bool {
        match self {
            Arithmetic::Float => kind == PacketKind::Float,
            Arithmetic::Fixed => matches!(kind, PacketKind::Fixed | PacketKind::Exponents),
        }
    }
}

/// Adds a contribution of `kind` to a sum of the same length.
#[inline]
pub fn add(kind: PacketKind, sum: &mut [u8], contribution: &[u8]) {
    match kind {
        PacketKind::Fixed => wide::add_integers(sum, contribution),
        PacketKind::Exponents => {
            for (sum, new) in sum.iter_mut().zip(contribution) {
                *sum = (*sum).max(*new);
            }
        }
        _ => wide::add_floats(sum, contribution),
    }
}

/// Loops over whole segments, compiled twice: for every processor, and for those with AVX2, which need half as many iterations. Short segments
/// skip the test for AVX2, which would take longer than it saves.
mod wide {
    macro_rules! compiled_twice {
        (pub fn $name:ident($first:ident: $slice:ty $(, $argument:ident: $type:ty)*) $(-> $result:ty)? $body:block) => {
            #[inline]
            pub fn $name($first: $slice $(, $argument: $type)*) $(-> $result)? {
                #[inline(always)]
                fn everywhere($first: $slice $(, $argument: $type)*) $(-> $result)? $body
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2")]
                    fn with_avx2($first: $slice $(, $argument: $type)*) $(-> $result)? {
                        everywhere($first $(, $argument)*)
                    }
                    if $first.len() >= 64 && is_x86_feature_detected!("avx2") {
                        // SAFETY: the processor has AVX2.
                        return unsafe { with_avx2($first $(, $argument)*) };
                    }
                }
                everywhere($first $(, $argument)*)
            }
        };
    }

    compiled_twice! {
        pub fn add_floats(sum: &mut [u8], contribution: &[u8]) {
            let sums = sum.as_chunks_mut::<4>().0.iter_mut();
            for (sum, new) in sums.zip(contribution.as_chunks::<4>().0) {
                *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*new)).to_le_bytes();
            }
        }
    }
    compiled_twice! {
        pub fn add_integers(sum: &mut [u8], contribution: &[u8]) {
            let sums = sum.as_chunks_mut::<4>().0.iter_mut();
            for (sum, new) in sums.zip(contribution.as_chunks::<4>().0) {
                *sum = i32::from_le_bytes(*sum).wrapping_add(i32::from_le_bytes(*new)).to_le_bytes();
            }
        }
    }
    compiled_twice! {
        pub fn largest_magnitude(values: &[f32]) -> u32 {
            values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7FFF_FFFF))
        }
    }
    compiled_twice! {
        pub fn to_integers(values: &[f32], unit: f64, body: &mut [u8]) {
            // Added to a float64 of magnitude below 2^51, it leaves the nearest integer, ties to even, in the lowest bits.
            const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
            for (bytes, value) in body.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                let units = f64::from(*value) * unit;
                // Saturated, so a value beyond the agreed exponent does not overflow. The sum of a block with NaN is never read.
                let units = units.clamp(i32::MIN.into(), i32::MAX.into());
                *bytes = ((units + ROUND).to_bits() as u32).to_le_bytes();
            }
        }
    }
    compiled_twice! {
        pub fn from_integers(body: &[u8], unit: f64, values: &mut [f32]) {
            for (value, bytes) in values.iter_mut().zip(body.as_chunks::<4>().0) {
                *value = (f64::from(i32::from_le_bytes(*bytes)) * unit) as f32;
            }
        }
    }
}

const _: () = assert!(
    cfg!(target_endian = "little"),
    "float32 values are sent as they lie in memory, and the wire is little endian"
);

/// float32 values in the byte order of the wire.
pub fn bytes_of(values: &[f32]) -> &[u8] {
    values.as_bytes()
}

/// Reads float32 values.
pub fn read_floats(body: &[u8], values: &mut [f32]) {
    values.as_mut_bytes().copy_from_slice(body);
}

/// Divides a sum by the number of its workers.
pub fn divide(values: &mut [f32], workers: u32) {
    // The inverse of a power of two is exact, and multiplication is faster.
    if workers.is_power_of_two() {
        let inverse = (workers as f32).recip();
        values.iter_mut().for_each(|value| *value *= inverse);
    } else {
        values.iter_mut().for_each(|value| *value /= workers as f32);
    }
}

/// Exponent of a block with an infinity or NaN. All values of its sum are NaN.
const NOT_FINITE: u8 = 255;

/// Exponent of the largest magnitude, biased as in float32: all values are below 2^(exponent - 126).
pub fn exponent(values: &[f32]) -> u8 {
    (wide::largest_magnitude(values) >> 23) as u8
}

/// Fixed-point grid of a block.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// The value 1.0 is 2^scale units; `None` for a block with an infinity or NaN.
    scale: Option<i32>,
}

impl Grid {
    /// Grid for values below 2^(exponent - 126), summed over `workers`.
    pub fn new(exponent: u8, workers: u32) -> Self {
        let sum_bits = workers.max(1).next_power_of_two().ilog2() as i32;
        Grid { scale: (exponent != NOT_FINITE).then(|| 30 - sum_bits + 126 - i32::from(exponent)) }
    }

    /// Replaces `body` by the values as integers, rounded to nearest, ties to even.
    pub fn write(self, values: &[f32], body: &mut Vec<u8>) {
        body.resize(4 * values.len(), 0);
        wide::to_integers(values, self.scale.map_or(0.0, power_of_two), body);
    }

    /// Reads sums of such integers.
    pub fn read(self, body: &[u8], values: &mut [f32]) {
        match self.scale {
            Some(scale) => wide::from_integers(body, power_of_two(-scale), values),
            None => values.fill(f32::NAN),
        }
    }
}

/// 2^power, within the range of normal float64 numbers.
fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((1023 + power) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed_sum(vectors: &[Vec<f32>]) -> Vec<f32> {
        let largest = vectors.iter().map(|v| exponent(v)).max().unwrap();
        let grid = Grid::new(largest, vectors.len() as u32);
        let mut sum = vec![0; 4 * vectors[0].len()];
        for vector in vectors {
            let mut body = Vec::new();
            grid.write(vector, &mut body);
            add(PacketKind::Fixed, &mut sum, &body);
        }
        let mut read = vec![0.0; vectors[0].len()];
        grid.read(&sum, &mut read);
        read
    }

    #[test]
    fn the_grid_keeps_the_largest_values_of_all_workers_within_range() {
        for workers in [1, 2, 3, 64] {
            for largest in [f32::MAX / 64.0, 1.0, 1.999_999_9, f32::MIN_POSITIVE, 1e-30] {
                let sum = fixed_sum(&vec![vec![largest, -largest, largest / 4.0]; workers]);
                for (sum, one) in sum.iter().zip([largest, -largest, largest / 4.0]) {
                    let exact = one as f64 * workers as f64;
                    let error = (f64::from(*sum) - exact).abs();
                    // float32 has 24 bits, the grid 24 or more of the largest.
                    assert!(error <= f64::from(largest) * workers as f64 * 2f64.powi(-23), "{workers} x {one}: {sum}");
                }
            }
        }
    }

    #[test]
    fn integers_are_rounded_to_nearest_and_saturate() {
        let unit = Grid { scale: Some(0) };
        let fractions = [0.5, 1.5, -0.5, -2.5, 2.5001, -7.0, 0.499_999_97];
        let large = [16_777_215.0, 2_147_483_500.0, 3e9, -3e9, f32::MAX, f32::MIN];
        let all = [fractions.as_slice(), &large].concat();
        // Short and long: the code for every processor, and the one for this processor.
        for values in [all.clone(), all.repeat(8)] {
            let (mut body, mut read) = (Vec::new(), vec![0.0; values.len()]);
            unit.write(&values, &mut body);
            unit.read(&body, &mut read);
            let nearest = |&value: &f32| f64::from(value).round_ties_even() as i32 as f32;
            assert_eq!(read, values.iter().map(nearest).collect::<Vec<_>>());
        }
    }

    #[test]
    fn zeros_stay_zero_and_infinities_become_nan() {
        assert_eq!(fixed_sum(&[vec![0.0; 3], vec![-0.0; 3]]), [0.0; 3]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let sum = fixed_sum(&[vec![1.0, bad], vec![1.0, 2.0]]);
            assert!(sum.iter().all(|value| value.is_nan()), "{sum:?}");
        }
    }

    #[test]
    fn each_kind_adds_in_its_own_way() {
        let mut sum = 1.5f32.to_le_bytes();
        add(PacketKind::Float, &mut sum, &2.25f32.to_le_bytes());
        assert_eq!(f32::from_le_bytes(sum), 3.75);
        let mut sum = (-7i32).to_le_bytes();
        add(PacketKind::Fixed, &mut sum, &300i32.to_le_bytes());
        assert_eq!(i32::from_le_bytes(sum), 293);
        let mut sum = [1, 200, 3, 0];
        add(PacketKind::Exponents, &mut sum, &[2, 100, 3, 255]);
        assert_eq!(sum, [2, 200, 3, 255]);
    }
}

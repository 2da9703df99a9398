//! Element types of columns, and their numbers: NaN and infinity.

use half::f16;
use serde::{Deserialize, Serialize};

/// Defines [`Dtype`] from a table: variant, name, NumPy's letter for its kind, Rust's type and its conversion to float64.
macro_rules! dtypes {
    ($($variant:ident $name:literal $kind:literal $type:ty => $to_f64:expr;)+) => {
        /// Element type of a column, in NumPy's names. A bool is one byte, 0 or 1.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Dtype {
            $($variant),+
        }

        impl Dtype {
            pub const ALL: &[Dtype] = &[$(Dtype::$variant),+];

            /// NumPy's letter for the kind: `b`ool, `u`nsigned or signed `i`nteger, `f`loat.
            pub const fn kind(self) -> u8 {
                match self {
                    $(Dtype::$variant => $kind),+
                }
            }

            /// Size of one element in bytes.
            pub const fn bytes(self) -> usize {
                match self {
                    $(Dtype::$variant => size_of::<$type>()),+
                }
            }

            /// Whether elements are floats, which may be NaN or infinite.
            pub const fn is_float(self) -> bool {
                self.kind() == b'f'
            }

            /// Reads one element, little endian, as the nearest float64.
            ///
            /// # Panics
            /// When `element` has another size than [`Self::bytes`].
            pub fn read(self, element: &[u8]) -> f64 {
                const SIZE: &str = "the size of the type";
                match self {
                    $(Dtype::$variant => {
                        $to_f64(<$type>::from_le_bytes(element.try_into().expect(SIZE)))
                    })+
                }
            }

            /// NumPy's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name),+
                }
            }
        }
    };
}

dtypes! {
    Bool "bool" b'b' u8 => |byte| f64::from(u8::from(byte != 0));
    Uint8 "uint8" b'u' u8 => f64::from;
    Int8 "int8" b'i' i8 => f64::from;
    Uint16 "uint16" b'u' u16 => f64::from;
    Int16 "int16" b'i' i16 => f64::from;
    Uint32 "uint32" b'u' u32 => f64::from;
    Int32 "int32" b'i' i32 => f64::from;
    Uint64 "uint64" b'u' u64 => |integer: u64| integer as f64;
    Int64 "int64" b'i' i64 => |integer: i64| integer as f64;
    Float16 "float16" b'f' f16 => f16::to_f64;
    Float32 "float32" b'f' f32 => f64::from;
    Float64 "float64" b'f' f64 => |number| number;
}

/// Whether every element is finite. NaN and infinity have all bits of the exponent set (IEEE 754), so adding one to the exponent
/// carries into the sign bit. The loop has no branch, so the compiler vectorizes it.
macro_rules! all_finite {
    ($bits:ty, $infinity:expr, $bytes:expr) => {{
        const EXPONENT: $bits = $infinity.to_bits();
        const ONE: $bits = EXPONENT & EXPONENT.wrapping_neg();
        let (elements, _) = $bytes.as_chunks();
        let carries = elements
            .iter()
            .fold(0, |carries, &element| carries | (<$bits>::from_le_bytes(element) & EXPONENT).wrapping_add(ONE));
        carries >> (<$bits>::BITS - 1) == 0
    }};
}

/// Index and value of the first element that is NaN or infinite.
pub(crate) fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f64)> {
    let finite = match dtype {
        Dtype::Float16 => all_finite!(u16, f16::INFINITY, bytes),
        Dtype::Float32 => all_finite!(u32, f32::INFINITY, bytes),
        Dtype::Float64 => all_finite!(u64, f64::INFINITY, bytes),
        _ => true,
    };
    if finite {
        return None;
    }
    let elements = bytes.chunks_exact(dtype.bytes());
    let mut numbers = elements.map(|element| dtype.read(element)).enumerate();
    numbers.find(|(_, number)| !number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of each dtype at each place of arrays as short and as long as vector instructions are wide.
    #[test]
    fn the_first_of_any_place_is_found() {
        let encode = |dtype, number: f64| match dtype {
            Dtype::Float16 => f16::from_f64(number).to_le_bytes().to_vec(),
            Dtype::Float32 => (number as f32).to_le_bytes().to_vec(),
            _ => number.to_le_bytes().to_vec(),
        };
        let largest = |dtype| match dtype {
            Dtype::Float16 => f16::MAX.to_f64(),
            Dtype::Float32 => f64::from(f32::MAX),
            _ => f64::MAX,
        };
        for dtype in [Dtype::Float16, Dtype::Float32, Dtype::Float64] {
            let good = [0.0, -0.0, 1.0, -1.5, 1e-7, largest(dtype), -largest(dtype)];
            for len in [0, 1, 3, 8, if cfg!(miri) { 17 } else { 67 }] {
                let numbers: Vec<f64> = good.iter().copied().cycle().take(len).collect();
                let bytes = |numbers: &[f64]| -> Vec<u8> { numbers.iter().flat_map(|&n| encode(dtype, n)).collect() };
                assert_eq!(first_not_finite(dtype, &bytes(&numbers)), None);
                for place in 0..len {
                    for bad in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                        let mut numbers = numbers.clone();
                        numbers[place] = bad;
                        numbers[len - 1] = if place == len - 1 { bad } else { f64::NAN };
                        let (found, number) = first_not_finite(dtype, &bytes(&numbers)).expect("one is not finite");
                        assert_eq!(found, place, "{dtype:?} {bad} among {len}");
                        assert!(number == bad || (number.is_nan() && bad.is_nan()));
                    }
                }
            }
        }
    }

    #[test]
    fn integers_are_finite() {
        let ones = [0xff; 16];
        for dtype in [Dtype::Uint8, Dtype::Int32, Dtype::Int64, Dtype::Bool] {
            assert_eq!(first_not_finite(dtype, &ones), None);
        }
    }
}

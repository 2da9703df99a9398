//! Values of a column: their element types, and the codecs that pack them, each by itself. Differences between values are in
//! [`crate::difference`].
//!
//! To add a codec, add a variant of [`Codec`]; the compiler reports the matches to extend here.

use std::cell::RefCell;

use half::f16;
use serde::{Deserialize, Serialize};
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx};

/// zstd's own default. Level 1 packs a Breakout frame 5 % faster into 2 % more bytes; level 5 saves 8 % and takes twice
/// the time.
const ZSTD_LEVEL: i32 = 3;

thread_local! {
    // Contexts are reused from value to value: 150 and 100 KB per thread that meets a column of this codec.
    static ZSTD_PACKER: RefCell<CCtx<'static>> = RefCell::new({
        let mut zstd = CCtx::create();
        zstd.set_parameter(CParameter::CompressionLevel(ZSTD_LEVEL))
            .expect("zstd has this level");
        zstd
    });
    static ZSTD_UNPACKER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// How the values of a column are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Raw, inside the row.
    None,
    /// A blob beside the row: an LZ4 block, or a difference from the key row.
    Lz4,
    /// A blob beside the row: a zstd frame, or a difference from the key row.
    Zstd,
}

impl Codec {
    /// The name in TOML and Python.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
        }
    }

    /// Whether values of a fixed size are blobs beside the rows; otherwise they are raw inside them.
    pub const fn makes_blobs(self) -> bool {
        match self {
            Codec::None => false,
            Codec::Lz4 | Codec::Zstd => true,
        }
    }

    /// Packs a value into `out`, at least as long, and returns the length of the blob; `None` if the value is its own blob.
    pub fn pack(self, value: &[u8], out: &mut [u8]) -> Option<usize> {
        if self == Codec::None {
            return None;
        }
        let out = &mut out[..value.len()];
        let packed = match self {
            Codec::None => None,
            // Fails if the block does not fit.
            Codec::Lz4 => lz4::block::compress_to_buffer(value, None, false, out).ok(),
            Codec::Zstd => ZSTD_PACKER.with_borrow_mut(|zstd| zstd.compress2(out, value).ok()),
        };
        packed.filter(|&length| length < value.len())
    }

    /// Unpacks a blob, which is untrusted, into `out`, which has the size of the value. The error is the reason why it is no such value.
    pub fn unpack(self, blob: &[u8], out: &mut [u8]) -> Result<(), String> {
        if blob.len() == out.len() {
            out.copy_from_slice(blob);
            return Ok(());
        }
        if blob.len() > out.len() {
            return Err(format!("a blob of {} bytes for a value of {}", blob.len(), out.len()));
        }
        let written = match self {
            Codec::None => Err("raw values are not packed".to_owned()),
            // A column has at most 2^28 bytes.
            Codec::Lz4 => {
                lz4::block::decompress_to_buffer(blob, Some(out.len() as i32), out).map_err(|error| error.to_string())
            }
            // A single call allocates no window, however large the frame declares it.
            Codec::Zstd => ZSTD_UNPACKER
                .with_borrow_mut(|zstd| zstd.decompress(out, blob))
                .map_err(|code| zstd_safe::get_error_name(code).to_owned()),
        };
        match written {
            Ok(written) if written == out.len() => Ok(()),
            Ok(written) => Err(format!("its {} blob unpacks to {written} bytes instead of {}", self.name(), out.len())),
            Err(reason) => Err(format!("its {} blob does not unpack: {reason}", self.name())),
        }
    }
}

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
    use proptest::collection::vec;
    use proptest::prelude::*;

    use base::system::random;

    use super::*;

    const BLOB_CODECS: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

    /// The blob of a value: packed, or the value itself.
    fn blob(codec: Codec, value: &[u8]) -> Vec<u8> {
        let mut out = vec![0; value.len()];
        match codec.pack(value, &mut out) {
            Some(length) => out[..length].to_vec(),
            None => value.to_vec(),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn a_value_that_does_not_shrink_is_its_own_blob() {
        let noise: [u8; 500] = random();
        for codec in BLOB_CODECS {
            assert_eq!(codec.pack(&noise, &mut vec![0; 600]), None);
            assert_eq!(codec.pack(&[7], &mut [0]), None);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn damaged_blobs_are_refused() {
        let value = [3; 1000];
        for codec in BLOB_CODECS {
            let whole = blob(codec, &value);
            assert!(whole.len() < 50);
            let refused = |blob: &[u8], bytes| codec.unpack(blob, &mut vec![0; bytes]).unwrap_err();
            assert!(refused(&whole[..whole.len() - 1], 1000).contains(codec.name()));
            assert!(refused(&whole, 999).contains(codec.name()));
            assert!(refused(&whole, 1001).contains("instead of 1001"));
            assert!(refused(&[0xf0; 40], 1000).contains("does not unpack"));
            assert!(refused(&value, 999).contains("a blob of 1000 bytes"));
        }
        assert!(Codec::None.unpack(&[1], &mut [0; 2]).is_err());
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
        fn values_come_back(runs in vec((any::<u8>(), 1..300usize), 1..60), noise in vec(any::<u8>(), 0..300)) {
            let mut value: Vec<u8> = runs.iter().flat_map(|&(byte, count)| vec![byte; count]).collect();
            value.extend(noise);
            for codec in BLOB_CODECS {
                let blob = blob(codec, &value);
                prop_assert!(blob.len() <= value.len());
                let mut out = vec![0xaa; value.len()];
                prop_assert_eq!(codec.unpack(&blob, &mut out), Ok(()));
                prop_assert_eq!(&out, &value);
            }
        }

        #[test]
        #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
        fn any_bytes_are_unpacked_or_refused(
            damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            bytes in vec(any::<u8>(), 0..100),
            size in 0..3000usize,
        ) {
            let value: Vec<u8> = (0..2000u32).map(|i| (i / 7 * i / 100) as u8).collect();
            for codec in BLOB_CODECS {
                let mut damaged = blob(codec, &value);
                for (at, byte) in &damage {
                    let at = at.index(damaged.len());
                    damaged[at] = *byte;
                }
                for blob in [&damaged, &bytes] {
                    let _ = codec.unpack(blob, &mut vec![0; size]);
                    let _ = codec.unpack(blob, &mut vec![0; value.len()]);
                }
            }
        }
    }

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

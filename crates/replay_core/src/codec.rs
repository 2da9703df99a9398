//! Codecs: how the values of a column are packed, each by itself. Differences between values are in
//! [`crate::difference`].
//!
//! To add a codec, add a variant of [`Codec`]; the compiler reports the matches to extend here.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx};

/// zstd's own default. Level 1 packs a Breakout frame 5 % faster into 2 % more bytes; level 5 saves 8 % and takes twice
/// the time (`docs/reports/2026-11-22-design.md`).
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

    /// Parses the name of a codec. The error lists the names.
    pub fn from_name(name: &str) -> Result<Self, serde::de::value::Error> {
        Codec::deserialize(serde::de::value::StrDeserializer::new(name))
    }

    /// Whether values are blobs beside the rows; otherwise they are raw inside them.
    pub const fn makes_blobs(self) -> bool {
        match self {
            Codec::None => false,
            Codec::Lz4 | Codec::Zstd => true,
        }
    }

    /// Packs a value into `out`, at least as long, and returns the length of the blob; `None` if the value is its own blob.
    pub fn pack(self, value: &[u8], out: &mut [u8]) -> Option<usize> {
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
    fn names_are_read_back() {
        for codec in BLOB_CODECS.into_iter().chain([Codec::None]) {
            assert_eq!(Codec::from_name(codec.name()), Ok(codec));
        }
        let error = Codec::from_name("gzip").unwrap_err().to_string();
        assert!(error.contains("`none`") && error.contains("`lz4`"), "{error}");
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
}

//! Codecs: how the values of a column are packed, each by itself. What changed from one value to another is in
//! [`crate::difference`].
//!
//! A codec is a variant of [`Codec`]; the compiler names the matches of this file that lack it, and the enum of the wire.

use serde::{Deserialize, Serialize};

/// How the values of a column are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Raw, inside the row.
    None,
    /// A blob beside the row: an LZ4 block, or what changed since the key row.
    Lz4,
}

impl Codec {
    /// The name in TOML and Python.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::None => "none",
            Codec::Lz4 => "lz4",
        }
    }

    /// The codec of a name. The error lists the names.
    pub fn from_name(name: &str) -> Result<Self, serde::de::value::Error> {
        Codec::deserialize(serde::de::value::StrDeserializer::new(name))
    }

    /// Whether values are blobs beside the rows; otherwise they are raw inside them.
    pub const fn makes_blobs(self) -> bool {
        match self {
            Codec::None => false,
            Codec::Lz4 => true,
        }
    }

    /// Packs a value into `out`, which has at least its size, and returns the length of the blob. `None` where packing
    /// saves nothing: the value is then its own blob.
    pub fn pack(self, value: &[u8], out: &mut [u8]) -> Option<usize> {
        let out = &mut out[..value.len()];
        let packed = match self {
            Codec::None => None,
            // An error says that the block does not fit.
            Codec::Lz4 => lz4::block::compress_to_buffer(value, None, false, out).ok(),
        };
        packed.filter(|&length| length < value.len())
    }

    /// Unpacks a blob into `out`, which has exactly the value's size.
    ///
    /// # Errors
    /// Says why the blob, which may be any bytes, is no value of this size.
    pub fn unpack(self, blob: &[u8], out: &mut [u8]) -> Result<(), String> {
        if blob.len() == out.len() {
            out.copy_from_slice(blob);
            return Ok(());
        }
        if blob.len() > out.len() {
            return Err(format!(
                "a blob of {} bytes for a value of {}",
                blob.len(),
                out.len()
            ));
        }
        let written = match self {
            Codec::None => Err("raw values are not packed".to_owned()),
            // A column has at most 2^28 bytes.
            Codec::Lz4 => lz4::block::decompress_to_buffer(blob, Some(out.len() as i32), out)
                .map_err(|error| error.to_string()),
        };
        match written {
            Ok(written) if written == out.len() => Ok(()),
            Ok(written) => Err(format!(
                "its {} blob unpacks to {written} bytes instead of {}",
                self.name(),
                out.len()
            )),
            Err(reason) => Err(format!(
                "its {} blob does not unpack: {reason}",
                self.name()
            )),
        }
    }
}

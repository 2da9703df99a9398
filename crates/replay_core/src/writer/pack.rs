//! Rows and their blobs, packed into one open chunk per stream (layout: `schema/innet.capnp`).

use crate::difference;
use crate::schema::flags::DIFFERENCE;
use crate::schema::{Codec, TableConfig};

/// A row that would take more than one part in so many of its key row's blobs is a new key row.
const DIFFERENCE_PART: usize = 3;

/// The steps of one stream that have not been pushed yet.
#[derive(Default)]
pub(super) struct OpenChunk {
    steps: u32,
    rows: Vec<u8>,
    blobs: Vec<u8>,
    /// The values of the newest key row that are packed as blobs.
    key: Vec<u8>,
    /// Bytes of its blobs; 0 before the first.
    key_blobs: usize,
}

impl OpenChunk {
    pub(super) fn steps(&self) -> u32 {
        self.steps
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.len() + self.blobs.len()
    }

    /// Appends the chunk to a payload and starts the next one.
    pub(super) fn move_into(&mut self, payload: &mut Vec<u8>) {
        payload.append(&mut self.rows);
        payload.append(&mut self.blobs);
        self.steps = 0;
        self.key_blobs = 0;
    }
}

/// Packs rows. Keeps its memory from row to row: packing a frame takes about a microsecond, and an allocation would
/// be a good part of it.
pub(super) struct Packer {
    columns: Vec<PackedColumn>,
    blobs: BlobPacker,
    /// As many as the largest column has bytes.
    zeros: Vec<u8>,
}

struct PackedColumn {
    bytes: usize,
    codec: Codec,
}

impl Packer {
    pub(super) fn new(config: &TableConfig) -> Self {
        let columns: Vec<_> = config
            .columns
            .iter()
            .map(|column| PackedColumn {
                bytes: column.bytes(),
                codec: column.codec,
            })
            .collect();
        let blobs = columns.iter().filter(|column| column.codec == Codec::Lz4);
        let largest = columns.iter().map(|column| column.bytes).max();
        Packer {
            blobs: BlobPacker {
                scratch: vec![0; blobs.map(|column| column.bytes).sum()],
                lengths: Vec::new(),
            },
            zeros: vec![0; largest.unwrap_or_default()],
            columns,
        }
    }

    /// Adds a row. `value` gives the bytes of a column; `None` is zeros.
    pub(super) fn pack<'a>(
        &mut self,
        chunk: &mut OpenChunk,
        flags: u8,
        value: impl Fn(usize) -> Option<&'a [u8]>,
    ) {
        let raw = |codec| {
            let columns = self.columns.iter().enumerate();
            let columns = columns.filter(move |(_, column)| column.codec == codec);
            columns.map(|(index, column)| value(index).unwrap_or(&self.zeros[..column.bytes]))
        };
        let blobs = &mut self.blobs;
        let row_flags = if blobs.pack_difference(chunk, raw(Codec::Lz4)) {
            flags | DIFFERENCE
        } else {
            blobs.pack_key(chunk, raw(Codec::Lz4));
            flags
        };
        chunk.steps += 1;
        chunk.rows.push(row_flags);
        for value in raw(Codec::None) {
            chunk.rows.extend_from_slice(value);
        }
        for length in &self.blobs.lengths {
            chunk.rows.extend_from_slice(&length.to_le_bytes());
        }
    }
}

/// Makes the blobs of one row.
struct BlobPacker {
    /// As many bytes as the values of a row: longer blobs are of no use.
    scratch: Vec<u8>,
    /// The lengths of the blobs that were made.
    lengths: Vec<u32>,
}

impl BlobPacker {
    /// Packs a row as what changed since the key row; false, and nothing is packed, when that takes too much.
    fn pack_difference<'a>(
        &mut self,
        chunk: &mut OpenChunk,
        values: impl Iterator<Item = &'a [u8]>,
    ) -> bool {
        let room = chunk.key_blobs / DIFFERENCE_PART;
        if room == 0 {
            return false;
        }
        self.lengths.clear();
        let (mut written, mut key) = (0, &chunk.key[..]);
        for value in values {
            let (base, rest) = key.split_at(value.len());
            let end = room.min(written + value.len());
            let Some(length) = difference::encode(base, value, &mut self.scratch[written..end])
            else {
                return false;
            };
            // A column has at most 2^28 bytes.
            self.lengths.push(length as u32);
            (written, key) = (written + length, rest);
        }
        chunk.blobs.extend_from_slice(&self.scratch[..written]);
        true
    }

    /// Packs a row by itself.
    fn pack_key<'a>(&mut self, chunk: &mut OpenChunk, values: impl Iterator<Item = &'a [u8]>) {
        self.lengths.clear();
        chunk.key.clear();
        let before = chunk.blobs.len();
        for value in values {
            let packed = &mut self.scratch[..value.len()];
            // An error says that the block does not fit, so that it would not be shorter.
            let blob = match lz4::block::compress_to_buffer(value, None, false, packed) {
                Ok(length) if length < value.len() => &packed[..length],
                _ => value,
            };
            self.lengths.push(blob.len() as u32);
            chunk.blobs.extend_from_slice(blob);
            chunk.key.extend_from_slice(value);
        }
        chunk.key_blobs = chunk.blobs.len() - before;
    }
}

//! Rows and LZ4 blobs, packed into one open chunk per stream (layout: `schema/innet.capnp`).

use crate::schema::{Codec, TableConfig};

/// The steps of one stream that have not been pushed yet.
#[derive(Default)]
pub(super) struct OpenChunk {
    steps: u32,
    rows: Vec<u8>,
    blobs: Vec<u8>,
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
    }
}

/// Packs rows. Keeps its memory from row to row: compressing a frame takes microseconds, and an allocation would
/// be a good part of them.
pub(super) struct Packer {
    columns: Vec<PackedColumn>,
    /// A compressed value; as many bytes as the largest column, for a longer block is of no use.
    scratch: Vec<u8>,
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
        let largest = columns.iter().map(|column| column.bytes).max();
        let largest = largest.unwrap_or_default();
        Packer {
            columns,
            scratch: vec![0; largest],
            zeros: vec![0; largest],
        }
    }

    /// Adds a row. `value` gives the bytes of a column; `None` is zeros.
    pub(super) fn pack<'a>(
        &mut self,
        chunk: &mut OpenChunk,
        flags: u8,
        value: impl Fn(usize) -> Option<&'a [u8]>,
    ) {
        let Packer {
            columns,
            scratch,
            zeros,
        } = self;
        chunk.steps += 1;
        chunk.rows.push(flags);
        for (index, column) in columns.iter().enumerate() {
            if column.codec == Codec::None {
                let raw = value(index).unwrap_or(&zeros[..column.bytes]);
                chunk.rows.extend_from_slice(raw);
            }
        }
        for (index, column) in columns.iter().enumerate() {
            if column.codec == Codec::None {
                continue;
            }
            let raw = value(index).unwrap_or(&zeros[..column.bytes]);
            let packed = &mut scratch[..raw.len()];
            // An error says that the block does not fit, so that it would not be shorter.
            let blob = match lz4::block::compress_to_buffer(raw, None, false, packed) {
                Ok(length) if length < raw.len() => &packed[..length],
                _ => raw,
            };
            chunk.blobs.extend_from_slice(blob);
            // A column has at most 2^28 bytes.
            let length = blob.len() as u32;
            chunk.rows.extend_from_slice(&length.to_le_bytes());
        }
    }
}

//! The layout of a packed row. The writer packs rows by it, the memory checks them by it, and the decoder unpacks them by
//! it. `schema/innet.capnp` documents it as a contract:
//!
//! ```text
//! flags          1 byte
//! raw columns    in the table's order, each value as it is
//! blob lengths   4 bytes for each other column, in the table's order
//! ```

use crate::schema::{Column, TableConfig};

pub const FLAGS_OFFSET: usize = 0;

#[derive(Debug, Clone)]
pub struct RowLayout {
    pub table: String,
    pub columns: Box<[ColumnLayout]>,
    /// Indexes of the columns whose values are blobs, in the order of their lengths.
    pub blob_columns: Box<[usize]>,
    /// Bytes of one row, without its blobs.
    pub row_bytes: usize,
    /// Offset of the blob lengths, which end the row.
    lengths_offset: usize,
}

/// One column of a table, and its part of a row.
#[derive(Debug, Clone)]
pub struct ColumnLayout {
    pub column: Column,
    /// Bytes of one value, unpacked.
    pub bytes: usize,
    pub location: ValueLocation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueLocation {
    /// Raw, at this offset of the row.
    Row(usize),
    /// In the blob of this number, whose length is in the row.
    Blob(usize),
}

/// The length of a blob, as stored in a row. The highest bit marks a difference to the key row's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobLength(u32);

impl RowLayout {
    pub fn of(config: &TableConfig) -> Self {
        let mut blob_columns = Vec::new();
        let mut lengths_offset = FLAGS_OFFSET + 1;
        let columns = config.columns.iter().enumerate().map(|(index, column)| {
            let bytes = column.bytes();
            let location = if column.codec.makes_blobs() {
                blob_columns.push(index);
                ValueLocation::Blob(blob_columns.len() - 1)
            } else {
                lengths_offset += bytes;
                ValueLocation::Row(lengths_offset - bytes)
            };
            ColumnLayout { column: column.clone(), bytes, location }
        });
        RowLayout {
            table: config.name.clone(),
            columns: columns.collect(),
            row_bytes: config.row_bytes(),
            lengths_offset,
            blob_columns: blob_columns.into(),
        }
    }

    /// The lengths of a row's blobs, in the order of the blobs.
    pub fn blob_lengths(&self, row: &[u8]) -> impl Iterator<Item = BlobLength> {
        let (lengths, _) = row[self.lengths_offset..].as_chunks();
        lengths.iter().map(|&bytes| BlobLength::from_le_bytes(bytes))
    }
}

impl BlobLength {
    /// Bytes that a length takes in a row.
    pub const BYTES: usize = Column::BLOB_LENGTH_BYTES;
    const DIFFERENCE: u32 = 1 << 31;

    /// The length of a value that is packed by itself; a value has at most [`TableConfig::MAX_STEP_BYTES`].
    pub const fn of_value(bytes: usize) -> Self {
        BlobLength(bytes as u32)
    }

    pub const fn of_difference(bytes: usize) -> Self {
        BlobLength(bytes as u32 | Self::DIFFERENCE)
    }

    pub const fn bytes(self) -> usize {
        (self.0 & !Self::DIFFERENCE) as usize
    }

    pub const fn is_difference(self) -> bool {
        self.0 & Self::DIFFERENCE != 0
    }

    pub const fn from_le_bytes(bytes: [u8; Self::BYTES]) -> Self {
        BlobLength(u32::from_le_bytes(bytes))
    }

    pub const fn to_le_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }
}

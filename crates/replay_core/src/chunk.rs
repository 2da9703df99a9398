//! The packed steps of one stream, and the layout of a row. The writer packs rows by it, the memory checks them by it, and the decoder unpacks
//! them by it. `schema/innet.capnp` documents it as a contract:
//!
//! ```text
//! flags          1 byte
//! raw columns    in the table's order, each value as it is
//! blob lengths   4 bytes for each other column, in the table's order
//! counts         4 bytes for each ragged column, in the table's order: its elements
//! ```
//!
//! After [`PackedRows::check`] every offset that the memory computes lies inside the
//! payload. Blobs are not unpacked here; only their lengths are checked.

use std::ops::Range;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::processor::prefetch;
use crate::schema::{Codec, Column, TableConfig, flags};

/// The flags that a row of a chunk may have.
const CHUNK_FLAGS: u8 = flags::FIRST | flags::TERMINATED | flags::TRUNCATED | flags::FINAL | flags::DIFFERENCE;

/// Rows of fixed size, then their blobs, checked.
#[derive(Debug, Clone)]
pub struct PackedRows {
    bytes: Bytes,
    rows: u32,
    row_bytes: usize,
    /// One entry for each row, and one for the end; empty without blob columns.
    blobs: Box<[RowBlobs]>,
}

/// Offset of a row's blobs, and the number of its key row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlobs {
    /// Offset of the first blob in the chunk.
    start: u32,
    /// The newest row without differences: this row itself, or an earlier one.
    key: u32,
}

impl PackedRows {
    /// Checks `bytes` as `rows` rows and their blobs. O(rows).
    ///
    /// # Errors
    /// [`Error::Schema`] when there is no row, a flag is unknown, a difference has no key row, a blob is longer than
    /// its column, a blob other than a difference is empty, a ragged value has more elements than its column, or than its blob can
    /// have, or the length does not match rows and blobs.
    pub fn check(layout: &RowLayout, rows: u32, bytes: Bytes) -> Result<PackedRows> {
        let refuse = |reason| Err(Error::schema(&layout.table, reason));
        if rows == 0 {
            return refuse("a chunk has at least one step".into());
        }
        let row_bytes = layout.row_bytes;
        let blobs_offset = row_bytes.checked_mul(rows as usize);
        let (Some(blobs_offset), Ok(total)) =
            (blobs_offset.filter(|&end| end <= bytes.len()), u32::try_from(bytes.len()))
        else {
            return refuse(format!("{rows} steps of {row_bytes} bytes do not fit a chunk of {} bytes", bytes.len()));
        };
        let blob_columns = &layout.blob_columns;
        let mut blobs = Vec::new();
        if !blob_columns.is_empty() {
            blobs.reserve_exact(rows as usize + 1);
        }
        // In 64 bits: 2^32 lengths of 2^32 bytes cannot overflow it.
        let mut end = blobs_offset as u64;
        let mut key = 0;
        let has_counts = !layout.ragged_columns.is_empty();
        for (index, row) in (0..).zip(bytes[..blobs_offset].chunks_exact(row_bytes)) {
            let row_flags = row[FLAGS_OFFSET];
            if row_flags & !CHUNK_FLAGS != 0 {
                return refuse(format!("step {index} has unknown flags {row_flags:#04x}"));
            }
            let has_differences = row_flags & flags::DIFFERENCE != 0;
            if has_differences && (index == 0 || blob_columns.is_empty()) {
                return refuse(format!("step {index} is a difference and has no key row"));
            }
            if blob_columns.is_empty() {
                continue;
            }
            if !has_differences {
                key = index;
            }
            blobs.push(RowBlobs { start: end.min(u64::from(total)) as u32, key });
            for (length, &column) in layout.blob_lengths(row).zip(blob_columns) {
                if length.is_difference() && !has_differences {
                    return refuse(format!(
                        "step {index} has a difference for column {:?}, and is a key row",
                        layout.columns[column].column.name
                    ));
                }
                let ColumnLayout { least_blob, most_blob: most, .. } = layout.columns[column];
                let least = if length.is_difference() { 0 } else { least_blob };
                if !(least..=most).contains(&length.bytes()) {
                    return refuse(format!(
                        "step {index} has {} bytes for column {:?}; packed it takes {least} to {most}",
                        length.bytes(),
                        layout.columns[column].column.name
                    ));
                }
                end += length.bytes() as u64;
            }
            if has_counts && let Err(reason) = layout.check_counts(row) {
                return refuse(format!("step {index} {reason}"));
            }
        }
        if end != u64::from(total) {
            return refuse(format!("rows and blobs take {end} bytes, the chunk has {total}"));
        }
        if !blob_columns.is_empty() {
            blobs.push(RowBlobs { start: total, key });
        }
        Ok(PackedRows { bytes, rows, row_bytes, blobs: blobs.into_boxed_slice() })
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The fixed-size part of some rows.
    ///
    /// # Panics
    /// When `rows` reaches beyond [`Self::rows`].
    pub fn row_slice(&self, rows: Range<u32>) -> &[u8] {
        &self.bytes[rows.start as usize * self.row_bytes..rows.end as usize * self.row_bytes]
    }

    /// Range of some rows' blobs in [`Self::as_bytes`]; empty without blob columns.
    ///
    /// # Panics
    /// When `rows` reaches beyond [`Self::rows`].
    pub fn blob_range(&self, rows: Range<u32>) -> Range<usize> {
        if self.blobs.is_empty() {
            return 0..0;
        }
        let start = |row: u32| self.blobs[row as usize].start as usize;
        start(rows.start)..start(rows.end)
    }

    /// The key row of a row with differences.
    pub fn key_row(&self, row: u32) -> Option<u32> {
        let key = self.blobs.get(row as usize)?.key;
        (key != row).then_some(key)
    }

    /// Prefetches the first cache lines of a read of `rows` rows from `row` on, which may be beyond the last one.
    pub fn prefetch(&self, row: u32, rows: u32) {
        /// The processor fetches what follows by itself.
        const MOST: usize = 512;
        let start = row as usize * self.row_bytes;
        let end = start + MOST.min(rows as usize * self.row_bytes);
        if let Some(fields) = self.bytes.get(start..end.min(self.bytes.len())) {
            prefetch(fields);
        }
        if let Some(blobs) = self.blobs.get(row as usize) {
            prefetch(blobs);
        }
    }

    /// Rows and blobs as they arrived.
    pub fn as_bytes(&self) -> &Bytes {
        &self.bytes
    }
}

pub const FLAGS_OFFSET: usize = 0;

#[derive(Debug, Clone)]
pub struct RowLayout {
    pub table: String,
    pub columns: Box<[ColumnLayout]>,
    /// Indexes of the columns whose values are blobs, in the order of their lengths.
    pub blob_columns: Box<[usize]>,
    /// Indexes of the columns whose values have any length, in the order of their counts.
    pub ragged_columns: Box<[usize]>,
    /// Bytes of one row, without its blobs.
    pub row_bytes: usize,
    /// Offset of the blob lengths.
    lengths_offset: usize,
    /// Offset of the counts, which end the row.
    counts_offset: usize,
    /// Bytes of the values of fixed size, unpacked.
    fixed_bytes: usize,
}

/// One column of a table, and its part of a row.
#[derive(Debug, Clone)]
pub struct ColumnLayout {
    pub column: Column,
    /// Bytes of one value, unpacked; 0 where the column is ragged.
    pub bytes: usize,
    /// Bytes of one element of a ragged value; of a whole value where the column is not ragged.
    pub element_bytes: usize,
    /// Bytes of the smallest blob that is no difference.
    least_blob: usize,
    most_blob: usize,
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
        let (mut blob_columns, mut ragged_columns) = (Vec::new(), Vec::new());
        let (mut lengths_offset, mut fixed_bytes) = (FLAGS_OFFSET + 1, 0);
        let columns = config.columns.iter().enumerate().map(|(index, column)| {
            let bytes = column.fixed_bytes();
            fixed_bytes += bytes;
            if column.is_ragged() {
                ragged_columns.push(index);
            }
            let location = if column.makes_blobs() {
                blob_columns.push(index);
                ValueLocation::Blob(blob_columns.len() - 1)
            } else {
                lengths_offset += bytes;
                ValueLocation::Row(lengths_offset - bytes)
            };
            let (least_blob, most_blob) = (usize::from(!column.is_ragged()), column.bytes());
            let element_bytes = column.element_bytes();
            ColumnLayout { column: column.clone(), bytes, element_bytes, least_blob, most_blob, location }
        });
        RowLayout {
            table: config.name.clone(),
            columns: columns.collect(),
            row_bytes: config.row_bytes(),
            lengths_offset,
            counts_offset: lengths_offset + blob_columns.len() * BlobLength::BYTES,
            fixed_bytes,
            blob_columns: blob_columns.into(),
            ragged_columns: ragged_columns.into(),
        }
    }

    /// The lengths of a row's blobs, in the order of the blobs.
    pub fn blob_lengths(&self, row: &[u8]) -> impl Iterator<Item = BlobLength> {
        let (lengths, _) = row[self.lengths_offset..self.counts_offset].as_chunks();
        lengths.iter().map(|&bytes| BlobLength::from_le_bytes(bytes))
    }

    /// Indexes of the columns whose values have one size.
    pub fn fixed_columns(&self) -> impl Iterator<Item = usize> {
        (0..self.columns.len()).filter(|&column| self.columns[column].bytes > 0)
    }

    /// The ragged columns, each with the number of elements in a row.
    pub fn counts(&self, row: &[u8]) -> impl Iterator<Item = (usize, usize)> {
        let (counts, _) = row[self.counts_offset..].as_chunks();
        self.ragged_columns.iter().copied().zip(counts.iter().map(|&count| u32::from_le_bytes(count) as usize))
    }

    /// Bytes of a checked row, unpacked.
    pub fn unpacked_bytes(&self, row: &[u8]) -> usize {
        let ragged = self.counts(row).map(|(column, count)| count * self.columns[column].element_bytes);
        self.fixed_bytes + ragged.sum::<usize>()
    }

    /// Checks the counts of a row by its blob lengths, so that what is allocated by them is bounded. The error is the reason.
    pub fn check_counts(&self, row: &[u8]) -> std::result::Result<(), String> {
        let mut total = self.fixed_bytes;
        for (index, count) in self.counts(row) {
            let ColumnLayout { column, element_bytes, location, .. } = &self.columns[index];
            let refuse = |reason: String| Err(format!("has {count} elements of column {:?}, {reason}", column.name));
            let most = column.most_elements();
            if count > most {
                return refuse(format!("which has at most {most}"));
            }
            let ValueLocation::Blob(number) = *location else { continue };
            let length = self.blob_lengths(row).nth(number).unwrap_or(BlobLength::of_value(0));
            let bytes = count * element_bytes;
            let fits = match column.codec {
                Codec::None => length.bytes() == bytes,
                _ => length.bytes() <= bytes && (length.bytes() == 0) == (bytes == 0),
            };
            if length.is_difference() || !fits {
                return refuse(format!("and {} bytes of them instead of {bytes}", length.bytes()));
            }
            total += bytes;
        }
        if total as u64 > TableConfig::MAX_STEP_BYTES {
            return Err(format!("has {total} bytes unpacked; the limit is {}", TableConfig::MAX_STEP_BYTES));
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schema::Dtype;
    use crate::schema::flags::DIFFERENCE;

    /// The length of a difference, as a row has it.
    fn difference(bytes: usize) -> u32 {
        u32::from_le_bytes(BlobLength::of_difference(bytes).to_le_bytes())
    }

    fn config() -> TableConfig {
        let column = |name: &str, dtype, shape: &[u32], codec| Column {
            name: name.into(),
            dtype,
            shape: shape.into(),
            codec,
            finite: true,
            max_length: 0,
        };
        TableConfig::new(
            "t",
            vec![
                column("frame", Dtype::Uint8, &[10], Codec::Lz4),
                column("action", Dtype::Uint16, &[], Codec::None),
                column("extra", Dtype::Float32, &[], Codec::Lz4),
            ],
            100,
        )
    }

    /// One row: flags, action, blob lengths.
    fn row(flag: u8, lengths: [u32; 2]) -> Vec<u8> {
        let mut row = vec![flag, 0xAA, 0xBB];
        lengths.iter().for_each(|l| row.extend_from_slice(&l.to_le_bytes()));
        row
    }

    fn chunk(rows: &[Vec<u8>], blob_bytes: usize) -> Bytes {
        let mut bytes = rows.concat();
        bytes.extend((0..blob_bytes).map(|i| i as u8));
        bytes.into()
    }

    fn reason(result: Result<PackedRows>) -> String {
        match result {
            Err(Error::Schema { reason, .. }) => reason,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[test]
    fn finds_rows_and_blobs() {
        let layout = RowLayout::of(&config());
        let bytes = chunk(&[row(1, [3, 1]), row(0, [10, 4]), row(2, [1, 2])], 21);
        let packed = PackedRows::check(&layout, 3, bytes).unwrap();
        assert_eq!(layout.row_bytes, 11);
        assert_eq!(packed.row_slice(1..2), row(0, [10, 4]));
        let blobs = |r: Range<u32>| &packed.as_bytes()[packed.blob_range(r)];
        assert_eq!(blobs(0..1), [0, 1, 2, 3]);
        assert_eq!(blobs(1..3), (4..21).collect::<Vec<u8>>());
        assert!(blobs(3..3).is_empty());
    }

    #[test]
    fn finds_key_rows() {
        let layout = RowLayout::of(&config());
        let flags = [0, DIFFERENCE, DIFFERENCE | 1, 0, 0, DIFFERENCE];
        let length = |flag| if flag == 0 { 1 } else { difference(0) };
        let rows = flags.map(|flag| row(flag, [length(flag), 1]));
        let packed = PackedRows::check(&layout, 6, chunk(&rows, 9)).unwrap();
        let keys: Vec<_> = (0..6).map(|row| packed.key_row(row)).collect();
        assert_eq!(keys, [None, Some(0), Some(0), None, None, Some(4)]);
        assert_eq!(packed.blob_range(1..2).len(), 1);

        let raw = |codec| Column { codec, ..config().columns[1].clone() };
        let layout = RowLayout::of(&TableConfig::new("t", vec![raw(Codec::None)], 9));
        assert_eq!(PackedRows::check(&layout, 1, vec![0, 1, 2].into()).unwrap().key_row(0), None);
        let with_difference = PackedRows::check(&layout, 2, vec![0, 1, 2, DIFFERENCE, 1, 2].into());
        assert!(reason(with_difference).contains("no key row"));
    }

    #[test]
    fn refuses_what_does_not_add_up() {
        let layout = RowLayout::of(&config());
        let check = |rows, bytes| reason(PackedRows::check(&layout, rows, bytes));
        assert!(check(0, Bytes::new()).contains("at least one"));
        assert!(check(2, chunk(&[row(0, [1, 1])], 2)).contains("do not fit"));
        assert!(check(u32::MAX, chunk(&[row(0, [1, 1])], 2)).contains("do not fit"));
        assert!(check(1, chunk(&[row(32, [1, 1])], 2)).contains("unknown flags 0x20"));
        assert!(check(1, chunk(&[row(DIFFERENCE, [1, 1])], 2)).contains("no key row"));
        let key = row(0, [1, 1]);
        let after = |lengths| check(2, chunk(&[key.clone(), row(DIFFERENCE, lengths)], 7));
        assert!(after([difference(0), difference(5)]).contains("0 to 4"));
        assert!(after([difference(0), 0]).contains("1 to 4"));
        assert!(check(1, chunk(&[row(0, [1, difference(0)])], 1)).contains("is a key row"));
        assert!(check(1, chunk(&[row(0, [11, 1])], 12)).contains("column \"frame\""));
        assert!(check(1, chunk(&[row(0, [1, 5])], 6)).contains("column \"extra\""));
        assert!(check(1, chunk(&[row(0, [0, 1])], 1)).contains("0 bytes"));
        assert!(check(1, chunk(&[row(0, [5, 1])], 5)).contains("take 17 bytes"));
        assert!(check(1, chunk(&[row(0, [5, 1])], 7)).contains("take 17 bytes"));
    }

    /// A raw ragged column of at most 5 elements of 2 bytes, and a packed one of 1 byte.
    fn ragged() -> RowLayout {
        let column =
            |name: &str, dtype, codec, max_length| Column { codec, max_length, ..Column::new(name, dtype, vec![0]) };
        let columns = vec![column("raw", Dtype::Int16, Codec::None, 5), column("packed", Dtype::Uint8, Codec::Lz4, 0)];
        RowLayout::of(&TableConfig::new("t", columns, 100))
    }

    /// Flags, blob lengths, counts.
    fn ragged_row(flag: u8, lengths: [u32; 2], counts: [u32; 2]) -> Vec<u8> {
        let numbers = lengths.into_iter().chain(counts);
        [flag].into_iter().chain(numbers.flat_map(u32::to_le_bytes)).collect()
    }

    #[test]
    fn counts_fit_their_blobs() {
        let layout = ragged();
        assert_eq!(layout.row_bytes, 17);
        let good = [ragged_row(0, [6, 2], [3, 9]), ragged_row(0, [0, 0], [0, 0]), ragged_row(0, [10, 4], [5, 4])];
        let packed = PackedRows::check(&layout, 3, chunk(&good, 22)).unwrap();
        let counts: Vec<_> = layout.counts(packed.row_slice(0..1)).collect();
        assert_eq!(counts, [(0, 3), (1, 9)]);
        assert_eq!(layout.unpacked_bytes(packed.row_slice(0..1)), 15);
        let check = |flag, lengths: [u32; 2], counts| {
            let blobs = lengths.map(|length| BlobLength(length).bytes()).iter().sum();
            let key = ragged_row(0, [0, 0], [0, 0]);
            reason(PackedRows::check(&layout, 2, chunk(&[key, ragged_row(flag, lengths, counts)], blobs)))
        };
        assert!(check(0, [10, 0], [6, 0]).contains("at most 5"));
        assert!(check(0, [12, 0], [6, 0]).contains("column \"raw\""));
        assert!(check(0, [4, 0], [3, 0]).contains("4 bytes of them instead of 6"));
        assert!(check(0, [0, 3], [0, 2]).contains("column \"packed\""));
        assert!(check(0, [0, 0], [0, 2]).contains("0 bytes of them instead of 2"));
        assert!(check(0, [0, 1], [0, 0]).contains("instead of 0"));
        assert!(check(0, [0, 9], [0, u32::MAX]).contains("4294967295 elements"));
        assert!(check(DIFFERENCE, [0, difference(1)], [0, 2]).contains("column \"packed\""));
    }

    #[test]
    fn a_row_has_the_bytes_of_a_step() {
        let columns = ["a", "b"].map(|name| Column { codec: Codec::Lz4, ..Column::new(name, Dtype::Uint8, vec![0]) });
        let layout = RowLayout::of(&TableConfig::new("t", columns.into(), 100));
        let most = TableConfig::MAX_STEP_BYTES as u32;
        let check = |counts| PackedRows::check(&layout, 1, chunk(&[ragged_row(0, [1, 1], counts)], 2));
        assert!(check([most - 9, 9]).is_ok());
        assert!(reason(check([most - 9, 10])).contains("the limit is"));
    }

    proptest! {
        #[test]
        fn whatever_passes_has_counts_within_their_columns(
            rows in 0u32..4,
            bytes in proptest::collection::vec(prop_oneof![4 => 0u8..3, 1 => Just(DIFFERENCE), 1 => any::<u8>()], 0..90),
        ) {
            let layout = ragged();
            if let Ok(packed) = PackedRows::check(&layout, rows, bytes.clone().into()) {
                for row in 0..rows {
                    let fields = packed.row_slice(row..row + 1);
                    let counts: Vec<_> = layout.counts(fields).map(|(_, count)| count).collect();
                    let lengths: Vec<_> = layout.blob_lengths(fields).map(BlobLength::bytes).collect();
                    prop_assert!(counts[0] <= 5 && lengths[0] == 2 * counts[0]);
                    prop_assert!(lengths[1] <= counts[1] && (lengths[1] == 0) == (counts[1] == 0));
                }
            }
        }

        #[test]
        fn whatever_passes_has_its_offsets_inside(
            rows in 0u32..6,
            bytes in proptest::collection::vec(prop_oneof![4 => 0u8..3, 1 => Just(DIFFERENCE), 1 => any::<u8>()], 0..80),
        ) {
            let layout = RowLayout::of(&config());
            if let Ok(packed) = PackedRows::check(&layout, rows, bytes.clone().into()) {
                let ends: Vec<_> = (0..rows).map(|r| packed.blob_range(r..r + 1)).collect();
                prop_assert_eq!(ends[0].start, rows as usize * layout.row_bytes);
                prop_assert!(ends.windows(2).all(|w| w[0].end == w[1].start));
                prop_assert_eq!(ends.last().unwrap().end, bytes.len());
                prop_assert!((0..rows).filter_map(|r| packed.key_row(r)).all(|key| packed.key_row(key).is_none()));
            }
        }
    }
}

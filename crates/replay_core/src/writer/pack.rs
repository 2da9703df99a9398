//! Rows and their blobs, packed into one open chunk per stream (layout: `schema/innet.capnp`).

use crate::difference;
use crate::schema::flags::DIFFERENCE;
use crate::schema::{Codec, TableConfig};

/// A value changes little while its difference takes at most one part in so many of its key row's blob.
const DIFFERENCE_PART: usize = 3;

/// The steps of one stream that have not been pushed yet.
#[derive(Default)]
pub(super) struct OpenChunk {
    steps: u32,
    rows: Vec<u8>,
    blobs: Vec<u8>,
    /// The newest key row.
    key: KeyRow,
}

/// A row that is packed by itself, and that later ones are compared with.
#[derive(Default)]
struct KeyRow {
    /// The values of its blob columns; none before the first row.
    values: Vec<u8>,
    /// For each of them the bytes that a difference may take, as long as it changes little.
    rooms: Vec<Option<usize>>,
    /// Whether a row after it has shown which columns those are.
    is_tried: bool,
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
        self.key.rooms.clear();
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
        let largest = columns.iter().map(|column| column.bytes).max();
        let largest = largest.unwrap_or_default();
        Packer {
            blobs: BlobPacker {
                scratch: vec![0; largest],
                lengths: Vec::new(),
            },
            zeros: vec![0; largest],
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
    /// As many bytes as the largest column: longer blobs are of no use.
    scratch: Vec<u8>,
    /// The lengths of the blobs that were made, with the mark of differences.
    lengths: Vec<u32>,
}

impl BlobPacker {
    /// Packs what changed little since the key row as the difference to it, and the rest by itself. False, and
    /// nothing is packed, when it is time for another key row: nothing changed little, or no longer does.
    fn pack_difference<'a>(
        &mut self,
        chunk: &mut OpenChunk,
        values: impl Iterator<Item = &'a [u8]>,
    ) -> bool {
        self.lengths.clear();
        let OpenChunk { blobs, key, .. } = chunk;
        let before = blobs.len();
        let mut bases = &key.values[..];
        for (value, room) in values.zip(&mut key.rooms) {
            let (base, rest) = bases.split_at(value.len());
            bases = rest;
            if let Some(bytes) = *room {
                if let Some(length) = difference::encode(base, value, &mut self.scratch[..bytes]) {
                    blobs.extend_from_slice(&self.scratch[..length]);
                    self.lengths.push(length as u32 | difference::MARK);
                    continue;
                }
                if key.is_tried {
                    blobs.truncate(before);
                    return false;
                }
                *room = None;
            }
            self.pack_alone(blobs, value);
        }
        key.is_tried = true;
        if key.rooms.iter().all(Option::is_none) {
            blobs.truncate(before);
            return false;
        }
        true
    }

    /// Packs a row by itself.
    fn pack_key<'a>(&mut self, chunk: &mut OpenChunk, values: impl Iterator<Item = &'a [u8]>) {
        self.lengths.clear();
        let OpenChunk { blobs, key, .. } = chunk;
        key.values.clear();
        key.rooms.clear();
        key.is_tried = false;
        for value in values {
            let length = self.pack_alone(blobs, value);
            key.values.extend_from_slice(value);
            key.rooms.push(Some(length / DIFFERENCE_PART));
        }
    }

    /// Packs a value by itself, and returns the length of its blob.
    fn pack_alone(&mut self, blobs: &mut Vec<u8>, value: &[u8]) -> usize {
        let packed = &mut self.scratch[..value.len()];
        // An error says that the block does not fit, so that it would not be shorter.
        let blob = match lz4::block::compress_to_buffer(value, None, false, packed) {
            Ok(length) if length < value.len() => &packed[..length],
            _ => value,
        };
        blobs.extend_from_slice(blob);
        // A column has at most 2^28 bytes.
        self.lengths.push(blob.len() as u32);
        blob.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Column, Dtype};

    const FRAME: usize = 600;
    const STATE: usize = 100;

    /// Packs steps of a frame and a state into one chunk, and returns the flags and blob lengths of its rows.
    fn packed(steps: &[(Vec<u8>, Vec<u8>)]) -> Vec<(u8, [u32; 2])> {
        let column = |name: &str, bytes: usize| Column {
            name: name.into(),
            dtype: Dtype::Uint8,
            shape: vec![bytes as u32],
            codec: Codec::Lz4,
        };
        let columns = vec![column("frame", FRAME), column("state", STATE)];
        let mut packer = Packer::new(&TableConfig::new("t", columns, 100));
        let mut chunk = OpenChunk::default();
        for (frame, state) in steps {
            packer.pack(&mut chunk, 0, |column| Some([&frame[..], state][column]));
        }
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let rows = chunk.rows.chunks_exact(9);
        rows.map(|row| (row[0], [word(&row[1..5]), word(&row[5..9])]))
            .collect()
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|_| rand::random()).collect()
    }

    /// A frame with a byte that is new.
    fn touched(frame: &[u8], at: usize) -> Vec<u8> {
        let mut frame = frame.to_vec();
        frame[at] ^= 1;
        frame
    }

    #[test]
    fn what_changed_little_is_a_difference_and_what_did_not_change_an_empty_one() {
        let (frame, state) = (noise(FRAME), noise(STATE));
        let rows = packed(&[(frame.clone(), state.clone()), (touched(&frame, 3), state)]);
        let key = [FRAME as u32, STATE as u32];
        let difference = [difference::MARK | 3, difference::MARK];
        assert_eq!(rows, [(0, key), (DIFFERENCE, difference)]);
    }

    #[test]
    fn a_column_that_changes_altogether_leaves_the_others_their_differences() {
        let frame = noise(FRAME);
        let steps: Vec<_> = (0..5)
            .map(|step| (touched(&frame, step), noise(STATE)))
            .collect();
        let rows = packed(&steps);
        assert_eq!(rows[0].0, 0);
        for (flags, [frame, state]) in &rows[1..] {
            assert_eq!((*flags, *state), (DIFFERENCE, STATE as u32));
            assert!(frame & difference::MARK != 0 && frame & !difference::MARK < 10);
        }
    }

    #[test]
    fn a_scene_that_changes_begins_with_a_key_row() {
        let (one, other, state) = (noise(FRAME), noise(FRAME), noise(STATE));
        let steps = [&one, &one, &other, &other].map(|frame| (frame.clone(), state.clone()));
        let flags: Vec<_> = packed(&steps).iter().map(|(flags, _)| *flags).collect();
        assert_eq!(flags, [0, DIFFERENCE, 0, DIFFERENCE]);
    }

    #[test]
    fn rows_that_have_nothing_in_common_are_all_key_rows() {
        let steps: Vec<_> = (0..4).map(|_| (noise(FRAME), noise(STATE))).collect();
        assert!(
            packed(&steps)
                .iter()
                .all(|&row| row == (0, [FRAME as u32, STATE as u32]))
        );
    }
}

//! Packs checked rows of a step or a block (values, flags and estimates, one of each stream at each step) into one open chunk per stream.

use super::step::{StepBatch, StepChecker};
use crate::chunk::{BlobLength, RowLayout, ValueLocation};
use crate::codec::Codec;
use crate::difference;
use crate::episode_windows::{EpisodeWindows, Estimate};
use crate::schema::TableConfig;
use crate::schema::flags::{self, DIFFERENCE};

/// Divisor of the length of the key row's blob: no difference is longer than the quotient.
const DIFFERENCE_PART: usize = 3;

/// The steps of one stream that have not been pushed yet.
#[derive(Default)]
pub(super) struct OpenChunk {
    pub(super) steps: u32,
    rows: Vec<u8>,
    blobs: Vec<u8>,
    key: KeyRow,
}

/// The newest row that is packed by itself. Later rows may be differences to it.
#[derive(Default)]
struct KeyRow {
    /// Its blob columns' values, one after the other, without ragged ones.
    values: Vec<u8>,
    /// Most bytes of a difference, by blob column; `None` where rows differ too much, and for ragged columns. Empty before the first row of a chunk.
    difference_limits: Vec<Option<usize>>,
    /// The next row has shown which columns change too much.
    has_successor: bool,
}

impl OpenChunk {
    pub(super) fn bytes(&self) -> usize {
        self.rows.len() + self.blobs.len()
    }

    /// Appends the chunk to a payload and starts the next one.
    pub(super) fn move_into(&mut self, payload: &mut Vec<u8>) {
        payload.append(&mut self.rows);
        payload.append(&mut self.blobs);
        self.steps = 0;
        self.key.difference_limits.clear();
    }
}

/// Packs rows. Memory is reused: an allocation would be a good part of the microsecond that a frame takes.
pub(super) struct Packer {
    layout: RowLayout,
    blobs: BlobPacker,
    /// As many as the largest column of fixed size has bytes.
    zeros: Vec<u8>,
}

impl Packer {
    pub(super) fn new(config: &TableConfig) -> Self {
        let layout = RowLayout::of(config);
        let largest = layout.columns.iter().map(|column| column.bytes).max();
        let largest = largest.unwrap_or_default();
        Packer { layout, blobs: BlobPacker { scratch: vec![0; largest], lengths: Vec::new() }, zeros: vec![0; largest] }
    }

    /// Adds a row. `value` gives the bytes of a column; `None` is zeros.
    pub(super) fn pack<'a>(&mut self, chunk: &mut OpenChunk, flags: u8, value: impl Fn(usize) -> Option<&'a [u8]>) {
        let columns = &self.layout.columns;
        let value = |column: usize| value(column).unwrap_or(&self.zeros[..columns[column].bytes]);
        let blob_values = || {
            let indexes = self.layout.blob_columns.iter();
            indexes.map(|&index| BlobValue {
                codec: columns[index].column.codec,
                is_ragged: columns[index].bytes == 0,
                bytes: value(index),
            })
        };
        let blobs = &mut self.blobs;
        let row_flags = if blobs.pack_differences(chunk, blob_values()) {
            flags | DIFFERENCE
        } else {
            blobs.pack_key_row(chunk, blob_values());
            flags
        };
        chunk.steps += 1;
        let row_start = chunk.rows.len();
        chunk.rows.push(row_flags);
        for (index, column) in columns.iter().enumerate() {
            if let ValueLocation::Row(offset) = column.location {
                debug_assert_eq!(chunk.rows.len() - row_start, offset);
                chunk.rows.extend_from_slice(value(index));
            }
        }
        for length in &self.blobs.lengths {
            chunk.rows.extend_from_slice(&length.to_le_bytes());
        }
        for &index in &self.layout.ragged_columns {
            // Checked: at most 2^28 bytes.
            let count = (value(index).len() / columns[index].element_bytes) as u32;
            chunk.rows.extend_from_slice(&count.to_le_bytes());
        }
        debug_assert_eq!(chunk.rows.len() - row_start, self.layout.row_bytes);
    }
}

struct BlobPacker {
    /// As many bytes as the largest value: a longer blob would save nothing.
    scratch: Vec<u8>,
    lengths: Vec<BlobLength>,
}

/// The value of a column that makes blobs.
struct BlobValue<'a> {
    codec: Codec,
    is_ragged: bool,
    bytes: &'a [u8],
}

impl BlobPacker {
    /// Packs values that changed little since the key row as differences, others by themselves. Returns false, with nothing packed, when a
    /// key row is due: no column changes little, or one that did no longer does.
    fn pack_differences<'a>(&mut self, chunk: &mut OpenChunk, values: impl Iterator<Item = BlobValue<'a>>) -> bool {
        self.lengths.clear();
        let OpenChunk { blobs, key, .. } = chunk;
        if key.difference_limits.iter().all(Option::is_none) {
            return false;
        }
        let blobs_before = blobs.len();
        let mut key_values = &key.values[..];
        for (value, limit) in values.zip(&mut key.difference_limits) {
            let (key_value, rest) = key_values.split_at(if value.is_ragged { 0 } else { value.bytes.len() });
            key_values = rest;
            if let Some(most) = *limit {
                let out = &mut self.scratch[..most];
                if let Some(length) = difference::encode(key_value, value.bytes, out) {
                    blobs.extend_from_slice(&self.scratch[..length]);
                    self.lengths.push(BlobLength::of_difference(length));
                    continue;
                }
                if key.has_successor {
                    blobs.truncate(blobs_before);
                    return false;
                }
                *limit = None;
            }
            self.pack_value(blobs, &value);
        }
        key.has_successor = true;
        if key.difference_limits.iter().all(Option::is_none) {
            blobs.truncate(blobs_before);
            return false;
        }
        true
    }

    fn pack_key_row<'a>(&mut self, chunk: &mut OpenChunk, values: impl Iterator<Item = BlobValue<'a>>) {
        self.lengths.clear();
        let OpenChunk { blobs, key, .. } = chunk;
        key.values.clear();
        key.difference_limits.clear();
        key.has_successor = false;
        for value in values {
            let length = self.pack_value(blobs, &value);
            if !value.is_ragged {
                key.values.extend_from_slice(value.bytes);
            }
            key.difference_limits.push((!value.is_ragged).then_some(length / DIFFERENCE_PART));
        }
    }

    /// Packs a value by itself, and returns the length of its blob.
    fn pack_value(&mut self, blobs: &mut Vec<u8>, value: &BlobValue<'_>) -> usize {
        let BlobValue { codec, bytes: value, .. } = *value;
        if value.len() > self.scratch.len() && codec.makes_blobs() {
            self.scratch.resize(value.len(), 0);
        }
        let blob = match codec.pack(value, &mut self.scratch) {
            Some(length) => &self.scratch[..length],
            None => value,
        };
        blobs.extend_from_slice(blob);
        self.lengths.push(BlobLength::of_value(blob.len()));
        blob.len()
    }
}

/// The rows of a step: one of each stream, or of each stream at each step of a block.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// `None` outside a block.
    pub(super) steps: Option<usize>,
    pub(super) streams: usize,
}

impl Rows {
    pub(super) fn count(self) -> usize {
        self.steps.unwrap_or(1) * self.streams
    }

    /// Leading dimensions of an array; the dimensions of a row follow.
    pub(super) fn leading(self) -> impl Iterator<Item = usize> + Clone {
        self.steps.into_iter().chain([self.streams])
    }

    pub(super) fn words(self) -> &'static str {
        match self.steps {
            Some(_) => "steps and environments",
            None => "environments",
        }
    }

    /// A row's stream and step, for errors.
    pub(super) fn position(self, row: usize) -> String {
        let stream = row % self.streams;
        match self.steps {
            Some(_) => format!("stream {stream} at step {}", row / self.streams),
            None => format!("stream {stream}"),
        }
    }
}

/// Values of every row, in elements of `each` bytes.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) each: usize,
    /// The first element of each row of a ragged column, and the end; otherwise a row has one element.
    pub(super) offsets: Option<&'a [i64]>,
}

impl<'a> Strided<'a> {
    pub(super) fn of(&self, row: usize) -> &'a [u8] {
        let (first, end) = match self.offsets {
            None => (row, row + 1),
            Some(offsets) => (offsets[row] as usize, offsets[row + 1] as usize),
        };
        &self.bytes[first * self.each..end * self.each]
    }
}

/// Q-values, float32 `[rows, actions]`.
#[derive(Clone, Copy)]
pub(super) struct QValues<'a>(pub(super) Strided<'a>);

impl QValues<'_> {
    pub(super) fn actions(&self) -> usize {
        self.0.each / 4
    }

    pub(super) fn of(&self, row: usize, action: usize) -> f32 {
        read_f32(&self.0.of(row)[4 * action..4 * (action + 1)])
    }

    fn greedy(&self, row: usize) -> f32 {
        let values = self.0.of(row).chunks_exact(4).map(read_f32);
        values.fold(f32::NEG_INFINITY, f32::max)
    }
}

pub(super) fn read_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

pub(super) fn is_set(bits: Option<&[bool]>, row: usize) -> bool {
    bits.is_some_and(|bits| bits[row])
}

/// The last observations of episodes that end with a step, checked.
pub(super) struct LastObservations<'a> {
    pub(super) columns: Vec<(usize, Strided<'a>)>,
    pub(super) ended: Option<&'a [bool]>,
    pub(super) q: Option<QValues<'a>>,
}

impl<'a> LastObservations<'a> {
    pub(super) fn values(&self, column: usize) -> Option<Strided<'a>> {
        let mut columns = self.columns.iter();
        columns.find(|(of, _)| *of == column).map(|(_, values)| *values)
    }
}

/// The final row that follows a row.
pub(super) struct LastObservation<'s, 'a> {
    last: &'s LastObservations<'a>,
    row: usize,
    pub(super) estimate: Estimate,
}

impl<'a> LastObservation<'_, 'a> {
    /// The row's value of a column; `None` is zeros.
    pub(super) fn value(&self, column: usize) -> Option<&'a [u8]> {
        let values = self.last.values(column)?;
        Some(values.of(self.row))
    }
}

pub(super) struct CheckedStep<'a> {
    pub(super) checker: &'a StepChecker,
    pub(super) rows: Rows,
    pub(super) columns: Vec<Strided<'a>>,
    pub(super) step: StepBatch<'a>,
    pub(super) q: Option<QValues<'a>>,
    pub(super) last: Option<LastObservations<'a>>,
}

impl<'a> CheckedStep<'a> {
    pub(super) fn is_final(&self, row: usize) -> bool {
        is_set(self.step.final_rows, row)
    }

    pub(super) fn ends(&self, row: usize) -> bool {
        is_set(self.step.terminated, row) || is_set(self.step.truncated, row)
    }

    /// Whether an environment that ended with this row has its last observation in the next one.
    pub(super) fn awaits_final_after(&self, row: usize) -> bool {
        !self.is_final(row) && self.ends(row) && self.last_observation(row).is_none()
    }

    pub(super) fn flags(&self, row: usize, windows: &EpisodeWindows) -> u8 {
        if self.is_final(row) {
            return flags::FINAL;
        }
        let mut bits = 0;
        if windows.starts_stack(self.step.first.map(|first| first[row])) {
            bits |= flags::FIRST;
        }
        if is_set(self.step.terminated, row) {
            bits |= flags::TERMINATED;
        }
        if is_set(self.step.truncated, row) {
            bits |= flags::TRUNCATED;
        }
        bits
    }

    /// The value of a column in a row; `None` is zeros.
    pub(super) fn value(&self, column: usize, row: usize) -> Option<&'a [u8]> {
        let kept = self.checker.kept[column] || !self.is_final(row);
        kept.then(|| self.columns[column].of(row))
    }

    pub(super) fn number(&self, column: usize, row: usize) -> f64 {
        let dtype = self.checker.config.columns[column].dtype;
        dtype.read(self.columns[column].of(row))
    }

    pub(super) fn reward(&self, row: usize) -> f64 {
        let column = self.checker.reward;
        column.map_or(0.0, |column| self.number(column, row))
    }

    /// The actor's reward and Q-values for a row.
    pub(super) fn estimate(&self, row: usize) -> Estimate {
        let greedy = self.q.map(|q| q.greedy(row));
        if self.is_final(row) {
            return Estimate { greedy, ..Estimate::default() };
        }
        let taken = self.q.zip(self.checker.action).map(|(q, column)| {
            let action = self.number(column, row);
            q.of(row, action as usize)
        });
        Estimate {
            reward: self.reward(row),
            taken,
            greedy,
            // The smallest above 0 stays above 0, so that the item is sampled.
            priority: self.step.priority.map(|priority| match priority[row] {
                priority if priority > 0.0 => (priority as f32).max(f32::from_bits(1)),
                priority => priority as f32,
            }),
        }
    }

    /// The final row to append after a row.
    pub(super) fn last_observation(&self, row: usize) -> Option<LastObservation<'_, 'a>> {
        let last = self.last.as_ref()?;
        let ended = last.ended.map_or_else(|| self.ends(row), |ended| ended[row]);
        (ended && !self.is_final(row)).then(|| LastObservation {
            last,
            row,
            estimate: Estimate { greedy: last.q.map(|q| q.greedy(row)), ..Estimate::default() },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::FLAGS_OFFSET;
    use crate::schema::{Column, Dtype};

    const FRAME: usize = 600;
    const STATE: usize = 100;
    /// The lengths of a row that does not compress.
    const KEY: [BlobLength; 2] = [BlobLength::of_value(FRAME), BlobLength::of_value(STATE)];

    /// Packs steps of a frame and a state into one chunk, and returns the flags and blob lengths of its rows.
    fn packed(steps: &[(Vec<u8>, Vec<u8>)]) -> Vec<(u8, [BlobLength; 2])> {
        let column = |name: &str, bytes: usize| Column {
            name: name.into(),
            dtype: Dtype::Uint8,
            shape: vec![bytes as u32],
            codec: Codec::Lz4,
            finite: true,
            max_length: 0,
        };
        let columns = vec![column("frame", FRAME), column("state", STATE)];
        let mut packer = Packer::new(&TableConfig::new("t", columns, 100));
        let mut chunk = OpenChunk::default();
        for (frame, state) in steps {
            packer.pack(&mut chunk, 0, |column| Some([&frame[..], state][column]));
        }
        let rows = chunk.rows.chunks_exact(packer.layout.row_bytes);
        rows.map(|row| {
            let lengths: Vec<_> = packer.layout.blob_lengths(row).collect();
            (row[FLAGS_OFFSET], lengths.try_into().unwrap())
        })
        .collect()
    }

    fn noise(bytes: usize) -> Vec<u8> {
        std::iter::repeat_with(base::system::random::<1>).flatten().take(bytes).collect()
    }

    /// A frame with a byte that is new.
    fn touched(frame: &[u8], at: usize) -> Vec<u8> {
        let mut frame = frame.to_vec();
        frame[at] ^= 1;
        frame
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn what_changed_little_is_a_difference_and_what_did_not_change_an_empty_one() {
        let (frame, state) = (noise(FRAME), noise(STATE));
        let rows = packed(&[(frame.clone(), state.clone()), (touched(&frame, 3), state)]);
        let differences = [3, 0].map(BlobLength::of_difference);
        assert_eq!(rows, [(0, KEY), (DIFFERENCE, differences)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn a_column_that_changes_altogether_leaves_the_others_their_differences() {
        let frame = noise(FRAME);
        let steps: Vec<_> = (0..5).map(|step| (touched(&frame, step), noise(STATE))).collect();
        let rows = packed(&steps);
        assert_eq!(rows[0].0, 0);
        for (flags, [frame, state]) in &rows[1..] {
            assert_eq!((*flags, *state), (DIFFERENCE, KEY[1]));
            assert!(frame.is_difference() && frame.bytes() < 10);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn a_scene_that_changes_begins_with_a_key_row() {
        let (one, other, state) = (noise(FRAME), noise(FRAME), noise(STATE));
        let steps = [&one, &one, &other, &other].map(|frame| (frame.clone(), state.clone()));
        let flags: Vec<_> = packed(&steps).iter().map(|(flags, _)| *flags).collect();
        assert_eq!(flags, [0, DIFFERENCE, 0, DIFFERENCE]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn rows_that_have_nothing_in_common_are_all_key_rows() {
        let steps: Vec<_> = (0..4).map(|_| (noise(FRAME), noise(STATE))).collect();
        assert_eq!(packed(&steps), [(0, KEY); 4]);
    }
}

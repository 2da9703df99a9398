//! Episodes of a table, in the order in which they end: read with [`Replay::read_steps`] while the table is in use.
//!
//! Chunks of all streams arrive in turns, so the episodes that were played side by side are collected side by side, packed. Only one is
//! unpacked at a time.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use base::wait::Wait;

use crate::chunk::{FLAGS_OFFSET, PackedRows};
use crate::error::{Error, Result};
use crate::replay::{ReadPosition, ReadSteps, Replay, Sampled, SampledItem, StoredSteps};
use crate::schema::{TableConfig, flags};
use crate::view::{Array, Decoder};

/// Bytes of chunks in one answer.
const READ_BYTES: u32 = 4 << 20;
/// Unpacked bytes of an episode after which the rest is a part of its own: some episodes never end. The longest ones of Atari take 190 MB.
const PART_BYTES: usize = 256 << 20;

/// Packed bytes of all unfinished episodes after which the largest is returned as it is: without final rows an end is not known.
const OPEN_BYTES: usize = 1 << 30;

type StreamName = (u32, u64, u32);

/// Steps of an episode, packed. Copies, so that evicted chunks and frames of replies are freed.
#[derive(Default)]
struct Steps {
    rows: Vec<u8>,
    blobs: Vec<u8>,
    /// Rows without those that only unpack others.
    count: usize,
    /// Bytes of these rows, unpacked.
    unpacked: usize,
}

/// The newest episode of a stream, and the number of the step that continues it.
struct OpenEpisode {
    steps: Steps,
    next_step: u64,
}

/// Reads the episodes of a table.
pub struct EpisodeReader {
    table: String,
    /// Where to go on, at each server; `None` before the first call.
    positions: Option<VecDeque<ReadPosition>>,
    decoder: Decoder,
    open: BTreeMap<StreamName, OpenEpisode>,
    open_bytes: usize,
    ready: VecDeque<Steps>,
}

impl EpisodeReader {
    /// A reader of the table of this definition, which unpacks with `threads` threads.
    pub fn new(config: &TableConfig, threads: usize) -> Result<Self> {
        Ok(EpisodeReader {
            table: config.name.clone(),
            positions: None,
            decoder: Decoder::of_rows(config, threads)?,
            open: BTreeMap::new(),
            open_bytes: 0,
            ready: VecDeque::new(),
        })
    }

    /// The next episode, each array with one element for each step: `terminated`, `truncated`, `first` and `final` (bool), and the columns.
    /// `None` at the end of the steps that the table had at the first call.
    ///
    /// An episode may lack an evicted beginning, or an end that has not arrived; a final row alone is left out. An
    /// episode of more than 256 MB comes in parts.
    ///
    /// # Errors
    /// Errors of [`Replay::read_steps`], and [`Error::Corrupt`] for steps that do not decode.
    pub fn next<E: From<Error>>(&mut self, replay: &dyn Replay<E>, wait: &Wait<'_>) -> Result<Option<Vec<Array>>, E> {
        loop {
            if let Some(steps) = self.ready.pop_front() {
                return Ok(Some(self.decode(steps)?));
            }
            let positions = match &mut self.positions {
                Some(positions) => positions,
                None => self.positions.insert(replay.read_positions(&self.table, wait)?.into()),
            };
            let Some(&from) = positions.front() else {
                return Ok(None);
            };
            let read = replay.read_steps(&self.table, &ReadSteps { from, bytes: READ_BYTES }, wait)?;
            match read.next {
                Some(next) => positions[0] = next,
                None => drop(positions.pop_front()),
            }
            let ended = positions.is_empty();
            for chunk in read.chunks {
                self.add(from.server, chunk)?;
            }
            if ended {
                for mut episode in std::mem::take(&mut self.open).into_values() {
                    episode.end(&mut self.ready);
                }
            }
        }
    }

    fn decode(&self, steps: Steps) -> Result<Vec<Array>> {
        let batch = self.decoder.decode(&steps.into_sampled(), 0.0)?;
        if let Some(rejected) = batch.rejected.first() {
            return Err(Error::Corrupt(format!(
                "step {} of an episode in table {:?} does not decode: {}",
                rejected.item, self.table, rejected.reason
            )));
        }
        // The flags and the columns, without the mask before them, the numbers of items after them, and the dimension of a window.
        let columns = &self.decoder.layout().columns;
        let arrays = batch.arrays.into_iter().skip(1).take(4 + columns.len());
        let without_window = |mut array: Array| {
            if array.offsets.is_empty() {
                array.shape.remove(1);
                array.strides.remove(1);
            } else {
                array.offsets.remove(0);
            }
            array
        };
        let mut arrays: Vec<_> = arrays.map(without_window).collect();
        // Ragged columns are after the others.
        arrays[4..].sort_by_key(|array| columns.iter().position(|layout| layout.column.name == array.name));
        Ok(arrays)
    }

    /// Adds the rows of a chunk to the episode of its stream. An episode ends before a first row and a gap, and after a final row.
    fn add(&mut self, server: u32, chunk: StoredSteps) -> Result<()> {
        let packed = PackedRows::check(self.decoder.layout(), chunk.rows, chunk.packed)?;
        let fields = |row: u32| packed.row_slice(row..row + 1);
        let has = |row: u32, flag: u8| fields(row)[FLAGS_OFFSET] & flag != 0;
        let name = (server, chunk.writer, chunk.stream);
        let mut open =
            self.open.remove(&name).unwrap_or(OpenEpisode { steps: Steps::default(), next_step: chunk.first_step });
        self.open_bytes -= open.steps.bytes();
        if open.next_step != chunk.first_step {
            // Steps between them were evicted.
            open.end(&mut self.ready);
        }
        let next_step = chunk.first_step.checked_add(u64::from(chunk.rows));
        open.next_step =
            next_step.ok_or_else(|| Error::Corrupt(format!("a chunk begins at step {}", chunk.first_step)))?;
        let (mut from, mut unpacked) = (0, open.steps.unpacked);
        for row in 0..chunk.rows {
            let steps = open.steps.count + (row - from) as usize;
            let bytes = self.decoder.layout().unpacked_bytes(fields(row));
            if has(row, flags::FINAL) {
                // The row before it may be gone: then it is of no use.
                if steps > 0 {
                    open.steps.add(&packed, from..row + 1);
                    open.end(&mut self.ready);
                }
                (from, unpacked) = (row + 1, 0);
                continue;
            }
            if has(row, flags::FIRST) || steps > 0 && unpacked + bytes > PART_BYTES {
                open.steps.add(&packed, from..row);
                open.end(&mut self.ready);
                (from, unpacked) = (row, 0);
            }
            unpacked += bytes;
        }
        open.steps.add(&packed, from..chunk.rows);
        open.steps.unpacked = unpacked;
        if open.steps.count > 0 {
            self.open_bytes += open.steps.bytes();
            self.open.insert(name, open);
        }
        while self.open_bytes > OPEN_BYTES {
            let largest = self.open.values_mut().max_by_key(|episode| episode.steps.bytes());
            let Some(largest) = largest else { break };
            self.open_bytes -= largest.steps.bytes();
            largest.end(&mut self.ready);
        }
        Ok(())
    }
}

impl OpenEpisode {
    fn end(&mut self, ready: &mut VecDeque<Steps>) {
        if self.steps.count > 0 {
            ready.push_back(std::mem::take(&mut self.steps));
        }
    }
}

impl Steps {
    fn bytes(&self) -> usize {
        self.rows.len() + self.blobs.len()
    }

    /// Adds rows of a chunk, before them the key row of a first row that needs it.
    fn add(&mut self, packed: &PackedRows, rows: Range<u32>) {
        if rows.is_empty() {
            return;
        }
        if let Some(key) = packed.key_row(rows.start) {
            let begin = self.rows.len();
            self.copy(packed, key..key + 1);
            self.rows[begin + FLAGS_OFFSET] |= flags::REFERENCE;
        }
        self.count += rows.len();
        self.copy(packed, rows);
    }

    fn copy(&mut self, packed: &PackedRows, rows: Range<u32>) {
        self.rows.extend_from_slice(packed.row_slice(rows.clone()));
        let blobs = packed.blob_range(rows);
        self.blobs.extend_from_slice(&packed.as_bytes()[blobs]);
    }

    /// The steps as a sample of items of one row.
    fn into_sampled(self) -> Sampled {
        let item = SampledItem { probability: 1.0, ..SampledItem::default() };
        Sampled {
            items: vec![item; self.count],
            rows: self.rows.into(),
            blobs: vec![self.blobs.into()],
            ..Sampled::default()
        }
    }
}

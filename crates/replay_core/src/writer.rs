//! The writer: steps of many streams in, pushes of packed chunks and complete items out.

use std::sync::Arc;

use bytes::Bytes;
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use crate::error::{Error, Result};
use crate::replay::{ChunkHead, NewItem, OpenWriter, PushBody, PushChannel, Replay, Wait};
use crate::schema::{Codec, Dtype, TableConfig, flags};
use crate::view::{ACTION, REWARD, ViewSpec, find_scalar, read_scalar};
use crate::window::{Estimate, StreamWindows};

/// Open chunks of this many bytes together are pushed, however few steps they have.
const FULL_BYTES: usize = 4 << 20;

/// Values of every stream: an array without gaps whose first dimension is the streams.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// `[streams, ...]`.
    pub shape: &'a [usize],
    /// The elements, little endian, in row-major order.
    pub bytes: &'a [u8],
}

/// The last observations of the episodes that a step ends, where the environment has already started the next
/// ones (Gymnasium's SAME_STEP autoreset).
#[derive(Debug, Clone, Copy)]
pub struct FinalObservations<'a> {
    /// The view's observation column, `[streams, *shape]`; only the streams in `ended` are read.
    pub observation: Values<'a>,
    /// `[streams]`: whose episode ends with this step; by default where it is terminated or truncated.
    pub ended: Option<&'a [bool]>,
    /// float32 `[streams, actions]`: Q-values of these observations.
    pub q: Option<Values<'a>>,
}

/// One step of every stream: observation_t, action_t, reward_{t+1} and the ends that they led to.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepBatch<'a> {
    /// Every column of the table, by name, each `[streams, *shape]`.
    pub columns: &'a [(&'a str, Values<'a>)],
    /// `[streams]`: learning ends after this step (a terminal state, or a life lost); by default nowhere.
    pub terminated: Option<&'a [bool]>,
    /// `[streams]`: the episode is cut after this step; by default nowhere.
    pub truncated: Option<&'a [bool]>,
    /// `[streams]`: the observation starts a new stack. By default after every end. The first row of a stream
    /// and the row after a final row start one in any case: nothing before them belongs to them.
    pub first: Option<&'a [bool]>,
    /// `[streams]`: the row holds only the last observation of an episode (Gymnasium's NEXT_STEP autoreset: the
    /// row after an end). Its other columns and flags are not read. By default nowhere.
    pub final_rows: Option<&'a [bool]>,
    /// Gymnasium's SAME_STEP autoreset: the last observations of the episodes that end here.
    pub final_observations: Option<FinalObservations<'a>>,
    /// float32 `[streams, actions]`: Q-values of the observations, for priorities at birth.
    pub q: Option<Values<'a>>,
    /// `[streams]`: priorities of the items anchored at this step, before the exponent. They go before those
    /// from Q-values; without either an item starts at the largest priority that the table has held.
    pub priority: Option<&'a [f32]>,
}

/// How a writer works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterOptions {
    /// For people: it stands in errors and logs.
    pub name: String,
    /// Steps of a stream in one chunk: the unit of pushing, storage and eviction; 1 to 65536.
    pub chunk_steps: u32,
}

impl Default for WriterOptions {
    fn default() -> Self {
        WriterOptions {
            name: "writer".into(),
            chunk_steps: 50,
        }
    }
}

/// What a writer has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriterCounters {
    /// Steps taken, without final rows.
    pub steps: u64,
    /// Final rows taken.
    pub final_rows: u64,
    /// Items made.
    pub items: u64,
    /// Windows dropped at a reset that no end announced.
    pub dropped_by_reset: u64,
    /// Windows dropped because the final row of a truncated episode did not follow.
    pub dropped_without_final_row: u64,
}

/// Packs the steps of some streams and pushes them to a table.
///
/// [`Writer::append`] takes a step whole or not at all: after an error the same step may be appended again.
/// Steps wait in open chunks until `chunk_steps` are there; the next append, a flush or the close pushes them.
/// Dropping a writer drops what it has not pushed.
pub struct Writer {
    channel: Box<dyn PushChannel>,
    packer: Packer,
    chunk_steps: usize,
    windows: Vec<StreamWindows>,
    chunks: Vec<OpenChunk>,
    items: Vec<NewItem>,
    /// A push that failed; it is tried again before anything else.
    unsent: Option<PushBody>,
    counters: WriterCounters,
    closed: bool,
}

impl Writer {
    /// Opens a writer of `table`, whose items have the windows of `view`.
    ///
    /// # Errors
    /// Those of the replay, of [`ViewSpec::validate`], and [`Error::Config`] for options out of range.
    pub fn open(
        replay: &dyn Replay,
        table: &str,
        streams: u32,
        view: &ViewSpec,
        options: WriterOptions,
        wait: &Wait<'_>,
    ) -> Result<Self> {
        let config = replay.table_config(table, wait)?;
        view.validate(&config)?;
        if streams == 0 {
            return Err(Error::Config("a writer needs at least one stream".into()));
        }
        if !(1..=65_536).contains(&options.chunk_steps) {
            return Err(Error::Config(format!(
                "a writer's chunk_steps is 1 to 65536, got {}",
                options.chunk_steps
            )));
        }
        let channel = replay.open_writer(
            OpenWriter {
                table: table.to_owned(),
                writer: rand::random(),
                name: options.name,
                streams,
                window_before: view.before(),
                window_after: view.after(),
            },
            wait,
        )?;
        let streams = streams as usize;
        Ok(Writer {
            channel,
            packer: Packer::new(config, view, streams)?,
            chunk_steps: options.chunk_steps as usize,
            windows: (0..streams)
                .map(|stream| StreamWindows::new(stream as u32, view))
                .collect(),
            chunks: (0..streams).map(|_| OpenChunk::default()).collect(),
            items: Vec::new(),
            unsent: None,
            counters: WriterCounters::default(),
            closed: false,
        })
    }

    /// Takes one step of every stream. Pushes first where the open chunks are full, so this may wait.
    ///
    /// # Errors
    /// [`Error::Schema`] names a column, what is expected and what came; [`Error::Priority`] for a bad priority
    /// or Q-value; [`Error::Closed`] after [`Writer::close`]; and those of the push. In each case the step was
    /// not taken, and nothing taken before it is lost.
    pub fn append(&mut self, step: &StepBatch<'_>, wait: &Wait<'_>) -> Result<()> {
        self.check_open()?;
        let step = self.packer.check(step, &self.windows)?;
        if self.is_full() {
            self.push(wait)?;
        }
        self.take(&step);
        Ok(())
    }

    /// Pushes what is there and returns when it is applied. Open windows stay open.
    ///
    /// # Errors
    /// Those of the push; nothing is lost, and the next call tries again.
    pub fn flush(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.check_open()?;
        self.push(wait)?;
        self.channel.flush(wait)
    }

    /// Flushes and closes the writer on the memory. Open windows never become items.
    ///
    /// # Errors
    /// Those of the push; the writer then stays open.
    pub fn close(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        self.push(wait)?;
        self.channel.close(wait)?;
        self.closed = true;
        Ok(())
    }

    /// What the writer has done so far.
    pub fn counters(&self) -> WriterCounters {
        let mut counters = self.counters;
        for dropped in self.windows.iter().map(StreamWindows::dropped) {
            counters.dropped_by_reset += dropped.by_reset;
            counters.dropped_without_final_row += dropped.without_final_row;
        }
        counters
    }

    fn check_open(&self) -> Result<()> {
        if self.closed {
            return Err(Error::Closed("the writer"));
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.unsent.is_some()
            || self
                .chunks
                .iter()
                .any(|chunk| chunk.steps as usize >= self.chunk_steps)
            || self.chunks.iter().map(OpenChunk::bytes).sum::<usize>() >= FULL_BYTES
    }

    /// Pushes the open chunks, after a push that failed before.
    fn push(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.unsent.is_none() {
            self.unsent = self.seal()?;
        } else {
            // What came after the failed push stays open until that one is through.
        }
        Ok(())
    }
}

//! The writer: makes pushes of packed chunks and complete items from the steps of many streams. `step` checks the steps,
//! `pack` reads and packs their rows, and [`crate::episode_windows`] finds the complete items.

mod pack;
mod step;

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use crate::episode_windows::{DroppedWindows, EpisodeWindows};
use crate::error::{Error, Result};
use crate::replay::{ChunkHead, NewItem, OpenWriter, PushBody, PushChannel, Replay, WriterId};
use crate::schema::{TableConfig, flags};
use crate::view_spec::ViewSpec;
use base::allocation;
use base::system::random_number;
use base::wait::Wait;
use pack::{CheckedStep, OpenChunk, Packer};
use step::StepChecker;

pub use step::{FinalObservations, StepBatch, Values};

/// Total bytes of the open chunks at which they are pushed, however few steps they have.
const FULL_BYTES: usize = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterOptions {
    /// Display name, in errors and logs.
    pub name: String,
    /// [`OpenWriter::server`]; `None` is the one with the fewest writers.
    pub server: Option<u32>,
    /// Steps of a stream in one chunk: the unit of pushing, storage and eviction; 1 to 65536.
    pub chunk_steps: u32,
}

impl Default for WriterOptions {
    fn default() -> Self {
        WriterOptions { name: "writer".into(), server: None, chunk_steps: 50 }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriterCounters {
    /// Appended steps, without final rows.
    pub steps: u64,
    pub final_rows: u64,
    pub items: u64,
    pub dropped: DroppedWindows,
    pub unsent_rows: u64,
}

/// Packs the steps of some streams and pushes them to a table.
///
/// [`Writer::append`] is atomic: after an error the same step may be appended again. Steps are kept in open chunks until
/// there are `chunk_steps` of them; the next append, a flush or the close pushes them. Dropping a writer drops the steps
/// that it has not pushed.
pub struct Writer<E = Error> {
    channel: Box<dyn PushChannel<E>>,
    checker: Arc<StepChecker>,
    packer: Packer,
    chunk_steps: u32,
    windows: Vec<EpisodeWindows>,
    chunks: Vec<OpenChunk>,
    items: Vec<NewItem>,
    /// Pushes that have failed or wait for an earlier one, the oldest first.
    unsent: VecDeque<PushBody>,
    counters: WriterCounters,
    id: WriterId,
    name: String,
    /// The newest call says which rows are final ones: the last observation of an episode comes with the next call.
    marks_final_rows: bool,
    /// Version of the parameters that the rows of the open chunks come from.
    version: u64,
    warned: bool,
    closed: bool,
}

/// Dropped windows from which on a writer is warned even though it makes items.
const MANY_DROPPED: u64 = 100;

impl<E: From<Error>> Writer<E> {
    /// Opens a writer of `table`, whose items have the windows of `view`.
    ///
    /// # Errors
    /// Errors of the replay and of [`ViewSpec::validate`], and [`Error::Config`] for options out of range, or pushes or
    /// windows that the table could not hold.
    pub fn open(
        replay: &dyn Replay<E>,
        table: &str,
        streams: u32,
        view: &ViewSpec,
        options: WriterOptions,
        wait: &Wait<'_>,
    ) -> Result<Self, E> {
        let config = replay.table_config(table, wait)?;
        Self::over_channel(config, streams, view, options, |open| replay.open_writer(table, open, wait))
    }

    /// A writer of the table with this definition, over the channel that `open_channel` opens.
    ///
    /// # Errors
    /// Errors of `open_channel` and of [`ViewSpec::validate`], and [`Error::Config`] for options out of range, or pushes
    /// or windows that the table could not hold; [`Error::OutOfMemory`].
    pub fn over_channel(
        config: Arc<TableConfig>,
        streams: u32,
        view: &ViewSpec,
        options: WriterOptions,
        open_channel: impl FnOnce(OpenWriter) -> Result<Box<dyn PushChannel<E>>, E>,
    ) -> Result<Self, E> {
        view.validate(&config)?;
        if streams == 0 {
            let reason = "a writer has at least one stream, the steps of one environment: num_envs is 1 or more, got 0";
            return Err(Error::Config(reason.into()).into());
        }
        if !(1..=65_536).contains(&options.chunk_steps) {
            let reason = format!("a writer's chunk_steps is 1 to 65536, got {}", options.chunk_steps);
            return Err(Error::Config(reason).into());
        }
        check_pushes_fit(&config, streams, options.chunk_steps)?;
        config.check_window(streams, view.before(), view.after())?;
        // Each stream keeps a key row. The packer has two rows, and a chunk one more.
        let rows = u64::from(streams) + 3;
        let row_bytes = config.columns.iter().map(|column| column.fixed_bytes() as u64).sum::<u64>();
        allocation::check("a writer", rows.saturating_mul(row_bytes)).map_err(Error::from)?;
        let (writer, name) = (random_number(), options.name);
        let channel = open_channel(OpenWriter {
            writer,
            name: name.clone(),
            server: options.server,
            streams,
            window_before: view.before(),
            window_after: view.after(),
        })?;
        let id = WriterId { table: config.name.clone(), writer, server: channel.server() };
        Ok(Writer {
            channel,
            packer: Packer::new(&config),
            checker: Arc::new(StepChecker::new(config, view, streams as usize)),
            chunk_steps: options.chunk_steps,
            windows: (0..streams).map(|stream| EpisodeWindows::new(stream, view)).collect(),
            chunks: (0..streams).map(|_| OpenChunk::default()).collect(),
            items: Vec::new(),
            unsent: VecDeque::new(),
            counters: WriterCounters::default(),
            id,
            name,
            marks_final_rows: false,
            version: 0,
            warned: false,
            closed: false,
        })
    }

    /// Appends one step of every stream. Full open chunks are pushed first, which may block.
    ///
    /// # Errors
    /// [`Error::Schema`] with the column, the expected and the given array, or the index of NaN or infinity in a reward or an
    /// observation ([`Column::finite`](crate::schema::Column::finite)); [`Error::Priority`] for a bad priority;
    /// [`Error::Closed`] after [`Writer::close`]; and the push's errors. In each case the step is not appended, and no
    /// earlier one is lost.
    pub fn append(&mut self, step: &StepBatch<'_>, wait: &Wait<'_>) -> Result<(), E> {
        self.append_rows(step, None, wait)
    }

    /// Appends a block of consecutive steps. Rows, items and pushes equal those of one [`Writer::append`] for each step. Full chunks of
    /// earlier steps are pushed first, which may block. Full chunks of the block are pushed by the next call, or by [`Writer::send`].
    ///
    /// # Errors
    /// Errors of [`Writer::append`]. In each case no step of the block is appended.
    pub fn extend(&mut self, block: &StepBatch<'_>, steps: usize, wait: &Wait<'_>) -> Result<(), E> {
        self.append_rows(block, Some(steps), wait)
    }

    fn append_rows(&mut self, rows: &StepBatch<'_>, steps: Option<usize>, wait: &Wait<'_>) -> Result<(), E> {
        self.check_open()?;
        let checker = Arc::clone(&self.checker);
        let checked = checker.check(rows, steps, &self.windows)?;
        if rows.version != self.version {
            // A chunk has one version.
            self.seal(self.marks_final_rows);
        }
        self.push_full(wait)?;
        self.version = rows.version;
        self.marks_final_rows = rows.final_rows.is_some();
        for step in 0..steps.unwrap_or(1) {
            if step > 0 && self.is_full() {
                self.seal(self.marks_final_rows);
            }
            self.take(&checked, step);
        }
        Ok(())
    }

    /// Pushes full open chunks, without waiting until they are applied. After an error no step is lost, and the next call retries.
    pub fn send(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        self.check_open()?;
        self.push_full(wait)
    }

    /// Pushes all steps and returns when they are applied. Open windows stay open. After an error the next call retries.
    pub fn flush(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        self.push_and_flush(false, wait)
    }

    /// [`Writer::flush`] for a sample that waits. Items of a terminated episode whose last observation comes with the next call
    /// are pushed with that: the sample would take them without it.
    pub fn flush_complete(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        self.push_and_flush(self.marks_final_rows, wait)
    }

    fn push_and_flush(&mut self, hold: bool, wait: &Wait<'_>) -> Result<(), E> {
        self.check_open()?;
        self.seal(hold);
        self.push_sealed(wait)?;
        self.channel.flush(wait)
    }

    /// Flushes and closes the writer, whatever the age of its parameters; after an error it stays open. Windows of unfinished episodes are
    /// dropped, and trajectories among them counted.
    pub fn close(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        if self.closed {
            return Ok(());
        }
        // Pushes may wait for newer parameters.
        if self.checker.config.max_version_lag > 0 {
            self.channel.end_steps(wait)?;
        }
        let items_before = self.items.len();
        self.windows.iter_mut().for_each(|windows| windows.end(&mut self.items));
        self.counters.items += (self.items.len() - items_before) as u64;
        self.seal(false);
        self.push_sealed(wait)?;
        self.channel.close(wait)?;
        self.closed = true;
        self.windows.iter_mut().for_each(EpisodeWindows::leave);
        self.warn_of_dropped_windows();
        Ok(())
    }

    /// Its name in the memory, for [`Replay::get_parameters`].
    pub fn id(&self) -> &WriterId {
        &self.id
    }

    pub fn counters(&self) -> WriterCounters {
        let mut counters = self.counters;
        for windows in &self.windows {
            counters.dropped.add(&windows.dropped);
        }
        let open = self.chunks.iter().map(|chunk| chunk.steps);
        let failed = self.unsent.iter().flat_map(|push| &push.chunks);
        let unsent = open.chain(failed.map(|chunk| chunk.rows));
        counters.unsent_rows = unsent.map(u64::from).sum();
        counters
    }

    fn check_open(&self) -> Result<()> {
        if self.closed {
            return Err(Error::Closed("the writer"));
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.steps >= self.chunk_steps)
            || self.chunks.iter().map(OpenChunk::bytes).sum::<usize>() >= FULL_BYTES
    }

    /// Warns once of a writer that makes no items, or that drops many windows: usually flags were forgotten.
    fn warn_of_dropped_windows(&mut self) {
        let counters = self.counters();
        let DroppedWindows { by_reset, without_final_row, unfinished, within_burn_in } = counters.dropped;
        let dropped = counters.dropped.by_mistake();
        let few = match counters.items {
            0 => dropped + within_burn_in == 0,
            _ => dropped < MANY_DROPPED,
        };
        if self.warned || few {
            return;
        }
        self.warned = true;
        tracing::warn!(
            "writer {:?} of table {:?} has dropped {dropped} windows and made {} items: {by_reset} windows at a row with `first` \
             that follows no terminated or truncated row, {without_final_row} too short without the final row of a truncated \
             step, {unfinished} trajectories whose episode had not ended when the writer closed; {within_burn_in} more ended within \
             their burn_in",
            self.name,
            self.id.table,
            counters.items,
        );
    }

    /// Pushes the open chunks if one is full, after the pushes before them.
    fn push_full(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        if self.is_full() {
            self.seal(self.marks_final_rows);
        }
        self.push_sealed(wait)
    }

    fn push_sealed(&mut self, wait: &Wait<'_>) -> Result<(), E> {
        if !self.unsent.is_empty() {
            self.warn_of_dropped_windows();
        }
        while let Some(body) = self.unsent.front() {
            self.channel.push(body.clone(), wait)?;
            self.unsent.pop_front();
        }
        Ok(())
    }

    /// Makes a push of the open chunks and the items that they complete, without those that `hold` keeps for the next row.
    fn seal(&mut self, hold: bool) {
        let extends = |item: &mut NewItem| hold && self.windows[item.stream as usize].may_extend(item);
        let held: Vec<_> = self.items.extract_if(.., extends).collect();
        let items = std::mem::replace(&mut self.items, held);
        let mut payload = Vec::with_capacity(self.chunks.iter().map(OpenChunk::bytes).sum());
        let mut heads = Vec::with_capacity(self.chunks.len());
        for (stream, chunk) in self.chunks.iter_mut().enumerate() {
            if chunk.steps == 0 {
                continue;
            }
            heads.push(ChunkHead {
                stream: stream as u32,
                rows: chunk.steps,
                first_step: self.windows[stream].next_step - u64::from(chunk.steps),
                // Sealed at FULL_BYTES, a chunk has at most two steps more: far below 2^32.
                bytes: chunk.bytes() as u32,
                version: self.version,
            });
            chunk.move_into(&mut payload);
        }
        if !(heads.is_empty() && items.is_empty()) {
            self.unsent.push_back(PushBody { chunks: heads, items, payload: Bytes::from(payload) });
        }
    }

    /// Packs one step of a block: a row of each stream.
    fn take(&mut self, rows: &CheckedStep<'_>, step: usize) {
        let items_before = self.items.len();
        let first = step * self.windows.len();
        for (stream, (windows, chunk)) in self.windows.iter_mut().zip(&mut self.chunks).enumerate() {
            let row = first + stream;
            let row_flags = rows.flags(row, windows);
            self.packer.pack(chunk, row_flags, |column| rows.value(column, row));
            windows.append(row_flags, rows.estimate(row), &mut self.items);
            if row_flags & flags::FINAL != 0 {
                self.counters.final_rows += 1;
            } else {
                self.counters.steps += 1;
            }
            if let Some(last) = rows.last_observation(row) {
                self.packer.pack(chunk, flags::FINAL, |column| last.value(column));
                windows.append(flags::FINAL, last.estimate, &mut self.items);
                self.counters.final_rows += 1;
            }
        }
        self.counters.items += (self.items.len() - items_before) as u64;
    }
}

/// Checks that the table can hold a push of one full chunk of each stream.
fn check_pushes_fit(config: &TableConfig, streams: u32, chunk_steps: u32) -> Result<()> {
    let refuse = |pushed: String, held: String| {
        Err(Error::Config(format!(
            "a writer of {streams} streams with chunk_steps {chunk_steps} pushes {pushed} at once, and table {:?} \
             holds {held}: take fewer streams (num_envs), a smaller chunk_steps, or a table with a larger capacity",
            config.name
        )))
    };
    let streams = u64::from(streams);
    // A step may add a final row to an almost full chunk.
    let rows = streams * (u64::from(chunk_steps) + 1);
    if rows > config.capacity {
        return refuse(format!("up to {rows} steps"), config.capacity.to_string());
    }
    // Without blobs, whose sizes are not known yet.
    let step = streams.saturating_mul(config.row_bytes() as u64);
    let bytes = step.saturating_mul(u64::from(chunk_steps)).min(step.max(FULL_BYTES as u64));
    let capacity = config.effective_capacity_bytes();
    if bytes > capacity {
        return refuse(format!("{bytes} bytes and more"), format!("{capacity} bytes"));
    }
    Ok(())
}

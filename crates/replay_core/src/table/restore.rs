//! A table from the records of a snapshot: all of it is checked before anything is stored, and then put in place as
//! a whole (`place`). The file comes from outside, so it is checked as a push is.

pub(crate) mod place;

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::snapshot_records::RecordKind;
use crate::snapshot_records::content::{
    ChunkRecord, ItemRecord, ReadingRecord, StreamRecord, TableState, WriterRecord, WriterStream, read_numbers,
};
use crate::view_spec::ViewSpec;

use super::Table;
use super::stored::Charge;
use super::writers::{WriterIdentity, Writers};

/// Limit of every count in a file, so that counting on from it does not overflow.
const MOST_COUNTED: u64 = 1 << 47;

/// `Err` describes the fault of a record.
type RecordResult = std::result::Result<(), String>;

/// A table of a snapshot, as far as it was read: at most the newest steps that the table can hold.
pub(crate) struct Staged {
    table: Arc<Table>,
    saved: TableConfig,
    streams: Vec<StagedStream>,
    chunks: VecDeque<StagedChunk>,
    /// For each sequence of chunks without a gap, the step after its last.
    runs: Vec<u64>,
    /// Number in the snapshot of the first of `chunks`.
    first: u64,
    steps: u64,
    bytes: u64,
    items: Vec<ItemRecord>,
    /// Index in `items` of each item of the last items record; `None` for one that is left out.
    last_items: Vec<Option<usize>>,
    /// Ids of `items`, if the snapshot has them.
    ids: Vec<u64>,
    writers: Vec<WriterRecord>,
    /// Steps dropped because the table is too small.
    left_out: u64,
    reading: Option<ReadingRecord>,
    state: Option<TableState>,
}

struct StagedStream {
    writer: Arc<WriterIdentity>,
    number: u32,
    /// The number that the next step has unless there is a gap.
    next_step: u64,
    last_chunk: Option<u64>,
    /// Index in `Staged::runs` of its last chunk.
    run: usize,
    /// Whether it is a stream of an open writer.
    is_open: bool,
}

struct StagedChunk {
    packed: PackedRows,
    charge: Arc<Charge>,
    stream: usize,
    first_step: u64,
    /// The chunk whose first row follows this one's last.
    continued_by: Option<u64>,
    /// Index in `Staged::runs`.
    run: usize,
    items: usize,
}

impl StagedChunk {
    /// Bytes counted against the table's limit, as if this chunk were a push of its own.
    fn bytes(&self) -> u64 {
        self.packed.as_bytes().len() as u64 + TableConfig::CHUNK_BYTES
    }

    /// Its first step and its rows.
    fn span(&self) -> (u64, u32) {
        (self.first_step, self.packed.rows())
    }
}

impl Staged {
    /// Begins with a table and its definition in the snapshot.
    ///
    /// # Errors
    /// [`Error::TableDiffers`] when rows or masses have another meaning in the table.
    pub fn new(table: Arc<Table>, saved: TableConfig) -> Result<Self> {
        let mut columns = saved.columns.clone();
        // Stored rows do not depend on what writers check.
        for (column, own) in columns.iter_mut().zip(&table.config.columns) {
            column.finite = own.finite;
        }
        let of_snapshot = TableConfig {
            columns,
            sampler: saved.sampler,
            priority_exponent: saved.priority_exponent,
            priority_unit_log2: saved.priority_unit_log2,
            ..TableConfig::clone(&table.config)
        };
        if let Some(difference) = table.config.difference_from(&of_snapshot, "in the snapshot") {
            return Err(Error::TableDiffers { table: saved.name, difference });
        }
        Ok(Staged {
            table,
            saved,
            streams: Vec::new(),
            chunks: VecDeque::new(),
            runs: Vec::new(),
            first: 0,
            steps: 0,
            bytes: 0,
            items: Vec::new(),
            last_items: Vec::new(),
            ids: Vec::new(),
            writers: Vec::new(),
            left_out: 0,
            reading: None,
            state: None,
        })
    }

    /// Checks that a changed view of the table finds its rows around every item: samples with it would fail until the last of these
    /// items has gone.
    ///
    /// # Errors
    /// [`Error::TableDiffers`].
    pub fn check_view(&mut self) -> Result<()> {
        let (view, saved) = (&self.table.config.view, &self.saved.view);
        let Some(view) = view.as_ref().filter(|_| view != saved) else {
            return Ok(());
        };
        let is_narrow = |before, after| before < view.before() || after < view.after();
        let narrow = |item: &&ItemRecord| {
            let chunk = self.chunk(item.chunk.into());
            let writer = chunk.map(|chunk| &self.streams[chunk.stream].writer);
            writer.is_some_and(|writer| is_narrow(writer.window_before, writer.window_after))
        };
        let (narrow, items) = (self.items.iter().filter(narrow).count(), self.items.len());
        if narrow == 0 {
            // The next items of these writers would be as narrow: they have expired, and open again with the new view.
            self.writers.retain(|writer| !is_narrow(writer.window_before, writer.window_after));
            return Ok(());
        }
        let saved = saved.as_ref().map_or("None".to_owned(), ViewSpec::to_string);
        let difference =
            format!("view is {saved}, asked for {view}, and {narrow} of {items} items have too few steps for it");
        Err(Error::TableDiffers { table: self.name().to_owned(), difference })
    }

    pub fn name(&self) -> &str {
        &self.table.config.name
    }

    /// Whether the table's last record was read.
    pub fn is_complete(&self) -> bool {
        self.state.is_some()
    }

    /// Takes the next record.
    ///
    /// # Errors
    /// A description of its fault.
    pub fn take(&mut self, kind: RecordKind, body: Bytes) -> RecordResult {
        match kind {
            RecordKind::Stream => self.take_stream(StreamRecord::from_bytes(body)?),
            RecordKind::Chunk => {
                let (head, packed) = ChunkRecord::from_bytes(body)?;
                self.take_chunk(head, packed)
            }
            RecordKind::Items => {
                self.last_items.clear();
                ItemRecord::read_all(body)?.try_for_each(|item| self.take_item(item))
            }
            RecordKind::Ids => self.take_ids(&read_numbers(body)?),
            RecordKind::Writer => self.take_writer(WriterRecord::from_bytes(body)?),
            RecordKind::Reading => self.take_reading(ReadingRecord::from_bytes(body)?),
            RecordKind::State => self.take_state(TableState::from_bytes(body)?),
            RecordKind::Memory | RecordKind::Table | RecordKind::Parameters | RecordKind::End => {
                Err(format!("a record of kind {} inside a table", kind as u32))
            }
        }
    }

    fn take_stream(&mut self, stream: StreamRecord) -> RecordResult {
        if stream.writer.len() > Writers::MAX_NAME_BYTES {
            return Err(format!("a writer's name of {} bytes", stream.writer.len()));
        }
        self.streams.push(StagedStream {
            writer: WriterIdentity::new(stream.writer, stream.window_before, stream.window_after),
            number: stream.number,
            next_step: 0,
            last_chunk: None,
            run: 0,
            is_open: false,
        });
        Ok(())
    }

    fn take_chunk(&mut self, head: ChunkRecord, packed: Bytes) -> RecordResult {
        let number = self.end();
        let index = head.stream as usize;
        let Some(stream) = self.streams.get_mut(index) else {
            return Err(format!("a chunk of stream {index}, which is unknown"));
        };
        if stream.is_open {
            return Err(format!("a chunk of stream {index} after its writer"));
        }
        let charge = Charge::new(&self.table.held);
        let packed = PackedRows::check(&self.table.layout, head.rows, charge.payload(packed))
            .map_err(|error| error.to_string())?;
        let next_step = head.first_step.checked_add(u64::from(head.rows));
        let Some(next_step) = next_step.filter(|_| head.first_step >= stream.next_step) else {
            return Err(format!("step {} of stream {index} after step {}", head.first_step, stream.next_step));
        };
        let continues = stream.next_step == head.first_step;
        let previous = stream.last_chunk.replace(number).filter(|_| continues);
        stream.next_step = next_step;
        if previous.is_none() {
            stream.run = self.runs.len();
            self.runs.push(next_step);
        }
        let run = stream.run;
        self.runs[run] = next_step;
        if let Some(previous) = previous.and_then(|number| self.chunk_mut(number)) {
            previous.continued_by = Some(number);
        }
        self.steps += u64::from(head.rows);
        let chunk = StagedChunk {
            packed,
            charge,
            stream: index,
            first_step: head.first_step,
            continued_by: None,
            run,
            items: 0,
        };
        self.bytes += chunk.bytes();
        self.chunks.push_back(chunk);
        while self.steps > self.table.config.capacity || self.bytes > self.table.capacity_bytes {
            self.leave_out_oldest();
        }
        Ok(())
    }

    fn take_writer(&mut self, writer: WriterRecord) -> RecordResult {
        let name = &writer.name;
        let refuse = |reason: &str| Err(format!("writer {:#018x} {reason}", writer.number));
        if name.len() > Writers::MAX_NAME_BYTES {
            return refuse("with a name that is too long");
        }
        let open = self.writers.iter().map(|other| other.streams.len());
        let streams = writer.streams.len() + open.sum::<usize>();
        if writer.streams.is_empty() || streams > Writers::MOST_STREAMS as usize {
            return refuse("with more streams than a table has, or without one");
        }
        if self.writers.iter().any(|other| other.number == writer.number) {
            return refuse("appears twice");
        }
        if writer.epoch == 0 || writer.epoch == u32::MAX {
            return refuse("with an epoch that no writer has");
        }
        if writer.last_sequence.max(writer.steps) >= MOST_COUNTED {
            return refuse("with a count that no writer reaches");
        }
        for (number, stream) in (0..).zip(&writer.streams) {
            if stream.record == WriterStream::WITHOUT_CHUNKS {
                continue;
            }
            let Some(staged) = self.streams.get_mut(stream.record as usize) else {
                return refuse("with a stream that is not there");
            };
            let (identity, windows) = (&staged.writer, (writer.window_before, writer.window_after));
            let same = identity.name == *name
                && (identity.window_before, identity.window_after) == windows
                && staged.number == number
                && staged.next_step <= stream.next_step;
            if !same || std::mem::replace(&mut staged.is_open, true) {
                return refuse("with a stream of another writer");
            }
        }
        self.writers.push(writer);
        Ok(())
    }

    fn take_ids(&mut self, ids: &[u64]) -> RecordResult {
        if ids.len() != self.last_items.len() {
            return Err(format!("{} ids of {} items", ids.len(), self.last_items.len()));
        }
        for (&id, index) in ids.iter().zip(self.last_items.drain(..)) {
            if let Some(index) = index {
                // Ids are matched to items by position: an items record without ids would shift them.
                if index != self.ids.len() {
                    return Err("items without ids before items with ids".to_owned());
                }
                self.ids.push(id);
            }
        }
        Ok(())
    }

    fn take_reading(&mut self, reading: ReadingRecord) -> RecordResult {
        if reading.writers.len() != self.streams.len() || reading.end >= MOST_COUNTED || reading.end < self.end() {
            return Err("numbers for readers that do not fit its chunks".to_owned());
        }
        self.reading = Some(reading);
        Ok(())
    }

    fn take_item(&mut self, item: ItemRecord) -> RecordResult {
        let number = u64::from(item.chunk);
        if number >= self.end() {
            return Err(format!("an item of chunk {number}, which is unknown"));
        }
        if !(0.0..f64::INFINITY).contains(&item.priority) {
            return Err(format!("an item of priority {}", item.priority));
        }
        if number < self.first || self.table.items.is_used_up(item.times_sampled) {
            self.last_items.push(None);
            return Ok(());
        }
        if self.items.len() as u64 >= self.saved.capacity {
            return Err(format!("more than the {} items that its table could hold", self.saved.capacity));
        }
        self.check_window(&item)?;
        if let Some(chunk) = self.chunk_mut(number) {
            chunk.items += 1;
            self.last_items.push(Some(self.items.len()));
            self.items.push(item);
        }
        Ok(())
    }

    /// Checks that the item's rows are present and consecutive.
    fn check_window(&self, item: &ItemRecord) -> RecordResult {
        let refuse = |reason: &str| Err(format!("an item of chunk {} {reason}", item.chunk));
        let Some(chunk) = self.chunk(u64::from(item.chunk)) else {
            return refuse("that is not there");
        };
        let writer = &self.streams[chunk.stream].writer;
        if item.before > writer.window_before || item.after > writer.window_after {
            return refuse("with rows beyond its writer's window");
        }
        if item.first_row >= chunk.packed.rows() {
            return refuse("with a first row beyond it");
        }
        // No overflow: the row is within the chunk, whose steps were checked.
        let there = self.runs[chunk.run] - (chunk.first_step + u64::from(item.first_row));
        if u64::from(item.before) + 1 + u64::from(item.after) > there {
            return refuse("whose rows are not all there");
        }
        Ok(())
    }

    fn take_state(&mut self, state: TableState) -> RecordResult {
        let largest = f64::from_bits(state.max_priority);
        if !(largest.is_finite() && largest.is_sign_positive()) {
            return Err(format!("a largest priority of {largest}"));
        }
        if let Some(count) = state.counts().find(|&count| count >= MOST_COUNTED) {
            return Err(format!("a count of {count}"));
        }
        let taken = state.counters[super::stats::INSERTED_STEPS];
        if let Some(item) = self.items.iter().find(|item| item.born > taken) {
            return Err(format!("an item from step {} of {taken}", item.born));
        }
        while self.first < state.evicted_chunks && self.drop_oldest().is_some() {}
        let mut items: usize = self.chunks.iter().map(|chunk| chunk.items).sum();
        while items > self.table.items.capacity() {
            items -= self.leave_out_oldest().map_or(items, |chunk| chunk.items);
        }
        let first = self.first;
        let mut kept = self.items.iter().map(|item| u64::from(item.chunk) >= first);
        self.ids.retain(|_| kept.next().unwrap_or(false));
        self.items.retain(|item| u64::from(item.chunk) >= first);
        self.state = Some(state);
        Ok(())
    }

    fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    fn chunk(&self, number: u64) -> Option<&StagedChunk> {
        self.chunks.get(number.checked_sub(self.first)? as usize)
    }

    fn chunk_mut(&mut self, number: u64) -> Option<&mut StagedChunk> {
        self.chunks.get_mut(number.checked_sub(self.first)? as usize)
    }

    /// [`Self::drop_oldest`] for a chunk that the table is too small for.
    fn leave_out_oldest(&mut self) -> Option<StagedChunk> {
        let oldest = self.drop_oldest();
        self.left_out += oldest.as_ref().map_or(0, |chunk| u64::from(chunk.packed.rows()));
        oldest
    }

    fn drop_oldest(&mut self) -> Option<StagedChunk> {
        let oldest = self.chunks.pop_front()?;
        self.first += 1;
        self.steps -= u64::from(oldest.packed.rows());
        self.bytes -= oldest.bytes();
        Some(oldest)
    }
}

//! A table from the records of a snapshot: all of it is checked before anything is stored, and then put in place as
//! a whole (`place`), as pushes are. The file comes from outside, so it is checked as a push is.

pub(crate) mod place;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::snapshot_records::RecordKind;
use crate::snapshot_records::content::{ChunkRecord, ItemRecord, StreamRecord, TableState, WriterRecord, from_json};
use crate::view_spec::ViewSpec;

use super::Table;
use super::prepare::{Prepared, PreparedChunk};
use super::stored::{Charge, StoredChunk};
use super::streams::{ChunkSpan, FirstChunk, Stream};
use super::writers::{WriterIdentity, Writers};

/// Limit of every count in a file, so that counting on from it does not overflow.
const MOST_COUNTED: u64 = 1 << 47;

/// `Err` describes the fault of a record.
type RecordResult = std::result::Result<(), String>;

/// A table of a snapshot, as far as it was read: at most the newest steps that the table can hold.
pub(crate) struct Staged {
    table: Arc<Table>,
    saved: TableConfig,
    /// Writers by their serials, shared by their chunks as by those that they push later.
    identities: HashMap<u64, Arc<WriterIdentity>>,
    streams: Vec<StagedStream>,
    /// Each a push of its own, whose stream is an index in `streams`. Chunks have the numbers of the snapshot.
    chunks: VecDeque<Prepared>,
    /// Number of the first of `chunks`.
    first: u64,
    steps: u64,
    bytes: u64,
    items: Vec<ItemRecord>,
    writers: Vec<WriterRecord>,
    /// Steps dropped because the table is too small.
    left_out: u64,
    state: Option<TableState>,
}

struct StagedStream {
    writer: Arc<WriterIdentity>,
    number: u32,
    steps: Stream,
    /// Number of the open writer that has it.
    open: Option<u64>,
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
            identities: HashMap::new(),
            streams: Vec::new(),
            chunks: VecDeque::new(),
            first: 0,
            steps: 0,
            bytes: 0,
            items: Vec::new(),
            writers: Vec::new(),
            left_out: 0,
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
            let stream = self.stream_of(item.chunk.into());
            stream.is_some_and(|stream| is_narrow(stream.writer.window_before, stream.writer.window_after))
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
            RecordKind::Stream => self.take_stream(from_json(&body)?),
            RecordKind::Chunk => {
                let (head, packed) = ChunkRecord::from_bytes(body)?;
                self.take_chunk(head, packed)
            }
            RecordKind::Items => ItemRecord::read_all(body)?.try_for_each(|item| self.take_item(item)),
            RecordKind::Writer => self.take_writer(from_json(&body)?),
            RecordKind::State => self.take_state(from_json(&body)?),
            RecordKind::Memory | RecordKind::Table | RecordKind::Parameters | RecordKind::End => {
                Err(format!("a record of kind {} inside a table", kind as u32))
            }
        }
    }

    fn take_stream(&mut self, stream: StreamRecord) -> RecordResult {
        let StreamRecord { writer, serial, window_before, window_after, number } = stream;
        let writer = self.identity(writer, serial, window_before, window_after)?;
        self.streams.push(StagedStream { writer, number, steps: Stream::default(), open: None });
        Ok(())
    }

    /// The writer of a serial, which belongs to one writer.
    fn identity(
        &mut self,
        name: String,
        serial: u64,
        window_before: u16,
        window_after: u16,
    ) -> std::result::Result<Arc<WriterIdentity>, String> {
        if name.len() > Writers::MAX_NAME_BYTES {
            return Err(format!("a writer's name of {} bytes", name.len()));
        }
        let writer = WriterIdentity { name, window_before, window_after, serial };
        let known = self.identities.entry(serial).or_insert_with(|| Arc::new(writer.clone()));
        match **known == writer {
            true => Ok(known.clone()),
            false => Err(format!("two writers of the serial {serial:#018x}")),
        }
    }

    fn take_chunk(&mut self, head: ChunkRecord, packed: Bytes) -> RecordResult {
        let number = self.end();
        let index = head.stream as usize;
        let Some(StagedStream { writer, number: stream, steps, open }) = self.streams.get_mut(index) else {
            return Err(format!("a chunk of stream {index}, which is unknown"));
        };
        if open.is_some() {
            return Err(format!("a chunk of stream {index} after its writer"));
        }
        let charge = Charge::new(&self.table.held);
        let bytes = packed.len() as u64 + TableConfig::CHUNK_BYTES;
        let packed = PackedRows::check(&self.table.format.layout, head.rows, charge.payload(packed))
            .map_err(|error| error.to_string())?;
        if head.first_step < steps.next_step || head.first_step.checked_add(u64::from(head.rows)).is_none() {
            return Err(format!("step {} of stream {index} after step {}", head.first_step, steps.next_step));
        }
        let span = ChunkSpan { arrival: number, ..steps.arriving(head.first_step, head.rows) };
        let chunk = PreparedChunk {
            continues: steps.continues(head.first_step),
            stored: Some(StoredChunk::new(packed, writer.clone(), *stream, head.first_step, bytes)),
            handle: None,
            stream: head.stream,
            span,
        };
        steps.push(span);
        let rows = u64::from(head.rows);
        self.steps += rows;
        self.bytes += bytes;
        self.chunks.push_back(Prepared { chunks: vec![chunk], items: Vec::new(), charge, rows, bytes, late: 0 });
        while self.steps > self.table.config.capacity || self.bytes > self.table.held.limit {
            self.leave_out_oldest();
        }
        Ok(())
    }

    fn take_writer(&mut self, writer: WriterRecord) -> RecordResult {
        let refuse = |reason: &str| Err(format!("writer {:#018x} {reason}", writer.number));
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
        let identity = self.identity(writer.name.clone(), writer.serial, writer.window_before, writer.window_after)?;
        for (number, stream) in (0..).zip(&writer.streams) {
            let Some(record) = stream.record else {
                continue;
            };
            let Some(staged) = self.streams.get_mut(record as usize) else {
                return refuse("with a stream that is not there");
            };
            let same = Arc::ptr_eq(&staged.writer, &identity)
                && staged.number == number
                && staged.steps.next_step <= stream.next_step;
            if !same || staged.open.replace(writer.number).is_some() {
                return refuse("with a stream of another writer");
            }
        }
        self.writers.push(writer);
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
            return Ok(());
        }
        if self.items.len() as u64 >= self.saved.capacity {
            return Err(format!("more than the {} items that its table could hold", self.saved.capacity));
        }
        self.check_window(&item)?;
        self.items.push(item);
        Ok(())
    }

    /// Checks that the item's rows are present and consecutive.
    fn check_window(&self, item: &ItemRecord) -> RecordResult {
        let refuse = |reason: &str| Err(format!("an item of chunk {} {reason}", item.chunk));
        let number = u64::from(item.chunk);
        let (Some(chunk), Some(stream)) = (self.chunk(number), self.stream_of(number)) else {
            return refuse("that is not there");
        };
        if item.before > stream.writer.window_before || item.after > stream.writer.window_after {
            return refuse("with rows beyond its writer's window");
        }
        // Within the chunk, the first row does not overflow.
        if item.first_row >= chunk.span.rows {
            return refuse("with a first row beyond it");
        }
        let first = chunk.span.first_step + u64::from(item.first_row);
        let last = first.saturating_add(u64::from(item.before) + u64::from(item.after));
        match stream.steps.locate(first, last, None) {
            Ok(Some((FirstChunk::Stored(arrival), _))) if arrival == number => Ok(()),
            _ => refuse("whose rows are not all there"),
        }
    }

    fn take_state(&mut self, state: TableState) -> RecordResult {
        let largest = state.max_priority;
        if !largest.is_sign_positive() {
            return Err(format!("a largest priority of {largest}"));
        }
        if let Some(count) = state.counts().find(|&count| count >= MOST_COUNTED) {
            return Err(format!("a count of {count}"));
        }
        if state.served.is_some_and(|served| served.end < self.end()) {
            return Err("numbers for readers that do not fit its chunks".to_owned());
        }
        let taken = state.counters.inserted_steps;
        if let Some(item) = self.items.iter().find(|item| item.born > taken) {
            return Err(format!("an item from step {} of {taken}", item.born));
        }
        while self.first < state.evicted_chunks && self.drop_oldest().is_some() {}
        self.items.retain(|item| u64::from(item.chunk) >= self.first);
        if let Some(excess) = self.items.len().checked_sub(self.table.items.capacity() + 1) {
            let mut chunks: Vec<_> = self.items.iter().map(|item| u64::from(item.chunk)).collect();
            let (_, &mut last, _) = chunks.select_nth_unstable(excess);
            while self.first <= last && self.leave_out_oldest().is_some() {}
            self.items.retain(|item| u64::from(item.chunk) >= self.first);
        }
        self.state = Some(state);
        Ok(())
    }

    fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    fn chunk(&self, number: u64) -> Option<&PreparedChunk> {
        self.chunks.get(number.checked_sub(self.first)? as usize)?.chunks.first()
    }

    fn stream_of(&self, number: u64) -> Option<&StagedStream> {
        self.streams.get(self.chunk(number)?.stream as usize)
    }

    /// [`Self::drop_oldest`] for a chunk that the table is too small for.
    fn leave_out_oldest(&mut self) -> Option<Prepared> {
        let oldest = self.drop_oldest();
        self.left_out += oldest.as_ref().map_or(0, |chunk| chunk.rows);
        oldest
    }

    fn drop_oldest(&mut self) -> Option<Prepared> {
        let oldest = self.chunks.pop_front()?;
        self.first += 1;
        self.steps -= oldest.rows;
        self.bytes -= oldest.bytes;
        Some(oldest)
    }
}

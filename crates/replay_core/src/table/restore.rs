//! A table from the records of a snapshot: all of it is checked before anything is stored, and then stored as
//! a whole (`store`), as pushes are. The file comes from outside, so it is checked as a push is.

pub(crate) mod store;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::snapshot_records::{ChunkRecord, ItemRecord, OpenRecord, RecordKind, TableState, WriterRecord, from_json};
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
    writers: Vec<StagedWriter>,
    /// Chunks have the numbers of the snapshot.
    chunks: VecDeque<StagedChunk>,
    /// Number of the first of `chunks`.
    first: u64,
    steps: u64,
    bytes: u64,
    items: Vec<ItemRecord>,
    /// Steps dropped because the table is too small.
    left_out: u64,
    state: Option<TableState>,
}

struct StagedWriter {
    identity: Arc<WriterIdentity>,
    streams: HashMap<u32, Stream>,
    open: Option<OpenRecord>,
}

impl StagedWriter {
    fn is_narrower_than(&self, view: &ViewSpec) -> bool {
        self.identity.window_before < view.before() || self.identity.window_after < view.after()
    }
}

struct StagedChunk {
    /// Index in `Staged::writers`.
    writer: usize,
    /// The chunk, as a push of its writer.
    push: Prepared,
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
            writers: Vec::new(),
            chunks: VecDeque::new(),
            first: 0,
            steps: 0,
            bytes: 0,
            items: Vec::new(),
            left_out: 0,
            state: None,
        })
    }

    /// Checks that a changed view of the table finds its rows around every item: samples with it would fail until the last of these
    /// items has gone.
    pub fn check_view(&mut self) -> Result<()> {
        let (view, saved) = (&self.table.config.view, &self.saved.view);
        let Some(view) = view.as_ref().filter(|_| view != saved) else {
            return Ok(());
        };
        let writer = |item: &ItemRecord| self.chunk(item.chunk.into()).map(|(_, writer)| writer);
        let narrow = |item: &&ItemRecord| writer(item).is_some_and(|writer| writer.is_narrower_than(view));
        let (narrow, items) = (self.items.iter().filter(narrow).count(), self.items.len());
        if narrow == 0 {
            // The next items of these writers would be as narrow: they have expired, and open again with the new view.
            let narrow = self.writers.iter_mut().filter(|writer| writer.is_narrower_than(view));
            narrow.for_each(|writer| writer.open = None);
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
            RecordKind::Writer => self.take_writer(from_json(&body)?),
            RecordKind::Chunk | RecordKind::OldChunk => {
                let (head, packed) = ChunkRecord::from_bytes(body, kind == RecordKind::Chunk)?;
                self.take_chunk(head, packed)
            }
            RecordKind::Items => ItemRecord::read_all(body)?.try_for_each(|item| self.take_item(item)),
            RecordKind::State => self.take_state(from_json(&body)?),
            RecordKind::Memory | RecordKind::Table | RecordKind::Parameters | RecordKind::End => {
                Err(format!("a record of kind {} inside a table", kind as u32))
            }
        }
    }

    fn take_writer(&mut self, WriterRecord { identity, open }: WriterRecord) -> RecordResult {
        let name = identity.name.len();
        if name > Writers::MAX_NAME_BYTES {
            return Err(format!("a writer's name of {name} bytes"));
        }
        if let Some(open) = &open {
            let refuse = |reason: &str| Err(format!("writer {:#018x} {reason}", open.number));
            let others = || self.writers.iter().filter_map(|writer| writer.open.as_ref());
            let streams = open.next_steps.len() + others().map(|other| other.next_steps.len()).sum::<usize>();
            if open.next_steps.is_empty() || streams > Writers::MOST_STREAMS as usize {
                return refuse("with more streams than a table has, or without one");
            }
            if others().any(|other| other.number == open.number) {
                return refuse("appears twice");
            }
            if open.epoch == 0 || open.epoch == u32::MAX {
                return refuse("with an epoch that no writer has");
            }
            if open.last_sequence.max(open.steps) >= MOST_COUNTED {
                return refuse("with a count that no writer reaches");
            }
        }
        self.writers.push(StagedWriter { identity: Arc::new(identity), streams: HashMap::new(), open });
        Ok(())
    }

    fn take_chunk(&mut self, head: ChunkRecord, packed: Bytes) -> RecordResult {
        let number = self.end();
        let ChunkRecord { writer: index, stream, rows, first_step, version } = head;
        let Some(writer) = self.writers.get_mut(index as usize) else {
            return Err(format!("a chunk of writer {index}, which is unknown"));
        };
        let steps = writer.streams.entry(stream).or_default();
        let end = first_step.checked_add(u64::from(rows)).filter(|_| first_step >= steps.next_step);
        let most = match &writer.open {
            Some(open) => open.next_steps.get(stream as usize).copied(),
            None => Some(u64::MAX),
        };
        if end.is_none_or(|end| most.is_none_or(|most| end > most)) {
            return Err(format!("step {first_step} of stream {stream} after step {}", steps.next_step));
        }
        let charge = Charge::new(&self.table.held);
        let bytes = packed.len() as u64 + TableConfig::CHUNK_BYTES;
        let packed = PackedRows::check(&self.table.format.layout, rows, charge.payload(packed))
            .map_err(|error| error.to_string())?;
        let span = ChunkSpan { arrival: number, ..steps.arriving(first_step, rows) };
        let chunk = PreparedChunk {
            continues: steps.continues(first_step),
            stored: Some(StoredChunk::new(packed, writer.identity.clone(), stream, first_step, version, bytes)),
            handle: None,
            stream,
            span,
        };
        steps.push(span);
        let rows = u64::from(rows);
        self.steps += rows;
        self.bytes += bytes;
        let push = Prepared { chunks: vec![chunk], items: Vec::new(), charge, rows, bytes, late: 0 };
        self.chunks.push_back(StagedChunk { writer: index as usize, push });
        while self.steps > self.table.config.capacity || self.bytes > self.table.held.limit {
            self.leave_out_oldest();
        }
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
        let Some((chunk, writer)) = self.chunk(number) else {
            return refuse("that is not there");
        };
        if item.before > writer.identity.window_before || item.after > writer.identity.window_after {
            return refuse("with rows beyond its writer's window");
        }
        // Within the chunk, the first row does not overflow.
        if item.first_row >= chunk.span.rows {
            return refuse("with a first row beyond it");
        }
        let first = chunk.span.first_step + u64::from(item.first_row);
        let last = first.saturating_add(u64::from(item.before) + u64::from(item.after));
        match writer.streams[&chunk.stream].locate(first, last, None) {
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

    fn chunk(&self, number: u64) -> Option<(&PreparedChunk, &StagedWriter)> {
        let StagedChunk { writer, push } = self.chunks.get(number.checked_sub(self.first)? as usize)?;
        Some((push.chunks.first()?, &self.writers[*writer]))
    }

    /// [`Self::drop_oldest`] for a chunk that the table is too small for.
    fn leave_out_oldest(&mut self) -> Option<u64> {
        let rows = self.drop_oldest()?;
        self.left_out += rows;
        Some(rows)
    }

    /// Drops the oldest chunk, and returns its rows.
    fn drop_oldest(&mut self) -> Option<u64> {
        let StagedChunk { push, .. } = self.chunks.pop_front()?;
        self.first += 1;
        self.steps -= push.rows;
        self.bytes -= push.bytes;
        Some(push.rows)
    }
}

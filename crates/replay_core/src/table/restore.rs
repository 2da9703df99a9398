//! A table from the records of a snapshot: all of it is checked before anything is stored, and then put in place as
//! a whole. The file comes from outside, so it is checked as a push is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::schema::TableConfig;
use crate::snapshot_records::RecordKind;
use crate::snapshot_records::content::{
    ChunkRecord, ItemRecord, StreamRecord, TableState, WriterRecord, WriterStream, read_ids,
};

use super::Table;
use super::ids::ItemId;
use super::items::{ItemRows, Items};
use super::residents::Residents;
use super::stored::{Charge, NewChunk, StoredChunk};
use super::streams::Stream;
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
    /// Steps that the table is too small for.
    left_out: u64,
    state: Option<TableState>,
}

/// A table of a snapshot in place.
pub(crate) struct Placed {
    pub table: Arc<Table>,
    /// Earlier ids of its items, if the snapshot has them.
    pub ids: Vec<(u64, ItemId)>,
    /// Steps of the snapshot that the table is too small for.
    pub left_out: u64,
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
    /// Bytes in the table's limit, as of a push of this chunk alone.
    fn bytes(&self) -> u64 {
        self.packed.as_bytes().len() as u64 + TableConfig::CHUNK_BYTES
    }

    /// Its first step and its rows.
    fn span(&self) -> (u64, u32) {
        (self.first_step, self.packed.rows())
    }
}

/// A chunk of a snapshot with everything that placing it takes.
struct ReadyChunk {
    new: NewChunk,
    charge: Arc<Charge>,
    bytes: u64,
    /// Index of the chunk whose first row follows this one's last.
    continued_by: Option<usize>,
}

impl Staged {
    /// Begins with a table and its definition in the snapshot.
    ///
    /// # Errors
    /// [`Error::TableDiffers`] when rows or masses have another meaning in the table.
    pub fn new(table: Arc<Table>, saved: TableConfig) -> Result<Self> {
        let asked = TableConfig {
            columns: saved.columns.clone(),
            sampler: saved.sampler,
            priority_exponent: saved.priority_exponent,
            priority_unit_log2: saved.priority_unit_log2,
            ..TableConfig::clone(&table.config)
        };
        if let Some(difference) = table.config.difference(&asked) {
            return Err(Error::TableDiffers {
                table: saved.name,
                difference,
            });
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
            state: None,
        })
    }

    pub fn name(&self) -> &str {
        &self.table.config.name
    }

    /// Whether the table has ended.
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
            RecordKind::Ids => self.take_ids(&read_ids(body)?),
            RecordKind::Writer => self.take_writer(WriterRecord::from_bytes(body)?),
            RecordKind::State => self.take_state(TableState::from_bytes(body)?),
            RecordKind::Table | RecordKind::Parameters | RecordKind::End => {
                Err(format!("a {kind:?} record inside a table"))
            }
        }
    }

    /// Puts everything into the table, which has to be empty, and returns it. Everything is allocated before the insert
    /// lock, which is held for the whole of it: an empty table has no samples to delay.
    ///
    /// # Errors
    /// Nothing is stored with [`Error::NotEmpty`], or [`Error::UnknownTable`] (it was dropped).
    pub fn place(mut self) -> Result<Placed> {
        let state = self.state.unwrap_or_default();
        let table = self.table.clone();
        let identities = self.share_identities();
        let streams: Vec<_> = self
            .chunks
            .iter()
            .map(|chunk| (chunk.stream, chunk.span()))
            .collect();
        let mut ids = Vec::with_capacity(self.ids.len());
        let mut chunks = self.build();

        let mut residents = table.lock_residents()?;
        table.check_open()?;
        let mut news = chunks.iter_mut().map(|chunk| &mut chunk.new);
        if !(table.is_unused(&residents) && news.all(|new| new.enter(&table.chunks))) {
            let refused = Error::NotEmpty {
                table: table.config.name.clone(),
                steps: residents.steps,
                bytes: table.held.bytes(),
            };
            drop(residents);
            for handle in chunks.iter().filter_map(|chunk| chunk.new.handle()) {
                table.chunks.retire(handle);
            }
            return Err(refused);
        }
        let first_arrival = residents.end();
        for index in 0..chunks.len() {
            let next = chunks[index].continued_by;
            let next = next.and_then(|next| chunks[next].new.handle());
            let chunk = &mut chunks[index];
            let Some(resident) = chunk.new.take_resident() else {
                continue;
            };
            chunk.charge.count(chunk.bytes);
            if let Some(next) = next
                && let Some(stored) = table.chunks.pin(resident.handle)
            {
                stored.set_next(next);
            }
            residents.push(resident);
        }
        for (index, item) in self.items.iter().enumerate() {
            let arrival = first_arrival + u64::from(item.chunk) - self.first;
            let Some(resident) = residents.get_mut(arrival) else {
                continue;
            };
            let rows = ItemRows {
                first_row: item.first_row,
                before: item.before,
                after: item.after,
            };
            // Without mass until its samples are counted, so that no sample finds it before.
            let id = table
                .items
                .insert(resident.handle, rows, item.born, 0)
                .expect("the table is empty, and there are no more items than it has slots");
            table.items.count_earlier_samples(id, item.times_sampled);
            table.sampler.insert_saved(&table.items, id, item.units);
            let priority = table.sampler.saved_priority(&table.items, item.units);
            // Rounding of the mass may have raised it.
            let largest = f64::from_bits(state.max_priority);
            table.max_priority.insert(id, priority.min(largest));
            resident.items.push(id);
            ids.extend(self.ids.get(index).map(|&bits| (bits, id)));
        }
        self.place_writers(identities, &streams, first_arrival);
        table.go_on_from(&state, &self.saved);
        drop(residents);
        table.held.wake();
        Ok(Placed {
            table,
            ids,
            left_out: self.left_out,
        })
    }

    /// Gives the chunks of a writer its identity, as those have that it pushes next.
    fn share_identities(&mut self) -> Vec<Arc<WriterIdentity>> {
        let streams = &mut self.streams;
        let identity = |record: &WriterRecord| {
            let identity = Arc::new(WriterIdentity {
                name: record.name.clone(),
                window_before: record.window_before,
                window_after: record.window_after,
            });
            for stream in &record.streams {
                if let Some(staged) = streams.get_mut(stream.record as usize) {
                    staged.writer = identity.clone();
                }
            }
            identity
        };
        self.writers.iter().map(identity).collect()
    }

    /// Opens the writers of the snapshot; `chunks` has the stream and the steps of each chunk.
    fn place_writers(
        &self,
        identities: Vec<Arc<WriterIdentity>>,
        chunks: &[(usize, (u64, u32))],
        first_arrival: u64,
    ) {
        let mut of_record: Vec<_> = self.streams.iter().map(|_| None).collect();
        for (writer, record) in self.writers.iter().enumerate() {
            for (number, stream) in record.streams.iter().enumerate() {
                if let Some(slot) = of_record.get_mut(stream.record as usize) {
                    *slot = Some((writer, number));
                }
            }
        }
        let restored = |stream: &WriterStream| Stream::restored(stream.next_step);
        let mut streams: Vec<Vec<Stream>> = (self.writers.iter())
            .map(|record| record.streams.iter().map(restored).collect())
            .collect();
        for (arrival, &(record, (first_step, rows))) in (first_arrival..).zip(chunks) {
            if let Some((writer, number)) = of_record[record] {
                streams[writer][number].push_restored(arrival, first_step, rows);
            }
        }
        for ((record, identity), streams) in self.writers.iter().zip(identities).zip(streams) {
            self.table.writers.restore(record, identity, streams);
        }
    }

    fn build(&mut self) -> Vec<ReadyChunk> {
        let first = self.first;
        let build = |chunk: StagedChunk| {
            let stream = &self.streams[chunk.stream];
            let bytes = chunk.bytes();
            let writer = stream.writer.clone();
            let stored = StoredChunk::new(chunk.packed, writer, stream.number, chunk.first_step);
            ReadyChunk {
                new: NewChunk::new(stored, bytes, chunk.items),
                charge: chunk.charge,
                bytes,
                continued_by: chunk.continued_by.map(|number| (number - first) as usize),
            }
        };
        std::mem::take(&mut self.chunks)
            .into_iter()
            .map(build)
            .collect()
    }

    fn take_stream(&mut self, stream: StreamRecord) -> RecordResult {
        if stream.writer.len() > Writers::MAX_NAME_BYTES {
            return Err(format!("a writer's name of {} bytes", stream.writer.len()));
        }
        self.streams.push(StagedStream {
            writer: Arc::new(WriterIdentity {
                name: stream.writer,
                window_before: stream.window_before,
                window_after: stream.window_after,
            }),
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
            return Err(format!(
                "step {} of stream {index} after step {}",
                head.first_step, stream.next_step
            ));
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
        if writer.streams.is_empty() || streams > Writers::MAX_STREAMS as usize {
            return refuse("with more streams than a table has, or without one");
        }
        if self
            .writers
            .iter()
            .any(|other| other.number == writer.number)
        {
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
            return Err(format!(
                "{} ids of {} items",
                ids.len(),
                self.last_items.len()
            ));
        }
        for (&id, index) in ids.iter().zip(self.last_items.drain(..)) {
            if let Some(index) = index {
                // Without the ids of an items record, those of the ones before would name its items.
                if index != self.ids.len() {
                    return Err("items without ids before items with ids".to_owned());
                }
                self.ids.push(id);
            }
        }
        Ok(())
    }

    fn take_item(&mut self, item: ItemRecord) -> RecordResult {
        let number = u64::from(item.chunk);
        if number >= self.end() {
            return Err(format!("an item of chunk {number}, which is unknown"));
        }
        if item.units > self.table.sampler.most_saved_units() {
            return Err(format!("an item of {} units of priority", item.units));
        }
        if number < self.first || self.table.items.is_used_up(item.times_sampled) {
            self.last_items.push(None);
            return Ok(());
        }
        if self.items.len() as u64 >= self.saved.capacity {
            return Err(format!(
                "more than the {} items that its table could hold",
                self.saved.capacity
            ));
        }
        self.check_window(&item)?;
        if let Some(chunk) = self.chunk_mut(number) {
            chunk.items += 1;
            self.last_items.push(Some(self.items.len()));
            self.items.push(item);
        }
        Ok(())
    }

    /// Checks that the item's rows are there, one after the other.
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
        // Within the chunk, whose steps were checked not to overflow.
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
        self.chunks
            .get_mut(number.checked_sub(self.first)? as usize)
    }

    /// [`Self::drop_oldest`] for a chunk that the table is too small for.
    fn leave_out_oldest(&mut self) -> Option<StagedChunk> {
        let oldest = self.drop_oldest();
        self.left_out += oldest
            .as_ref()
            .map_or(0, |chunk| u64::from(chunk.packed.rows()));
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

impl Placed {
    /// Lets the items be named by their earlier ids, too, as far as the memory's limit allows.
    pub fn remember_ids(self, memory: &Memory) {
        if self.ids.is_empty() {
            return;
        }
        let table = &self.table.config.name;
        match memory.reserve(Items::earlier_ids_bytes(self.ids.len())) {
            Some(reservation) => self.table.items.remember_earlier_ids(self.ids, reservation),
            None => tracing::warn!(
                table,
                "max_bytes has no memory left for the ids of the restored items: updates by ids from before are stale"
            ),
        }
    }
}

impl Table {
    /// Whether the table has no step, and no reader holds bytes or items of it.
    fn is_unused(&self, residents: &Residents) -> bool {
        let free = self.items.free() == self.items.capacity();
        let has_room = self.sampler.has_room(&self.items, self.items.capacity());
        residents.steps == 0 && self.held.bytes() == 0 && free && has_room
    }

    /// Takes over the counts of a table of the definition `saved`. Under the insert lock, after the items: until then
    /// the rate limiter holds samples back.
    fn go_on_from(&self, state: &TableState, saved: &TableConfig) {
        for ((_, counter), value) in self.counters.all().into_iter().zip(state.counters) {
            counter.store(value, Ordering::Relaxed);
        }
        let largest = f64::from_bits(state.max_priority);
        self.max_priority.go_on_from(largest);
        self.samples.store(state.samples, Ordering::Relaxed);
        self.limiter.go_on_from(
            state.limiter_inserted,
            state.limiter_sampled,
            (
                saved.samples_per_insert,
                saved.effective_slack(),
                saved.min_size,
            ),
        );
    }
}

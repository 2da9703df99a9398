//! What was pushed, as the tables must know it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use replay_core::replay::{NewItem, OpenWriter, Push, SampleRequest, Sampled, SampledItem, StepsRead, WriterOpened};
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig, flags};

/// Names of tables.
pub const TABLES: [&str; 3] = ["one", "two", "three"];

const FRAME: usize = 16;
/// Bytes of a step in the rows of a batch: flags, number, lengths of the frame and of the words, number of words.
const ROW: usize = 1 + 8 + 4 + 4 + 4;

/// A table whose settings depend on `kind`.
pub fn table_config(name: &str, kind: u8, capacity: u64) -> TableConfig {
    let frame = Column { codec: Codec::Lz4, ..Column::new("frame", Dtype::Uint8, vec![FRAME as u32]) };
    let words = Column { max_length: 4, ..Column::new("words", Dtype::Uint16, vec![0]) };
    let mut config = TableConfig::new(name, vec![Column::new("number", Dtype::Uint64, vec![]), frame, words], capacity);
    config.sampler = match kind % 7 {
        0 => Sampler::Prioritized,
        1 => Sampler::Uniform,
        2 => Sampler::Fifo,
        3 => Sampler::Lifo,
        4 => Sampler::MaxHeap,
        5 => Sampler::MinHeap,
        _ => Sampler::RankBased,
    };
    let settings = kind / 7;
    if settings & 1 != 0 || config.sampler == Sampler::Fifo {
        config.max_times_sampled = 2;
    }
    if settings & 2 != 0 {
        (config.samples_per_insert, config.slack) = (2.0, 16.0);
    }
    if settings & 16 != 0 && config.sampler == Sampler::Fifo && config.samples_per_insert == 0.0 {
        config.queue_size = capacity.min(20) as u32;
    }
    config.live_max_priority = settings & 4 != 0;
    config.max_version_lag = u32::from(settings & 8 != 0);
    if settings & 16 != 0 {
        (config.parameters, config.max_sample_lag) = (Some("policy".into()), 1);
    }
    config
}

/// A step of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    pub writer: u8,
    pub stream: u8,
    pub number: u32,
}

impl Step {
    /// Its column "number". The generation of its table tells it from the steps of dropped tables.
    fn code(self, generation: u16) -> u64 {
        u64::from(generation) << 48
            | u64::from(self.writer) << 40
            | u64::from(self.stream) << 32
            | u64::from(self.number)
    }

    fn of_code(code: u64, generation: u16) -> Step {
        assert_eq!(code >> 48, u64::from(generation), "a step of another table");
        Step { writer: (code >> 40) as u8, stream: (code >> 32) as u8, number: code as u32 }
    }
}

/// Version of a chunk that begins with this step.
pub fn version_of(first_step: u64) -> u64 {
    first_step % 4
}

fn frame(code: u64) -> [u8; FRAME] {
    std::array::from_fn(|i| (code as u8).wrapping_mul(31).wrapping_add(i as u8))
}

/// The bytes of the words of a step: none to four words.
fn words(code: u64) -> Vec<u8> {
    (0..code % 5).flat_map(|word| (code as u16).wrapping_add(word as u16).to_le_bytes()).collect()
}

/// A chunk of consecutive steps, as a writer packs it.
pub fn pack(generation: u16, first: Step, rows: u32) -> Vec<u8> {
    let codes = (0..rows).map(|row| {
        let number = first.number.wrapping_add(row);
        Step { number, ..first }.code(generation)
    });
    let mut packed = Vec::new();
    for code in codes.clone() {
        let first = code as u32 == 0;
        packed.push(if first { flags::FIRST } else { 0 });
        packed.extend(code.to_le_bytes());
        let words = words(code).len() as u32;
        packed.extend([FRAME as u32, words, words / 2].into_iter().flat_map(u32::to_le_bytes));
    }
    packed.extend(codes.flat_map(|code| [&frame(code)[..], &words(code)].concat()));
    packed
}

/// The steps in rows with their blobs.
fn unpack(generation: u16, rows: &[u8], blobs: &[u8]) -> Vec<Step> {
    assert_eq!(rows.len() / ROW * ROW, rows.len(), "whole rows");
    let mut rest = blobs;
    let rows = rows.chunks_exact(ROW).map(|row| {
        let code = u64::from_le_bytes(row[1..9].try_into().expect("eight bytes"));
        let blobs = [&frame(code)[..], &words(code)].concat();
        rest = rest.strip_prefix(&blobs[..]).unwrap_or_else(|| panic!("the frame and the words of {code:x}"));
        Step::of_code(code, generation)
    });
    let steps = rows.collect();
    assert!(rest.is_empty(), "blobs of the rows alone");
    steps
}

/// Asserts that each step follows the one before.
fn assert_consecutive(steps: &[Step]) {
    for pair in steps.windows(2) {
        let next = Step { number: pair[0].number + 1, ..pair[0] };
        assert_eq!(pair[1], next, "steps of one stream, without gaps");
    }
}

/// A writer of a table, after its last successful request.
#[derive(Debug, Clone, Default)]
pub struct WriterState {
    pub epoch: u32,
    pub sequence: u64,
    /// Next step of each stream.
    pub next: BTreeMap<u32, u64>,
    /// Its streams, and the rows before and after its anchors.
    pub streams: u32,
    pub window: (u16, u16),
    /// It was closed. The table may have forgotten it since.
    pub closed: bool,
}

/// One table.
pub struct TableLedger {
    pub generation: u16,
    pub config: TableConfig,
    pub writers: BTreeMap<u8, WriterState>,
    /// Windows of the items that were pushed, by anchor: rows before and after it. Evicted ones are included.
    items: BTreeMap<Step, BTreeSet<(u16, u16)>>,
    /// Anchors of the ids that were sampled.
    ids: HashMap<u64, Step>,
    /// Ids that were removed as corrupt.
    removed: BTreeSet<u64>,
    /// A push with spoiled bytes was accepted: steps may have any content.
    pub spoiled: bool,
}

impl TableLedger {
    /// An empty table.
    pub fn new(generation: u16, config: TableConfig) -> Self {
        TableLedger {
            generation,
            config,
            writers: BTreeMap::new(),
            items: BTreeMap::new(),
            ids: HashMap::new(),
            removed: BTreeSet::new(),
            spoiled: false,
        }
    }

    /// Forgets steps and items; writers continue.
    pub fn empty(&mut self) {
        self.items.clear();
        self.removed.clear();
    }

    /// Notes an opened writer.
    pub fn open(&mut self, writer: u8, open: &OpenWriter, opened: &WriterOpened) {
        let known = self.writers.entry(writer).or_default();
        if known.closed && opened.last_sequence == 0 {
            *known = WriterState::default();
        }
        assert!(opened.epoch > known.epoch, "an epoch rises");
        assert_eq!(opened.last_sequence, known.sequence, "the last applied push");
        known.epoch = opened.epoch;
        known.closed = false;
        known.streams = open.streams;
        known.window = (open.window_before, open.window_after);
    }

    /// Notes an acknowledged push of `writer`.
    pub fn push(&mut self, writer: u8, push: &Push) {
        let known = self.writers.get_mut(&writer).expect("only an opened writer pushes");
        assert_eq!(push.epoch, known.epoch, "a push of an earlier epoch is refused");
        if push.sequence <= known.sequence {
            return;
        }
        assert_eq!(push.sequence, known.sequence + 1, "pushes are in order");
        known.sequence = push.sequence;
        for chunk in &push.body.chunks {
            let next = known.next.entry(chunk.stream).or_default();
            assert!(chunk.first_step >= *next, "steps only go forward");
            *next = chunk.first_step + u64::from(chunk.rows);
        }
        for item in &push.body.items {
            let windows = self.items.entry(anchor(writer, item)).or_default();
            windows.insert((item.before, item.after));
        }
    }

    /// An id, by any number: a known one if there are some.
    pub fn id(&self, pick: u64) -> u64 {
        let known = self.ids.keys().copied().min_by_key(|id| id ^ pick);
        known.filter(|_| !pick.is_multiple_of(8)).unwrap_or(pick)
    }

    /// Notes that the item of this id is gone.
    pub fn remove(&mut self, id: u64) {
        self.removed.insert(id);
    }

    /// Compares a batch with what was pushed, and its versions with the `newest` of the parameters.
    pub fn check_sample(&mut self, request: &SampleRequest, sampled: &Sampled, newest: u64) {
        let wanted = request.count as usize;
        let enough = request.allow_short || request.share.is_some();
        assert!(sampled.items.len() <= wanted, "no more items than wanted");
        assert!(enough || sampled.items.len() == wanted, "as many items as wanted");
        for &SampledItem { version, .. } in &sampled.items {
            let known = self.config.parameters.is_some() && version > 0;
            assert!(version == 0 || (known && version + 1 >= newest), "version {version}, of {newest}");
        }
        if self.spoiled {
            return;
        }
        let steps = unpack(self.generation, &sampled.rows, &sampled.blobs.concat());
        let mut rest = steps.as_slice();
        for item in &sampled.items {
            let (before, after) = (usize::from(item.before), usize::from(item.after));
            let (window, others) = rest.split_at(before + 1 + after);
            rest = others;
            assert_consecutive(window);
            let anchor = window[before];
            // Several items may have an anchor.
            let windows = self.items.get(&anchor).expect("an item that was pushed");
            let mut returned =
                windows.iter().map(|&(before, after)| (request.before.min(before), request.after.min(after)));
            assert!(
                returned.any(|rows| rows == (item.before, item.after)),
                "a window that was pushed, as far as it is asked for"
            );
            assert!(!self.removed.contains(&item.id), "a removed item is gone");
            let named = *self.ids.entry(item.id).or_insert(anchor);
            assert_eq!(named, anchor, "an id names one item");
            assert!(item.probability > 0.0 && item.probability <= 1.0, "a probability, not {}", item.probability);
            let limit = self.config.max_times_sampled;
            assert!(limit == 0 || item.times_sampled <= limit, "max_times_sampled");
        }
        assert!(rest.is_empty(), "rows of the items alone");
    }

    /// Compares stored chunks with what was pushed.
    pub fn check_steps(&self, read: &StepsRead) {
        if self.spoiled {
            return;
        }
        for chunk in &read.chunks {
            let (rows, blobs) = chunk.packed.split_at(ROW * chunk.rows as usize);
            let steps = unpack(self.generation, rows, blobs);
            assert_consecutive(&steps);
            assert_eq!(u64::from(steps[0].number), chunk.first_step);
            assert_eq!(chunk.version, version_of(chunk.first_step));
            assert_eq!(u32::from(steps[0].stream), chunk.stream);
        }
    }
}

fn anchor(writer: u8, item: &NewItem) -> Step {
    Step { writer, stream: item.stream as u8, number: item.anchor as u32 }
}

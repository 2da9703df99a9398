//! The oracle: what was sent, what was acknowledged, and what may be there.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

use bytes::Bytes;
use replay_core::memory::Memory;
use replay_core::replay::{ChunkHead, NewItem, PushBody, ReadPosition, ReadSteps, SampleRequest, Sampled};
use replay_core::schema::{Codec, Column, Dtype, TableConfig, flags};

use crate::frequencies::Frequencies;

/// The table of every world.
pub const TABLE: &str = "steps";
/// Bytes of a step's blob.
const FRAME: usize = 16;
/// Limit of an item's probability times the number of equal items. It is above 1 for items that came between a batch and the count, and for
/// sums of servers that the batches before have changed: in 46,000 batches of 260 worlds it was 1.06 at most.
const MOST_OF_EQUAL: f64 = 1.25;
/// Bytes of a step in the rows of a batch: flags, writer, number, lengths of the frame and of the words, number of words.
const ROW: usize = 1 + 8 + 8 + 4 + 4 + 4;

/// Definition of the table. It holds all steps of a world.
pub fn table() -> TableConfig {
    let frame = Column { codec: Codec::Lz4, ..Column::new("frame", Dtype::Uint8, vec![FRAME as u32]) };
    let words = Column { max_length: 4, ..Column::new("words", Dtype::Uint16, vec![0]) };
    let columns =
        vec![Column::new("writer", Dtype::Uint64, vec![]), Column::new("number", Dtype::Uint64, vec![]), frame, words];
    TableConfig::new(TABLE, columns, 1 << 16)
}

fn frame(writer: u64, number: u64) -> [u8; FRAME] {
    std::array::from_fn(|i| (31 * writer + 7 * number) as u8 ^ i as u8)
}

/// The bytes of the words of a step: none to four words.
fn words(number: u64) -> Vec<u8> {
    (0..number % 5).flat_map(|word| (number as u16).wrapping_add(word as u16).to_le_bytes()).collect()
}

/// Steps `first..first + rows` of a writer with one stream, of an unknown version. Each step whose window is complete becomes an item.
pub fn push_body(writer: u64, first: u64, rows: u32, window: u16) -> PushBody {
    let numbers = first..first + u64::from(rows);
    let mut packed = Vec::new();
    for number in numbers.clone() {
        packed.push(if number == 0 { flags::FIRST } else { 0 });
        packed.extend(writer.to_le_bytes());
        packed.extend(number.to_le_bytes());
        let words = words(number).len() as u32;
        packed.extend([FRAME as u32, words, words / 2].into_iter().flat_map(u32::to_le_bytes));
    }
    packed.extend(numbers.clone().flat_map(|number| [&frame(writer, number)[..], &words(number)].concat()));
    PushBody {
        chunks: vec![ChunkHead { stream: 0, rows, first_step: first, bytes: packed.len() as u32, version: 0 }],
        items: numbers
            .filter(|&number| number >= u64::from(window))
            .map(|anchor| NewItem { anchor, stream: 0, before: window, after: 0, priority: None })
            .collect(),
        payload: Bytes::from(packed),
    }
}

/// Most steps of an episode.
pub const LONGEST_EPISODE: u16 = 6;

/// Steps of each episode of a writer that pushes whole ones.
fn episode_steps(writer: u64) -> u64 {
    1 + writer % u64::from(LONGEST_EPISODE)
}

/// An item for each episode that ends in these steps: all its steps, and the one before them. Its first steps may be in earlier pushes.
pub fn episodes(writer: u64, numbers: Range<u64>) -> Vec<NewItem> {
    let steps = episode_steps(writer);
    let last = numbers.filter(|number| (number + 1) % steps == 0);
    let first = last.map(|last| last + 1 - steps);
    let item = |anchor: u64| NewItem {
        anchor,
        stream: 0,
        before: anchor.min(1) as u16,
        after: steps as u16 - 1,
        priority: None,
    };
    first.map(item).collect()
}

/// A step: its writer and number.
pub type Step = (u64, u64);

/// The steps in rows with their blobs.
fn unpack(rows: &[u8], blobs: &[u8]) -> Vec<Step> {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let mut rest = blobs;
    let rows = rows.chunks_exact(ROW).map(|row| {
        let step = (number(&row[1..9]), number(&row[9..17]));
        let blobs = [&frame(step.0, step.1)[..], &words(step.1)].concat();
        rest = rest.strip_prefix(&blobs[..]).unwrap_or_else(|| panic!("the frame and the words of {step:?}"));
        step
    });
    let steps = rows.collect();
    assert!(rest.is_empty(), "blobs of the rows alone");
    steps
}

/// A writer.
#[derive(Debug, Clone, Default)]
struct Writer {
    /// Steps that it has sent, or is sending.
    sent: u64,
    /// Version of the parameters of its steps, from this step on.
    versions: BTreeMap<u64, u64>,
    /// Steps that have to be there.
    acknowledged: u64,
    /// The error that ended it said that so many steps are there, at this number of starts of servers.
    told: Option<(u64, u64)>,
}

/// The ledger of a world.
#[derive(Clone, Default)]
pub struct Ledger(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    writers: BTreeMap<u64, Writer>,
    /// Steps of the ids that were sampled, in the whole world.
    ids: HashMap<u64, Step>,
    samples: u64,
    /// Batches' items since the last start of a server, by id.
    delivered: HashMap<u64, u32>,
    /// Samples while nothing changes.
    frequencies: Option<Frequencies>,
    /// Starts of servers.
    starts: u64,
    /// Each item is an episode.
    whole: bool,
    /// The table evicts its oldest steps, or is emptied, so that a writer's first ones may be missing.
    evicts: bool,
}

impl Ledger {
    /// The table of this world is small, or is emptied.
    pub fn expect_evictions(&self) {
        self.0.borrow_mut().evicts = true;
    }

    /// Whether writers push whole episodes from now on.
    pub fn expect_episodes(&self, whole: bool) {
        self.0.borrow_mut().whole = whole;
    }

    /// Number of a new writer.
    pub fn writer(&self) -> u64 {
        let mut state = self.0.borrow_mut();
        let number = state.writers.len() as u64 + 1;
        state.writers.insert(number, Writer::default());
        number
    }

    /// Steps of a writer from `first` on are made with this version of the parameters.
    pub fn makes(&self, writer: u64, first: u64, version: u64) {
        let mut state = self.0.borrow_mut();
        state.writers.get_mut(&writer).expect("a known writer").versions.insert(first, version);
    }

    /// A writer sends its steps up to `end`.
    pub fn sends(&self, writer: u64, end: u64) {
        let mut state = self.0.borrow_mut();
        let writer = state.writers.get_mut(&writer).expect("a known writer");
        writer.sent = writer.sent.max(end);
    }

    /// The server has acknowledged the steps up to `end`, those after the last acknowledgement since the number of starts was `since`. If a
    /// server has started since, nothing is promised: the answer may be of the one before, and an expired writer closes without an error.
    pub fn acknowledged(&self, writer: u64, end: u64, since: u64) {
        let mut state = self.0.borrow_mut();
        if state.starts == since {
            state.writers.get_mut(&writer).expect("a known writer").acknowledged = end;
        }
    }

    /// Starts of servers so far.
    pub fn starts(&self) -> u64 {
        self.0.borrow().starts
    }

    /// The writer's error says that its server has `steps` of its steps.
    pub fn told(&self, writer: u64, steps: u64) {
        let mut state = self.0.borrow_mut();
        let told = Some((steps, state.starts));
        state.writers.get_mut(&writer).expect("a known writer").told = told;
    }

    /// Steps acknowledged so far, by writer.
    pub fn acknowledgements(&self) -> BTreeMap<u64, u64> {
        let state = self.0.borrow();
        let writers = state.writers.iter();
        writers.map(|(&number, writer)| (number, writer.acknowledged)).collect()
    }

    /// A server starts with what its newest snapshot has, at least `saved`. Later steps of its writers, `own`, are lost.
    ///
    /// # Panics
    /// When steps of the snapshot are missing.
    pub fn restarted(&self, memory: &Memory, own: &BTreeSet<u64>, saved: &BTreeMap<u64, u64>) {
        let there = self.applied(memory);
        let mut state = self.0.borrow_mut();
        state.starts += 1;
        state.delivered.clear();
        let evicts = state.evicts;
        for (&number, writer) in state
            .writers
            .iter_mut()
            // Of a small table, `own` leaves out those whose steps had been displaced.
            .filter(|(number, _)| own.contains(*number) || there.contains_key(*number))
        {
            if evicts && !there.contains_key(&number) {
                // Newer steps of other writers have displaced its own, or it had none.
                writer.acknowledged = 0;
                continue;
            }
            let steps = there.get(&number).copied().unwrap_or(0);
            let promised = saved.get(&number).copied().unwrap_or(0);
            assert!(steps >= promised, "writer {number} had {promised} steps in a snapshot, and has {steps}");
            writer.acknowledged = writer.acknowledged.min(steps);
        }
    }

    /// Number of the step after the last one of each writer in a memory.
    ///
    /// # Panics
    /// When they are not the first steps of what the writer has sent, each once, except for evicted ones.
    pub fn applied(&self, memory: &Memory) -> BTreeMap<u64, u64> {
        let mut applied: BTreeMap<u64, u64> = BTreeMap::new();
        let evicts = self.0.borrow().evicts;
        let Ok(table) = memory.table(TABLE) else {
            return applied;
        };
        let mut from = Some(ReadPosition::default());
        while let Some(position) = from {
            let request = ReadSteps { from: position, bytes: 1 << 20 };
            let read = table.read_steps(&request).expect("the table has not failed");
            for chunk in &read.chunks {
                let (rows, blobs) = chunk.packed.split_at(ROW * chunk.rows as usize);
                for (writer, number) in unpack(rows, blobs) {
                    let first = if evicts { number } else { 0 };
                    let next = applied.entry(writer).or_insert(first);
                    assert_eq!(number, *next, "the next step of writer {writer}");
                    *next += 1;
                }
            }
            from = read.next;
        }
        let state = self.0.borrow();
        for (writer, steps) in &applied {
            let sent = state.writers.get(writer).expect("a known writer").sent;
            assert!(*steps <= sent, "writer {writer} has sent {sent} steps, not {steps}");
        }
        applied
    }

    /// Compares the memories of all servers with what was sent, at the end.
    ///
    /// # Panics
    /// When an acknowledged step is missing, a writer has steps on two servers, or was told another number than there is.
    pub fn check_end(&self, memories: &[&Memory]) {
        let mut everywhere: BTreeMap<u64, u64> = BTreeMap::new();
        for memory in memories {
            for (writer, steps) in self.applied(memory) {
                let before = everywhere.insert(writer, steps);
                assert_eq!(before, None, "writer {writer} is on two servers");
            }
            let table = memory.table(TABLE).expect("the table is there");
            table.check_at_rest().expect("the table's counts agree");
        }
        let state = self.0.borrow();
        for (number, writer) in &state.writers {
            if state.evicts && !everywhere.contains_key(number) {
                continue;
            }
            let steps = everywhere.get(number).copied().unwrap_or(0);
            let least = writer.acknowledged;
            assert!(steps >= least, "writer {number}: {least} steps acknowledged, {steps} there");
            match writer.told {
                Some((told, starts)) if starts == state.starts => {
                    assert_eq!(steps, told, "writer {number} was told")
                }
                Some((told, _)) => assert!(steps <= told, "writer {number} was told {told}, not {steps}"),
                None => {}
            }
        }
    }

    /// Compares the number of items of a memory that keeps all with the episodes that its writers have ended there.
    ///
    /// # Panics
    /// When they differ.
    pub fn check_episodes(&self, memory: &Memory, items: u64) {
        let ended: u64 = self.applied(memory).iter().map(|(&writer, steps)| steps / episode_steps(writer)).sum();
        assert_eq!(items, ended, "an item for each ended episode");
    }

    /// Compares a batch with what was sent, and its probabilities with the number of live items where these are `equal`. They may be
    /// smaller: a client learns a server's sum with the items that it samples there, which are few of a server with few items.
    ///
    /// # Panics
    /// When they differ, or an item's version is older than `least`; `None` for a table that names no parameters.
    pub fn check_sample(&self, request: &SampleRequest, sampled: &Sampled, equal: Option<u64>, least: Option<u64>) {
        let (versioned, least) = (least.is_some(), least.unwrap_or(0));
        let mut state = self.0.borrow_mut();
        state.samples += 1;
        assert!(sampled.items.len() <= request.count as usize);
        let steps = unpack(&sampled.rows, &sampled.blobs.concat());
        let mut rest = steps.as_slice();
        for item in &sampled.items {
            let before = usize::from(item.before);
            let (window, others) = rest.split_at(before + 1 + usize::from(item.after));
            rest = others;
            let (writer, number) = window[before];
            let known = state.writers.get(&writer).expect("a known writer");
            let sent = known.sent;
            assert!(number < sent, "step {number} of {sent} of writer {writer}");
            if state.whole {
                let after = u64::from(item.after) + 1;
                let whole = (before as u64, number % after, after);
                assert_eq!(whole, (number.min(1), 0, episode_steps(writer)), "a whole episode of writer {writer}");
            }
            let version = |step: &Step| known.versions.range(..=step.1).next_back().map_or(0, |(_, version)| *version);
            let oldest = window.iter().map(version).min().unwrap_or(0);
            assert_eq!(item.version, if versioned { oldest } else { 0 }, "the oldest version of its rows");
            assert!(oldest == 0 || !versioned || oldest >= least, "version {oldest} is older than {least}");
            for (at, &step) in window.iter().enumerate() {
                assert_eq!(step, (writer, number + at as u64 - before as u64), "its window");
            }
            let named = *state.ids.entry(item.id).or_insert((writer, number));
            assert_eq!(named, (writer, number), "an id names one item");
            let probability = item.probability;
            assert!(probability > 0.0 && probability <= 1.0, "{probability}");
            if let Some(frequencies) = &mut state.frequencies {
                frequencies.add(item.id, item.probability);
            }
            if let Some(live) = equal {
                let relative = item.probability * live as f64;
                assert!(relative < MOST_OF_EQUAL, "{relative} times the probability of {live} equal items");
            }
        }
        assert!(rest.is_empty(), "rows of the items alone");
    }

    /// Counts the items of a batch that was requested after the last start of a server, of a table that gives each item to `most` batches.
    ///
    /// # Panics
    /// When one has come more often.
    pub fn check_delivered(&self, sampled: &Sampled, most: u32) {
        let mut state = self.0.borrow_mut();
        for item in &sampled.items {
            let times = state.delivered.entry(item.id).or_default();
            *times += 1;
            assert!(*times <= most, "item {} was delivered {times} times, of {most}", item.id);
        }
    }

    /// From now on nothing changes: samples are counted.
    pub fn count_samples(&self) {
        self.0.borrow_mut().frequencies = Some(Frequencies::default());
    }

    /// Ends the count of samples.
    ///
    /// # Panics
    /// When items are not sampled by their probabilities.
    pub fn check_frequencies(&self) {
        let frequencies = self.0.borrow_mut().frequencies.take();
        frequencies.expect("samples are counted").check();
    }

    /// Batches so far.
    pub fn samples(&self) -> u64 {
        self.0.borrow().samples
    }

    /// Steps acknowledged so far, of all writers.
    pub fn steps(&self) -> u64 {
        self.0.borrow().writers.values().map(|writer| writer.acknowledged).sum()
    }

    /// Writers so far.
    pub fn writers(&self) -> usize {
        self.0.borrow().writers.len()
    }
}

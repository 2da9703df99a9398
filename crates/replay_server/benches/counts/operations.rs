//! The operations of a Breakout run that are counted.

use std::collections::BTreeMap;

use base::wait::Wait;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::SampleRequest;
use replay_core::sum_tree::{SampledLeaf, SumTree, Update};
use replay_core::view::{DecodeOptions, Decoder};
use replay_core::writer::{Writer, WriterOptions};
use replay_core::{Replay, TableConfig};
use replay_link::error::Error;

use crate::breakout::{self, STREAMS};
use crate::tally::{Counts, in_process, remote};
use crate::world;

/// Runs of each operation that are counted; a power of two, so that averages are exact.
const TIMES: usize = 8;
/// Runs before those that are counted: buffers have their sizes then.
const WARM_UP: usize = 2;
const CHUNK_STEPS: usize = 50;
/// Steps of the table: full after ten pushes of all streams, so that each one that is counted evicts.
const CAPACITY: usize = 10 * STREAMS * CHUNK_STEPS;
const BATCH: usize = 512;
/// Of the paper's network for four actions, in float32.
const PARAMETER_BYTES: usize = 4 * 3_292_837;
const LEAVES: u32 = 1 << 20;

const FOREVER: Wait<'static> = Wait { deadline: None, interrupted: &|| false, notice: None };

/// Every operation with its counts.
pub fn count_all() -> BTreeMap<String, Counts> {
    let mut all = BTreeMap::new();
    let limits = MemoryLimits { seed: Some(0), ..MemoryLimits::default() };
    Fixture { name: "in process", replay: &*Memory::new(limits), count: in_process, all: &mut all }.count_all();
    Fixture {
        name: "remote",
        replay: &world::connect(Memory::new(limits)).expect("a server that answers"),
        count: remote,
        all: &mut all,
    }
    .count_all();
    count_tree(&mut all);
    all
}

/// Where operations run, and how they are counted there.
struct Fixture<'a> {
    name: &'static str,
    replay: &'a dyn Replay<Error>,
    /// [`remote`] or [`in_process`].
    count: fn(usize, &mut dyn FnMut(usize)) -> Counts,
    all: &'a mut BTreeMap<String, Counts>,
}

impl Fixture<'_> {
    fn count_all(&mut self) {
        let table = breakout::table(CAPACITY as u64);
        self.replay.create_table(&table, &FOREVER).expect("a table");
        self.count_pushes();
        let ids = self.count_samples(&table);
        self.count_updates(&ids);
        self.count_parameters();
    }

    fn count(&mut self, operation: &str, run: &mut dyn FnMut(usize)) {
        (0..WARM_UP).for_each(&mut *run);
        let counts = (self.count)(TIMES, run);
        self.all.insert(format!("{operation}, {}", self.name), counts);
    }

    fn count_pushes(&mut self) {
        for (streams, named) in [(STREAMS, "16 streams"), (1, "one stream")] {
            let frames: Vec<_> = (0..CHUNK_STEPS).map(|step| breakout::frames(step, streams)).collect();
            let mut writer = open(self.replay, streams);
            let mut push = |_| {
                for frames in &frames {
                    breakout::append(&mut writer, frames, streams);
                }
                writer.flush(&FOREVER).expect("a push");
            };
            (0..CAPACITY / (STREAMS * CHUNK_STEPS)).for_each(&mut push);
            self.count(&format!("push {CHUNK_STEPS} steps of {named}"), &mut push);
        }
    }

    /// Also the ids of a batch.
    fn count_samples(&mut self, table: &TableConfig) -> Vec<u64> {
        let view = breakout::view();
        let options = DecodeOptions { threads: 1, ..DecodeOptions::default() };
        let decoder = Decoder::new(table, &view, options).expect("a view of the table");
        let request = SampleRequest::new(BATCH as u32, &view);
        let replay = self.replay;
        let mut ids = Vec::new();
        self.count(&format!("sample {BATCH} into arrays"), &mut |_| {
            let sampled = replay.sample(&table.name, &request, &FOREVER).expect("items to sample");
            let batch = decoder.decode(&sampled, 0.4).expect("frames that unpack");
            assert_eq!(batch.rejected, []);
            ids.clear();
            ids.extend(sampled.items.iter().map(|item| item.id));
        });
        ids
    }

    fn count_updates(&mut self, ids: &[u64]) {
        let replay = self.replay;
        let mut rng = StdRng::seed_from_u64(1);
        let priorities: Vec<_> = ids.iter().map(|_| rng.random_range(0.1..2.0)).collect();
        self.count(&format!("update {BATCH} priorities"), &mut |_| {
            let receipt = replay.update_priorities("breakout", ids, &priorities, &FOREVER);
            assert_eq!(receipt.expect("ids of this table").stale, 0);
        });
    }

    fn count_parameters(&mut self) {
        let replay = self.replay;
        let parameters = parameters();
        self.count("put 13 MB of parameters", &mut |_| {
            replay.put_parameters("policy", parameters.clone(), &FOREVER).expect("a version");
        });
        self.count("get 13 MB of parameters", &mut |_| {
            let got = replay.get_parameters("policy", 0, None, &FOREVER);
            let got = got.expect("an answer").expect("a version");
            assert_eq!(got.bytes.len(), parameters.len());
        });
    }
}

fn open(replay: &dyn Replay<Error>, streams: usize) -> Writer<Error> {
    let options = WriterOptions { chunk_steps: CHUNK_STEPS as u32, ..WriterOptions::default() };
    let view = breakout::view();
    Writer::open(replay, "breakout", streams as u32, &view, options, &FOREVER).expect("a writer")
}

/// A safetensors file with one tensor.
fn parameters() -> Bytes {
    let header =
        format!(r#"{{"w":{{"dtype":"U8","shape":[{PARAMETER_BYTES}],"data_offsets":[0,{PARAMETER_BYTES}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + PARAMETER_BYTES, 7);
    file.into()
}

/// Samples and updates of the tree alone.
fn count_tree(all: &mut BTreeMap<String, Counts>) {
    let tree: SumTree = SumTree::new(LEAVES, -19);
    for slot in 0..LEAVES {
        tree.activate(slot, 1 + u64::from(slot % 1000));
    }
    let targets: Vec<_> = (0..BATCH).map(|i| i as f64 / BATCH as f64).collect();
    let mut sampled: Vec<SampledLeaf> = Vec::new();
    let mut updates: Vec<Update> = Vec::new();
    let mut step = |turn: usize| {
        tree.sample_batch(&targets, &mut sampled);
        updates.clear();
        updates.extend(sampled.iter().map(|item| Update {
            slot: item.slot,
            generation: item.generation,
            units: 1 + turn as u64,
        }));
        assert_eq!(tree.set_batch(&updates), BATCH);
    };
    (0..WARM_UP).for_each(&mut step);
    let name = format!("sample and update {BATCH} of 2^20 leaves");
    all.insert(name, in_process(TIMES, &mut step));
}

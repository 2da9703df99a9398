//! NaN and infinities in steps: refused where learning would read them, unless the column allows them.

use std::sync::Arc;

use base::wait::Wait;
use replay_core::error::{Error, Result};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::schema::{Column, Dtype, TableConfig};
use replay_core::view::{NStep, ViewSpec, Window};
use replay_core::writer::{FinalObservations, StepBatch, Values, Writer, WriterOptions};

const BAD: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

fn n_step() -> ViewSpec {
    ViewSpec::NStep(NStep::default())
}

fn window() -> ViewSpec {
    ViewSpec::Window(Window::default())
}

/// Observations of two by two numbers, a hidden state, and rewards, which the caller may change.
fn table(change: impl FnOnce(&mut TableConfig)) -> TableConfig {
    let columns = vec![
        Column::new("observation", Dtype::Float32, vec![2, 2]),
        Column::new("action", Dtype::Uint8, vec![]),
        Column::new("reward", Dtype::Float32, vec![]),
        Column::new("hidden", Dtype::Float32, vec![]),
    ];
    let mut config = TableConfig::new("t", columns, 1_000);
    change(&mut config);
    config
}

/// One step of two streams.
#[derive(Clone, Copy, Default)]
struct Step {
    observation: [[f32; 4]; 2],
    reward: [f32; 2],
    hidden: [f32; 2],
    truncated: [bool; 2],
    final_rows: Option<[bool; 2]>,
    final_observation: Option<[[f32; 4]; 2]>,
    q: Option<[[f32; 3]; 2]>,
    final_q: Option<[[f32; 3]; 2]>,
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// The table, and a writer of two streams.
struct World {
    memory: Arc<Memory>,
    writer: Writer,
}

impl World {
    fn new(config: &TableConfig, view: &ViewSpec) -> Self {
        let memory = Memory::new(MemoryLimits::default());
        memory.create_table(config).unwrap();
        let options = WriterOptions::default();
        let writer = Writer::open(&*memory, "t", 2, view, options, &Wait::forever()).unwrap();
        World { memory, writer }
    }

    fn append(&mut self, step: &Step) -> Result<()> {
        let observation = bytes(step.observation.as_flattened());
        let (reward, hidden) = (bytes(&step.reward), bytes(&step.hidden));
        let last = step.final_observation.map(|last| bytes(last.as_flattened()));
        let q = step.q.map(|q| bytes(q.as_flattened()));
        let final_q = step.final_q.map(|q| bytes(q.as_flattened()));
        let shape = [2, 2, 2];
        let last = last.as_ref();
        let last = last.map(|last| [("observation", Values::new(Dtype::Float32, &shape, last))]);
        let columns = [
            ("observation", Values::new(Dtype::Float32, &shape, &observation)),
            ("action", Values::new(Dtype::Uint8, &[2], &[0; 2])),
            ("reward", Values::new(Dtype::Float32, &[2], &reward)),
            ("hidden", Values::new(Dtype::Float32, &[2], &hidden)),
        ];
        let of_q = |q| Values::new(Dtype::Float32, &[2, 3], q);
        let step = StepBatch {
            truncated: Some(&step.truncated),
            final_rows: step.final_rows.as_ref().map(|rows| &rows[..]),
            final_observations: last.as_ref().map(|last| FinalObservations {
                columns: last,
                ended: None,
                q: final_q.as_deref().map(of_q),
            }),
            q: q.as_deref().map(of_q),
            ..StepBatch::new(&columns)
        };
        self.writer.append(&step, &Wait::forever())
    }

    /// Expects a step to be refused with all `words`, and later steps to be stored as if there had been none.
    fn refuses(&mut self, step: &Step, words: &[&str]) {
        let before = self.writer.counters();
        let error = self.append(step).expect_err("a step that is not finite");
        assert!(matches!(error, Error::Schema { .. }));
        let message = error.to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} has to name {word:?}");
        }
        assert_eq!(self.writer.counters(), before);
    }

    /// Steps in the table, without final rows, once all have arrived.
    fn stored(&mut self) -> u64 {
        self.writer.flush(&Wait::forever()).unwrap();
        self.memory.stats()["tables"]["t"]["steps"].as_u64().unwrap()
    }
}

#[test]
fn an_observation_is_refused_with_its_place() {
    let mut world = World::new(&table(|_| ()), &n_step());
    world.append(&Step::default()).unwrap();
    for bad in BAD {
        let mut step = Step::default();
        step.observation[1][2] = bad;
        let got = format!("\"observation\" of stream 1 is {bad} at [1, 0]");
        world.refuses(&step, &["table \"t\"", &got, "finite=False"]);
    }
    for _ in 0..4 {
        world.append(&Step::default()).unwrap();
    }
    assert_eq!(world.stored(), 10);
    assert_eq!(world.writer.counters().items, 8);
}

#[test]
fn a_reward_is_refused() {
    let mut world = World::new(&table(|_| ()), &n_step());
    for bad in BAD {
        let mut step = Step::default();
        step.reward[1] = bad;
        let got = format!("\"reward\" of stream 1 is {bad}, ");
        world.refuses(&step, &[&got, "finite=False"]);
    }
    world.append(&Step::default()).unwrap();
    assert_eq!(world.stored(), 2);
}

#[test]
fn a_bad_observation_is_named_before_its_q_values() {
    let mut world = World::new(&table(|_| ()), &n_step());
    let mut step = Step { q: Some([[0.0, f32::NAN, 0.0]; 2]), ..Step::default() };
    world.refuses(&step, &["q has to be finite, got NaN"]);
    step.observation[0][0] = f32::NAN;
    world.refuses(&step, &["\"observation\" of stream 0 is NaN at [0, 0]"]);

    // In the mode SAME_STEP, of a stream that ends.
    let mut last = Step {
        truncated: [false, true],
        final_observation: Some([[0.0; 4]; 2]),
        q: Some([[0.0; 3]; 2]),
        final_q: Some([[f32::NAN; 3]; 2]),
        ..Step::default()
    };
    world.refuses(&last, &["final q has to be finite, got NaN"]);
    last.final_observation = Some([[0.0; 4], [0.0, 0.0, 0.0, f32::INFINITY]]);
    world.refuses(&last, &["\"final_observation\" of stream 1 is inf at [1, 1]"]);
}

/// The rewards of final rows, and final observations of episodes that go on, are not read.
#[test]
fn what_is_not_read_is_not_refused() {
    let mut world = World::new(&table(|_| ()), &n_step());
    let end = Step { truncated: [true, false], ..Step::default() };
    world.append(&end).unwrap();
    let mut last = Step { final_rows: Some([true, false]), reward: [f32::NAN, 0.0], ..Step::default() };
    let mut bad = last;
    bad.observation[0][3] = f32::NAN;
    world.refuses(&bad, &["\"observation\" of stream 0 is NaN at [1, 1]"]);
    last.reward[1] = f32::NAN;
    world.refuses(&last, &["\"reward\" of stream 1 is NaN"]);
    last.reward[1] = 0.0;
    world.append(&last).unwrap();

    let same_step =
        Step { truncated: [false, true], final_observation: Some([[f32::NAN; 4], [1.0; 4]]), ..Step::default() };
    world.append(&same_step).unwrap();
    assert_eq!(world.writer.counters().final_rows, 2);
}

#[test]
fn columns_of_finite_false_and_others_take_any_number() {
    let any = |config: &mut TableConfig| {
        config.columns[0].finite = false;
        config.columns[2].finite = false;
    };
    let mut world = World::new(&table(any), &n_step());
    let mut step =
        Step { observation: [[f32::NAN; 4]; 2], reward: [f32::INFINITY; 2], hidden: [f32::NAN; 2], ..Step::default() };
    world.append(&step).unwrap();
    // The initial priority would be infinite.
    step.q = Some([[0.0; 3]; 2]);
    world.refuses(&step, &["stream 0 has the reward inf", "give priorities instead"]);
    assert_eq!(world.stored(), 2);

    let mut world = World::new(&table(|_| ()), &n_step());
    let hidden = Step { hidden: [f32::NAN; 2], ..Step::default() };
    world.append(&hidden).unwrap();
}

/// A window names no observation, but the table's view may.
#[test]
fn the_views_of_writer_and_table_name_observations() {
    let observation = Step { observation: [[f32::NAN; 4]; 2], ..Step::default() };
    let reward = Step { reward: [f32::NAN; 2], ..Step::default() };
    let mut world = World::new(&table(|_| ()), &window());
    world.append(&observation).unwrap();
    world.refuses(&reward, &["\"reward\" of stream 0"]);

    let learned = |config: &mut TableConfig| config.view = Some(n_step());
    let mut world = World::new(&table(learned), &window());
    world.refuses(&observation, &["\"observation\" of stream 0"]);
    world.refuses(&reward, &["\"reward\" of stream 0"]);
}

#[test]
fn every_float_is_checked() {
    for (dtype, nan) in
        [(Dtype::Float16, half::f16::NAN.to_le_bytes().to_vec()), (Dtype::Float64, f64::NAN.to_le_bytes().to_vec())]
    {
        let columns = vec![Column::new("observation", dtype, vec![]), Column::new("reward", Dtype::Int8, vec![])];
        let memory = Memory::new(MemoryLimits::default());
        memory.create_table(&TableConfig::new("t", columns, 1_000)).unwrap();
        let options = WriterOptions::default();
        let wait = Wait::forever();
        let mut writer = Writer::open(&*memory, "t", 1, &n_step(), options, &wait).unwrap();
        let mut append = |bytes: &[u8]| {
            let columns =
                [("observation", Values::new(dtype, &[1], bytes)), ("reward", Values::new(Dtype::Int8, &[1], &[0x7f]))];
            writer.append(&StepBatch::new(&columns), &wait)
        };
        let error = append(&nan).unwrap_err();
        assert!(matches!(error, Error::Schema { .. }), "{error}");
        append(&vec![0; nan.len()]).unwrap();
    }
}

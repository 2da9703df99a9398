//! Environments whose every observation, action, reward and Q-value is known afterwards.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::schema::{Codec, Column, Dtype, TableConfig};

pub const FRAME_SHAPE: [usize; 2] = [4, 8];
pub const FRAME_BYTES: usize = 32;
pub const ACTIONS: usize = 3;
pub const STATE_BYTES: usize = 24;

pub type Frame = [u8; FRAME_BYTES];

/// What happens after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    GoesOn,
    /// Learning ends, the game and its observation stack continue.
    LosesLife,
    Terminates,
    Truncates,
    /// The episode is cut and nobody keeps its last observation.
    TruncatesUnseen,
    /// The environment is reset and nobody says that the episode was over.
    ResetsUnannounced,
}

/// Where an environment hands over the last observation of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Autoreset {
    NextStep,
    SameStep,
}

#[derive(Debug, Clone)]
pub struct Step {
    /// Unique among all steps of all environments.
    pub id: u64,
    pub action: i64,
    pub reward: f32,
    pub state: Vec<u8>,
    pub q: [f32; ACTIONS],
    pub event: Event,
}

impl Step {
    pub fn terminates(&self) -> bool {
        matches!(self.event, Event::LosesLife | Event::Terminates)
    }

    pub fn truncates(&self) -> bool {
        matches!(self.event, Event::Truncates | Event::TruncatesUnseen)
    }

    fn ends_episode(&self) -> bool {
        !matches!(self.event, Event::GoesOn | Event::LosesLife)
    }
}

/// One episode: `observations[i]` is what step i saw; one more where the last observation was kept.
#[derive(Debug, Clone, Default)]
pub struct Episode {
    pub steps: Vec<Step>,
    pub observations: Vec<Frame>,
    /// Q-values of the last observation.
    pub final_q: [f32; ACTIONS],
}

/// A row as it goes to the writer.
pub struct Appended {
    pub frame: Frame,
    pub step: Step,
    pub first: bool,
    pub is_final: bool,
    pub final_frame: Option<Frame>,
    pub final_q: [f32; ACTIONS],
}

pub struct Environment {
    stream: u64,
    autoreset: Autoreset,
    events: std::vec::IntoIter<Event>,
    rng: StdRng,
    taken: u64,
    frame: Frame,
    state: Vec<u8>,
    /// NEXT_STEP: the observation of the final row, which is next.
    final_due: Option<Frame>,
    pub episodes: Vec<Episode>,
}

impl Environment {
    /// Frames of odd streams change little from step to step, those of even ones altogether; states change little in
    /// streams 1, 5, 9, ... alone.
    pub fn new(stream: u64, autoreset: Autoreset, events: Vec<Event>, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ (stream << 32));
        let frame = random_frame(&mut rng);
        Environment {
            stream,
            autoreset,
            events: events.into_iter(),
            rng,
            taken: 0,
            frame,
            state: vec![0; STATE_BYTES],
            final_due: None,
            episodes: vec![Episode::default()],
        }
    }

    pub fn advance(&mut self) -> Appended {
        if let Some(frame) = self.final_due.take() {
            let mut step = self.random_step(Event::GoesOn);
            let episode = self.episodes.last_mut().unwrap();
            episode.observations.push(frame);
            step.q = episode.final_q;
            self.reset();
            return Appended { frame, step, first: false, is_final: true, final_frame: None, final_q: [0.0; ACTIONS] };
        }
        let mut event = self.events.next().unwrap_or(Event::GoesOn);
        if event == Event::TruncatesUnseen && self.autoreset == Autoreset::NextStep {
            // Its row comes whether one wants it or not.
            event = Event::Truncates;
        }
        let step = self.random_step(event);
        let frame = self.frame;
        let next = self.next_frame();
        let final_q = random_q(&mut self.rng);
        let episode = self.episodes.last_mut().unwrap();
        let first = episode.steps.is_empty();
        episode.steps.push(step.clone());
        episode.observations.push(frame);
        let mut final_frame = None;
        if matches!(event, Event::Terminates | Event::Truncates) {
            episode.final_q = final_q;
            match self.autoreset {
                Autoreset::NextStep => self.final_due = Some(next),
                Autoreset::SameStep => {
                    episode.observations.push(next);
                    final_frame = Some(next);
                }
            }
        }
        if !step.ends_episode() {
            self.frame = next;
        } else if self.final_due.is_none() {
            self.reset();
        }
        Appended { frame, step, first, is_final: false, final_frame, final_q }
    }

    fn reset(&mut self) {
        self.frame = random_frame(&mut self.rng);
        self.episodes.push(Episode::default());
    }

    fn changes_little(&self) -> bool {
        self.stream % 2 == 1
    }

    fn next_frame(&mut self) -> Frame {
        let mut frame = self.frame;
        if !self.changes_little() || self.rng.random_bool(0.1) {
            frame = random_frame(&mut self.rng);
        } else if self.rng.random_bool(0.8) {
            frame[self.rng.random_range(0..FRAME_BYTES)] = self.rng.random();
        }
        frame
    }

    fn random_step(&mut self, event: Event) -> Step {
        self.taken += 1;
        let changed = if self.changes_little() { 4 } else { STATE_BYTES };
        self.rng.fill(&mut self.state[..changed]);
        Step {
            id: (self.stream << 32) | self.taken,
            action: self.rng.random_range(0..ACTIONS as i64),
            reward: self.rng.random_range(-2.0..2.0),
            state: self.state.clone(),
            q: random_q(&mut self.rng),
            event,
        }
    }
}

/// Half of them compress, half do not.
fn random_frame(rng: &mut StdRng) -> Frame {
    if rng.random() {
        return [rng.random(); FRAME_BYTES];
    }
    std::array::from_fn(|_| rng.random())
}

fn random_q(rng: &mut StdRng) -> [f32; ACTIONS] {
    std::array::from_fn(|_| rng.random_range(-5.0..5.0))
}

/// The codecs whose values are blobs.
pub const BLOB_CODECS: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

pub fn table() -> TableConfig {
    table_of(Codec::Lz4)
}

/// The table with blobs packed by `codec`.
pub fn table_of(codec: Codec) -> TableConfig {
    // Miri runs no C, and the codecs are C.
    let codec = if cfg!(miri) { Codec::None } else { codec };
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        codec,
        finite: true,
        max_length: 0,
    };
    let frame_shape = FRAME_SHAPE.map(|n| n as u32);
    TableConfig::new(
        "test",
        vec![
            column("state", Dtype::Float32, &[STATE_BYTES as u32 / 4], codec),
            column("action", Dtype::Int64, &[], Codec::None),
            column("frame", Dtype::Uint8, &frame_shape, codec),
            column("reward", Dtype::Float32, &[], Codec::None),
            column("id", Dtype::Uint64, &[], Codec::None),
        ],
        10_000,
    )
}

//! Writer and views against a naive oracle: environments run through the writer, its pushes are taken apart,
//! items are sampled from them and decoded, and every array is compared with what the episodes say.

mod arrays;
mod bad_input;
mod bad_samples;
mod environment;
mod in_process;
mod not_finite;
mod oracle;
mod ragged;
mod recorder;
mod trajectories;

use std::collections::BTreeSet;
use std::sync::Arc;

use base::wait::Wait;
use environment::{ACTIONS, Appended, Autoreset, Environment, Episode, FRAME_SHAPE, STATE_BYTES};
use recorder::{Recorder, Stored};
use replay_core::error::Result;
use replay_core::schema::{Codec, Dtype};
use replay_core::view::ViewSpec;
use replay_core::writer::{FinalObservations, StepBatch, Values, Writer, WriterCounters, WriterOptions};

/// A writer whose pushes are recorded.
pub fn open(view: &ViewSpec, streams: u32, chunk_steps: u32) -> Result<(Writer, Recorder)> {
    open_of(Codec::Lz4, view, streams, chunk_steps)
}

/// The same, with blobs packed by `codec`.
pub fn open_of(codec: Codec, view: &ViewSpec, streams: u32, chunk_steps: u32) -> Result<(Writer, Recorder)> {
    let recorder = Recorder::default();
    let channel = Box::new(recorder.clone());
    let options = WriterOptions { chunk_steps, ..WriterOptions::default() };
    let config = Arc::new(environment::table_of(codec));
    let writer = Writer::over_channel(config, streams, view, options, |_| Ok(channel))?;
    Ok((writer, recorder))
}

/// Hands one row of each environment to the writer.
pub fn append(writer: &mut Writer, rows: &[Appended], autoreset: Autoreset) -> Result<()> {
    append_changed(writer, rows, autoreset, |_| ())
}

/// Hands one row of each environment to the writer, after a change.
pub fn append_changed(
    writer: &mut Writer,
    rows: &[Appended],
    autoreset: Autoreset,
    change: impl FnOnce(&mut StepBatch<'_>),
) -> Result<()> {
    fn join(values: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
        values.flatten().collect()
    }
    let q_bytes = |q: &[f32; ACTIONS]| q.iter().flat_map(|q| q.to_le_bytes()).collect();
    let streams = rows.len();
    let frame_shape = [streams, FRAME_SHAPE[0], FRAME_SHAPE[1]];

    let frames = join(rows.iter().map(|row| row.frame.to_vec()));
    let states = join(rows.iter().map(|row| row.step.state.clone()));
    let actions = join(rows.iter().map(|row| row.step.action.to_le_bytes().to_vec()));
    let rewards = join(rows.iter().map(|row| row.step.reward.to_le_bytes().to_vec()));
    let ids = join(rows.iter().map(|row| row.step.id.to_le_bytes().to_vec()));
    let q = join(rows.iter().map(|row| q_bytes(&row.step.q)));
    let final_q = join(rows.iter().map(|row| q_bytes(&row.final_q)));
    let final_frames = join(rows.iter().map(|row| row.final_frame.unwrap_or([9; 32]).to_vec()));
    let bits = |of: fn(&Appended) -> bool| rows.iter().map(of).collect::<Vec<bool>>();
    let terminated = bits(|row| row.step.terminates());
    let truncated = bits(|row| row.step.truncates());
    let first = bits(|row| row.first);
    let is_final = bits(|row| row.is_final);
    let ended = bits(|row| row.final_frame.is_some());
    let q_shape = [streams, ACTIONS];
    let same_step = autoreset == Autoreset::SameStep;
    let scalar_shape = [streams];
    let state_shape = [streams, STATE_BYTES / 4];
    let columns = [
        ("action", Values::new(Dtype::Int64, &scalar_shape, &actions)),
        ("reward", Values::new(Dtype::Float32, &scalar_shape, &rewards)),
        ("frame", Values::new(Dtype::Uint8, &frame_shape, &frames)),
        ("state", Values::new(Dtype::Float32, &state_shape, &states)),
        ("id", Values::new(Dtype::Uint64, &scalar_shape, &ids)),
    ];
    let last = [("frame", Values::new(Dtype::Uint8, &frame_shape, &final_frames))];
    let mut step = StepBatch {
        columns: &columns,
        terminated: Some(&terminated),
        truncated: Some(&truncated),
        first: Some(&first),
        final_rows: (!same_step).then_some(&is_final),
        final_observations: same_step.then_some(FinalObservations {
            columns: &last,
            ended: Some(&ended),
            q: Some(Values::new(Dtype::Float32, &q_shape, &final_q)),
        }),
        q: Some(Values::new(Dtype::Float32, &q_shape, &q)),
        priority: None,
        version: 0,
    };
    change(&mut step);
    writer.append(&step, &Wait::forever())
}

/// What a run leaves.
pub struct Run {
    /// Of the table's blobs.
    pub codec: Codec,
    /// Of all environments.
    pub episodes: Vec<Episode>,
    /// All that was pushed.
    pub stored: Stored,
    /// At the end.
    pub counters: WriterCounters,
}

/// Runs environments for `appends` rows each through a writer.
pub fn run(
    codec: Codec,
    view: &ViewSpec,
    mut environments: Vec<Environment>,
    autoreset: Autoreset,
    appends: usize,
    chunk_steps: u32,
) -> Run {
    let streams = environments.len();
    let (mut writer, recorder) = open_of(codec, view, streams as u32, chunk_steps).unwrap();
    for _ in 0..appends {
        let rows: Vec<_> = environments.iter_mut().map(Environment::advance).collect();
        append(&mut writer, &rows, autoreset).unwrap();
    }
    writer.close(&Wait::forever()).unwrap();
    let recorded = recorder.0.lock().unwrap();
    assert!(recorded.closed);
    Run {
        codec,
        episodes: environments.into_iter().flat_map(|environment| environment.episodes).collect(),
        stored: Stored::new(&environment::table(), streams, &recorded.pushes),
        counters: writer.counters(),
    }
}

/// The ids of all steps for which `has_item` holds.
pub fn expected_ids(episodes: &[Episode], has_item: impl Fn(&Episode, usize) -> bool) -> BTreeSet<u64> {
    episodes
        .iter()
        .flat_map(|episode| {
            (0..episode.steps.len())
                .filter(|&at| has_item(episode, at))
                .map(|at| episode.steps[at].id)
                .collect::<Vec<_>>()
        })
        .collect()
}

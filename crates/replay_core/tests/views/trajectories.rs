//! Every array of the `Trajectory` view, over random episodes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use replay_core::view::{Array, Batch, Trajectory, ViewSpec};

use crate::arrays::{APPENDS, bytes, codecs, decode_all, f32_of, item, runs, start, u64_of};
use crate::environment::{Episode, FRAME_BYTES, FRAME_SHAPE, STATE_BYTES, Step};
use crate::run;

/// The steps of the item that begins at a step: `Err` where one has to begin there and none does.
fn steps_of(episode: &Episode, at: usize, max_steps: usize) -> Option<Result<usize, ()>> {
    let ended = |step: &Step| step.terminates() || step.truncates();
    let life = episode.steps[..at].iter().rposition(ended).map_or(0, |last| last + 1);
    if !(at - life).is_multiple_of(max_steps) {
        return None;
    }
    let left = &episode.steps[at..];
    let steps = left.iter().take(max_steps).position(ended).map_or(max_steps, |last| last + 1);
    let whole = left.get(steps - 1).is_some_and(|last| ended(last) || episode.observations.len() > at + steps);
    Some(whole.then_some(steps).ok_or(()))
}

/// The values of one item in a ragged array.
fn part(array: &Array, index: usize) -> Vec<u8> {
    let [offsets] = &array.offsets[..] else { panic!("{} has one level of offsets", array.name) };
    let offsets = offsets.to_bytes();
    let offset = |at: usize| u64_of(&offsets[8 * at..8 * at + 8]) as usize;
    let each = array.shape[1..].iter().product::<usize>() * array.dtype.bytes();
    array.to_bytes()[offset(index) * each..offset(index + 1) * each].to_vec()
}

fn bit(batch: &Batch, name: &str, index: usize) -> bool {
    batch.get(name).unwrap().to_bytes()[index] == 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 200 }))]

    #[test]
    fn trajectories_equal_the_episodes(
        (events, autoreset, seed, chunk_steps) in runs(),
        codec in codecs(),
        max_steps in prop_oneof![1..=5u16, Just(1000)],
        gamma in prop_oneof![Just(1.0), Just(0.9)],
    ) {
        let spec = Trajectory { max_steps, gamma, observation: "frame".into() };
        let view = ViewSpec::Trajectory(spec);
        let run = run(codec, &view, start(events, autoreset, seed), autoreset, APPENDS, chunk_steps);
        let (mut expected, mut unfinished) = (BTreeMap::new(), 0);
        for episode in &run.episodes {
            for at in 0..episode.steps.len() {
                match steps_of(episode, at, max_steps.into()) {
                    Some(Ok(steps)) => drop(expected.insert(episode.steps[at].id, (episode, at, steps))),
                    Some(Err(())) => unfinished += 1,
                    None => {}
                }
            }
        }
        prop_assert_eq!(run.counters.dropped.by_mistake(), unfinished);
        prop_assert_eq!(run.counters.items, expected.len() as u64);

        let batch = decode_all(&run, &view, 1 + seed as usize % 3, seed);
        let columns = ["id", "action", "reward", "state", "observation", "returns"];
        let [ids, actions, rewards, states, frames, returns] = columns.map(|name| batch.get(name).unwrap());
        prop_assert_eq!(&frames.shape[1..], FRAME_SHAPE);
        let next_observation = bytes(&batch, "next_observation");
        for index in 0..batch.len {
            let id = part(ids, index);
            let (episode, at, count) = expected.remove(&u64_of(&id[..8])).expect("an item of its own");
            let steps = &episode.steps[at..at + count];
            prop_assert_eq!(id, steps.iter().flat_map(|step| step.id.to_ne_bytes()).collect::<Vec<_>>());
            prop_assert_eq!(part(actions, index), steps.iter().flat_map(|s| s.action.to_ne_bytes()).collect::<Vec<_>>());
            prop_assert_eq!(part(rewards, index), steps.iter().flat_map(|s| s.reward.to_ne_bytes()).collect::<Vec<_>>());
            prop_assert_eq!(part(states, index), steps.iter().flat_map(|s| s.state.clone()).collect::<Vec<_>>());
            prop_assert_eq!(part(states, index).len(), count * STATE_BYTES);
            prop_assert_eq!(part(frames, index), episode.observations[at..at + count].concat());
            let returns = part(returns, index);
            for (step, value) in returns.chunks_exact(4).enumerate() {
                let left = steps[step..].iter().rev();
                let want = left.fold(0.0, |following, step| f64::from(step.reward) + gamma * following);
                prop_assert_eq!(f32_of(value), want as f32);
            }
            let last = steps.last().unwrap();
            let begins = at == 0 || episode.steps[at - 1].terminates();
            prop_assert_eq!(bit(&batch, "begins", index), begins);
            prop_assert_eq!(bit(&batch, "ends", index), last.terminates() || last.truncates());
            prop_assert_eq!(bit(&batch, "terminated", index), last.terminates());
            prop_assert_eq!(bit(&batch, "truncated", index), last.truncates());
            let following = episode.observations.get(at + count);
            prop_assert_eq!(bit(&batch, "has_next", index), following.is_some());
            prop_assert_eq!(item(&next_observation, index), following.unwrap_or(&[0; FRAME_BYTES]));
        }
        prop_assert!(expected.is_empty());
    }
}

//! What the views have to give, computed from whole episodes without rows, chunks or windows.

use replay_core::view::{NStep, Padding, Sequences};

use crate::environment::{Episode, FRAME_BYTES, Frame, Step};

/// Finds a step by its id.
pub fn find(episodes: &[Episode], id: u64) -> (&Episode, usize) {
    episodes
        .iter()
        .find_map(|episode| {
            let at = episode.steps.iter().position(|step| step.id == id)?;
            Some((episode, at))
        })
        .expect("a step that was taken")
}

pub struct NStepItem {
    pub observation: Vec<u8>,
    pub next_observation: Vec<u8>,
    pub reward: f64,
    pub discount: f64,
    pub priority: f64,
}

/// The item anchored at a step, if its window was completed.
pub fn n_step(view: &NStep, episode: &Episode, anchor: usize) -> Option<NStepItem> {
    let (mut reward, mut terminated, mut last) = (0.0, false, anchor);
    for i in 0..usize::from(view.n) {
        let Some(step) = episode.steps.get(anchor + i) else {
            break;
        };
        reward += view.gamma.powi(i as i32) * f64::from(step.reward);
        last = anchor + i;
        if step.terminates() {
            terminated = true;
            break;
        }
    }
    let steps = last + 1 - anchor;
    if !terminated {
        episode.observations.get(last + 1)?;
        if steps < usize::from(view.n) && !episode.steps[last].truncates() {
            return None;
        }
    }
    let observation = stack(episode, anchor, view.stack.before() + 1, view.padding);
    let next_observation = if terminated {
        let mut frames = observation.clone();
        frames.extend(vec![0; usize::from(view.n) * FRAME_BYTES]);
        frames.split_off(usize::from(view.n) * FRAME_BYTES)
    } else {
        stack(episode, last + 1, view.stack.before() + 1, view.padding)
    };
    let discount = if terminated { 0.0 } else { view.gamma.powi(steps as i32) };
    let step = &episode.steps[anchor];
    let target = reward + discount * greedy(episode, last + 1);
    Some(NStepItem { observation, next_observation, reward, discount, priority: (target - taken(step)).abs() })
}

/// The steps of the sequence that begins at a step, if there is one, and its priority.
pub fn sequence(view: &Sequences, episode: &Episode, first: usize) -> Option<(usize, f64)> {
    let life = episode.steps[..first].iter().rposition(Step::terminates).map_or(0, |lost| lost + 1);
    if !(first - life).is_multiple_of(view.period.into()) {
        return None;
    }
    let full = usize::from(view.burn_in + view.length);
    let left = &episode.steps[first..];
    let to_end = left.iter().position(|step| step.terminates() || step.truncates());
    let steps = match to_end {
        Some(end) if end < full => end + 1,
        _ => full,
    };
    if steps > left.len() || steps <= usize::from(view.burn_in) {
        return None;
    }
    let last = first + steps - 1;
    if !episode.steps[last].terminates() && episode.observations.len() <= last + 1 {
        return None;
    }
    let errors: Vec<f64> = (first + usize::from(view.burn_in)..=last)
        .map(|at| {
            let step = &episode.steps[at];
            let bootstrap = if step.terminates() { 0.0 } else { view.gamma * greedy(episode, at + 1) };
            (f64::from(step.reward) + bootstrap - taken(step)).abs()
        })
        .collect();
    let largest = errors.iter().copied().fold(0.0, f64::max);
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    Some((steps, 0.9 * largest + 0.1 * mean))
}

/// The observation stack that the agent saw at a step (or after the last).
pub fn stack(episode: &Episode, at: usize, stack: u16, padding: Padding) -> Vec<u8> {
    let zeros: Frame = [0; FRAME_BYTES];
    (0..usize::from(stack))
        .rev()
        .flat_map(|back| match (at.checked_sub(back), padding) {
            (Some(index), _) => episode.observations[index],
            (None, Padding::RepeatFirst) => episode.observations[0],
            (None, Padding::Zero) => zeros,
        })
        .collect()
}

fn taken(step: &Step) -> f64 {
    f64::from(step.q[step.action as usize])
}

fn greedy(episode: &Episode, at: usize) -> f64 {
    let q = match episode.steps.get(at) {
        Some(step) => step.q,
        None => episode.final_q,
    };
    f64::from(q.into_iter().fold(f32::MIN, f32::max))
}

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
    let left = &episode.steps[anchor..];
    let (steps, _) = steps_of(episode, anchor, view.n.into())?;
    let reward = (0..steps).map(|i| view.gamma.powi(i as i32) * f64::from(left[i].reward)).sum();
    let discount = if left[steps - 1].terminates() { 0.0 } else { view.gamma.powi(steps as i32) };
    let observation = stack(episode, anchor, view.stack.before() + 1, view.padding);
    let unseen = episode.observations.len() == anchor + steps;
    let next = anchor + if unseen { view.n.into() } else { steps };
    let next_observation = stack(episode, next, view.stack.before() + 1, view.padding);
    let step = &episode.steps[anchor];
    let target = reward + discount * greedy(episode, anchor + steps);
    Some(NStepItem { observation, next_observation, reward, discount, priority: (target - taken(step)).abs() })
}

/// At most `most` steps from an anchor to the end of the life or episode: those whose next observation came or that terminate,
/// and with a truncated one after them. `None` where the window is open.
fn steps_of(episode: &Episode, anchor: usize, most: usize) -> Option<(usize, usize)> {
    let left = &episode.steps[anchor..];
    let end = left.iter().take(most).position(|step| step.terminates() || step.truncates());
    let all = end.map_or(most, |end| end + 1);
    let last = left.get(all - 1)?;
    let known = last.terminates() || episode.observations.len() > anchor + all;
    match all - usize::from(!known) {
        0 => None,
        _ if !known && !last.truncates() => None,
        counted => Some((counted, all)),
    }
}

pub struct SequenceItem {
    /// Steps that learning may use.
    pub counted: usize,
    /// With a truncated one whose last observation never came.
    pub all: usize,
    pub priority: f64,
}

/// The sequence that begins at a step, if there is one.
pub fn sequence(view: &Sequences, episode: &Episode, first: usize) -> Option<SequenceItem> {
    let life = episode.steps[..first].iter().rposition(Step::terminates).map_or(0, |lost| lost + 1);
    if !(first - life).is_multiple_of(view.period.into()) {
        return None;
    }
    let (counted, all) = steps_of(episode, first, usize::from(view.burn_in + view.length))?;
    if counted <= usize::from(view.burn_in) {
        return None;
    }
    let errors: Vec<f64> = (first + usize::from(view.burn_in)..first + counted)
        .map(|at| {
            let step = &episode.steps[at];
            let bootstrap = if step.terminates() { 0.0 } else { view.gamma * greedy(episode, at + 1) };
            (f64::from(step.reward) + bootstrap - taken(step)).abs()
        })
        .collect();
    let largest = errors.iter().copied().fold(0.0, f64::max);
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    Some(SequenceItem { counted, all, priority: 0.9 * largest + 0.1 * mean })
}

/// The observation stack that the agent saw at a step (or after the last); an observation that never came is zeros.
pub fn stack(episode: &Episode, at: usize, stack: u16, padding: Padding) -> Vec<u8> {
    let zeros: Frame = [0; FRAME_BYTES];
    (0..usize::from(stack))
        .rev()
        .flat_map(|back| match (at.checked_sub(back), padding) {
            (Some(index), _) => episode.observations.get(index).copied().unwrap_or(zeros),
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

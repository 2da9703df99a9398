//! Every array of every view, over random episodes.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use replay_core::schema::Codec;
use replay_core::view::{Batch, DecodeOptions, Decoder, NStep, Padding, Sequences, ViewSpec, Window};

use crate::environment::{self, Autoreset, BLOB_CODECS, Environment, Event, FRAME_BYTES, FRAME_SHAPE, STATE_BYTES};
use crate::{Run, expected_ids, oracle, run};

pub const APPENDS: usize = if cfg!(miri) { 10 } else { 40 };

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => Just(Event::GoesOn),
        2 => Just(Event::LosesLife),
        2 => Just(Event::Terminates),
        2 => Just(Event::Truncates),
        1 => Just(Event::TruncatesUnseen),
        1 => Just(Event::ResetsUnannounced),
    ]
}

/// One to three streams of events, how they are reset, a seed and the length of chunks.
pub fn runs() -> impl Strategy<Value = (Vec<Vec<Event>>, Autoreset, u64, u32)> {
    (
        prop::collection::vec(prop::collection::vec(event(), 0..APPENDS), 1..=3),
        prop_oneof![Just(Autoreset::NextStep), Just(Autoreset::SameStep)],
        any::<u64>(),
        1..8u32,
    )
}

pub fn codecs() -> impl Strategy<Value = Codec> {
    prop::sample::select(&BLOB_CODECS)
}

fn padding() -> impl Strategy<Value = Padding> {
    prop_oneof![Just(Padding::Zero), Just(Padding::RepeatFirst)]
}

pub fn start(events: Vec<Vec<Event>>, autoreset: Autoreset, seed: u64) -> Vec<Environment> {
    events
        .into_iter()
        .enumerate()
        .map(|(stream, events)| Environment::new(stream as u64, autoreset, events, seed))
        .collect()
}

/// Samples every item once, reading at most the window of `view`.
pub fn decode_all(run: &Run, view: &ViewSpec, threads: usize, seed: u64) -> Batch {
    let options = DecodeOptions { threads, ..DecodeOptions::default() };
    let decoder = Decoder::new(&environment::table_of(run.codec), view, options).unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let sampled = run.stored.sample(&run.stored.items, view.before(), view.after(), &mut rng);
    let batch = decoder.decode(&sampled, 0.4).unwrap();
    assert_eq!(batch.rejected, []);
    assert_eq!(batch.len, run.stored.items.len());
    batch
}

/// The bytes of an array, and of one item of it.
pub fn bytes(batch: &Batch, name: &str) -> (Vec<u8>, usize) {
    let array = batch.get(name).unwrap();
    let each = array.shape[1..].iter().product::<usize>() * array.dtype.bytes();
    (array.to_bytes(), each)
}

/// The bytes of one item.
pub fn item(array: &(Vec<u8>, usize), index: usize) -> &[u8] {
    &array.0[index * array.1..(index + 1) * array.1]
}

pub fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes(bytes.try_into().unwrap())
}

pub fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

fn assert_close(got: f32, want: f64) {
    assert!((f64::from(got) - want).abs() <= 1e-5 * want.abs().max(1.0), "{got} is not {want}");
}

/// Takes the number of steps that no item stands for, and the counters, which have to agree but for windows that
/// were still open at the end.
fn check_counters(run: &Run, expected: &BTreeSet<u64>, reach: usize) {
    let counters = run.counters;
    let steps: usize = run.episodes.iter().map(|episode| episode.steps.len()).sum();
    assert_eq!(counters.steps, steps as u64);
    assert_eq!(counters.items, expected.len() as u64);
    let lost = steps - expected.len();
    let dropped = counters.dropped.by_mistake() as usize;
    let streams_open = 3 * reach;
    assert!(dropped <= lost && lost <= dropped + streams_open);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 200 }))]

    #[test]
    fn n_step_arrays_equal_the_oracle(
        (events, autoreset, seed, chunk_steps) in runs(),
        codec in codecs(),
        stack in 1..=4u16,
        n in 1..=5u16,
        narrower in any::<bool>(),
        padding in padding(),
    ) {
        let spec = NStep { observation: "frame".into(), stack: stack.into(), n, gamma: 0.9, padding };
        // Items may be written with a wider window than they are read with.
        let written = if narrower {
            NStep { stack: (stack + 1).into(), n: n + 2, ..spec.clone() }
        } else {
            spec.clone()
        };
        let view = ViewSpec::NStep(spec.clone());
        let environments = start(events, autoreset, seed);
        let run = run(codec, &ViewSpec::NStep(written.clone()), environments, autoreset, APPENDS, chunk_steps);
        let expected = expected_ids(&run.episodes, |episode, at| {
            oracle::n_step(&written, episode, at).is_some()
        });
        check_counters(&run, &expected, written.n.into());

        let batch = decode_all(&run, &view, 1 + seed as usize % 3, seed);
        let ids = bytes(&batch, "id");
        let got: BTreeSet<_> = (0..batch.len).map(|i| u64_of(item(&ids, i))).collect();
        prop_assert_eq!(&got, &expected);

        let mut shape = vec![batch.len, stack.into(), FRAME_SHAPE[0], FRAME_SHAPE[1]];
        if stack == 1 {
            shape.remove(1);
        }
        prop_assert_eq!(&batch.get("observation").unwrap().shape, &shape);
        prop_assert_eq!(&batch.get("next_observation").unwrap().shape, &shape);
        let observation = bytes(&batch, "observation");
        let next_observation = bytes(&batch, "next_observation");
        let (reward, discount) = (bytes(&batch, "reward"), bytes(&batch, "discount"));
        let (action, state) = (bytes(&batch, "action"), bytes(&batch, "state"));
        for i in 0..batch.len {
            let (episode, at) = oracle::find(&run.episodes, u64_of(item(&ids, i)));
            let want = oracle::n_step(&spec, episode, at).unwrap();
            prop_assert_eq!(item(&observation, i), &want.observation);
            prop_assert_eq!(item(&next_observation, i), &want.next_observation);
            assert_close(f32_of(item(&reward, i)), want.reward);
            assert_close(f32_of(item(&discount, i)), want.discount);
            prop_assert_eq!(item(&action, i), episode.steps[at].action.to_le_bytes());
            prop_assert_eq!(item(&state, i), &episode.steps[at].state);
            let written = oracle::n_step(&written, episode, at).unwrap();
            assert_close(run.stored.items[i].priority.unwrap(), written.priority);
        }
    }

    #[test]
    fn sequences_equal_the_oracle(
        (events, autoreset, seed, chunk_steps) in runs(),
        codec in codecs(),
        stack in 1..=3u16,
        (length, burn_in, period) in (1..=5u16, 0..=3u16, 1..=6u16),
        padding in padding(),
    ) {
        let spec = Sequences {
            observation: "frame".into(),
            stack: stack.into(), length, burn_in, period,
            gamma: 0.9,
            padding,
            state: vec!["state".into()],
        };
        let view = ViewSpec::Sequences(spec.clone());
        let run = run(codec, &view, start(events, autoreset, seed), autoreset, APPENDS, chunk_steps);
        let expected = expected_ids(&run.episodes, |episode, at| {
            oracle::sequence(&spec, episode, at).is_some()
        });
        let batch = decode_all(&run, &view, 1, seed);
        let ids = bytes(&batch, "id");
        let got: BTreeSet<_> = (0..batch.len).map(|i| u64_of(&item(&ids, i)[..8])).collect();
        prop_assert_eq!(&got, &expected);

        let full = usize::from(length + burn_in);
        let observation = bytes(&batch, "observation");
        prop_assert_eq!(observation.1, (full + 1) * usize::from(stack) * FRAME_BYTES);
        let (reward, discount) = (bytes(&batch, "reward"), bytes(&batch, "discount"));
        let [mask, terminated, truncated, first] =
            ["mask", "terminated", "truncated", "first"].map(|name| bytes(&batch, name));
        let state = bytes(&batch, "state");
        for i in 0..batch.len {
            let (episode, at) = oracle::find(&run.episodes, u64_of(&item(&ids, i)[..8]));
            let want = oracle::sequence(&spec, episode, at).unwrap();
            assert_close(run.stored.items[i].priority.unwrap(), want.priority);
            prop_assert_eq!(item(&state, i), &episode.steps[at].state);
            let stack_bytes = usize::from(stack) * FRAME_BYTES;
            for (t, got) in item(&observation, i).chunks_exact(stack_bytes).enumerate().take(want.counted + 1) {
                prop_assert_eq!(got, oracle::stack(episode, at + t, stack, padding));
            }
            for t in 0..full {
                let step = (t < want.all).then(|| &episode.steps[at + t]);
                prop_assert_eq!(item(&mask, i)[t], u8::from(t < want.counted));
                let bit = |bit: Option<bool>| u8::from(bit == Some(true));
                prop_assert_eq!(item(&terminated, i)[t], bit(step.map(|s| s.terminates())));
                prop_assert_eq!(item(&truncated, i)[t], bit(step.map(|s| s.truncates())));
                prop_assert_eq!(item(&first, i)[t], bit(step.map(|_| at + t == 0)));
                let number = |array, t: usize| f32_of(&item(array, i)[4 * t..4 * t + 4]);
                assert_close(number(&reward, t), step.map_or(0.0, |s| s.reward.into()));
                let bootstraps = t < want.counted && !episode.steps[at + t].terminates();
                assert_close(number(&discount, t), if bootstraps { 0.9 } else { 0.0 });
                prop_assert_eq!(
                    u64_of(&item(&ids, i)[8 * t..8 * t + 8]),
                    step.map_or(0, |s| s.id)
                );
            }
        }
    }

    #[test]
    fn raw_windows_hold_the_rows_around_the_anchor(
        (events, _, seed, chunk_steps) in runs(),
        codec in codecs(),
        (before, after) in (0..=3u16, 0..=3u16),
    ) {
        let written = ViewSpec::NStep(NStep {
            observation: "frame".into(), stack: 4.into(), n: 3, gamma: 0.9, padding: Padding::Zero,
        });
        let view = ViewSpec::Window(Window { before, after });
        let autoreset = Autoreset::SameStep;
        let run = run(codec, &written, start(events, autoreset, seed), autoreset, APPENDS, chunk_steps);
        let batch = decode_all(&run, &view, 2, seed);
        let (ids, frames) = (bytes(&batch, "id"), bytes(&batch, "frame"));
        let [mask, is_final, first] = ["mask", "final", "first"].map(|name| bytes(&batch, name));
        let state = bytes(&batch, "state");
        for (i, stored) in run.stored.items.iter().enumerate() {
            let anchor = usize::from(before);
            let (episode, at) = oracle::find(&run.episodes, u64_of(&item(&ids, i)[8 * anchor..][..8]));
            for slot in 0..=usize::from(before + after) {
                let exists = slot + usize::from(before.min(stored.before)) >= anchor
                    && slot <= anchor + usize::from(run.stored.after(stored, after));
                prop_assert_eq!(item(&mask, i)[slot], u8::from(exists));
                let id = u64_of(&item(&ids, i)[8 * slot..][..8]);
                let frame = &item(&frames, i)[slot * FRAME_BYTES..][..FRAME_BYTES];
                let state = &item(&state, i)[slot * STATE_BYTES..][..STATE_BYTES];
                if !exists {
                    prop_assert!(id == 0 && frame.iter().chain(state).all(|&byte| byte == 0));
                    continue;
                }
                let step = at + slot - anchor;
                prop_assert_eq!(frame, &episode.observations[step]);
                let is_last = step == episode.steps.len();
                prop_assert_eq!(item(&is_final, i)[slot], u8::from(is_last));
                prop_assert_eq!(item(&first, i)[slot], u8::from(step == 0));
                if is_last {
                    prop_assert!(id == 0 && state.iter().all(|&byte| byte == 0));
                } else {
                    prop_assert_eq!(id, episode.steps[step].id);
                    prop_assert_eq!(state, &episode.steps[step].state);
                }
            }
        }
    }
}

#[test]
fn observation_and_next_observation_share_frames_where_they_overlap() {
    let view = ViewSpec::NStep(NStep {
        observation: "frame".into(),
        stack: 4.into(),
        n: 3,
        gamma: 0.9,
        padding: Padding::Zero,
    });
    let autoreset = Autoreset::NextStep;
    let frames = |events: Vec<Event>| {
        let run = run(Codec::Lz4, &view, start(vec![events], autoreset, 1), autoreset, 12, 5);
        let batch = decode_all(&run, &view, 1, 1);
        let now = batch.get("observation").unwrap();
        let next = batch.get("next_observation").unwrap();
        assert!(now.shared && next.shared);
        assert!(std::sync::Arc::ptr_eq(&now.buffer, &next.buffer));
        let frames = [now, next].map(|array| array.strides[0] / FRAME_BYTES);
        (next.offset < now.end(), frames)
    };
    assert_eq!(frames(vec![Event::GoesOn; 3]), (true, [7, 7]));
    // A window of fewer than n steps has its next observation at another distance.
    for end in [Event::Terminates, Event::Truncates, Event::LosesLife] {
        assert_eq!(frames(vec![Event::GoesOn, end]), (false, [4, 4]));
    }
}

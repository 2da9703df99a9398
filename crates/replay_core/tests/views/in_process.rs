//! Writer, memory, sample and decoder together, in one process.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use base::wait::Wait;
use replay_core::Error;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, SampleRequest};
use replay_core::schema::{Codec, Sampler};
use replay_core::view::{DecodeOptions, Decoder, NStep, Padding, ViewSpec};
use replay_core::writer::{Writer, WriterOptions};

use crate::environment::{self, Autoreset, BLOB_CODECS, Environment, Event};
use crate::{append, oracle};

fn view(stack: u16, n: u16) -> ViewSpec {
    ViewSpec::NStep(NStep { observation: "frame".into(), stack: stack.into(), n, gamma: 0.9, padding: Padding::Zero })
}

fn sample_request(count: u32, view: &ViewSpec) -> SampleRequest {
    SampleRequest { min_probability: true, ..SampleRequest::new(count, view) }
}

#[test]
fn sampled_arrays_are_what_the_environments_did() {
    for codec in BLOB_CODECS {
        samples_what_the_environments_did(codec);
    }
}

fn samples_what_the_environments_did(codec: Codec) {
    let config = environment::table_of(codec);
    let memory = Memory::new(MemoryLimits::default());
    let replay: &dyn Replay = &*memory;
    let wait = Wait::forever();
    replay.create_table(&config, &wait).unwrap();
    let view = view(4, 3);
    let ViewSpec::NStep(spec) = &view else { unreachable!("made as NStep") };
    let autoreset = Autoreset::SameStep;
    let mut environments: Vec<_> = (0..3)
        .map(|stream| {
            let events = (0..200).map(|step| match (step + 7 * stream) % 23 {
                5 => Event::LosesLife,
                11 => Event::Truncates,
                17 => Event::Terminates,
                _ => Event::GoesOn,
            });
            Environment::new(stream, autoreset, events.collect(), 11)
        })
        .collect();
    let options = WriterOptions { chunk_steps: 7, ..WriterOptions::default() };
    let mut writer = Writer::open(replay, "test", 3, &view, options, &wait).unwrap();
    for _ in 0..200 {
        let rows: Vec<_> = environments.iter_mut().map(Environment::advance).collect();
        append(&mut writer, &rows, autoreset).unwrap();
    }
    writer.close(&wait).unwrap();
    let episodes: Vec<_> = environments.into_iter().flat_map(|e| e.episodes).collect();

    let decoder = Decoder::new(&config, &view, DecodeOptions::default()).unwrap();
    let mut seen = BTreeSet::new();
    for _ in 0..20 {
        let sampled = replay.sample("test", &sample_request(128, &view), &wait).unwrap();
        assert_eq!(sampled.live_items, writer.counters().items);
        let batch = decoder.decode(&sampled, 0.4).unwrap();
        assert_eq!((batch.len, batch.rejected.len()), (128, 0));
        let column = |name: &str| batch.get(name).unwrap().to_bytes();
        let (ids, now, next) = (column("id"), column("observation"), column("next_observation"));
        let reward = column("reward");
        for i in 0..batch.len {
            let id = u64::from_ne_bytes(ids[8 * i..8 * i + 8].try_into().unwrap());
            let (episode, at) = oracle::find(&episodes, id);
            let want = oracle::n_step(spec, episode, at).unwrap();
            let bytes = want.observation.len();
            assert_eq!(&now[i * bytes..(i + 1) * bytes], want.observation);
            assert_eq!(&next[i * bytes..(i + 1) * bytes], want.next_observation);
            let got = f32::from_ne_bytes(reward[4 * i..4 * i + 4].try_into().unwrap());
            assert!((f64::from(got) - want.reward).abs() < 1e-5);
            seen.insert(id);
        }
    }
    assert!(seen.len() > 300, "{} different items in 2560 samples", seen.len());
}

/// A reader that takes each item as soon as it can, once, from chunks that end between a termination and its final row.
#[test]
fn a_terminated_item_of_a_queue_has_its_last_observation() {
    let mut config = environment::table();
    config.sampler = Sampler::Fifo;
    config.max_times_sampled = 1;
    let memory = Memory::new(MemoryLimits::default());
    let (replay, wait): (&dyn Replay, _) = (&*memory, Wait::forever());
    replay.create_table(&config, &wait).unwrap();
    let view = view(2, 2);
    let ViewSpec::NStep(spec) = &view else { unreachable!("made as NStep") };
    let decoder = Decoder::new(&config, &view, DecodeOptions::default()).unwrap();
    let options = WriterOptions { chunk_steps: 1, ..WriterOptions::default() };
    let mut writer = Writer::open(replay, "test", 1, &view, options, &wait).unwrap();
    let events = [Event::GoesOn, Event::LosesLife, Event::GoesOn, Event::Terminates, Event::Terminates];
    let mut environment = Environment::new(0, Autoreset::NextStep, events.repeat(4), 1);
    let mut next = Vec::new();
    let mut take = || {
        let request = SampleRequest { allow_short: true, ..SampleRequest::new(9, &view) };
        let Ok(sampled) = replay.sample("test", &request, &Wait::until(Some(Instant::now()))) else { return };
        let batch = decoder.decode(&sampled, 0.0).unwrap();
        sampled.credit.unwrap().delivered();
        let [ids, frames] = ["id", "next_observation"].map(|name| batch.get(name).unwrap().to_bytes());
        let ids = ids.chunks_exact(8).map(|id| u64::from_ne_bytes(id.try_into().unwrap()));
        next.extend(ids.zip(frames.chunks_exact(frames.len() / batch.len).map(<[u8]>::to_vec)));
    };
    for _ in 0..28 {
        append(&mut writer, &[environment.advance()], Autoreset::NextStep).unwrap();
        take();
        // As a sample that waits does.
        writer.flush_complete(&wait).unwrap();
        take();
    }
    writer.close(&wait).unwrap();
    take();
    assert_eq!((next.len(), writer.counters().items), (20, 20));
    for (id, frames) in next {
        let (episode, at) = oracle::find(&environment.episodes, id);
        let want = oracle::n_step(spec, episode, at).unwrap();
        assert_eq!(frames, want.next_observation);
        assert!(episode.observations.len() > episode.steps.len(), "a last observation of every episode");
    }
}

#[test]
fn a_view_wider_than_what_was_written_is_refused() {
    let memory = Memory::new(MemoryLimits::default());
    let replay: &dyn Replay = &*memory;
    let wait = Wait::forever();
    replay.create_table(&environment::table(), &wait).unwrap();
    let options = WriterOptions::default();
    let mut writer = Writer::open(replay, "test", 1, &view(2, 1), options, &wait).unwrap();
    let mut environment = Environment::new(0, Autoreset::NextStep, vec![], 1);
    for _ in 0..10 {
        append(&mut writer, &[environment.advance()], Autoreset::NextStep).unwrap();
    }
    writer.flush(&wait).unwrap();
    let request = sample_request(4, &view(2, 1));
    assert_eq!(replay.sample("test", &request, &wait).unwrap().items.len(), 4);
    let error = replay.sample("test", &sample_request(4, &view(4, 1)), &wait).err();
    assert!(matches!(error, Some(Error::View { .. })));
}

#[test]
fn a_writer_held_back_by_the_limiter_loses_nothing() {
    let memory = Memory::new(MemoryLimits::default());
    let replay: &dyn Replay = &*memory;
    let wait = Wait::forever();
    let mut config = environment::table();
    config.samples_per_insert = 1.0;
    config.slack = 40.0;
    config.min_size = 1;
    replay.create_table(&config, &wait).unwrap();
    let view = view(1, 1);
    let options = WriterOptions { chunk_steps: 10, ..WriterOptions::default() };
    let mut writer = Writer::open(replay, "test", 1, &view, options, &wait).unwrap();
    let mut environment = Environment::new(0, Autoreset::NextStep, vec![], 1);
    let mut refused = 0;
    for _ in 0..200 {
        append(&mut writer, &[environment.advance()], Autoreset::NextStep).unwrap();
        // One try without waiting, again after a sample.
        let now = Wait::until(Some(Instant::now()));
        while let Err(error) = writer.flush(&now) {
            assert!(matches!(error, Error::Deadline { .. }));
            refused += 1;
            let sampled = replay.sample("test", &sample_request(8, &view), &now).unwrap();
            sampled.credit.unwrap().delivered();
        }
    }
    writer.close(&Wait::until(Some(Instant::now() + Duration::from_secs(60)))).unwrap();
    assert!(refused > 0);
    assert_eq!(writer.counters().items, 199);
    let mut ids = BTreeSet::new();
    let decoder = Decoder::new(&config, &view, DecodeOptions::default()).unwrap();
    while ids.len() < 199 {
        let sampled = replay.sample("test", &sample_request(8, &view), &wait).unwrap();
        let batch = decoder.decode(&sampled, 0.0).unwrap();
        let column = batch.get("id").unwrap().to_bytes();
        ids.extend(column.chunks_exact(8).map(|id| u64::from_ne_bytes(id.try_into().unwrap())));
    }
    assert!(ids.iter().all(|&id| id <= 200));
}

#[test]
fn a_window_that_the_table_cannot_hold_between_the_other_streams_is_refused() {
    let memory = Memory::new(MemoryLimits::default());
    let mut config = environment::table();
    config.capacity = 40;
    let (replay, wait): (&dyn Replay, _) = (&*memory, Wait::forever());
    replay.create_table(&config, &wait).unwrap();
    let open = |streams| {
        let options = WriterOptions { chunk_steps: 1, ..WriterOptions::default() };
        Writer::open(replay, "test", streams, &view(4, 3), options, &wait).map(drop)
    };
    open(6).unwrap();
    let error = open(7).unwrap_err();
    assert!(matches!(error, Error::Config { .. }));
    let text = error.to_string();
    for part in ["7 steps (3 before the anchor, 3 after it)", "43 steps of 7 streams", "holds 40"] {
        assert!(text.contains(part), "{text}");
    }
}

//! What must be refused, must not panic and must not be lost.

use bytes::Bytes;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use replay_core::error::{Error, ErrorCode};
use replay_core::replay::{BlobSegment, NewItem, Sampled, SampledItem, Wait};
use replay_core::schema::{Dtype, TableConfig, flags};
use replay_core::view::{
    DecodeOptions, Decoder, NStep, Normalization, Padding, Sequence, ViewSpec, Window,
};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};

use crate::environment::{self, Appended, Autoreset, Environment, Event};
use crate::recorder::{Recorder, Stored};
use crate::{append, append_changed, open, run};

fn n_step(stack: u16, n: u16) -> ViewSpec {
    ViewSpec::NStep(NStep {
        observation: "frame".into(),
        stack,
        n,
        gamma: 0.9,
        padding: Padding::Zero,
    })
}

fn sequence(length: u16, burn_in: u16) -> ViewSpec {
    ViewSpec::Sequence(Sequence {
        observation: "frame".into(),
        stack: 2,
        length,
        burn_in,
        period: 1,
        gamma: 0.9,
        padding: Padding::RepeatFirst,
        state: vec!["state".into()],
    })
}

fn steps(events: &[Event], autoreset: Autoreset, rows: usize) -> Vec<Appended> {
    let mut environment = Environment::new(0, autoreset, events.to_vec(), 5);
    (0..rows).map(|_| environment.advance()).collect()
}

fn decoder(view: &ViewSpec) -> Decoder {
    Decoder::new(&environment::table(), view, DecodeOptions::default()).unwrap()
}

fn stored(recorder: &Recorder) -> Stored {
    Stored::new(&environment::table(), 1, &recorder.0.lock().unwrap().pushes)
}

/// Appends a good step, then one that is changed, and expects the second to be refused with a message that
/// has all of `words`; then the good one goes through.
fn assert_refused(change: impl FnOnce(&mut StepBatch<'_>), code: ErrorCode, words: &[&str]) {
    let (mut writer, _) = open(&n_step(2, 2), 1, 10).unwrap();
    let rows = steps(&[], Autoreset::NextStep, 2);
    append(&mut writer, &rows[..1], Autoreset::NextStep).unwrap();
    let error = append_changed(&mut writer, &rows[1..], Autoreset::NextStep, change).unwrap_err();
    assert_eq!(error.code(), code);
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} has to name {word:?}");
    }
    assert_eq!(writer.counters().steps, 1);
    append(&mut writer, &rows[1..], Autoreset::NextStep).unwrap();
    assert_eq!(writer.counters().steps, 2);
}

const NAN_Q: [u8; 12] = [0, 0, 0, 0, 0, 0, 0xc0, 0x7f, 0, 0, 0, 0];

#[test]
fn a_wrong_dtype_names_column_expected_and_got() {
    let wrong = |step: &mut StepBatch<'_>| {
        step.columns = &[(
            "state",
            Values {
                dtype: Dtype::Float64,
                shape: &[1, 6],
                bytes: &[0; 48],
            },
        )];
    };
    let words = ["\"state\"", "float32[1, 6]", "float64[1, 6]"];
    assert_refused(wrong, ErrorCode::Schema, &words);
}

#[test]
fn a_wrong_shape_names_column_expected_and_got() {
    let wrong = |step: &mut StepBatch<'_>| {
        step.columns = &[(
            "state",
            Values {
                dtype: Dtype::Float32,
                shape: &[2, 6],
                bytes: &[0; 48],
            },
        )];
    };
    let words = ["\"state\"", "float32[1, 6]", "float32[2, 6]"];
    assert_refused(wrong, ErrorCode::Schema, &words);
}

#[test]
fn missing_bytes_are_refused() {
    let wrong = |step: &mut StepBatch<'_>| {
        step.columns = &[(
            "state",
            Values {
                dtype: Dtype::Float32,
                shape: &[1, 6],
                bytes: &[0; 23],
            },
        )];
    };
    assert_refused(wrong, ErrorCode::Schema, &["\"state\"", "24", "23"]);
}

#[test]
fn a_missing_column_is_named() {
    let missing = |step: &mut StepBatch<'_>| step.columns = &[];
    assert_refused(missing, ErrorCode::Schema, &["\"state\"", "missing"]);
}

#[test]
fn an_unknown_column_is_named() {
    let unknown = |step: &mut StepBatch<'_>| {
        step.columns = &[(
            "speed",
            Values {
                dtype: Dtype::Uint8,
                shape: &[1],
                bytes: &[0],
            },
        )];
    };
    assert_refused(unknown, ErrorCode::Schema, &["no column \"speed\""]);
}

#[test]
fn flags_of_another_number_of_streams_are_refused() {
    assert_refused(
        |step| step.terminated = Some(&[false, true]),
        ErrorCode::Schema,
        &["\"terminated\"", "[1]", "[2]"],
    );
}

#[test]
fn a_final_row_without_an_end_is_refused() {
    assert_refused(
        |step| step.final_rows = Some(&[true]),
        ErrorCode::Schema,
        &["stream 0", "final row"],
    );
}

#[test]
fn bad_priorities_and_q_values_are_refused() {
    for bad in [&[f32::NAN], &[f32::INFINITY], &[-1.0f32]] {
        assert_refused(
            move |step| step.priority = Some(bad),
            ErrorCode::Priority,
            &["finite"],
        );
    }
    let q = |bytes, shape| Values {
        dtype: Dtype::Float32,
        shape,
        bytes,
    };
    assert_refused(
        |step| step.q = Some(q(&NAN_Q, &[1, 3])),
        ErrorCode::Schema,
        &["q has to be finite", "NaN"],
    );
    // Every action of the environment is 0, 1 or 2.
    let (mut writer, _) = open(&n_step(1, 1), 1, 10).unwrap();
    let mut rows = steps(&[], Autoreset::NextStep, 1);
    rows[0].step.action = 3;
    let error = append(&mut writer, &rows, Autoreset::NextStep).unwrap_err();
    assert!(error.to_string().contains("action 3"), "{error}");
    rows[0].step.action = -1;
    let error = append(&mut writer, &rows, Autoreset::NextStep).unwrap_err();
    assert!(error.to_string().contains("action -1"), "{error}");
}

#[test]
fn a_final_observation_without_an_end_is_refused() {
    let (mut writer, _) = open(&n_step(1, 1), 1, 10).unwrap();
    let mut rows = steps(&[], Autoreset::SameStep, 1);
    rows[0].final_frame = Some(rows[0].frame);
    let error = append(&mut writer, &rows, Autoreset::SameStep).unwrap_err();
    assert!(error.to_string().contains("final observation"), "{error}");
}

#[test]
fn a_push_past_its_deadline_is_tried_again_and_nothing_is_lost() {
    let (mut writer, recorder) = open(&n_step(2, 3), 1, 4).unwrap();
    let rows = steps(&[], Autoreset::NextStep, 12);
    let mut refused = 0;
    for (index, row) in rows.iter().enumerate() {
        let row = std::slice::from_ref(row);
        if index == 4 {
            recorder.0.lock().unwrap().refuse = 2;
        }
        while let Err(error) = append(&mut writer, row, Autoreset::NextStep) {
            assert!(matches!(error, Error::Deadline { .. }));
            refused += 1;
        }
    }
    assert_eq!(refused, 2);
    recorder.0.lock().unwrap().refuse = 1;
    assert!(writer.flush(&Wait::forever()).is_err());
    writer.flush(&Wait::forever()).unwrap();
    let stored = stored(&recorder);
    let anchors: Vec<_> = stored.items.iter().map(|item| item.anchor).collect();
    assert_eq!(anchors, (0..9).collect::<Vec<_>>());
    let first_steps = |recorder: &Recorder| -> Vec<_> {
        let recorded = recorder.0.lock().unwrap();
        let heads = recorded.pushes.iter().flat_map(|push| &push.chunks);
        heads.map(|head| (head.first_step, head.rows)).collect()
    };
    assert_eq!(first_steps(&recorder), [(0, 4), (4, 4), (8, 4)]);
}

#[test]
fn a_closed_writer_takes_nothing() {
    let (mut writer, recorder) = open(&n_step(1, 1), 1, 10).unwrap();
    let rows = steps(&[], Autoreset::NextStep, 2);
    append(&mut writer, &rows[..1], Autoreset::NextStep).unwrap();
    writer.close(&Wait::forever()).unwrap();
    writer.close(&Wait::forever()).unwrap();
    assert_eq!(recorder.0.lock().unwrap().pushes.len(), 1);
    let error = append(&mut writer, &rows[1..], Autoreset::NextStep).unwrap_err();
    assert!(matches!(error, Error::Closed(_)));
    assert!(writer.flush(&Wait::forever()).is_err());
}

#[test]
fn stacks_start_after_every_end_when_nobody_says_where() {
    let (mut writer, recorder) = open(&n_step(4, 1), 1, 50).unwrap();
    let events = [Event::GoesOn, Event::LosesLife, Event::GoesOn];
    for row in steps(&events, Autoreset::NextStep, 4) {
        let row = std::slice::from_ref(&row);
        append_changed(&mut writer, row, Autoreset::NextStep, |step| {
            step.first = None;
            step.q = None;
        })
        .unwrap();
    }
    writer.flush(&Wait::forever()).unwrap();
    let item = |anchor, before, after| NewItem {
        anchor,
        stream: 0,
        before,
        after,
        priority: None,
    };
    // Rows 0 and 1 are one stack, rows 2 and 3 the next.
    let items = [item(0, 0, 1), item(1, 1, 0), item(2, 0, 1)];
    assert_eq!(stored(&recorder).items, items);
}

#[test]
fn given_priorities_go_before_those_from_q_values() {
    let (mut writer, recorder) = open(&n_step(1, 1), 1, 50).unwrap();
    for (row, given) in steps(&[], Autoreset::NextStep, 3)
        .iter()
        .zip([true, false, false])
    {
        let row = std::slice::from_ref(row);
        append_changed(&mut writer, row, Autoreset::NextStep, |step| {
            step.priority = given.then_some(&[7.5]);
        })
        .unwrap();
    }
    writer.flush(&Wait::forever()).unwrap();
    let items = stored(&recorder).items;
    assert_eq!(items[0].priority, Some(7.5));
    assert!(items[1].priority.is_some_and(|priority| priority != 7.5));
}

#[test]
fn a_view_that_does_not_fit_is_refused() {
    let refused = |config: &TableConfig, view: &ViewSpec, words: &[&str]| {
        let error = Decoder::new(config, view, DecodeOptions::default()).err();
        let message = error.expect("a refusal").to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} has to name {word:?}");
        }
    };
    let config = environment::table();
    refused(&config, &n_step(0, 1), &["stack", "got 0"]);
    refused(&config, &n_step(1, 0), &["n is", "got 0"]);
    refused(&config, &sequence(0, 0), &["length", "got 0"]);
    let ViewSpec::NStep(good) = n_step(1, 1) else {
        unreachable!("made as NStep")
    };
    let gamma = ViewSpec::NStep(NStep {
        gamma: 1.5,
        ..good.clone()
    });
    refused(&config, &gamma, &["gamma", "1.5"]);
    let other = ViewSpec::NStep(NStep {
        observation: "image".into(),
        ..good
    });
    refused(&config, &other, &["\"image\"", "frame"]);

    let mut config = environment::table();
    config.columns[0].name = "discount".into();
    refused(&config, &n_step(1, 1), &["\"discount\"", "rename"]);
    config.columns[0].name = "observation".into();
    refused(&config, &n_step(1, 1), &["\"observation\"", "rename"]);
    config.columns[0].name = "key".into();
    let window = ViewSpec::Window(Window {
        before: 0,
        after: 0,
    });
    refused(&config, &window, &["\"key\"", "rename"]);

    let mut config = environment::table();
    config.columns[3].shape = vec![2];
    refused(&config, &n_step(1, 1), &["\"reward\"", "[2]"]);
}

#[test]
fn pushes_that_could_not_fit_the_table_are_refused_at_the_start() {
    let open = |capacity, capacity_bytes, streams, chunk_steps| {
        let config = TableConfig {
            capacity,
            capacity_bytes,
            ..environment::table()
        };
        let options = WriterOptions {
            chunk_steps,
            ..WriterOptions::default()
        };
        let channel = |_| -> replay_core::Result<_> { Ok(Box::new(Recorder::default()) as Box<_>) };
        Writer::over_channel(config.into(), streams, &n_step(1, 1), options, channel)
    };
    let refused = |capacity, capacity_bytes, streams, chunk_steps, parts: &[&str]| {
        let error = open(capacity, capacity_bytes, streams, chunk_steps).err();
        let message = error.expect("a refusal").to_string();
        for part in parts.iter().chain(&["take fewer streams"]) {
            assert!(message.contains(part), "{part} in: {message}");
        }
    };
    let row = environment::table().row_bytes() as u64;
    refused(10, 0, 1, 10, &["up to 11 steps", "holds 10"]);
    refused(500, 0, 16, 50, &["up to 816 steps", "holds 500"]);
    refused(816, 800 * row - 1, 16, 50, &["bytes and more"]);
    // So many bytes make a push, however few steps they are.
    refused(1 << 20, (4 << 20) - 1, 4, 65_536, &["4194304 bytes"]);
    open(816, 800 * row, 16, 50).unwrap();
    open(11, 0, 1, 10).unwrap();
}

/// A draw of every item of a run whose steps change altogether.
fn good_draw(view: &ViewSpec) -> Sampled {
    draw_of_stream(0, view)
}

/// A draw of every item of a run of the environment of that number.
fn draw_of_stream(stream: u64, view: &ViewSpec) -> Sampled {
    let events = vec![
        Event::GoesOn,
        Event::LosesLife,
        Event::GoesOn,
        Event::Truncates,
        Event::GoesOn,
        Event::Terminates,
    ];
    let autoreset = Autoreset::SameStep;
    let environment = Environment::new(stream, autoreset, events, 3);
    let run = run(view, vec![environment], autoreset, 20, 7);
    let mut rng = StdRng::seed_from_u64(1);
    run.stored
        .draw(&run.stored.items, view.before(), view.after(), &mut rng)
}

/// All blobs of a draw, one after the other.
fn blob_bytes(sampled: &Sampled) -> Vec<u8> {
    let segments = sampled.blobs.iter().map(AsRef::<[u8]>::as_ref);
    segments.collect::<Vec<_>>().concat()
}

#[test]
fn an_item_that_does_not_decode_is_left_out_and_named() {
    let view = n_step(1, 1);
    let whole = decoder(&view).decode(&good_draw(&view), 0.4).unwrap();
    let mut sampled = good_draw(&view);
    // The first row's rows: flags, action, reward, id, then the lengths of state and frame. The state does not
    // compress, so the frame's blob begins at 24; an LZ4 token of a literal that is not there breaks it.
    let row_bytes = environment::table().row_bytes();
    let broken = (0..sampled.rows.len() / row_bytes)
        .find(|row| {
            let lengths = &sampled.rows[(row + 1) * row_bytes - 8..(row + 1) * row_bytes];
            lengths[0] == 24 && lengths[4] < 32
        })
        .expect("a row with a compressed frame");
    let mut blobs = blob_bytes(&sampled);
    let mut at = 0;
    for row in 0..broken {
        let lengths = &sampled.rows[(row + 1) * row_bytes - 8..(row + 1) * row_bytes];
        at += usize::from(lengths[0]) + usize::from(lengths[4]);
    }
    blobs[at + 24] = 0xf0;
    sampled.blobs = vec![BlobSegment::Received(Bytes::from(blobs))];
    let mut first_row = 0;
    let item = sampled
        .items
        .iter()
        .position(|item| {
            first_row += usize::from(item.before + 1 + item.after);
            broken < first_row
        })
        .unwrap();

    let batch = decoder(&view).decode(&sampled, 0.4).unwrap();
    assert_eq!(batch.len, whole.len - 1);
    assert_eq!(batch.rejected.len(), 1);
    assert_eq!(batch.rejected[0].key, sampled.items[item].key);
    assert!(batch.rejected[0].reason.contains("\"frame\""));
    for array in &batch.arrays {
        let all = whole.get(&array.name).unwrap().to_bytes();
        let each = all.len() / whole.len;
        let (before, after) = all.split_at(item * each);
        let expected = [before, &after[each..]].concat();
        assert_eq!(array.shape[0], batch.len);
        if array.name != "weight" {
            assert_eq!(array.to_bytes(), expected, "{}", array.name);
        }
    }
}

/// The flags of each row of a draw.
fn flags_of(sampled: &Sampled) -> Vec<u8> {
    let rows = sampled.rows.chunks_exact(environment::table().row_bytes());
    rows.map(|row| row[0]).collect()
}

#[test]
fn a_difference_that_does_not_apply_is_left_out() {
    let view = n_step(1, 1);
    let good = draw_of_stream(1, &view);
    assert!(
        decoder(&view)
            .decode(&good, 0.4)
            .unwrap()
            .rejected
            .is_empty()
    );
    // The last row is a difference; its frame's is the last blob. Its runs are a byte each, so what changes its last
    // skip makes it reach beyond the frame.
    let last = *flags_of(&good).last().unwrap();
    assert_ne!(last & flags::DIFFERENCE, 0);
    let mut blobs = blob_bytes(&good);
    let skip = blobs.len() - 3;
    assert_eq!(blobs[skip + 1], 1, "a run of one byte");
    blobs[skip] = 32;
    let sampled = Sampled {
        blobs: vec![BlobSegment::Received(Bytes::from(blobs))],
        ..good
    };
    let batch = decoder(&view).decode(&sampled, 0.4).unwrap();
    assert_eq!(batch.rejected.len(), 1);
    let reason = &batch.rejected[0].reason;
    assert!(
        reason.contains("\"frame\"") && reason.contains("beyond"),
        "{reason}"
    );
}

#[test]
fn a_draw_that_begins_with_a_difference_is_refused() {
    let view = n_step(1, 1);
    let mut sampled = draw_of_stream(1, &view);
    let mut rows = sampled.rows.to_vec();
    rows[0] |= flags::DIFFERENCE;
    sampled.rows = Bytes::from(rows);
    let error = decoder(&view).decode(&sampled, 0.4).err().unwrap();
    assert!(
        matches!(&error, Error::Corrupt(why) if why.contains("begins with")),
        "{error}"
    );
}

#[test]
fn rows_that_are_for_reference_are_in_no_window() {
    let view = n_step(1, 1);
    let sampled = draw_of_stream(1, &view);
    let references = flags_of(&sampled)
        .iter()
        .filter(|&flag| flag & flags::REFERENCE != 0)
        .count();
    assert!(references > 0);
    let rows: usize = sampled
        .items
        .iter()
        .map(|item| usize::from(item.before + 1 + item.after))
        .sum();
    assert_eq!(flags_of(&sampled).len(), rows + references);
}

#[test]
fn a_window_without_its_bootstrap_observation_is_left_out() {
    let view = n_step(1, 2);
    let mut sampled = good_draw(&view);
    let row_bytes = environment::table().row_bytes();
    // The first item alone, without its last row.
    let lengths = |row: usize| -> usize {
        let at = (row + 1) * row_bytes;
        let lengths = sampled.rows[at - 8..at].chunks_exact(4);
        lengths.map(|length| usize::from(length[0])).sum()
    };
    let kept = lengths(0);
    let blobs = blob_bytes(&sampled)[..kept].to_vec();
    sampled.items.truncate(1);
    sampled.items[0].after = 0;
    sampled.rows = sampled.rows.slice(..row_bytes);
    sampled.blobs = vec![BlobSegment::Received(Bytes::from(blobs))];
    let batch = decoder(&view).decode(&sampled, 0.4).unwrap();
    assert_eq!((batch.len, batch.rejected.len()), (0, 1));
    assert_eq!(batch.get("observation").unwrap().shape, [0, 4, 8]);
}

#[test]
fn importance_weights_follow_their_normalisation() {
    let view = n_step(1, 1);
    let mut sampled = good_draw(&view);
    let weights = |sampled: &Sampled, normalization| {
        let options = DecodeOptions {
            normalization,
            threads: 1,
        };
        let decoder = Decoder::new(&environment::table(), &view, options).unwrap();
        decoder.decode(sampled, 0.4).map(|batch| {
            let bytes = batch.get("weight").unwrap().to_bytes();
            let weights = bytes.chunks_exact(4);
            weights
                .map(|weight| f32::from_ne_bytes(weight.try_into().unwrap()))
                .collect::<Vec<_>>()
        })
    };
    let n = sampled.live_items as f64;
    let raw = |p: f64| (n * p).powf(-0.4);
    let p: Vec<_> = sampled.items.iter().map(|item| item.probability).collect();
    let largest = p.iter().map(|&p| raw(p)).fold(0.0, f64::max);
    for (got, &p) in weights(&sampled, Normalization::Batch)
        .unwrap()
        .iter()
        .zip(&p)
    {
        assert!((f64::from(*got) - raw(p) / largest).abs() < 1e-6);
    }
    assert!(weights(&sampled, Normalization::Memory).is_err());
    sampled.min_probability = Some(0.0005);
    for (got, &p) in weights(&sampled, Normalization::Memory)
        .unwrap()
        .iter()
        .zip(&p)
    {
        assert!((f64::from(*got) - raw(p) / raw(0.0005)).abs() < 1e-6);
    }
    assert!(decoder(&view).decode(&sampled, f64::NAN).is_err());
}

fn views() -> impl Strategy<Value = ViewSpec> {
    prop_oneof![
        (1..=4u16, 1..=5u16).prop_map(|(stack, n)| n_step(stack, n)),
        (1..=4u16, 0..=3u16).prop_map(|(length, burn_in)| sequence(length, burn_in)),
        (0..=3u16, 0..=3u16).prop_map(|(before, after)| ViewSpec::Window(Window { before, after })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn decoding_damaged_draws_never_panics(
        view in views(),
        damage in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 0..20),
        cut in prop::option::of(any::<prop::sample::Index>()),
        stream in 0..2u64,
    ) {
        let mut sampled = draw_of_stream(stream, &n_step(4, 5));
        let (mut rows, mut blobs) = (sampled.rows.to_vec(), blob_bytes(&sampled));
        for (in_rows, at, byte) in damage {
            let bytes = if in_rows { &mut rows } else { &mut blobs };
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            blobs.truncate(cut.index(blobs.len()));
        }
        sampled.rows = Bytes::from(rows);
        sampled.blobs = vec![BlobSegment::Received(Bytes::from(blobs))];
        if let Ok(batch) = decoder(&view).decode(&sampled, 0.4) {
            prop_assert_eq!(batch.len + batch.rejected.len(), sampled.items.len());
        }
    }

    #[test]
    fn decoding_random_bytes_never_panics(
        view in views(),
        windows in prop::collection::vec((0..4u16, 0..6u16), 0..6),
        rows in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..2000),
        segments in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
        fitting in any::<bool>(),
    ) {
        let items: Vec<_> = windows
            .iter()
            .map(|&(before, after)| SampledItem {
                key: 0, probability: 0.0, age: 0, times_sampled: 0, before, after,
            })
            .collect();
        let mut rows = rows;
        if fitting {
            let count: usize = windows.iter().map(|(b, a)| usize::from(b + 1 + a)).sum();
            rows.resize(count * environment::table().row_bytes(), 0);
        }
        let sampled = Sampled {
            items,
            live_items: 0,
            min_probability: None,
            rows: Bytes::from(rows),
            blobs: segments
                .into_iter()
                .map(|bytes| BlobSegment::Received(Bytes::from(bytes)))
                .collect(),
            credit: None,
        };
        if let Ok(batch) = decoder(&view).decode(&sampled, 0.4) {
            prop_assert_eq!(batch.len + batch.rejected.len(), windows.len());
        }
    }
}

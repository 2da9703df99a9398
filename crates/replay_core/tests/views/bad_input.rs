//! Input of a writer or a view that must be refused, and must not be lost.

use base::wait::Wait;
use replay_core::error::Error;
use replay_core::replay::NewItem;
use replay_core::schema::{Codec, Dtype, TableConfig};
use replay_core::view::{DecodeOptions, Decoder, NStep, Padding, Sequences, ViewSpec, Window};
use replay_core::writer::{StepBatch, Values, Writer, WriterOptions};

use crate::environment::{self, Appended, Autoreset, Environment, Event};
use crate::recorder::{Recorder, Stored};
use crate::{append, append_changed, open};

pub fn n_step(stack: u16, n: u16) -> ViewSpec {
    ViewSpec::NStep(NStep { observation: "frame".into(), stack: stack.into(), n, gamma: 0.9, padding: Padding::Zero })
}

pub fn sequence(length: u16, burn_in: u16) -> ViewSpec {
    ViewSpec::Sequences(Sequences {
        observation: "frame".into(),
        stack: 2.into(),
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

pub fn decoder(view: &ViewSpec) -> Decoder {
    decoder_of(Codec::Lz4, view)
}

/// A decoder of samples whose blobs are packed by `codec`.
pub fn decoder_of(codec: Codec, view: &ViewSpec) -> Decoder {
    Decoder::new(&environment::table_of(codec), view, DecodeOptions::default()).unwrap()
}

fn stored(recorder: &Recorder) -> Stored {
    Stored::new(&environment::table(), 1, &recorder.0.lock().unwrap().pushes)
}

fn is_schema(error: &Error) -> bool {
    matches!(error, Error::Schema { .. })
}

/// Appends a good step, then one that is changed, and expects the second to be refused with a message that
/// has all of `words`; then the good one goes through.
fn assert_refused(change: impl FnOnce(&mut StepBatch<'_>), is: fn(&Error) -> bool, words: &[&str]) {
    let (mut writer, _) = open(&n_step(2, 2), 1, 10).unwrap();
    let rows = steps(&[], Autoreset::NextStep, 2);
    append(&mut writer, &rows[..1], Autoreset::NextStep).unwrap();
    let error = append_changed(&mut writer, &rows[1..], Autoreset::NextStep, change).unwrap_err();
    assert!(is(&error), "{error}");
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
        step.columns = const { &[("state", Values::new(Dtype::Float64, &[1, 6], &[0; 48]))] };
    };
    let words = ["\"state\"", "float32[1, 6]", "float64[1, 6]"];
    assert_refused(wrong, is_schema, &words);
}

#[test]
fn a_wrong_shape_names_column_expected_and_got() {
    let wrong = |step: &mut StepBatch<'_>| {
        step.columns = const { &[("state", Values::new(Dtype::Float32, &[2, 6], &[0; 48]))] };
    };
    let words = ["\"state\"", "float32[1, 6]", "float32[2, 6]"];
    assert_refused(wrong, is_schema, &words);
}

#[test]
fn missing_bytes_are_refused() {
    let wrong = |step: &mut StepBatch<'_>| {
        step.columns = const { &[("state", Values::new(Dtype::Float32, &[1, 6], &[0; 23]))] };
    };
    assert_refused(wrong, is_schema, &["\"state\"", "24", "23"]);
}

#[test]
fn a_missing_column_is_named() {
    let missing = |step: &mut StepBatch<'_>| step.columns = &[];
    assert_refused(missing, is_schema, &["\"state\"", "missing"]);
}

#[test]
fn an_unknown_column_is_named() {
    let unknown = |step: &mut StepBatch<'_>| {
        step.columns = const { &[("speed", Values::new(Dtype::Uint8, &[1], &[0]))] };
    };
    assert_refused(unknown, is_schema, &["no column \"speed\""]);
}

#[test]
fn flags_of_another_number_of_streams_are_refused() {
    assert_refused(|step| step.terminated = Some(&[false, true]), is_schema, &["\"terminated\"", "[1]", "2 values"]);
}

#[test]
fn a_final_row_without_an_end_is_refused() {
    assert_refused(|step| step.final_rows = Some(&[true]), is_schema, &["stream 0", "final row"]);
}

#[test]
fn bad_priorities_and_q_values_are_refused() {
    for (bad, words) in [
        (&[f64::NAN], "is nan: a priority has to be finite"),
        (&[f64::INFINITY], "is inf: a priority has to be finite"),
        (&[-1.0], "is -1: a priority has to be finite"),
        // A float32 cannot hold it.
        (&[1e300], "is 1e300: a new item's priority is a float32"),
    ] {
        assert_refused(
            move |step| step.priority = Some(bad),
            |error| matches!(error, Error::Priority { .. }),
            &["priority 0 of 1", words],
        );
    }
    let q = |bytes, shape| Values::new(Dtype::Float32, shape, bytes);
    assert_refused(|step| step.q = Some(q(&NAN_Q, &[1, 3])), is_schema, &["q has to be finite", "NaN"]);
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
    let item = |anchor, before, after| NewItem { anchor, stream: 0, before, after, priority: None };
    // Rows 0 and 1 are one stack, rows 2 and 3 the next.
    let items = [item(0, 0, 1), item(1, 1, 0), item(2, 0, 1)];
    assert_eq!(stored(&recorder).items, items);
}

#[test]
fn given_priorities_go_before_those_from_q_values() {
    let (mut writer, recorder) = open(&n_step(1, 1), 1, 50).unwrap();
    for (row, given) in steps(&[], Autoreset::NextStep, 3).iter().zip([true, false, false]) {
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
    let ViewSpec::NStep(good) = n_step(1, 1) else { unreachable!("made as NStep") };
    let gamma = ViewSpec::NStep(NStep { gamma: 1.5, ..good.clone() });
    refused(&config, &gamma, &["gamma", "1.5"]);
    let other = ViewSpec::NStep(NStep { observation: "image".into(), ..good });
    refused(&config, &other, &["\"image\"", "frame"]);

    let mut config = environment::table();
    config.columns[0].name = "discount".into();
    refused(&config, &n_step(1, 1), &["\"discount\"", "rename"]);
    config.columns[0].name = "observation".into();
    refused(&config, &n_step(1, 1), &["\"observation\"", "rename"]);
    config.columns[0].name = "ids".into();
    let window = ViewSpec::Window(Window { before: 0, after: 0 });
    refused(&config, &window, &["\"ids\"", "rename"]);

    let mut config = environment::table();
    config.columns[3].shape = vec![2];
    refused(&config, &n_step(1, 1), &["\"reward\"", "(2,)"]);
}

#[test]
fn pushes_that_could_not_fit_the_table_are_refused_at_the_start() {
    let open = |capacity, capacity_bytes, streams, chunk_steps| {
        let config = TableConfig { capacity, capacity_bytes, ..environment::table() };
        let options = WriterOptions { chunk_steps, ..WriterOptions::default() };
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

#[test]
fn a_stored_state_names_each_column_once() {
    let ViewSpec::Sequences(view) = sequence(4, 0) else {
        unreachable!("it has sequences");
    };
    let twice = ViewSpec::Sequences(Sequences { state: vec!["state".into(), "state".into()], ..view.clone() });
    let error = twice.validate(&environment::table()).unwrap_err();
    assert!(error.to_string().contains("\"state\" appears twice"), "{error}");
    let many = Sequences { state: vec![String::new(); TableConfig::MAX_COLUMNS + 1], ..view };
    let error = ViewSpec::Sequences(many).validate(&environment::table()).unwrap_err();
    assert!(error.to_string().contains("at most 256 columns, got 257"), "{error}");
}

//! Samples that are damaged or contradict each other: items that do not decode are left out and named, and nothing panics.

use bytes::Bytes;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use replay_core::error::Error;
use replay_core::replay::{Sampled, SampledItem};
use replay_core::schema::{Codec, flags};
use replay_core::view::{DecodeOptions, Decoder, Normalization, Trajectory, ViewSpec, Window};

use crate::arrays::codecs;
use crate::bad_input::{decoder, decoder_of, n_step, sequence};
use crate::environment::{self, Autoreset, BLOB_CODECS, Environment, Event};
use crate::run;

/// A sample of every item of a run whose steps change altogether.
fn good_sample(view: &ViewSpec) -> Sampled {
    sample_of_stream(Codec::Lz4, 0, view)
}

/// A sample of every item of a run of the environment of that number.
fn sample_of_stream(codec: Codec, stream: u64, view: &ViewSpec) -> Sampled {
    let events =
        vec![Event::GoesOn, Event::LosesLife, Event::GoesOn, Event::Truncates, Event::GoesOn, Event::Terminates];
    let autoreset = Autoreset::SameStep;
    let environment = Environment::new(stream, autoreset, events, 3);
    let run = run(codec, view, vec![environment], autoreset, 20, 7);
    let mut rng = StdRng::seed_from_u64(1);
    run.stored.sample(&run.stored.items, view.before(), view.after(), &mut rng)
}

/// All blobs of a sample, one after the other.
fn blob_bytes(sampled: &Sampled) -> Vec<u8> {
    let segments = sampled.blobs.iter().map(AsRef::<[u8]>::as_ref);
    segments.collect::<Vec<_>>().concat()
}

#[test]
#[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
fn an_item_that_does_not_decode_is_left_out_and_named() {
    for codec in BLOB_CODECS {
        leaves_out_a_broken_blob(codec);
    }
}

fn leaves_out_a_broken_blob(codec: Codec) {
    let view = n_step(1, 1);
    let decoder = decoder_of(codec, &view);
    let mut sampled = sample_of_stream(codec, 0, &view);
    let whole = decoder.decode(&sampled, 0.4).unwrap();
    // The first row's rows: flags, action, reward, id, then the lengths of state and frame. The state does not
    // compress, so the frame's blob begins at 24. No codec's blob of so few bytes may begin with 0xf0: in LZ4 it is
    // the token of a longer literal.
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
    sampled.blobs = vec![Bytes::from(blobs)];
    let mut first_row = 0;
    let item = sampled
        .items
        .iter()
        .position(|item| {
            first_row += usize::from(item.before + 1 + item.after);
            broken < first_row
        })
        .unwrap();

    let batch = decoder.decode(&sampled, 0.4).unwrap();
    assert_eq!(batch.len, whole.len - 1);
    assert_eq!(batch.rejected.len(), 1);
    assert_eq!(batch.rejected[0].id, sampled.items[item].id);
    assert!(batch.rejected[0].reason.contains("\"frame\""));
    for array in &batch.arrays {
        let all = whole.get(&array.name).unwrap().to_bytes();
        let each = all.len() / whole.len;
        let (before, after) = all.split_at(item * each);
        let expected = [before, &after[each..]].concat();
        assert_eq!(array.shape[0], batch.len);
        if array.name != "weights" {
            assert_eq!(array.to_bytes(), expected, "{}", array.name);
        }
    }
}

/// The flags of each row of a sample.
fn flags_of(sampled: &Sampled) -> Vec<u8> {
    let rows = sampled.rows.chunks_exact(environment::table().row_bytes());
    rows.map(|row| row[0]).collect()
}

#[test]
#[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
fn a_difference_that_does_not_apply_is_left_out() {
    let view = n_step(1, 1);
    let good = sample_of_stream(Codec::Lz4, 1, &view);
    assert!(decoder(&view).decode(&good, 0.4).unwrap().rejected.is_empty());
    // The last row is a difference; its frame's is the last blob. Its runs are a byte each, so what changes its last
    // skip makes it reach beyond the frame.
    let last = *flags_of(&good).last().unwrap();
    assert_ne!(last & flags::DIFFERENCE, 0);
    let mut blobs = blob_bytes(&good);
    let skip = blobs.len() - 3;
    assert_eq!(blobs[skip + 1], 1, "a run of one byte");
    blobs[skip] = 32;
    let sampled = Sampled { blobs: vec![Bytes::from(blobs)], ..good };
    let batch = decoder(&view).decode(&sampled, 0.4).unwrap();
    assert_eq!(batch.rejected.len(), 1);
    let reason = &batch.rejected[0].reason;
    assert!(reason.contains("\"frame\"") && reason.contains("beyond"), "{reason}");
}

#[test]
fn a_sample_that_begins_with_a_difference_is_refused() {
    let view = n_step(1, 1);
    let mut sampled = sample_of_stream(Codec::Lz4, 1, &view);
    let mut rows = sampled.rows.to_vec();
    rows[0] |= flags::DIFFERENCE;
    sampled.rows = Bytes::from(rows);
    let error = decoder(&view).decode(&sampled, 0.4).err().unwrap();
    assert!(matches!(&error, Error::Corrupt(why) if why.contains("begins with")), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
fn rows_that_are_for_reference_are_in_no_window() {
    let view = n_step(1, 1);
    let sampled = sample_of_stream(Codec::Lz4, 1, &view);
    let references = flags_of(&sampled).iter().filter(|&flag| flag & flags::REFERENCE != 0).count();
    assert!(references > 0);
    let rows: usize = sampled.items.iter().map(|item| usize::from(item.before + 1 + item.after)).sum();
    assert_eq!(flags_of(&sampled).len(), rows + references);
}

#[test]
#[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
fn a_window_without_its_bootstrap_observation_is_left_out() {
    let view = n_step(1, 2);
    let mut sampled = good_sample(&view);
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
    sampled.blobs = vec![Bytes::from(blobs)];
    let batch = decoder(&view).decode(&sampled, 0.4).unwrap();
    assert_eq!((batch.len, batch.rejected.len()), (0, 1));
    assert_eq!(batch.get("observation").unwrap().shape, [0, 4, 8]);
}

#[test]
fn importance_weights_follow_their_normalisation() {
    let view = n_step(1, 1);
    let mut sampled = good_sample(&view);
    let weights = |sampled: &Sampled, normalization| {
        let options = DecodeOptions { normalization, threads: 1 };
        let decoder = Decoder::new(&environment::table(), &view, options).unwrap();
        decoder.decode(sampled, 0.4).map(|batch| {
            let bytes = batch.get("weights").unwrap().to_bytes();
            let weights = bytes.chunks_exact(4);
            weights.map(|weight| f32::from_ne_bytes(weight.try_into().unwrap())).collect::<Vec<_>>()
        })
    };
    let n = sampled.live_items as f64;
    let raw = |p: f64| (n * p).powf(-0.4);
    let p: Vec<_> = sampled.items.iter().map(|item| item.probability).collect();
    let largest = p.iter().map(|&p| raw(p)).fold(0.0, f64::max);
    for (got, &p) in weights(&sampled, Normalization::Batch).unwrap().iter().zip(&p) {
        assert!((f64::from(*got) - raw(p) / largest).abs() < 1e-6);
    }
    assert!(weights(&sampled, Normalization::Memory).is_err());
    sampled.min_probability = Some(0.0005);
    for (got, &p) in weights(&sampled, Normalization::Memory).unwrap().iter().zip(&p) {
        assert!((f64::from(*got) - raw(p) / raw(0.0005)).abs() < 1e-6);
    }
    assert!(decoder(&view).decode(&sampled, f64::NAN).is_err());
}

fn views() -> impl Strategy<Value = ViewSpec> {
    prop_oneof![
        (1..=4u16, 1..=5u16).prop_map(|(stack, n)| n_step(stack, n)),
        (1..=4u16, 0..=3u16).prop_map(|(length, burn_in)| sequence(length, burn_in)),
        (0..=3u16, 0..=3u16).prop_map(|(before, after)| ViewSpec::Window(Window { before, after })),
        (1..=4u16).prop_map(|max_steps| {
            ViewSpec::Trajectory(Trajectory { max_steps, observation: "frame".into(), ..Trajectory::default() })
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 500 }))]

    #[test]
    #[cfg_attr(miri, ignore = "LZ4 and Zstandard are C")]
    fn decoding_damaged_samples_never_panics(
        view in views(),
        damage in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<u8>()), 0..20),
        cut in prop::option::of(any::<prop::sample::Index>()),
        stream in 0..2u64,
        codec in codecs(),
    ) {
        let mut sampled = sample_of_stream(codec, stream, &n_step(4, 5));
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
        sampled.blobs = vec![Bytes::from(blobs)];
        if let Ok(batch) = decoder_of(codec, &view).decode(&sampled, 0.4) {
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
        codec in codecs(),
    ) {
        let items: Vec<_> = windows
            .iter()
            .map(|&(before, after)| SampledItem { before, after, ..SampledItem::default() })
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
            state: None,
            rows: Bytes::from(rows),
            blobs: segments.into_iter().map(Bytes::from).collect(),
            shares: Vec::new(),
            lease: 0,
            credit: None,
        };
        if let Ok(batch) = decoder_of(codec, &view).decode(&sampled, 0.4) {
            prop_assert_eq!(batch.len + batch.rejected.len(), windows.len());
        }
    }
}

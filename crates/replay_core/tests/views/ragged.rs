//! Columns whose values have any length, against plain lists: every view, any lengths, zero among them.

use std::collections::HashMap;
use std::sync::Arc;

use base::wait::Wait;
use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_core::error::{Error, Result};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, SampleRequest, Sampled};
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig};
use replay_core::view::{Array, Batch, DecodeOptions, Decoder, NStep, Sequences, Stack, ViewSpec, Window};
use replay_core::writer::{FinalObservations, StepBatch, Values, Writer, WriterOptions};

const FRAME: usize = 300;

fn column(name: &str, dtype: Dtype, shape: &[u32], codec: Codec) -> Column {
    Column { codec, ..Column::new(name, dtype, shape.to_vec()) }
}

/// Ragged parts of an observation beside one that is stored as differences, and another ragged column.
fn table() -> TableConfig {
    let notes = Column { max_length: 40, ..column("notes", Dtype::Uint8, &[0], Codec::Zstd) };
    let columns = vec![
        column("observation/tokens", Dtype::Int32, &[0], Codec::None),
        column("observation/frame", Dtype::Uint8, &[FRAME as u32], Codec::Lz4),
        Column::new("reward", Dtype::Float32, vec![]),
        column("observation/points", Dtype::Float32, &[0, 3], Codec::Lz4),
        Column::new("id", Dtype::Uint64, vec![]),
        notes,
    ];
    TableConfig { sampler: Sampler::Uniform, ..TableConfig::new("test", columns, 10_000) }
}

/// An observation, or what else a step has.
#[derive(Clone, Default, Debug)]
struct Row {
    tokens: Vec<u8>,
    points: Vec<u8>,
    frame: Vec<u8>,
    notes: Vec<u8>,
}

impl Row {
    fn random(rng: &mut StdRng) -> Self {
        let mut bytes = |element: usize, most: usize| {
            let count = if rng.random_bool(0.3) { 0 } else { rng.random_range(0..=most) };
            // Bytes that pack, and floats that are finite.
            let byte = rng.random_range(0..100);
            vec![byte; count * element]
        };
        let (tokens, points, notes) = (bytes(4, 9), bytes(12, 30), bytes(1, 40));
        let mut frame = vec![7; FRAME];
        frame[rng.random_range(0..FRAME)] = rng.random();
        Row { tokens, points, frame, notes }
    }
}

/// The rows of an episode: T steps have T + 1 observations.
type Episode = Vec<Row>;

/// The values of a column in several rows, with their offsets.
struct Joined {
    bytes: Vec<u8>,
    shape: Vec<usize>,
    offsets: Vec<i64>,
}

fn joined<'a>(rows: impl Iterator<Item = &'a [u8]>, element: usize, inner: &[usize]) -> Joined {
    let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
    for row in rows {
        bytes.extend_from_slice(row);
        offsets.push((bytes.len() / element) as i64);
    }
    let shape = [&[bytes.len() / element], inner].concat();
    Joined { bytes, shape, offsets }
}

impl Joined {
    fn values(&self, dtype: Dtype) -> Values<'_> {
        Values { offsets: Some(&self.offsets), ..Values::new(dtype, &self.shape, &self.bytes) }
    }
}

/// Runs a stream of episodes of these lengths through a writer, step by step, and returns the episodes and the place of each id.
fn write(
    replay: &dyn Replay,
    view: &ViewSpec,
    lengths: &[Vec<usize>],
    chunk_steps: u32,
    seed: u64,
) -> (Vec<Episode>, HashMap<u64, (usize, usize)>) {
    let wait = Wait::forever();
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut episodes, mut places) = (Vec::new(), HashMap::new());
    let options = WriterOptions { chunk_steps, ..WriterOptions::default() };
    for stream in lengths {
        let mut writer = Writer::open(replay, "test", 1, view, options.clone(), &wait).unwrap();
        for &length in stream {
            let rows: Episode = (0..=length).map(|_| Row::random(&mut rng)).collect();
            for step in 0..length {
                let id = places.len() as u64;
                places.insert(id, (episodes.len(), step));
                append(&mut writer, &rows[step], id, (step + 1 == length).then(|| &rows[length])).unwrap();
            }
            episodes.push(rows);
        }
        writer.close(&wait).unwrap();
    }
    (episodes, places)
}

fn append(writer: &mut Writer, row: &Row, id: u64, last: Option<&Row>) -> Result<()> {
    let observation =
        |row: &Row| (joined([&row.tokens[..]].into_iter(), 4, &[]), joined([&row.points[..]].into_iter(), 12, &[3]));
    let (tokens, points) = observation(row);
    let notes = joined([&row.notes[..]].into_iter(), 1, &[]);
    let id = id.to_le_bytes();
    let columns = [
        ("observation/tokens", tokens.values(Dtype::Int32)),
        ("observation/frame", Values::new(Dtype::Uint8, &[1, FRAME], &row.frame)),
        ("observation/points", points.values(Dtype::Float32)),
        ("notes", notes.values(Dtype::Uint8)),
        ("reward", Values::new(Dtype::Float32, &[1], &[0; 4])),
        ("id", Values::new(Dtype::Uint64, &[1], &id)),
    ];
    let other = Row { frame: vec![0; FRAME], ..Row::default() };
    let last_row = last.unwrap_or(&other);
    let (last_tokens, last_points) = observation(last_row);
    let last_columns = [
        ("observation/tokens", last_tokens.values(Dtype::Int32)),
        ("observation/frame", Values::new(Dtype::Uint8, &[1, FRAME], &last_row.frame)),
        ("observation/points", last_points.values(Dtype::Float32)),
    ];
    let ends = [last.is_some()];
    let step = StepBatch {
        terminated: Some(&ends),
        final_observations: Some(FinalObservations { columns: &last_columns, ended: None, q: None }),
        ..StepBatch::new(&columns)
    };
    writer.append(&step, &Wait::forever())
}

fn number(bytes: &[u8]) -> usize {
    u64::from_ne_bytes(bytes.try_into().unwrap()) as usize
}

fn ends(array: &Array) -> Vec<usize> {
    array.to_bytes().chunks_exact(8).map(number).collect()
}

/// The parts of a ragged array with one level.
fn parts(array: &Array) -> Vec<Vec<u8>> {
    let offsets = ends(array.offsets.last().unwrap());
    let element = array.shape[1..].iter().product::<usize>() * array.dtype.bytes();
    let values = array.to_bytes();
    assert_eq!(values.len(), offsets.last().unwrap() * element);
    offsets.windows(2).map(|ends| values[ends[0] * element..ends[1] * element].to_vec()).collect()
}

/// The parts of each item of a ragged array with two levels.
fn nested(array: &Array) -> Vec<Vec<Vec<u8>>> {
    assert_eq!(array.offsets.len(), 2);
    let (outer, parts) = (ends(&array.offsets[0]), parts(array));
    assert_eq!(*outer.last().unwrap(), parts.len());
    outer.windows(2).map(|ends| parts[ends[0]..ends[1]].to_vec()).collect()
}

fn sample(replay: &dyn Replay, view: &ViewSpec, count: u32) -> Sampled {
    replay.sample("test", &SampleRequest::new(count, view), &Wait::forever()).unwrap()
}

fn decoder(view: &ViewSpec, threads: usize) -> Decoder {
    Decoder::new(&table(), view, DecodeOptions { threads, ..DecodeOptions::default() }).unwrap()
}

fn memory() -> Arc<Memory> {
    let memory = Memory::new(MemoryLimits::default());
    memory.create_table(&table()).unwrap();
    memory
}

fn n_step(n: u16) -> ViewSpec {
    ViewSpec::NStep(NStep { n, ..NStep::default() })
}

type Of = fn(&Row) -> &Vec<u8>;
const OBSERVATION: [(&str, Of); 2] = [("tokens", |row| &row.tokens), ("points", |row| &row.points)];

fn places_of(batch: &Batch, places: &HashMap<u64, (usize, usize)>, slots: usize, slot: usize) -> Vec<(usize, usize)> {
    let ids = batch.get("id").unwrap().to_bytes();
    ids.chunks_exact(8 * slots).map(|ids| places[&(number(&ids[8 * slot..][..8]) as u64)]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 100 }))]

    #[test]
    fn arrays_of_every_view_are_the_lists_that_were_written(
        lengths in vec(vec(1..7usize, 1..5), 1..4),
        n in 1..4u16,
        (chunk_steps, threads, seed) in (1..9u32, 1..4usize, any::<u64>()),
    ) {
        let memory = memory();
        let view = n_step(n);
        let (episodes, places) = write(&*memory, &view, &lengths, chunk_steps, seed);

        let batch = decoder(&view, threads).decode(&sample(&*memory, &view, 70), 0.0).unwrap();
        prop_assert_eq!((batch.len, batch.rejected.len()), (70, 0));
        let anchors = places_of(&batch, &places, 1, 0);
        for (part, of) in OBSERVATION {
            let now: Vec<_> = anchors.iter().map(|&(episode, at)| of(&episodes[episode][at]).clone()).collect();
            let next: Vec<_> = anchors.iter().map(|&(episode, at)| {
                let episode = &episodes[episode];
                of(&episode[(at + usize::from(n)).min(episode.len() - 1)]).clone()
            }).collect();
            prop_assert_eq!(parts(batch.get(&format!("observation/{part}")).unwrap()), now);
            prop_assert_eq!(parts(batch.get(&format!("next_observation/{part}")).unwrap()), next);
        }
        let notes: Vec<_> = anchors.iter().map(|&(episode, at)| episodes[episode][at].notes.clone()).collect();
        prop_assert_eq!(parts(batch.get("notes").unwrap()), notes);
        let frames: Vec<_> = anchors.iter().flat_map(|&(episode, at)| episodes[episode][at].frame.clone()).collect();
        prop_assert_eq!(batch.get("observation/frame").unwrap().to_bytes(), frames);

        let window = ViewSpec::Window(Window { before: 0, after: n });
        let batch = decoder(&window, threads).decode(&sample(&*memory, &window, 70), 0.0).unwrap();
        let (anchors, mask) = (places_of(&batch, &places, usize::from(n) + 1, 0), batch.get("mask").unwrap().to_bytes());
        for (part, of) in OBSERVATION {
            let found = nested(batch.get(&format!("observation/{part}")).unwrap());
            for (item, &(episode, at)) in anchors.iter().enumerate() {
                for slot in 0..=usize::from(n) {
                    let there = mask[item * (usize::from(n) + 1) + slot] == 1;
                    let row = if there { of(&episodes[episode][at + slot]).clone() } else { Vec::new() };
                    prop_assert_eq!(&found[item][slot], &row);
                }
            }
        }
    }

    #[test]
    fn sequences_of_values_of_any_length_are_nested(
        lengths in vec(vec(1..7usize, 1..5), 1..4),
        (length, state) in (1..5u16, any::<bool>()),
        (chunk_steps, seed) in (1..9u32, any::<u64>()),
    ) {
        let memory = memory();
        let view = ViewSpec::Sequences(Sequences {
            observation: "observation".into(),
            stack: Stack::All(1),
            length,
            burn_in: 0,
            period: 1,
            gamma: 0.9,
            padding: Default::default(),
            state: if state { vec!["notes".into()] } else { vec![] },
        });
        let (episodes, places) = write(&*memory, &view, &lengths, chunk_steps, seed);
        let batch = decoder(&view, 2).decode(&sample(&*memory, &view, 70), 0.0).unwrap();
        let anchors = places_of(&batch, &places, length.into(), 0);
        let rows = |(episode, at): (usize, usize), slots: usize, most: usize, of: Of| -> Vec<Vec<u8>> {
            let rows = &episodes[episode];
            (at..at + slots).map(|at| if at < rows.len() - most { of(&rows[at]).clone() } else { Vec::new() }).collect()
        };
        for (part, of) in OBSERVATION {
            let expected: Vec<_> = anchors.iter().map(|&place| rows(place, usize::from(length) + 1, 0, of)).collect();
            prop_assert_eq!(nested(batch.get(&format!("observation/{part}")).unwrap()), expected);
        }
        let notes = batch.get("notes").unwrap();
        if state {
            let expected: Vec<_> = anchors.iter().map(|&(episode, at)| episodes[episode][at].notes.clone()).collect();
            prop_assert_eq!(parts(notes), expected);
        } else {
            let expected: Vec<_> = anchors.iter().map(|&place| rows(place, length.into(), 1, |row| &row.notes)).collect();
            prop_assert_eq!(nested(notes), expected);
        }
    }

    /// Whatever a server says of its rows: no panic, and no more memory than the columns allow.
    #[test]
    fn a_sample_of_damaged_rows_is_refused_or_decoded(
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        seed in any::<u64>(),
    ) {
        let memory = memory();
        let view = n_step(2);
        write(&*memory, &view, &[vec![5, 3]], 4, seed);
        let mut sampled = sample(&*memory, &view, 40);
        let mut rows = sampled.rows.to_vec();
        for (at, byte) in damage {
            let at = at.index(rows.len());
            rows[at] = byte;
        }
        sampled.rows = Bytes::from(rows);
        if let Ok(batch) = decoder(&view, 1).decode(&sampled, 0.0) {
            let tokens = batch.get("observation/tokens").unwrap();
            prop_assert_eq!(tokens.offsets[0].shape[0], batch.len + 1);
            prop_assert_eq!(batch.len + batch.rejected.len(), 40);
        }
    }
}

#[test]
fn an_item_with_a_count_that_it_cannot_have_is_left_out() {
    let memory = memory();
    let view = n_step(1);
    write(&*memory, &view, &[vec![6, 6]], 50, 1);
    let decoder = decoder(&view, 2);
    let mut sampled = sample(&*memory, &view, 50);
    let whole = decoder.decode(&sampled, 0.0).unwrap();
    // The counts of tokens, points and notes end a row.
    let bad = 17;
    let rows_before: usize = sampled.items[..bad].iter().map(|item| usize::from(item.before + item.after) + 1).sum();
    let mut all = sampled.rows.to_vec();
    let row_bytes = table().row_bytes();
    // Key rows that are no rows of a window are before them.
    let is_row = |row: &&mut [u8]| row[0] & 32 == 0;
    let row = all.chunks_exact_mut(row_bytes).filter(is_row).nth(rows_before).unwrap();
    row[row_bytes - 12..row_bytes - 8].copy_from_slice(&u32::MAX.to_le_bytes());
    sampled.rows = Bytes::from(all);
    let batch = decoder.decode(&sampled, 0.0).unwrap();
    assert_eq!((batch.len, batch.rejected.len(), batch.rejected[0].item), (49, 1, bad));
    let reason = &batch.rejected[0].reason;
    assert!(reason.contains("4294967295 elements of column \"observation/tokens\""), "{reason}");
    for name in ["observation/tokens", "next_observation/points", "notes"] {
        let mut expected = parts(whole.get(name).unwrap());
        expected.remove(bad);
        assert_eq!(parts(batch.get(name).unwrap()), expected, "{name}");
    }
}

#[test]
fn a_blob_that_does_not_unpack_leaves_its_item_out() {
    let memory = memory();
    let view = n_step(1);
    write(&*memory, &view, &[vec![6, 6]], 50, 1);
    let decoder = decoder(&view, 2);
    let mut sampled = sample(&*memory, &view, 50);
    let whole = decoder.decode(&sampled, 0.0).unwrap();
    let blobs: Vec<u8> = sampled.blobs.iter().flat_map(|blob| AsRef::<[u8]>::as_ref(blob).to_vec()).collect();
    // No LZ4 block and no zstd frame.
    sampled.blobs = vec![Bytes::from(vec![0xf0; blobs.len()])];
    let batch = decoder.decode(&sampled, 0.0).unwrap();
    let failed: Vec<_> = batch.rejected.iter().map(|rejected| rejected.item).collect();
    assert!(!failed.is_empty() && batch.len == 50 - failed.len());
    let lengths = |batch: &Batch| -> Vec<usize> { parts(batch.get("notes").unwrap()).iter().map(Vec::len).collect() };
    let kept = lengths(&whole).into_iter().enumerate().filter(|(item, _)| !failed.contains(item));
    assert_eq!(lengths(&batch), kept.map(|(_, length)| length).collect::<Vec<_>>());
}

#[test]
fn a_slice_of_a_batch_has_the_offsets_of_its_items() {
    let memory = memory();
    let view = n_step(1);
    write(&*memory, &view, &[vec![6, 6]], 50, 1);
    let batch = decoder(&view, 1).decode(&sample(&*memory, &view, 20), 0.0).unwrap();
    let tokens = batch.get("observation/tokens").unwrap();
    let offsets = ends(&tokens.offsets[0]);
    let slice = tokens.items(3, 5, 1);
    assert_eq!((ends(&slice.offsets[0]), slice.step), (offsets[3..9].to_vec(), Some(1)));
    // Items 4, 7 and 10 of the batch.
    let every = tokens.items(1, 12, 3).items(1, 3, 1);
    assert_eq!((ends(&every.offsets[0]), every.step), (offsets[4..12].to_vec(), Some(3)));
    assert_eq!(tokens.items(20, 0, 1).offsets[0].shape, [1]);
}

#[test]
fn rows_that_do_not_fit_are_refused_and_named() {
    let memory = memory();
    let view = n_step(1);
    let mut writer = Writer::open(&*memory, "test", 1, &view, WriterOptions::default(), &Wait::forever()).unwrap();
    let mut rng = StdRng::seed_from_u64(0);
    let good = Row::random(&mut rng);
    let mut refused = |row: &Row| append(&mut writer, row, 0, None).unwrap_err().to_string();
    let long = refused(&Row { notes: vec![1; 41], ..good.clone() });
    assert!(long.contains("\"notes\" of stream 0 has 41 elements, and the column takes at most 40"), "{long}");
    let nan = f32::NAN.to_le_bytes();
    let points = [[0; 12], [[0; 4], nan, [0; 4]].concat().try_into().unwrap()].concat();
    let nan = refused(&Row { points, ..good.clone() });
    assert!(nan.contains("\"observation/points\" of stream 0 is NaN at [1, 1]"), "{nan}");
    append(&mut writer, &good, 0, None).unwrap();

    let mut given = |shape: &[usize], bytes: &[u8], offsets: Option<&[i64]>| {
        let tokens = Values { offsets, ..Values::new(Dtype::Int32, shape, bytes) };
        let empty = Values { offsets: Some(&[0, 0]), ..Values::new(Dtype::Uint8, &[0], &[]) };
        let columns = [
            ("observation/tokens", tokens),
            ("observation/frame", Values::new(Dtype::Uint8, &[1, FRAME], &[0; FRAME])),
            ("observation/points", Values { dtype: Dtype::Float32, shape: &[0, 3], ..empty }),
            ("notes", empty),
            ("reward", Values::new(Dtype::Float32, &[1], &[0; 4])),
            ("id", Values::new(Dtype::Uint64, &[1], &[0; 8])),
        ];
        match writer.append(&StepBatch::new(&columns), &Wait::forever()) {
            Err(Error::Schema { reason, .. }) => reason,
            other => panic!("expected a refusal, got {other:?}"),
        }
    };
    let names = |reason: String, part: &str| {
        assert!(reason.contains("observation/tokens") && reason.contains(part), "{reason}")
    };
    names(given(&[1], &[0; 4], None), "give a list of arrays, or a Ragged");
    names(given(&[2, 1], &[0; 8], Some(&[0, 2])), "int32 of the shape (None,)");
    names(given(&[2], &[0; 8], Some(&[0, 1])), "from 0 to its 2 values, got 2 offsets from 0 to 1");
    names(given(&[2], &[0; 8], Some(&[0, 1, 2])), "for 1 rows");
    names(given(&[2], &[0; 8], Some(&[1, 2])), "from 1 to 2");
}

#[test]
fn a_stack_of_values_of_any_length_is_refused() {
    let view = ViewSpec::NStep(NStep { stack: Stack::All(2), ..NStep::default() });
    let error = view.validate(&table()).unwrap_err().to_string();
    assert!(error.contains("\"observation/tokens\"") && error.contains("stack 1"), "{error}");
    let frames = Stack::Parts([("frame".to_owned(), 3)].into());
    ViewSpec::NStep(NStep { stack: frames, ..NStep::default() }).validate(&table()).unwrap();
}

/// The definition of a column is as older releases have it, unless it is ragged.
#[test]
fn definitions_name_a_free_dimension_and_its_limit() {
    let json = |column: &Column| serde_json::to_string(column).unwrap();
    let fixed = Column::new("a", Dtype::Uint8, vec![3]);
    assert!(!json(&fixed).contains("max_length"));
    let notes = table().columns[5].clone();
    assert_eq!(serde_json::from_str::<Column>(&json(&notes)).unwrap(), notes);
    assert_eq!(Column::new("a", Dtype::Float32, vec![0, 500]).codec, Codec::None);
    let refused = |column: Column| TableConfig::new("t", vec![column], 10).validate().unwrap_err().to_string();
    assert!(refused(Column::new("a", Dtype::Uint8, vec![3, 0])).contains("only the first dimension"));
    assert!(refused(Column { max_length: 3, ..fixed }).contains("no free dimension"));
    let longer = TableConfig { columns: vec![Column { max_length: 50, ..notes.clone() }], ..table() };
    let difference = TableConfig { columns: vec![notes], ..table() }.difference(&longer).unwrap();
    assert!(difference.contains("notes: uint8 (None,) zstd max_length=40"), "{difference}");
}

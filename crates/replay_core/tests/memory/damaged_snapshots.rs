//! Bytes that are no whole snapshot: they are refused, and nothing of them is kept.

use std::sync::Arc;

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::{Error, TableConfig};

use crate::snapshots::{Case, wide};
use replay_core::table::Turn;

use crate::support::*;

/// A small snapshot with all there is in one, and a memory to restore it into.
fn small_case() -> (Vec<u8>, Arc<Memory>) {
    let case = Case::new(&config(20));
    let mut actor = Actor::open(&case.table, 1);
    let body = Body::default().chunk(0, 0, 3).chunk(2, 0, 2);
    actor.push(body.window(0, 1, (1, 0), Some(2.0)));
    let body = Body::default().chunk(0, 3, 2);
    actor.push(body.window(0, 2, (2, 2), Some(3.0)).item(2, 1, 1.0));
    let bytes = case.save();
    let target = memory();
    target.create_table(&config(20)).unwrap();
    (bytes, target)
}

fn assert_refused(result: replay_core::Result<()>, memory: &Memory, what: &str) {
    let error = refusal(result);
    // Damage is not taken for a later release, which would refuse the start: an older snapshot is restored in its place.
    assert!(matches!(error, Error::Snapshot { newer: false, .. }), "{what}: {error}");
    let table = memory.table("t").unwrap();
    assert_eq!((stat(&table, "steps"), stat(&table, "bytes")), (0, 0));
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused() {
    let (bytes, target) = small_case();
    for length in 0..bytes.len() {
        let refused = restore(&target, &bytes[..length]);
        assert_refused(refused, &target, &format!("cut at {length}"));
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_refused(restore(&target, &longer), &target, "longer");
    restore(&target, &bytes).unwrap();
}

#[test]
fn a_file_with_any_bit_flipped_is_refused() {
    let (bytes, target) = small_case();
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let refused = restore(&target, &flipped);
        assert_refused(refused, &target, &format!("flipped at {at}"));
    }
    restore(&target, &bytes).unwrap();
}

/// Kind and body of each record of a file.
fn records(bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut rest = &bytes[12..];
    let mut records = Vec::new();
    while !rest.is_empty() {
        let kind = u32::from_le_bytes(rest[..4].try_into().unwrap());
        let length = u64::from_le_bytes(rest[4..12].try_into().unwrap()) as usize;
        records.push((kind, rest[12..12 + length].to_vec()));
        rest = &rest[12 + length + 4..];
    }
    records
}

/// The file of these records, with checksums that agree.
fn file(records: &[(u32, Vec<u8>)]) -> Vec<u8> {
    file_of(b"innetmem\x03\0\xfc\xff", records)
}

fn file_of(head: &[u8; 12], records: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = head.to_vec();
    let mut sum = crc32fast::Hasher::new();
    sum.update(&bytes);
    for (kind, body) in records {
        let head = [&kind.to_le_bytes()[..], &(body.len() as u64).to_le_bytes()].concat();
        for part in [&head, body] {
            sum.update(part);
            bytes.extend(part);
        }
        bytes.extend(sum.clone().finalize().to_le_bytes());
    }
    bytes
}

#[test]
fn records_that_are_missing_doubled_or_out_of_place_are_refused() {
    let (bytes, target) = small_case();
    let whole = records(&bytes);
    assert_eq!(file(&whole), bytes, "the test knows the format");
    let kinds: Vec<_> = whole.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [1, 2, 9, 9, 9, 4, 5, 6]);
    for at in 0..whole.len() {
        let mut missing = whole.clone();
        missing.remove(at);
        // Without its items a table is a table, and without the third chunk the fourth takes its number.
        if ![3, 5].contains(&at) {
            let refused = restore(&target, &file(&missing));
            assert_refused(refused, &target, &format!("without {at}"));
        }
        let mut other = whole.clone();
        other[at].0 = 99;
        let refused = restore(&target, &file(&other));
        assert_refused(refused, &target, &format!("kind of {at}"));
    }
    for at in [0, 2, 6, 7] {
        let mut doubled = whole.clone();
        doubled.insert(at, whole[at].clone());
        let refused = restore(&target, &file(&doubled));
        assert_refused(refused, &target, &format!("doubled {at}"));
    }
    restore(&target, &bytes).unwrap();
}

#[test]
fn a_checksum_covers_the_records_before_its_own() {
    let (bytes, target) = small_case();
    let lengths = records(&bytes).iter().map(|(_, body)| 12 + body.len() + 4).collect::<Vec<_>>();
    // Without the third chunk, and then without the items: what is left makes sense.
    for missing in [3, 5] {
        let from = 12 + lengths[..missing].iter().sum::<usize>();
        let cut = [&bytes[..from], &bytes[from + lengths[missing]..]].concat();
        let error = refusal(restore(&target, &cut));
        assert!(error.to_string().contains("checksum"), "{error}");
    }
}

#[test]
fn no_content_of_a_file_makes_a_table_that_is_not_whole() {
    let (bytes, _) = small_case();
    let whole = records(&bytes);
    let (mut refused, mut taken) = (0, 0);
    let mut target = memory();
    let mut table = target.create_table(&config(20)).unwrap();
    for (record, (_, body)) in whole.iter().enumerate() {
        for at in 0..body.len() {
            for value in [0, 0x7F, 0xFF, b'9'] {
                let mut altered = whole.clone();
                altered[record].1[at] = value;
                if restore(&target, &file(&altered)).is_err() {
                    refused += 1;
                    assert_eq!(stat(&table, "steps"), 0);
                    continue;
                }
                taken += 1;
                table.check_at_rest().unwrap();
                // Whatever its rows hold, they are all there; or it has another name now.
                for view in [request(8), wide(8)] {
                    drop(table.try_sample(&view, false, &mut Turn::default()));
                }
                let mut actor = Actor::open(&table, 1);
                (0..9).for_each(|_| drop(actor.try_push(actor.next(3))));
                table.check_at_rest().unwrap();
                target = memory();
                table = target.create_table(&config(20)).unwrap();
            }
        }
    }
    assert!(refused > 300 && taken > 300, "{refused} {taken}");
}

#[test]
fn no_number_in_a_file_makes_it_allocate_more_than_the_file_has() {
    let (bytes, target) = small_case();
    // The length of the first record.
    for length in [1 << 20, 1 << 40, u64::MAX] {
        let mut long = bytes.clone();
        long[16..24].copy_from_slice(&u64::to_le_bytes(length));
        let refused = restore(&target, &long);
        assert_refused(refused, &target, "a long record");
    }
}

#[test]
fn a_file_of_another_kind_or_release_is_told_so() {
    let (mut bytes, target) = small_case();
    let other = refusal(restore(&target, b"PK\x03\x04 some archive"));
    assert!(other.to_string().contains("no snapshot of a replay memory"));
    for format in [1, 4] {
        (bytes[8], bytes[10]) = (format, !format);
        let error = refusal(restore(&target, &bytes));
        let text = format!("it has format {format}, and this release reads formats 2 to 3");
        assert!(error.to_string().contains(&text), "{error}");
        assert!(matches!(error, Error::Snapshot { newer, .. } if newer == (format == 4)));
    }
}

#[test]
fn a_file_of_format_2_is_read_and_its_chunks_have_no_version() {
    let case = Case::new(&TableConfig { parameters: Some("policy".into()), ..config(20) });
    let mut actor = Actor::open(&case.table, 1);
    actor.push(Body::default().chunk(0, 0, 3).version(7).item(0, 1, 2.0));
    let mut whole = records(&case.save());
    // The version of the parameters is none of format 2.
    whole.retain(|(kind, _)| *kind != 7);
    for (kind, body) in whole.iter_mut().filter(|(kind, _)| *kind == 9) {
        *kind = 3;
        body.drain(..8);
    }
    let state = whole.iter_mut().find(|(kind, _)| *kind == 5).unwrap();
    let text = String::from_utf8(state.1.clone()).unwrap();
    state.1 = text.replace("\"expired_items\":0,", "").into_bytes();
    assert!(state.1.len() < text.len() && !text.contains("sample_lag"), "{text}");
    let target = memory();
    restore(&target, &file_of(b"innetmem\x02\0\xfd\xff", &whole)).unwrap();
    let table = target.table("t").unwrap();
    let sampled = sample(&table, 1);
    assert_eq!((anchors(&sampled), sampled.items[0].version), (vec![1], 0));
}

#[test]
fn a_snapshot_takes_no_more_than_its_limit_allows() {
    let (bytes, _) = small_case();
    let narrow = Memory::new(MemoryLimits { max_bytes: 100, receive_bytes: 0, ..MemoryLimits::default() });
    let error = refusal(restore(&narrow, &bytes));
    assert!(matches!(error, Error::Table { .. }));
    assert!(narrow.table("t").is_err());
}

//! Parameters: whole versions, checked files, counted bytes.

use std::sync::Arc;
use std::thread;

use base::allocation::TooLarge;
use bytes::Bytes;
use replay_core::Error;
use replay_core::budget::Budget;
use replay_core::parameters::ParameterStore;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::support::refusal;

/// A file with one tensor of `length` bytes `fill`.
pub fn file(fill: u8, length: usize) -> Bytes {
    let data = vec![fill; length];
    let view = TensorView::new(Dtype::U8, vec![length], &data).unwrap();
    safetensors::serialize([("w", view)], None).unwrap().into()
}

fn store(bytes: u64) -> (ParameterStore, Arc<Budget>) {
    let budget = Budget::new(bytes);
    (ParameterStore::new(budget.clone()), budget)
}

#[test]
fn versions_rise_and_only_newer_ones_are_returned() {
    let (store, _) = store(u64::MAX);
    assert_eq!(store.get("policy", 0), None);
    assert_eq!(store.put("policy", 0, file(1, 4)).unwrap(), 1);
    assert_eq!(store.put("policy", 0, file(2, 4)).unwrap(), 2);
    assert_eq!(store.put("other", 0, file(3, 4)).unwrap(), 1);
    let newest = store.get("policy", 1).unwrap();
    assert_eq!((newest.version, newest.bytes), (2, file(2, 4)));
    assert_eq!(store.get("policy", 2), None);
    assert_eq!(store.stats()["policy"]["version"], 2);
}

#[test]
fn a_put_that_is_sent_again_is_stored_once() {
    let (store, budget) = store(u64::MAX);
    assert_eq!(store.put("policy", 7, file(1, 4)).unwrap(), 1);
    assert_eq!(store.put("policy", 8, file(2, 4)).unwrap(), 2);
    // Its answer was lost, and another process has put a newer version meanwhile.
    assert_eq!(store.put("policy", 7, file(1, 4)).unwrap(), 1);
    assert_eq!(store.get("policy", 0).unwrap().bytes, file(2, 4));
    assert_eq!(budget.reserved(), file(2, 4).len() as u64);
    // Of another name it is another one, and without a number each is stored.
    assert_eq!(store.put("other", 7, file(1, 4)).unwrap(), 1);
    for version in 3..100 {
        assert_eq!(store.put("policy", 0, file(3, 4)).unwrap(), version);
    }
}

#[test]
fn a_put_that_is_sent_again_needs_no_memory_for_a_second_copy() {
    let large = file(1, 1000);
    let (store, budget) = store(large.len() as u64);
    assert_eq!(store.put("policy", 7, large.clone()).unwrap(), 1);
    assert_eq!(store.put("policy", 7, large.clone()).unwrap(), 1);
    assert_eq!(budget.left(), 0);
    let error = refusal(store.put("policy", 8, large));
    assert!(matches!(error, Error::TooLarge { .. }));
}

#[test]
fn what_is_not_a_safetensors_file_is_refused() {
    let (store, budget) = store(u64::MAX);
    let good = file(1, 100);
    let mut huge_header = good.to_vec();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut longer = good.to_vec();
    longer.push(0);
    for bad in [
        Bytes::new(),
        Bytes::from_static(b"\x80\x04pickle"),
        good.slice(..good.len() - 1),
        good.slice(..20),
        huge_header.into(),
        longer.into(),
    ] {
        let error = refusal(store.put("policy", 0, bad));
        assert!(matches!(error, Error::Parameters { .. }), "{error}");
    }
    assert!(matches!(refusal(store.put("", 0, good.clone())), Error::Parameters { .. }));
    assert!(matches!(refusal(store.put(&"x".repeat(129), 0, good.clone())), Error::Parameters { .. }));
    for name in 0..ParameterStore::MAX_NAMES {
        store.put(&name.to_string(), 0, file(1, 1)).unwrap();
    }
    let error = refusal(store.put("one more", 0, good.clone()));
    assert!(error.to_string().contains("1024 names"), "{error}");
    store.put("7", 0, good).unwrap();
    let held: u64 = store.stats().as_object().unwrap().values().map(|v| v["bytes"].as_u64().unwrap()).sum();
    assert_eq!(budget.reserved(), held, "refused files are not counted");
}

#[test]
fn versions_count_against_the_limit_until_their_last_reader() {
    let size = file(1, 100).len() as u64;
    let (store, budget) = store(2 * size);
    store.put("policy", 0, file(1, 100)).unwrap();
    let first = store.get("policy", 0).unwrap();
    store.put("policy", 0, file(2, 100)).unwrap();
    let error = refusal(store.put("policy", 0, file(3, 100)));
    assert!(matches!(error, Error::TooLarge(TooLarge { limit: 0, .. })), "{error}");
    assert!(error.to_string().contains("max_bytes: raise it"), "{error}");
    assert_eq!(first.bytes, file(1, 100));
    drop(first);
    assert_eq!(budget.reserved(), size);
    assert_eq!(store.put("policy", 0, file(3, 100)).unwrap(), 3);
}

#[test]
fn readers_never_see_half_a_version() {
    let (store, _) = store(u64::MAX);
    const VERSIONS: u64 = 400;
    let length = |version: u64| 1000 + version as usize;
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut seen = 0;
                while seen < VERSIONS {
                    let Some(newest) = store.get("policy", seen) else {
                        thread::yield_now();
                        continue;
                    };
                    assert!(newest.version > seen, "versions rise");
                    seen = newest.version;
                    let tensors = SafeTensors::deserialize(&newest.bytes).unwrap();
                    let data = tensors.tensor("w").unwrap().data();
                    assert_eq!(data.len(), length(seen));
                    assert!(data.iter().all(|&byte| byte == seen as u8));
                }
            });
        }
        for version in 1..=VERSIONS {
            let put = store.put("policy", 0, file(version as u8, length(version)));
            assert_eq!(put.unwrap(), version);
        }
    });
}

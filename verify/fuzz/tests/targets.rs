//! Each target on its committed inputs (`__fuzz__`), and on random ones for a second. `BOLERO_RANDOM_TEST_TIME_MS` sets another time; a
//! failure prints the input, or `BOLERO_RANDOM_SEED`, which repeats it.

use std::sync::atomic::{AtomicUsize, Ordering};

use bolero::check;

use fuzz::{calls, connections, files, frames, packets};

#[test]
fn frames_of_a_peer() {
    check!().for_each(frames::decode);
}

#[test]
fn requests_to_a_memory() {
    let sampled = AtomicUsize::new(0);
    check!().with_type::<(u8, Vec<calls::Call>)>().for_each(|(kind, calls)| {
        sampled.fetch_add(calls::run(*kind, calls), Ordering::Relaxed);
    });
    // However few calls a busy machine makes in a second.
    assert!(sampled.into_inner() > 0, "random calls have sampled no item");
}

#[test]
fn bytes_to_a_server() {
    check!().for_each(connections::to_server);
}

#[test]
fn bytes_to_a_client() {
    check!().for_each(connections::to_client);
}

#[test]
fn changed_snapshots() {
    check!().with_type::<Vec<files::Edit>>().for_each(|edits| files::restore(edits));
}

#[test]
fn parameters() {
    check!().for_each(files::parameters);
}

#[test]
fn texts_of_users() {
    check!().for_each(files::texts);
}

#[test]
fn datagrams_to_an_aggregator() {
    check!().with_type::<Vec<packets::Event>>().for_each(|events| packets::aggregate(events));
}

#[test]
fn ethernet_frames() {
    check!().for_each(packets::frame);
}

//! The rate limiter under loom: pushes at the same time, and samples and credits over a reset.
//! `cargo test -p replay_core --features loom --test loom_limiter`.
//!
//! Each property is checked as it is, and again with a fault put in that has to break it.
#![cfg(feature = "loom")]

use std::sync::Arc;

use replay_core::TableConfig;
use replay_core::limiter::Limiter;
use replay_core::sync::fault::{Fault, inject};
use replay_core::sync::thread;

/// Live items: more than `min_size`.
const LIVE: u64 = 5;

/// Runs a model whose readers are spawned last; `loom_sum_tree.rs` gives the reason.
fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

/// One sample for each insert, one item ahead on either side, and one item inserted.
fn limiter() -> Arc<Limiter> {
    let limiter = Limiter::new(&TableConfig {
        samples_per_insert: 1.0,
        slack: 1.0,
        min_size: 1,
        ..TableConfig::new("t", Vec::new(), 1000)
    });
    limiter.count_insert(1);
    Arc::new(limiter)
}

fn spawn(limiter: &Arc<Limiter>, run: impl FnOnce(&Limiter) + 'static) -> thread::JoinHandle<()> {
    let limiter = Arc::clone(limiter);
    thread::spawn(move || run(&limiter))
}

/// Two pushes of one item where one is allowed. Without the insert lock, whose order would hide the limiter's own.
fn pushes_at_the_same_time() {
    model(|| {
        let limiter = limiter();
        let pushes = [(); 2].map(|()| {
            spawn(&limiter, |limiter| {
                if let Ok(inserting) = limiter.admit_insert(LIVE, 1, false, f64::INFINITY) {
                    limiter.count_insert(1);
                    drop(inserting);
                }
            })
        });
        pushes.into_iter().for_each(|push| push.join().unwrap());
        let (_, inserted) = limiter.counts();
        assert_eq!(inserted, 2, "both pushes passed");
    });
}

/// A sample while the table is emptied: its counts are all of before, or all of after.
fn a_sample_meets_a_reset() {
    model(|| {
        let limiter = limiter();
        let reset = spawn(&limiter, |limiter| limiter.reset());
        let sample = spawn(&limiter, |limiter| {
            let _ = limiter.admit_sample(LIVE, 1, false);
        });
        reset.join().unwrap();
        sample.join().unwrap();
        let (sampled, inserted) = limiter.counts();
        assert_eq!((sampled, inserted), (0, 0), "a sample of nothing");
    });
}

/// A sample that is given back while the table is emptied.
fn a_credit_meets_a_reset() {
    model(|| {
        let limiter = limiter();
        let admitted = limiter.admit_sample(LIVE, 1, false).unwrap();
        let reset = spawn(&limiter, |limiter| limiter.reset());
        let credit = spawn(&limiter, move |limiter| limiter.give_back(admitted));
        reset.join().unwrap();
        credit.join().unwrap();
        assert_eq!(limiter.counts(), (0, 0), "a credit of before");
    });
}

#[test]
fn one_of_two_pushes_passes() {
    pushes_at_the_same_time();
}

#[test]
#[should_panic = "both pushes passed"]
fn a_push_that_ends_before_it_is_counted_is_found() {
    inject(Fault::EarlyEnd);
    pushes_at_the_same_time();
}

#[test]
#[should_panic = "both pushes passed"]
fn a_push_that_began_and_ended_unseen_is_found() {
    inject(Fault::ForgottenEnd);
    pushes_at_the_same_time();
}

#[test]
fn a_sample_has_counts_of_one_epoch() {
    a_sample_meets_a_reset();
}

#[test]
#[should_panic = "a sample of nothing"]
fn counts_of_two_epochs_are_found() {
    inject(Fault::MixedEpochs);
    a_sample_meets_a_reset();
}

#[test]
fn credits_of_before_a_reset_are_void() {
    a_credit_meets_a_reset();
}

#[test]
#[should_panic = "a credit of before"]
fn a_credit_of_another_epoch_is_found() {
    inject(Fault::ForeignCredit);
    a_credit_meets_a_reset();
}

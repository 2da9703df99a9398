//! Leases: batches whose items stay with their reader, and in the table, until it acknowledges them. A lease is the credit of its batch, kept
//! here: acknowledged, the batch is delivered; when the lease ends, it is undone, and its items are where they were.
//!
//! A batch is held for its reader from its sampling, so that one that is lost on its way ends with the reader, too. The time of a lease with
//! an end begins when the batch reaches its caller. Time is looked at by the pushes and samples that may wait for it.
//!
//! # Invariant
//!
//! A batch is delivered or undone, once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use base::system::{self, random_number};

use super::Table;
use crate::error::{Error, Result};
use crate::replay::{ChangeLease, SampleCredit, SampleRequest, Sampled};
use crate::sync::lock;

/// Most leases in the statistics.
const LISTED: usize = 256;
/// Most leases in the reason of a wait.
const NAMED: usize = 3;

/// Reader of leased batches, a connection or an iterator of this process: its own copy of the name that statistics and reasons of waits have.
pub type Reader = Arc<str>;

pub(super) struct Lease {
    /// Random, as a client may have one of a server before its restart.
    number: u64,
    reader: Reader,
    items: usize,
    /// `None` without an end.
    lasts: Option<Duration>,
    /// `None` while the batch of a lease with an end is on its way to its caller.
    begun: Option<Instant>,
    credit: Box<dyn SampleCredit>,
}

impl Lease {
    fn since(&self, now: Instant) -> Option<f64> {
        Some(now.saturating_duration_since(self.begun?).as_secs_f64())
    }
}

impl Table {
    /// Holds the items of a batch for its reader, as the request has asked. The batch has the number of the lease.
    pub fn hold(&self, request: &SampleRequest, mut sampled: Sampled, reader: &Reader) -> Sampled {
        if request.lease_ms == 0 {
            return sampled;
        }
        let Some(credit) = sampled.credit.take() else { return sampled };
        let lasts = (request.lease_ms != SampleRequest::NO_END).then(|| Duration::from_millis(request.lease_ms.into()));
        let (number, items) = (random_number().max(1), sampled.items.len());
        // When a lease without an end began does not matter.
        let begun = lasts.is_none().then(system::now);
        lock(&self.leases).push(Lease { number, reader: reader.clone(), items, lasts, begun, credit });
        sampled.lease = number;
        sampled
    }

    /// Begins a lease, or acknowledges its batch; [`Error::Lease`] when it is over.
    pub fn change_lease(&self, change: ChangeLease) -> Result<()> {
        self.check_open()?;
        self.expire_leases();
        let mut held = lock(&self.leases);
        let Some(place) = held.iter().position(|lease| lease.number == change.lease) else {
            let late = !change.begin && base::planted!(LateAcknowledgement);
            return if late { Ok(()) } else { Err(Error::Lease { table: self.config.name.clone() }) };
        };
        if change.begin {
            held[place].begun.get_or_insert_with(system::now);
            return Ok(());
        }
        let acknowledged = held.remove(place);
        drop(held);
        // Without the lock: it wakes waiting calls.
        acknowledged.credit.delivered();
        Ok(())
    }

    /// Ends the leases of a reader that is gone.
    pub fn return_leases(&self, reader: &Reader) {
        if !base::planted!(KeptLease) {
            self.end_leases(|lease| Arc::ptr_eq(&lease.reader, reader));
        }
    }

    /// Ends leases whose time is over.
    pub(super) fn expire_leases(&self) {
        // Other tables have none.
        if self.items.limits_samples() {
            let now = system::now();
            self.end_leases(|lease| {
                lease.since(now).zip(lease.lasts).is_some_and(|(since, lasts)| since >= lasts.as_secs_f64())
            });
        }
    }

    pub(super) fn end_leases(&self, ends: impl Fn(&Lease) -> bool) {
        // Undone without the lock: they wake waiting calls.
        let _ended: Vec<_> = lock(&self.leases).extract_if(.., |lease| ends(lease)).collect();
    }

    /// The oldest leases, which hold up a wait, for its reason; nothing without any.
    pub(super) fn leased(&self) -> String {
        let (held, now) = (lock(&self.leases), system::now());
        let named = held.iter().take(NAMED).map(|lease @ Lease { reader, items, .. }| match lease.since(now) {
            Some(since) => format!("; reader {reader:?} has {items} leased, for {since:.1} s"),
            None => format!("; {items} are on their way to reader {reader:?}"),
        });
        let more = held.len().saturating_sub(NAMED);
        named.chain((more > 0).then(|| format!("; {more} more batches are leased"))).collect()
    }

    /// Items of leases that have begun, and the leases, as [`Self::stats`] has them.
    pub(super) fn lease_stats(&self) -> (usize, Vec<Value>) {
        self.expire_leases();
        let (held, now) = (lock(&self.leases), system::now());
        let leased = held.iter().filter(|lease| lease.begun.is_some()).map(|lease| lease.items).sum();
        let listed = held
            .iter()
            .take(LISTED)
            .map(|lease| json!({"reader": &*lease.reader, "items": lease.items, "since_s": lease.since(now)}));
        (leased, listed.collect())
    }
}

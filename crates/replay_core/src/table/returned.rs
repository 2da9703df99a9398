//! What learners give back: priorities, corrupt items, and the samples of a batch that was not delivered.

use std::sync::Arc;

use base::allocation;
use base::notation::shortened;

use super::Table;
use super::items::Claim;
use crate::error::Result;
use crate::limiter::Admitted;
use crate::replay::check_update;
use crate::replay::{SampleCredit, UpdateReceipt};
use crate::sync::Ordering;

/// Most bytes of the reason that are logged.
const MAX_REASON: usize = 200;

/// Bytes that an update allocates for an id: its item and priority, the update of the tree, and a change of a sum.
const UPDATE_BYTES: u64 = 64;

impl Table {
    /// Sets priorities, before the exponent. The last value of a repeated id counts. Ids of items that are gone, and of other tables, memories
    /// and servers, are counted and ignored. Nothing is applied with [`Error::Priority`](crate::Error::Priority), or unless there are as many priorities as ids.
    pub fn update_priorities(&self, ids: &[u64], priorities: &[f64]) -> Result<UpdateReceipt> {
        self.check_open()?;
        check_update(&self.config.name, ids, priorities)?;
        allocation::check("an update of priorities", UPDATE_BYTES * ids.len() as u64)?;
        let mut items = Vec::with_capacity(ids.len());
        let mut new = Vec::with_capacity(ids.len());
        for (&bits, &priority) in ids.iter().zip(priorities) {
            let id = self.items.named(bits);
            let Some(id) = id.filter(|&id| self.items.confirm(id)) else {
                continue;
            };
            items.push(id);
            new.push(priority);
        }
        self.max_priority.update(&self.items, &items, &new);
        let applied = self.sampler.update(&self.items, &items, new);
        let stale = ids.len() - applied;
        self.counters.updated_priorities.fetch_add(applied as u64, Ordering::Relaxed);
        self.counters.stale_updates.fetch_add(stale as u64, Ordering::Relaxed);
        // A sample may be waiting for more items with mass.
        self.held.wake();
        Ok(UpdateReceipt { applied: applied as u32, stale: stale as u32 })
    }

    /// Removes an item that a client could not decode, and returns the name of its writer; `None` when it is gone.
    pub fn report_corrupt(&self, id: u64, reason: &str) -> Option<String> {
        let id = self.items.named(id)?;
        let metadata = self.items.metadata(id.slot);
        let chunk = self.chunks.pin(metadata.oldest)?;
        // The metadata are the item's if it is still there, and only one report of it counts.
        if !(self.items.confirm(id) && self.end(id).is_some()) {
            return None;
        }
        self.counters.corrupt_items.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            table = self.config.name,
            writer = chunk.writer.name,
            stream = chunk.stream,
            step = chunk.first_step + u64::from(metadata.rows.first_row),
            reason = &*shortened(reason, MAX_REASON),
            "removed an item that does not decode"
        );
        Some(chunk.writer.name.clone())
    }
}

/// Samples of a batch, from its beginning to its delivery. Dropped before it, they return to the rate limiter and to their items.
pub struct Undelivered {
    table: Arc<Table>,
    admitted: Admitted,
    /// Samples set aside that no claim has used.
    pub reserved: u32,
    pub claims: Vec<Claim>,
    /// Whether its end wakes waiting calls: once it was sampled, or items have expired. Another failed attempt would wake its own caller forever.
    pub wakes: bool,
}

impl Undelivered {
    /// A batch of at most `count` items, which holds the mass of those that it samples for the last time.
    pub fn new(table: &Arc<Table>, admitted: Admitted, count: u32) -> Self {
        table.items.begin_batch();
        let claims = Vec::with_capacity(count as usize);
        Undelivered { table: table.clone(), admitted, reserved: 0, claims, wakes: false }
    }

    /// Ends the sampling, and gives back unused samples; of a part, the rate limiter keeps all that were admitted. Returns the credit of the rest.
    pub fn sampled(mut self, is_share: bool) -> Option<Box<dyn SampleCredit>> {
        self.wakes = true;
        let table = self.table.clone();
        if !is_share {
            let unused = self.admitted.items - self.claims.len() as u32;
            table.limiter.give_back(self.admitted.split(unused));
        }
        table.items.return_samples(std::mem::take(&mut self.reserved));
        if table.limiter.limits_ratio() || table.items.limits_samples() {
            table.held.wake();
            return Some(Box::new(self));
        }
        self.deliver();
        None
    }

    fn deliver(mut self) {
        self.admitted.items = 0;
        let items = &self.table.items;
        let mut read: Vec<_> = match self.table.is_queue() {
            true => self.claims.iter().map(|claim| items.metadata(claim.id.slot).oldest).collect(),
            false => Vec::new(),
        };
        for claim in self.claims.drain(..) {
            items.settle(&claim);
        }
        read.dedup();
        self.table.free_read(&read);
    }
}

impl SampleCredit for Undelivered {
    fn delivered(self: Box<Self>) {
        self.deliver();
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        let table = &self.table;
        if !base::planted!(KeptSamples) {
            table.undo(&self.claims);
        }
        if !base::planted!(KeptCredit) {
            table.limiter.give_back(self.admitted);
        }
        table.items.return_samples(self.reserved);
        table.items.end_batch();
        if self.wakes {
            table.held.wake();
        }
    }
}

impl Table {
    /// Takes claims back: their items can be sampled again, in the order they had.
    pub(super) fn undo(&self, claims: &[Claim]) {
        for claim in claims {
            self.items.undo(claim);
            base::planted!(ReturnedTwice => self.items.undo(claim));
            if self.items.is_last(claim) {
                self.sampler.put_back(&self.items, claim.id);
            }
        }
    }
}

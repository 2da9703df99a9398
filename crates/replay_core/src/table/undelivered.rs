//! Samples of a batch until its delivery.

use std::sync::Arc;

use crate::limiter::Admitted;
use crate::replay::SampleCredit;

use super::Table;
use super::items::Claim;

/// Samples of a batch, from its beginning to its delivery. Dropped before it, they return to the rate limiter and to their items.
pub struct Undelivered {
    table: Arc<Table>,
    admitted: Admitted,
    /// Samples set aside that no claim has used.
    pub reserved: u32,
    pub claims: Vec<Claim>,
    /// Whether the batch was sampled. A failed attempt must not wake waiting calls: it would wake its own caller forever.
    sampled: bool,
}

impl Undelivered {
    /// A batch of at most `count` items, which holds the mass of those that it samples for the last time.
    pub fn new(table: &Arc<Table>, admitted: Admitted, count: u32) -> Self {
        table.items.begin_batch();
        let claims = Vec::with_capacity(count as usize);
        Undelivered { table: table.clone(), admitted, reserved: 0, claims, sampled: false }
    }

    /// Ends the sampling, and gives back unused samples; of a part, the rate limiter keeps all that were admitted. Returns the credit of the rest.
    pub fn sampled(mut self, is_part: bool) -> Option<Box<dyn SampleCredit>> {
        self.sampled = true;
        let table = self.table.clone();
        if !is_part {
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
        for claim in self.claims.drain(..) {
            self.table.items.settle(&claim);
        }
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
        if self.sampled {
            table.held.wake();
        }
    }
}

impl Table {
    /// Takes claims back: their items can be sampled again, in the order they had.
    pub(super) fn undo(&self, claims: &[Claim]) {
        for claim in claims {
            self.items.undo(claim);
            if self.items.is_last(claim) {
                self.sampler.put_back(&self.items, claim.id);
            }
        }
    }
}

//! Samples of a batch until its delivery.

use std::sync::Arc;

use crate::limiter::Admitted;
use crate::replay::SampleCredit;

use super::Table;
use super::items::Claim;

/// Samples of a batch until its delivery. Dropped before it, they return to the rate limiter and to their items.
pub struct Undelivered {
    table: Arc<Table>,
    admitted: Admitted,
    /// Empty without a limit on an item's samples: no sample then ends an item.
    claims: Vec<Claim>,
}

impl Undelivered {
    /// A batch under way, which holds the mass of items that it has sampled for the last time.
    pub fn new(table: &Arc<Table>, admitted: Admitted, mut claims: Vec<Claim>) -> Self {
        table.items.begin_batch();
        if !table.items.limits_samples() {
            claims.clear();
        }
        Undelivered { table: table.clone(), admitted, claims }
    }
}

impl SampleCredit for Undelivered {
    fn delivered(mut self: Box<Self>) {
        self.admitted.items = 0;
        for claim in self.claims.drain(..) {
            self.table.items.settle(&claim);
        }
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
        table.items.end_batch();
        table.held.wake();
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

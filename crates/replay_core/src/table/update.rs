//! Priorities from learners, and corrupt items.

use crate::error::{Error, Result, check_priorities};
use crate::replay::UpdateReceipt;
use crate::sync::Ordering;
use base::allocation;
use base::notation::shortened;

use super::Table;

/// Most bytes of the reason that are logged.
const MAX_REASON: usize = 200;

/// Bytes that an update allocates for an id: its item and priority, the update of the tree, and a change of a sum.
const UPDATE_BYTES: u64 = 64;

impl Table {
    /// Sets priorities, before the exponent. The last value of a repeated id counts. Ids of items that are gone, and of other tables, memories
    /// and servers, are counted and ignored. Nothing is applied with [`Error::Priority`], or unless there are as many priorities as ids.
    pub fn update_priorities(&self, ids: &[u64], priorities: &[f64]) -> Result<UpdateReceipt> {
        self.check_open()?;
        if ids.len() != priorities.len() {
            let reason = format!("{} ids and {} priorities", ids.len(), priorities.len());
            return Err(Error::schema(&self.config.name, reason));
        }
        check_priorities(priorities)?;
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

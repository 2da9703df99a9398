//! Priorities from learners, and corrupt items.

use std::sync::atomic::Ordering;

use crate::error::{Error, Result, check_priority, shortened};
use crate::replay::UpdateReceipt;

use super::Table;

/// Bytes of a reader's reason that are logged.
const MAX_REASON: usize = 200;

impl Table {
    /// Sets priorities, before the exponent. The last value of a repeated key counts. Keys of items that are gone, and
    /// keys of other tables, memories and servers, are counted and ignored.
    ///
    /// # Errors
    /// Nothing is applied with [`Error::Priority`] (a priority is NaN, infinite or negative) or
    /// [`Error::Schema`] (not as many priorities as keys).
    pub fn update_priorities(&self, keys: &[u64], priorities: &[f64]) -> Result<UpdateReceipt> {
        self.check_open()?;
        if keys.len() != priorities.len() {
            let reason = format!("{} keys and {} priorities", keys.len(), priorities.len());
            return Err(Error::schema(&self.config.name, reason));
        }
        for &priority in priorities {
            check_priority(priority)?;
        }
        let mut items = Vec::with_capacity(keys.len());
        let mut new = Vec::with_capacity(keys.len());
        for (&bits, &priority) in keys.iter().zip(priorities) {
            let key = self.items.named(bits);
            let Some(key) = key.filter(|&key| self.items.confirm(key)) else {
                continue;
            };
            items.push(key);
            new.push(priority);
        }
        self.max_priority.update(&self.items, &items, &new);
        let applied = self.sampler.update(&self.items, &items, new)?;
        let stale = keys.len() - applied;
        self.counters
            .updated_priorities
            .fetch_add(applied as u64, Ordering::Relaxed);
        self.counters
            .stale_updates
            .fetch_add(stale as u64, Ordering::Relaxed);
        // A sample may be waiting for more items with mass.
        self.held.wake();
        Ok(UpdateReceipt {
            applied: applied as u32,
            stale: stale as u32,
        })
    }

    /// Removes an item whose data a reader could not decode, and returns the name of the writer that pushed it;
    /// `None` when it is gone.
    pub fn report_corrupt(&self, key: u64, reason: &str) -> Option<String> {
        let key = self.items.named(key)?;
        let metadata = self.items.metadata(key.slot);
        let chunk = self.chunks.pin(metadata.oldest)?;
        // The metadata are the item's if it is still there, and only one report of it counts.
        if !(self.items.confirm(key) && self.items.kill(key)) {
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

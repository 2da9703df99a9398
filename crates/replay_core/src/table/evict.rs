//! Eviction of the oldest chunks, by steps, bytes and items. Under the insert lock chunks leave the order of
//! arrival and their items die; the chunks themselves are dropped after it is released.

use std::sync::atomic::Ordering;

use crate::cause::Cause;
use crate::error::Result;
use crate::limiter::Outcome;

use super::Table;
use super::prepare::Prepared;
use super::residents::{Resident, Residents};

/// Chunks taken out under the lock, to be dropped after it.
pub type Evicted = Vec<Box<Resident>>;

/// Chunks evicted under one hold of the insert lock: bounds the hold, and the list of them is allocated before.
pub const EVICTED_AT_ONCE: usize = 64;

impl Table {
    /// Evicts the oldest chunks until the push fits, as far as one hold of the lock goes. False: those in `evicted`
    /// have to be dropped before another look. `Err` is the cause of the wait.
    pub(super) fn make_room(
        &self,
        residents: &mut Residents,
        push: &Prepared,
        evicted: &mut Evicted,
    ) -> Outcome<bool> {
        // Blobs that readers hold of evicted chunks, and chunks that another push has evicted and is about to drop.
        let pinned = self.held.bytes().saturating_sub(residents.bytes);
        if pinned + push.bytes > self.capacity_bytes {
            return Err(Cause::PinnedBytes {
                pinned,
                missing: pinned + push.bytes - self.capacity_bytes,
            });
        }
        let items = push.items.len();
        while residents.steps + push.rows > self.config.capacity
            || residents.bytes + pinned + push.bytes > self.capacity_bytes
            || self.items.free() < items
            || !self.sampler.has_room(&self.items, items)
        {
            if evicted.len() == evicted.capacity() {
                return Ok(false);
            }
            let Some(oldest) = residents.pop() else {
                return Err(Cause::LastItems);
            };
            self.end_items(&oldest);
            evicted.push(oldest);
        }
        self.first_arrival.store(residents.first, Ordering::Relaxed);
        // Evicted chunks count until they are dropped, after the lock is released.
        Ok(self.held.bytes() + push.bytes <= self.capacity_bytes)
    }

    /// Removes every chunk that is live now, and its items; the limiter and the largest priority start from nothing. Writers
    /// continue, and windows do not reach back over this.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] for a table that has failed.
    pub(crate) fn empty(&self) -> Result<()> {
        let mut removed = Vec::with_capacity(EVICTED_AT_ONCE);
        let mut residents = self.lock_residents()?;
        let end = residents.end();
        self.limiter.reset();
        self.max_priority.reset();
        loop {
            while removed.len() < EVICTED_AT_ONCE && residents.first < end {
                let Some(oldest) = residents.pop() else { break };
                for &id in &oldest.items {
                    self.items.kill(id);
                }
                removed.push(oldest);
            }
            self.first_arrival.store(residents.first, Ordering::Relaxed);
            drop(residents);
            if removed.is_empty() {
                break;
            }
            self.retire(&mut removed);
            residents = self.lock_residents()?;
        }
        self.held.wake();
        Ok(())
    }

    /// Ends the items of a chunk that was evicted, and counts them. Under the insert lock.
    fn end_items(&self, chunk: &Resident) {
        let ended = chunk
            .items
            .iter()
            .filter(|&&id| self.items.kill(id))
            .count();
        let counters = &self.counters;
        counters
            .evicted_items
            .fetch_add(ended as u64, Ordering::Relaxed);
        counters
            .evicted_steps
            .fetch_add(u64::from(chunk.rows), Ordering::Relaxed);
    }

    /// Drops evicted chunks, now or with their last pin. Without the insert lock.
    pub(super) fn retire(&self, evicted: &mut Evicted) {
        for chunk in evicted.drain(..) {
            self.chunks.retire(chunk.handle);
        }
    }
}

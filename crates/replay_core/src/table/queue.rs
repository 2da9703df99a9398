//! The steps of a queue (`queue_size`). A chunk is freed once it is read, wherever it is in the order of arrival, as a long item that its
//! writer has not completed, or that a reader keeps, must not hold up the others.
//!
//! A chunk is read when no live item begins in it, no later one can, and the chunk before it in its stream was freed: until then, the windows
//! of that one's items may reach into it.
//!
//! # Invariant
//!
//! A queue evicts no step of an item that is unread, leased, or that its connected writer may still complete.

use std::collections::HashSet;

use super::Table;
use super::ids::ItemId;
use super::prepare::Prepared;
use super::stored::{Arrivals, EVICTED_AT_ONCE, Evicted, FREED, HEAD, PASSED, PushSize, StoredChunk};
use super::streams::Stream;
use super::writers::WriterIdentity;
use crate::error::Result;
use crate::limiter::Outcome;
use crate::slab::Handle;
use crate::sync::{Ordering, lock};

impl Table {
    pub(super) fn is_queue(&self) -> bool {
        self.config.queue_size > 0
    }

    /// Whether a push has room beside the steps that are not freed; `Err` is the reason of the wait. A queue evicts nothing.
    pub(super) fn check_room(&self, arrivals: &Arrivals, push: &PushSize) -> Outcome<bool> {
        let (steps, bytes) = (arrivals.steps + push.rows, self.held.bytes() + push.bytes);
        let (capacity, limit) = (self.config.capacity, self.held.limit);
        let missing = if steps > capacity {
            format!("{} of its capacity of {capacity} steps", arrivals.steps)
        } else if bytes > limit {
            format!("{} of its capacity_bytes of {limit}", self.held.bytes())
        } else if self.items.free() < push.items {
            format!("{} of its {capacity} item slots", self.items.live())
        } else {
            return Ok(true);
        };
        Err(format!(
            "is full: unread items, and steps of items that their writers have not completed, take {missing}{}; a reader of large batches \
             may wait as well: make the table larger, or sample fewer items at a time",
            self.leased()
        ))
    }

    /// Frees chunks in which, after this push of theirs, no later item begins, once they are read. Under the insert lock.
    pub(super) fn pass_chunks(
        &self,
        arrivals: &mut Arrivals,
        streams: &mut [Stream],
        push: &Prepared,
        writer: &WriterIdentity,
        freed: &mut Evicted,
    ) {
        let window = u64::from(writer.window_before) + u64::from(writer.window_after);
        let items = push.items.iter().map(|item| (item.stream, item.arrival(&push.chunks)));
        for (stream, newest) in push.chunks.iter().map(|chunk| (chunk.stream, 0)).chain(items) {
            streams[stream as usize].pass(newest, window, |arrival| {
                if let Some((handle, chunk)) = arrivals.live(&self.chunks, arrival) {
                    chunk.note(PASSED);
                    self.free_from(arrivals, handle, |_| false, freed);
                }
            });
        }
        arrivals.pass_freed(&self.chunks);
    }

    /// Frees the chunks of items that were delivered, once they are read.
    pub(super) fn free_read(&self, chunks: &[Handle]) {
        if chunks.is_empty() {
            return;
        }
        // A table that has failed is freed as a whole.
        let Ok(mut arrivals) = self.lock_inserts() else { return };
        let mut freed = Vec::with_capacity(EVICTED_AT_ONCE);
        for &chunk in chunks {
            self.free_from(&mut arrivals, chunk, |_| false, &mut freed);
        }
        arrivals.pass_freed(&self.chunks);
        drop(arrivals);
        self.retire(&mut freed);
    }

    /// Frees read chunks of disconnected writers, which complete no more items. Returns whether there were any.
    pub(super) fn free_left(&self) -> Result<bool> {
        let connected: HashSet<u64> = self.writers.connected_serials();
        let mut freed = Vec::with_capacity(EVICTED_AT_ONCE);
        let mut arrivals = self.lock_inserts()?;
        for arrival in arrivals.first..arrivals.end() {
            if freed.len() < EVICTED_AT_ONCE
                && let Some((handle, _)) = arrivals.live(&self.chunks, arrival)
            {
                self.free_from(&mut arrivals, handle, |chunk| !connected.contains(&chunk.writer.serial), &mut freed);
            }
        }
        arrivals.pass_freed(&self.chunks);
        drop(arrivals);
        let some = !freed.is_empty();
        self.retire(&mut freed);
        Ok(some)
    }

    /// Frees a chunk if it is read, and then those that continue it. `left`: no later item begins in a chunk, although none has passed it.
    fn free_from(
        &self,
        arrivals: &mut Arrivals,
        first: Handle,
        left: impl Fn(&StoredChunk) -> bool,
        freed: &mut Evicted,
    ) {
        let mut next = Some(first);
        while let Some(chunk) = next.and_then(|handle| self.chunks.pin(handle)) {
            let progress = chunk.progress();
            let is_next = progress & (HEAD | FREED) == HEAD && (progress & PASSED > 0 || left(&chunk));
            if !is_next || lock(&chunk.items).iter().any(|&id| self.keeps(id)) {
                return;
            }
            chunk.note(FREED);
            arrivals.uncount(&chunk);
            self.counters.evicted_steps.fetch_add(chunk.packed.rows().into(), Ordering::Relaxed);
            freed.extend(next);
            next = chunk.next();
            if let Some(chunk) = next.and_then(|next| self.chunks.pin(next)) {
                chunk.note(HEAD);
            }
        }
    }

    /// Whether the steps of an item have to stay.
    fn keeps(&self, id: ItemId) -> bool {
        let is_read = base::planted!(FreedLease) && self.items.is_used_up(self.items.times_sampled(id.slot));
        self.items.confirm(id) && !is_read
    }
}

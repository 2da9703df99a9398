//! Pushes: checked as a whole (`prepare`), given room (`evict`), then put in place as a whole.
//!
//! The writer's own lock is held throughout; the table's insert lock only while numbers, links and items are put
//! in place. What is evicted is dropped after that lock is released, and what is inserted is built before it is
//! taken.

use std::sync::atomic::Ordering;

use crate::error::Result;
use crate::replay::Push;

use super::evict::{EVICTED_AT_ONCE, Room};
use super::items::Window;
use super::prepare::{FirstChunk, Prepared};
use super::residents::Residents;
use super::streams::Link;
use super::writers::{Turn, lock};
use super::{Attempt, Table};

impl Table {
    /// Applies a push, once, and returns the steps that the table has taken from this writer so far; a push that
    /// was applied before is answered and not applied again. Blocked by the rate limiter, or when evicted chunks
    /// that readers pin leave no room in bytes.
    ///
    /// # Errors
    /// Nothing is stored, and the sequence number is not used up, with [`crate::Error::Expired`], [`crate::Error::Fenced`],
    /// [`crate::Error::Protocol`] (epoch or sequence number out of order), [`crate::Error::Schema`] (chunks or items that do not
    /// fit the columns, the streams or the windows), [`crate::Error::Priority`], [`crate::Error::TooLarge`] (more steps, items or
    /// bytes than the table holds) or [`crate::Error::UnknownTable`] (the table was dropped).
    pub fn try_push(&self, push: &Push) -> Result<Attempt<u64>> {
        self.check_open()?;
        let writer = self.writers.get(push.writer)?;
        let mut writer = lock(&writer);
        if writer.turn(push.epoch, push.sequence)? == Turn::Duplicate {
            return Ok(Attempt::Ready(writer.steps));
        }
        if !push.body.items.is_empty()
            && let Err(waits) = self.admit_push()
        {
            return Ok(self.blocked_push(waits));
        }
        let mut prepared = self.prepare(&mut writer, push)?;
        let mut evicted = Vec::with_capacity(EVICTED_AT_ONCE);
        loop {
            let mut residents = lock(&self.residents);
            let room = self.make_room(&mut residents, &prepared, &mut evicted);
            let outcome = match room {
                Room::Enough => self.place(&mut residents, &mut prepared).map(|()| true),
                Room::AfterDropping => Ok(false),
                Room::Blocked(waits) => Err(waits),
            };
            drop(residents);
            self.retire(&mut evicted);
            match outcome {
                Ok(true) => break,
                Ok(false) => {}
                Err(waits) => {
                    for &handle in &prepared.handles {
                        self.chunks.retire(handle);
                    }
                    return Ok(self.blocked_push(waits));
                }
            }
        }
        for (head, link) in push.body.chunks.iter().zip(&prepared.links) {
            writer.streams[head.stream as usize].push(*link);
        }
        writer.applied(prepared.rows);
        self.held.changed.notify(usize::MAX);
        Ok(Attempt::Ready(writer.steps))
    }

    /// Whether the rate limiter lets a push with items through, or a draw waits that only a push can help: it found
    /// fewer draws left than it needs. `Err` says who is waited for.
    pub(super) fn admit_push(&self) -> std::result::Result<(), String> {
        let admitted = self.limiter.admit_insert(self.items.live());
        // Hints both: whoever waits looks again soon.
        let wanted = self.draws_wanted.load(Ordering::Relaxed);
        if self.items.draws_left() < i64::from(wanted) {
            return Ok(());
        }
        admitted
    }

    fn blocked_push<T>(&self, waits: String) -> Attempt<T> {
        self.counters.blocked_pushes.fetch_add(1, Ordering::Relaxed);
        Attempt::Blocked(waits)
    }

    /// Puts a push in place: chunks, links, items. `Err` when readers pin so many evicted chunks that no slot is
    /// left: then the caller retires `push.handles`, and nothing was stored.
    fn place(
        &self,
        residents: &mut Residents,
        push: &mut Prepared,
    ) -> std::result::Result<(), String> {
        while let Some(stored) = push.stored.pop() {
            match self.chunks.insert(stored) {
                Ok(handle) => push.handles.push(handle),
                Err(stored) => {
                    // Dropped without the lock.
                    push.stored.push(stored);
                    return Err(format!(
                        "table {:?} has no room for another chunk beside the evicted ones that readers still hold; \
                         waiting for them",
                        self.config.name
                    ));
                }
            }
        }
        push.charge.count(push.bytes);
        for (mut ready, &handle) in push.chunks.drain(..).zip(&push.handles) {
            let previous = ready.continues.and_then(|c| residents.get_mut(c));
            if let Some(previous) = previous.and_then(|p| self.chunks.pin(p.handle)) {
                previous.set_next(handle);
            }
            ready.resident.handle = handle;
            let rows = ready.resident.rows;
            push.links.push(Link {
                arrival: residents.push(ready.resident),
                first_step: ready.first_step,
                rows,
            });
        }
        let born = push.rows
            + self
                .counters
                .inserted_steps
                .fetch_add(push.rows, Ordering::Relaxed);
        let mut inserted = 0;
        for ready in &push.items {
            let arrival = match ready.first_chunk {
                FirstChunk::Held(arrival) => arrival,
                FirstChunk::Pushed(index) => push.links[index].arrival,
            };
            // None: it was evicted since the check, perhaps to make room for this push.
            let Some(resident) = residents.get_mut(arrival) else {
                continue;
            };
            let window = Window {
                oldest: resident.handle,
                first_row: ready.first_row,
                before: ready.item.before,
                after: ready.item.after,
            };
            let units = self.units_at_birth(ready.item.priority.map(f64::from));
            let key = self
                .items
                .insert(window, born, units)
                .expect("make_room left a free slot, and only the insert lock's holder takes one");
            if let Some(order) = &self.order {
                order.append(key);
            }
            resident.items.push(key);
            inserted += 1;
        }
        self.limiter.count_insert(inserted);
        let late = push.late + push.items.len() as u64 - inserted;
        self.counters
            .inserted_items
            .fetch_add(inserted, Ordering::Relaxed);
        self.counters.late_items.fetch_add(late, Ordering::Relaxed);
        Ok(())
    }
}

//! Pushes: checked as a whole, then applied as a whole, evicting the oldest chunks to make room.
//!
//! The writer's own lock is held throughout; the table's insert lock only while numbers, links and items are put
//! in place. What is evicted is dropped after that lock is released, and what is inserted is built before it is
//! taken.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::chunk::PackedRows;
use crate::error::{Error, Result};
use crate::replay::{NewItem, Push};
use crate::slab::Handle;

use super::items::Window;
use super::residents::{Resident, Residents};
use super::stored::{Charge, StoredChunk};
use super::streams::{Link, Place};
use super::writers::{Turn, Writer, lock};
use super::{Attempt, Table};

/// Chunks evicted under one hold of the insert lock: bounds the hold, and the list of them is allocated before.
const EVICTED_AT_ONCE: usize = 64;

/// Where a chunk is before it has been placed.
const NOWHERE: Handle = Handle::from_bits(u64::MAX);

/// The place of a checked chunk among the residents.
struct ReadyChunk {
    resident: Box<Resident>,
    first_step: u64,
    /// The chunk of the stream that it continues.
    continues: Option<u64>,
}

/// A checked item.
struct ReadyItem {
    first_chunk: FirstChunk,
    first_row: u32,
    item: NewItem,
}

/// The chunk of an item's first row.
enum FirstChunk {
    Held(u64),
    /// By its index in the push.
    Pushed(usize),
}

/// A push that fits the table. Everything that placing it takes is allocated here, before the insert lock.
struct Prepared {
    stored: Vec<Box<StoredChunk>>,
    chunks: Vec<ReadyChunk>,
    items: Vec<ReadyItem>,
    charge: Arc<Charge>,
    rows: u64,
    bytes: u64,
    /// Items skipped because their first row has been evicted.
    late: u64,
    /// Filled by placing it: the chunks in the slab, and their links for the streams.
    handles: Vec<Handle>,
    links: Vec<Link>,
}

/// What a look at the table under the insert lock leads to.
enum Room {
    Enough,
    /// These were evicted and have to be dropped before another look.
    AfterDropping,
    Blocked(String),
}

impl Table {
    /// Applies a push, once, and returns the steps that the table has taken from this writer so far; a push that
    /// was applied before is answered and not applied again. Blocked by the rate limiter, or when evicted chunks
    /// that readers pin leave no room in bytes.
    ///
    /// # Errors
    /// Nothing is stored, and the sequence number is not used up, with [`Error::Expired`], [`Error::Fenced`],
    /// [`Error::Protocol`] (epoch or sequence number out of order), [`Error::Schema`] (chunks or items that do not
    /// fit the columns, the streams or the windows), [`Error::Priority`], [`Error::TooLarge`] (more steps, items or
    /// bytes than the table holds) or [`Error::UnknownTable`] (the table was dropped).
    pub fn try_push(&self, push: &Push) -> Result<Attempt<u64>> {
        self.check_open()?;
        let writer = self.writers.get(push.writer)?;
        let mut writer = lock(&writer);
        if writer.turn(push.epoch, push.sequence)? == Turn::Duplicate {
            return Ok(Attempt::Ready(writer.steps));
        }
        if !push.body.items.is_empty()
            && let Err(waits) = self.limiter.admit_insert(self.items.live())
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

    fn blocked_push<T>(&self, waits: String) -> Attempt<T> {
        self.counters.blocked_pushes.fetch_add(1, Ordering::Relaxed);
        Attempt::Blocked(waits)
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Schema {
            table: self.config.name.clone(),
            reason,
        }
    }

    /// Checks everything about a push that does not depend on other writers, and builds what it stores.
    fn prepare(&self, writer: &mut Writer, push: &Push) -> Result<Prepared> {
        let body = &push.body;
        let rows = body.chunks.iter().map(|c| u64::from(c.rows)).sum();
        let bytes = body.payload.len() as u64;
        for (what, size, limit) in [
            ("a push, in steps,", rows, self.config.capacity),
            ("a push, in bytes,", bytes, self.capacity_bytes),
            (
                "a push, in items,",
                body.items.len() as u64,
                self.items.capacity() as u64,
            ),
        ] {
            if size > limit {
                return Err(Error::TooLarge { what, size, limit });
            }
        }
        let packed = self.check_chunks(writer, push)?;
        let (items, late) = self.check_items(writer, push)?;

        let charge = Charge::new(self.held.clone(), bytes);
        let last = packed.len().wrapping_sub(1);
        let identity = &writer.identity;
        let reach = usize::from(identity.window_before) + usize::from(identity.window_after);
        let chunks = body.chunks.iter().enumerate().map(|(index, head)| {
            // An item for each row, and a few more at an episode's start: no growth under the lock.
            let room = if body.items.is_empty() {
                0
            } else {
                head.rows as usize + reach.min(64)
            };
            ReadyChunk {
                resident: Box::new(Resident {
                    handle: NOWHERE,
                    rows: head.rows,
                    freed_bytes: if index == last { bytes } else { 0 },
                    items: Vec::with_capacity(room),
                }),
                first_step: head.first_step,
                continues: writer.streams[head.stream as usize].continues(head.first_step),
            }
        });
        let stored = body.chunks.iter().zip(packed).map(|(head, packed)| {
            let writer = identity.clone();
            StoredChunk::new(packed, writer, head.stream, head.first_step, charge.clone())
        });
        Ok(Prepared {
            chunks: chunks.collect(),
            // Placed from the back.
            stored: stored.rev().collect(),
            items,
            charge: charge.clone(),
            rows,
            bytes,
            late,
            handles: Vec::with_capacity(body.chunks.len()),
            links: Vec::with_capacity(body.chunks.len()),
        })
    }

    fn check_chunks(&self, writer: &mut Writer, push: &Push) -> Result<Vec<PackedRows>> {
        let body = &push.body;
        let streams = writer.streams.len();
        let mut named: Vec<u32> = body.chunks.iter().map(|c| c.stream).collect();
        named.sort_unstable();
        if let Some(pair) = named.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.refuse(format!(
                "stream {} has two chunks in one push; it may have one",
                pair[0]
            )));
        }
        if let Some(&stream) = named.last()
            && stream as usize >= streams
        {
            return Err(self.refuse(format!(
                "stream {stream} of writer {:?}, which was opened with {streams}",
                writer.identity.name
            )));
        }
        let first_arrival = self.first_arrival.load(Ordering::Relaxed);
        let mut rest: Bytes = body.payload.clone();
        let mut packed = Vec::with_capacity(body.chunks.len());
        for head in &body.chunks {
            if head.bytes as usize > rest.len() {
                return Err(self.refuse(format!(
                    "the chunks take more than the payload's {} bytes",
                    body.payload.len()
                )));
            }
            packed.push(
                self.layout
                    .check(head.rows, rest.split_to(head.bytes as usize))?,
            );
            let stream = &mut writer.streams[head.stream as usize];
            stream.forget_before(first_arrival);
            if head.first_step < stream.next_step()
                || head.first_step.checked_add(u64::from(head.rows)).is_none()
            {
                return Err(self.refuse(format!(
                    "step {} of stream {} after step {}: step numbers do not go back",
                    head.first_step,
                    head.stream,
                    stream.next_step()
                )));
            }
        }
        if !rest.is_empty() {
            return Err(self.refuse(format!(
                "the payload has {} bytes more than its chunks",
                rest.len()
            )));
        }
        Ok(packed)
    }

    fn check_items(&self, writer: &Writer, push: &Push) -> Result<(Vec<ReadyItem>, u64)> {
        let body = &push.body;
        let mut chunk_of = vec![
            None;
            if body.items.is_empty() {
                0
            } else {
                writer.streams.len()
            }
        ];
        if !body.items.is_empty() {
            for (index, head) in body.chunks.iter().enumerate() {
                chunk_of[head.stream as usize] = Some(index);
            }
        }
        let mut items = Vec::with_capacity(body.items.len());
        let mut late = 0;
        for item in &body.items {
            let missing = |reason: String| {
                self.refuse(format!(
                    "the item at step {} of stream {} needs {reason}",
                    item.anchor, item.stream
                ))
            };
            let Some(stream) = writer.streams.get(item.stream as usize) else {
                return Err(missing(format!(
                    "a stream that the writer was opened with: 0 to {}",
                    writer.streams.len() - 1
                )));
            };
            if let Some(priority) = item.priority
                && !(priority.is_finite() && priority >= 0.0)
            {
                return Err(Error::Priority {
                    value: f64::from(priority),
                });
            }
            let identity = &writer.identity;
            if item.before > identity.window_before || item.after > identity.window_after {
                return Err(missing(format!(
                    "{} steps before and {} after; the writer was opened with {} and {}",
                    item.before, item.after, identity.window_before, identity.window_after
                )));
            }
            let first = item.anchor.checked_sub(u64::from(item.before));
            let last = item.anchor.checked_add(u64::from(item.after));
            let (Some(first), Some(last)) = (first, last) else {
                return Err(missing("steps that no stream has".into()));
            };
            let pushed = chunk_of[item.stream as usize];
            let range = pushed.map(|i: usize| (body.chunks[i].first_step, body.chunks[i].rows));
            let (first_chunk, first_row) =
                match (stream.locate(first, last, range).map_err(missing)?, pushed) {
                    (Place::Held { arrival, row }, _) => (FirstChunk::Held(arrival), row),
                    (Place::Pushed { row }, Some(index)) => (FirstChunk::Pushed(index), row),
                    (Place::Evicted | Place::Pushed { .. }, _) => {
                        late += 1;
                        continue;
                    }
                };
            items.push(ReadyItem {
                first_chunk,
                first_row,
                item: *item,
            });
        }
        Ok((items, late))
    }

    /// Evicts the oldest chunks until the push fits, as far as one hold of the lock goes.
    fn make_room(
        &self,
        residents: &mut Residents,
        push: &Prepared,
        evicted: &mut Vec<Box<Resident>>,
    ) -> Room {
        if !push.items.is_empty()
            && let Err(waits) = self.limiter.admit_insert(self.items.live())
        {
            return Room::Blocked(waits);
        }
        // Held by nobody but readers, and by chunks that another push has evicted and is about to drop.
        let pinned = self.held.bytes().saturating_sub(residents.bytes());
        if pinned + push.bytes > self.capacity_bytes {
            return Room::Blocked(format!(
                "table {:?} has {pinned} of its {} bytes in evicted chunks that readers still hold; waiting for them \
                 to let go of {}",
                self.config.name,
                self.capacity_bytes,
                pinned + push.bytes - self.capacity_bytes
            ));
        }
        let items = push.items.len();
        let order_full = || {
            self.order
                .as_ref()
                .is_some_and(|order| !order.has_room(items, |key| self.items.confirm(key)))
        };
        while residents.steps() + push.rows > self.config.capacity
            || residents.bytes() + pinned + push.bytes > self.capacity_bytes
            || self.items.free() < items
            || order_full()
        {
            if evicted.len() == evicted.capacity() {
                return Room::AfterDropping;
            }
            let Some(oldest) = residents.pop() else {
                return Room::Blocked(format!(
                    "table {:?} waits for readers that are taking its last items",
                    self.config.name
                ));
            };
            self.end_items(&oldest);
            evicted.push(oldest);
        }
        self.first_arrival
            .store(residents.first(), Ordering::Relaxed);
        if self.held.bytes() + push.bytes > self.capacity_bytes {
            // What was just evicted counts until it is dropped, without the lock.
            return Room::AfterDropping;
        }
        Room::Enough
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
        push.charge.count();
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

    /// Lets every chunk go that is live now, and its items; the limiter starts from nothing. Writers go on, and
    /// windows do not reach back over this.
    pub(crate) fn empty(&self) {
        let mut removed = Vec::with_capacity(EVICTED_AT_ONCE);
        let mut residents = lock(&self.residents);
        let end = residents.end();
        self.limiter.reset();
        loop {
            while removed.len() < EVICTED_AT_ONCE && residents.first() < end {
                let Some(oldest) = residents.pop() else { break };
                for &key in &oldest.items {
                    self.items.kill(key);
                }
                removed.push(oldest);
            }
            self.first_arrival
                .store(residents.first(), Ordering::Relaxed);
            drop(residents);
            if removed.is_empty() {
                break;
            }
            self.retire(&mut removed);
            residents = lock(&self.residents);
        }
        self.held.changed.notify(usize::MAX);
    }

    /// Ends the items of a chunk that was evicted, and counts them. Under the insert lock.
    fn end_items(&self, chunk: &Resident) {
        let ended = chunk
            .items
            .iter()
            .filter(|&&key| self.items.kill(key))
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
    fn retire(&self, evicted: &mut Vec<Box<Resident>>) {
        for chunk in evicted.drain(..) {
            self.chunks.retire(chunk.handle);
        }
    }
}

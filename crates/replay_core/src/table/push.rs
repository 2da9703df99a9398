//! Pushes, each applied as a whole: the rate limiter admits one, `prepare` checks and builds it, `stored` frees space, and
//! `Table::store` inserts it.
//!
//! The writer's own lock is held throughout; the table's insert lock only while chunks and items are stored.
//! Evicted chunks are dropped after that lock is released, and new ones are built before it is taken.
//!
//! # Invariant
//!
//! Pins, samples and updates are lock-free, except for the counts of the rate limiter, leases, versions of parameters, the order of a
//! sampler that has one, and the largest priority, where an update raises it. Insert and evict share one short lock for each table,
//! with samples of queues and samples that find nothing, never held over allocation, free or I/O.

use crate::error::{Result, WaitReason};
use crate::limiter::{Inserting, Outcome};
use crate::replay::{Push, PushBody};
use crate::slab::Handle;
use crate::sync::{Ordering, lock};

use super::ids::ItemId;
use super::prepare::{History, Prepared, PreparedChunk, PreparedItem};
use super::stored::{Arrivals, EVICTED_AT_ONCE, HEAD, PinnedChunk, PushSize};
use super::writers::{TableWriter, WriterIdentity};
use super::{Attempt, Table, Turn};

impl Table {
    /// Applies a push once and returns the steps that the table has taken from this writer so far; a repeated push is
    /// acknowledged without being applied. Blocked by the rate limiter, by evicted chunks that sampled batches still hold, or by earlier
    /// waiting pushes (a push without items skips the queue). A writer whose parameters are older than `max_version_lag` allows
    /// is blocked first.
    ///
    /// # Errors
    /// Nothing is stored, and the sequence number is not used up, with [`crate::Error::Expired`], [`crate::Error::Fenced`],
    /// [`crate::Error::Misuse`] (epoch or sequence number out of order), [`crate::Error::Schema`] (chunks or items that do not
    /// fit the columns, the streams or the windows), [`crate::Error::Priority`], [`crate::Error::TooLarge`] (more steps, items or
    /// bytes than the table holds), [`crate::Error::Internal`] (the table has failed, or a panic) or
    /// [`crate::Error::UnknownTable`] (the table was dropped).
    pub fn try_push(&self, push: &Push, turn: &mut Turn) -> Result<Attempt<u64>> {
        self.check_open()?;
        self.expire_leases();
        let writer = self.writers.get(push.writer)?;
        let mut writer = lock(&writer);
        if writer.has_applied(push.epoch, push.sequence)? {
            return Ok(Attempt::Ready(writer.steps));
        }
        // Steps of later items take room of a queue, too.
        let passes = push.body.items.is_empty() && (!self.is_queue() || push.body.chunks.is_empty());
        let waited = turn.waits();
        let parameters = self.parameters_of(&writer);
        let attempt = match parameters.as_ref().and_then(|parameters| self.outdated(&writer.identity, parameters)) {
            Some(reason) => turn.attempt(&writer.outdated, false, || Ok(Attempt::Blocked(reason)))?,
            None => {
                let apply = || self.catch_panic(|| self.apply(&mut writer, push));
                turn.attempt(&self.held.pushes, passes, apply)?
            }
        };
        match &attempt {
            Attempt::Ready(_) => {
                writer.count_wait(turn.waited());
                if let Some((_, version, newest)) = parameters {
                    self.counters.version_lag.record(newest.saturating_sub(version));
                }
            }
            Attempt::Blocked(_) if waited => turn.count_once(&self.counters.blocked_pushes),
            Attempt::Blocked(_) => {}
        }
        drop(writer);
        self.warn_of_unread_items();
        Ok(attempt)
    }

    /// Name, version and newest version of a writer's parameters; a writer without any counts as version 0 of those that the table
    /// names, or else of those with the highest version. `None` if the lag is neither limited nor known.
    fn parameters_of(&self, writer: &TableWriter) -> Option<(String, u64, u64)> {
        match &writer.parameters {
            Some((name, version)) => Some((name.clone(), *version, self.parameters.version(name))),
            None if self.config.max_version_lag == 0 => None,
            None => {
                let own = self.config.parameters.as_ref().map(|name| (name.clone(), self.parameters.version(name)));
                let (name, newest) = own.or_else(|| self.parameters.highest_version()).unwrap_or_default();
                Some((name, 0, newest))
            }
        }
    }

    /// The reason of the wait of a writer with these parameters, if they are too old.
    fn outdated(&self, writer: &WriterIdentity, parameters: &(String, u64, u64)) -> Option<WaitReason> {
        let (name, version, newest) = parameters;
        let most = self.config.max_version_lag;
        if most == 0 || newest.saturating_sub(*version) <= u64::from(most) {
            return None;
        }
        let has = match version {
            0 => format!("has got no parameters, and {name:?} has version {newest}"),
            _ => format!("makes its steps with version {version} of {name:?}, and version {newest} is the newest"),
        };
        let (writer, table) = (&writer.name, &self.config.name);
        let reason = format!(
            "writer {writer:?} of table {table:?} {has}: with max_version_lag {most} its steps wait until it gets newer ones \
             (get_parameters with this writer)"
        );
        Some(reason.into())
    }

    fn apply(&self, writer: &mut TableWriter, push: &Push) -> Result<Attempt<u64>> {
        let inserting = match self.admit_push(&push.body, &writer.identity) {
            Ok(inserting) => inserting,
            Err(reason) => return Ok(self.blocked_push(&(reason + &self.leased()))),
        };
        let mut prepared = match self.prepare(writer, &push.body) {
            Ok(prepared) => prepared,
            Err(error) => {
                // Other pushes may have been refused because of these items.
                drop(inserting);
                self.held.wake();
                return Err(error);
            }
        };
        let size = PushSize { rows: prepared.rows, bytes: prepared.bytes, items: prepared.items.len() };
        let (mut evicted, mut sweeps) = (Vec::with_capacity(EVICTED_AT_ONCE), false);
        loop {
            let mut arrivals = self.lock_inserts()?;
            let room = match self.is_queue() {
                false => self.make_room(&mut arrivals, &size, &mut evicted),
                true => self.check_room(&arrivals, &size),
            };
            let stored = room.and_then(|enough| Ok(enough && self.store(&mut arrivals, &mut prepared)?));
            if let Ok(true) = stored {
                // Under the lock: after a panic before this the table fails, so stored chunks are never pushed again.
                for chunk in &prepared.chunks {
                    writer.streams[chunk.stream as usize].push(chunk.span);
                }
                writer.applied(prepared.rows);
                if self.is_queue() {
                    self.pass_chunks(&mut arrivals, &mut writer.streams, &prepared, &writer.identity, &mut evicted);
                    // Chunks that writers have left may hold up the list, which grows with the next one.
                    sweeps = arrivals.is_full();
                }
            }
            drop(arrivals);
            self.retire(&mut evicted);
            match stored {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) if self.is_queue() && self.free_left()? => {}
                Err(reason) => {
                    // Without a notice: it would wake this call itself. Pushes that were refused because of these
                    // items try again at the end of their slice.
                    for handle in prepared.chunks.iter().filter_map(|c| c.handle) {
                        self.chunks.retire(handle);
                    }
                    return Ok(self.blocked_push(&reason));
                }
            }
        }
        while sweeps {
            sweeps = self.free_left()?;
        }
        // Before the notice below: the items are counted by now.
        drop(inserting);
        self.held.wake();
        Ok(Attempt::Ready(writer.steps))
    }

    fn blocked_push<T>(&self, reason: &str) -> Attempt<T> {
        Attempt::Blocked(format!("table {:?} {reason}", self.config.name).into())
    }

    /// Asks the rate limiter to admit a push. While a sample finds too few samples left, every push is admitted: new items unblock it.
    fn admit_push(&self, push: &PushBody, writer: &WriterIdentity) -> Outcome<Inserting<'_>> {
        // Both are hints: a blocked call retries soon.
        let wanted = self.items.samples_wanted.load(Ordering::Relaxed);
        let needed = self.items.samples_left() < i64::from(wanted);
        let unread = self.most_unread(push, writer);
        self.limiter.admit_insert(self.items.live(), push.items.len() as u64, needed, unread)
    }

    /// Items that a derived slack lets writers be ahead before a push: the most unread items for which this push evicts none of them. No
    /// limit where items do not end with their last sample, and while a sample waits, which may need more.
    ///
    /// It takes items of the mean length so far, other writers with the same windows, and chunks of the same size as this push.
    fn most_unread(&self, push: &PushBody, writer: &WriterIdentity) -> f64 {
        let derived = self.config.slack == 0.0 && self.limiter.limits_ratio();
        if !derived || !self.items.limits_samples() || self.held.samples.is_waited() {
            return f64::INFINITY;
        }
        let counters = &self.counters;
        // Relaxed, as all counters: the waits of pushes and samples are hints.
        let [inserted, evicted, items] = [&counters.inserted_steps, &counters.evicted_steps, &counters.inserted_items]
            .map(|count| count.load(Ordering::Relaxed));
        let rows = || push.chunks.iter().map(|chunk| u64::from(chunk.rows));
        let (new, largest) = (rows().sum::<u64>(), rows().max().unwrap_or(0));
        // Each stream has steps of items that are not complete: pushes of such steps are always admitted.
        let streams = self.writers.streams();
        let beside = new + streams * (u64::from(writer.window_before) + u64::from(writer.window_after));
        if items == 0 || inserted.saturating_sub(evicted) + beside <= self.config.capacity {
            return f64::INFINITY;
        }
        // Whole chunks are evicted.
        let kept = self.config.capacity.saturating_sub(beside + largest.saturating_sub(1));
        kept as f64 / (inserted as f64 / items as f64).max(1.0)
    }

    /// Stores a push, and counts it. Only under the insert lock. `Err` as of [`Self::store_chunks`].
    fn store(&self, arrivals: &mut Arrivals, push: &mut Prepared) -> Outcome<bool> {
        self.store_chunks(arrivals, push)?;
        let born = push.rows + self.counters.inserted_steps.fetch_add(push.rows, Ordering::Relaxed);
        let (mut inserted, mut largest) = (0, 0.0f64);
        let new = |_| History { born, times_sampled: 0 };
        self.store_items(arrivals, &push.items, &push.chunks, new, |index, _| {
            largest = largest.max(push.items[index].raises);
            inserted += 1;
        });
        self.max_priority.raise(largest);
        self.limiter.count_insert(inserted);
        let late = push.late + push.items.len() as u64 - inserted;
        self.counters.inserted_items.fetch_add(inserted, Ordering::Relaxed);
        self.counters.late_items.fetch_add(late, Ordering::Relaxed);
        Ok(true)
    }

    /// Stores chunks, and links them. Only under the insert lock. After an error none is stored; the caller retires their slots.
    pub(super) fn store_chunks(&self, arrivals: &mut Arrivals, push: &mut Prepared) -> Outcome<()> {
        if !push.chunks.iter_mut().all(|chunk| chunk.enter(&self.chunks)) {
            return Err(
                "has no slot for another chunk beside the evicted ones that samples still pin; waiting for them".into(),
            );
        }
        push.charge.count(push.bytes);
        for chunk in &mut push.chunks {
            let pinned = chunk.handle.and_then(|handle| Some((handle, self.chunks.pin(handle)?)));
            let Some((handle, stored)) = pinned else { continue };
            match chunk.continues.and_then(|c| arrivals.live(&self.chunks, c)) {
                Some((_, previous)) => previous.set_next(handle),
                None => stored.note(HEAD),
            }
            chunk.span.arrival = arrivals.push(handle, &stored);
        }
        Ok(())
    }

    /// Inserts items, whose chunks are in the table, some from this push (`pushed`). Calls `stored` with index and id of each item.
    /// The caller holds the insert lock.
    pub(super) fn store_items(
        &self,
        arrivals: &mut Arrivals,
        items: &[PreparedItem],
        pushed: &[PreparedChunk],
        history: impl Fn(usize) -> History,
        mut stored: impl FnMut(usize, ItemId),
    ) {
        // The chunk of the last item: neighbours begin in the same one.
        let mut first: Option<(u64, Handle, PinnedChunk<'_>)> = None;
        for (index, item) in items.iter().enumerate() {
            let arrival = item.arrival(pushed);
            if first.as_ref().is_none_or(|(of, ..)| *of != arrival) {
                first = arrivals.live(&self.chunks, arrival).map(|(handle, chunk)| (arrival, handle, chunk));
            }
            // None: it was evicted since the check, perhaps for this push.
            let Some((_, handle, chunk)) = &first else {
                continue;
            };
            let History { born, times_sampled } = history(index);
            let id = self
                .items
                .insert(*handle, item.rows, born, times_sampled, item.units)
                .expect("make_room left a free slot, and only the insert lock's holder takes one");
            self.sampler.insert(id, item.priority);
            self.max_priority.insert(id, item.priority);
            lock(&chunk.items).push(id);
            if let Some(after) = arrivals.after_save_point.as_mut().filter(|after| after.taken == born) {
                after.items.insert(id);
            }
            stored(index, id);
        }
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::sync::Arc;

    use crate::error::{Error, Result};
    use crate::memory::{Memory, MemoryLimits};
    use crate::replay::SampleRequest;
    use crate::schema::{Codec, Column, Dtype, TableConfig};
    use crate::table::tests::{open, push};

    use super::*;

    fn config() -> TableConfig {
        let column = Column {
            name: "value".into(),
            dtype: Dtype::Uint8,
            shape: vec![],
            codec: Codec::None,
            finite: true,
            max_length: 0,
        };
        TableConfig::new("t", vec![column], 100)
    }

    #[test]
    fn a_table_in_which_a_call_panicked_fails_and_stores_nothing_twice() {
        let config = TableConfig { capacity: 4, ..config() };
        fn refused<T>(call: Result<T>) {
            match call {
                Err(Error::Internal(reason)) => assert!(reason.contains("\"t\" has failed")),
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("a table that has failed answers"),
            }
        }
        for empties in [false, true] {
            let memory = Memory::new(MemoryLimits::default());
            let table = memory.create_table(&config).unwrap();
            let open = open(1, 1);
            table.open_writer(&open).unwrap();
            for sequence in 1..=4 {
                let pushed = table.try_push(&push(sequence, None), &mut Turn::default());
                assert!(matches!(pushed, Ok(Attempt::Ready(steps)) if steps == sequence));
            }
            // An item dies that has ended already.
            table.end_items_unnoticed();
            match empties {
                true => refused(memory.empty_table("t")),
                false => refused(table.try_push(&push(5, None), &mut Turn::default())),
            }
            assert_eq!(table.stats()["panics"], 1);

            refused(table.try_push(&push(5, None), &mut Turn::default()));
            let request = SampleRequest { count: 1, ..SampleRequest::default() };
            refused(table.try_sample(&request, false, &mut Turn::default()));
            refused(table.update_priorities(&[], &[]));
            refused(table.open_writer(&open));
            refused(memory.empty_table("t"));
            let stats = &memory.stats()["tables"]["t"];
            assert_eq!((&stats["failed"], &stats["panics"]), (&true.into(), &1.into()));
            memory.drop_table("t").unwrap();
            let again: Arc<Table> = memory.create_table(&config).unwrap();
            assert_eq!(again.stats()["failed"], false);
        }
    }

    #[test]
    fn a_panic_before_the_insert_lock_leaves_the_table_whole() {
        let memory = Memory::new(MemoryLimits::default());
        let table = memory.create_table(&config()).unwrap();
        let error = table.catch_panic::<()>(|| panic!("fault {}", 7));
        assert!(error.unwrap_err().to_string().contains("panicked: fault 7"));
        let stats = table.stats();
        assert_eq!((&stats["failed"], &stats["panics"]), (&false.into(), &1.into()));
        table.open_writer(&open(1, 1)).unwrap();
        let pushed = table.try_push(&push(1, None), &mut Turn::default());
        assert!(matches!(pushed, Ok(Attempt::Ready(1))));
    }
}

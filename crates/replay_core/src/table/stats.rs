//! The counters of a table, and the JSON object that shows them.

use serde_json::{Value, json};

use crate::snapshot_records::content::TableState;
use crate::sync::{AtomicU64, Ordering, lock};
use base::histogram::Histogram;

use super::Table;

/// Events since the table was made. Statistics only: nothing is published with them.
pub(super) struct TableCounters {
    pub inserted_steps: AtomicU64,
    pub inserted_items: AtomicU64,
    /// Items that came after their first row had been evicted.
    pub late_items: AtomicU64,
    pub evicted_steps: AtomicU64,
    pub evicted_items: AtomicU64,
    pub sampled_items: AtomicU64,
    pub updated_priorities: AtomicU64,
    pub stale_updates: AtomicU64,
    pub corrupt_items: AtomicU64,
    pub blocked_pushes: AtomicU64,
    pub blocked_samples: AtomicU64,
    /// Calls that panicked. Not part of a snapshot.
    pub panics: AtomicU64,
    /// Items evicted before their last sample, at `max_times_sampled`. Not part of a snapshot.
    pub evicted_unread_items: AtomicU64,
    /// Steps inserted between an item's insertion and its sampling. Not part of a snapshot.
    pub sample_age: Histogram,
    /// Version lag of a writer's parameters at its pushes, where known. Not part of a snapshot.
    pub version_lag: Histogram,
}

impl Default for TableCounters {
    fn default() -> Self {
        let zero = AtomicU64::default;
        TableCounters {
            inserted_steps: zero(),
            inserted_items: zero(),
            late_items: zero(),
            evicted_steps: zero(),
            evicted_items: zero(),
            sampled_items: zero(),
            updated_priorities: zero(),
            stale_updates: zero(),
            corrupt_items: zero(),
            blocked_pushes: zero(),
            blocked_samples: zero(),
            panics: zero(),
            evicted_unread_items: zero(),
            sample_age: Histogram::new(6, 26),
            version_lag: Histogram::new(0, 10),
        }
    }
}

/// Indices in [`TableCounters::all`].
pub(super) const INSERTED_STEPS: usize = 0;
pub(super) const INSERTED_ITEMS: usize = 1;
pub(super) const EVICTED_STEPS: usize = 3;
pub(super) const EVICTED_ITEMS: usize = 4;

impl TableCounters {
    /// All of them with their names, in an order that is part of the format of a snapshot.
    pub fn all(&self) -> [(&'static str, &AtomicU64); TableState::COUNTERS] {
        macro_rules! named {
            ($($field:ident)+) => {
                [$((stringify!($field), &self.$field)),+]
            };
        }
        named!(
            inserted_steps inserted_items late_items evicted_steps evicted_items sampled_items
            updated_priorities stale_updates corrupt_items blocked_pushes blocked_samples
        )
    }
}

impl Table {
    /// Gauges, and counters since the table was made, by the names of `docs/reference/statistics.md`. `bytes` (live and
    /// pinned) has [`CHUNK_BYTES`](crate::TableConfig::CHUNK_BYTES) for each chunk; `total_priority`, after the exponent, is
    /// null for an order of items; `max_priority`, before the exponent, is null while none was above 0; the limiter counts
    /// items since the table was last emptied, without undelivered samples.
    pub fn stats(&self) -> Value {
        let (steps, live_bytes) = {
            // Ignores poisoning: a failed table has statistics, too.
            let residents = lock(&self.residents);
            (residents.steps, residents.bytes)
        };
        let bytes = self.held.bytes();
        let (limiter_sampled, limiter_inserted) = self.limiter.counts();
        let (writers, absence) = (self.writers.counts(), self.writers.absence());
        let (absence, last_writer) = absence.unwrap_or_default();
        let (waiting_pushes, pushes_wait_for) = self.held.pushes.waits();
        let outdated = self.writers.outdated();
        let outdated = outdated.iter().map(|line| line.waits());
        let (outdated_pushes, outdated_reason) =
            outdated.fold((0, None), |(sum, reason), (n, r)| (sum + n, reason.or(r)));
        let (waiting_samples, samples_wait_for) = self.held.samples.waits();
        let mut stats = json!({
            "items": self.items.live(),
            "items_with_priority": self.items.tree.live_with_mass(),
            "steps": steps,
            "bytes": bytes,
            "live_bytes": live_bytes,
            "pinned_bytes": bytes.saturating_sub(live_bytes),
            "capacity": self.config.capacity,
            "capacity_bytes": self.capacity_bytes,
            "connected_writers": writers.connected,
            "resumable_writers": writers.resumable,
            "streams": writers.streams,
            "last_push_s": writers.last_push.map(|age| age.as_secs_f64()),
            "without_writers_s": absence.as_secs_f64(),
            "last_writer": last_writer,
            "by_writer": self.writers.stats(),
            "total_priority": self.sampler.order().is_none().then(|| self.sampler.total(&self.items).priority),
            "max_priority": self.max_priority.get(&self.items),
            "samples_per_insert": self.config.samples_per_insert,
            "slack": self.config.effective_slack(),
            "min_size": self.config.min_size,
            "max_version_lag": self.config.max_version_lag,
            "version_lag": self.counters.version_lag.stats(1.0),
            "outdated_pushes": outdated_pushes,
            "waiting_pushes": waiting_pushes + outdated_pushes,
            "pushes_wait_for": pushes_wait_for.or(outdated_reason),
            "waiting_samples": waiting_samples,
            "samples_wait_for": samples_wait_for,
            "sample_age": self.counters.sample_age.stats(1.0),
            "limiter_sampled": limiter_sampled,
            "limiter_inserted": limiter_inserted,
            "saturated_priorities": self.items.tree.saturated(),
            "rounded_up_priorities": self.items.tree.rounded_up(),
            "panics": self.counters.panics.load(Ordering::Relaxed),
            "evicted_unread_items": self.counters.evicted_unread_items.load(Ordering::Relaxed),
            "failed": self.has_failed(),
        });
        for (name, counter) in self.counters.all() {
            stats[name] = counter.load(Ordering::Relaxed).into();
        }
        stats
    }

    /// Checks the table at rest: the sum tree adds up, and as many items are live as live chunks have.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] that names the counts that differ.
    pub fn check_at_rest(&self) -> crate::Result<()> {
        self.items.tree.check_at_rest()?;
        let mut residents = lock(&self.residents);
        let mut live = 0;
        for arrival in residents.first..residents.end() {
            if let Some(chunk) = residents.get_mut(arrival) {
                let items = chunk.items.iter();
                live += items.filter(|&&id| self.items.confirm(id)).count() as u64;
            }
        }
        let (counted, free) = (self.items.live(), self.items.free() as u64);
        if live != counted || free + live != self.items.capacity() as u64 {
            return Err(crate::Error::Internal(format!(
                "{live} items belong to live chunks, {counted} are counted, {free} slots are free"
            )));
        }
        Ok(())
    }
}

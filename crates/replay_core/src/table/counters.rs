//! The counters and gauges of a table, and their JSON object.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use base::histogram::Histogram;

use super::Table;
use crate::sync::{AtomicBool, AtomicU64, Ordering, lock};

/// Defines [`TableCounters`] and [`SavedCounts`] with these counters.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// Events since the table was made. Statistics only: nothing is published with them.
        pub struct TableCounters {
            $($(#[$doc])* pub $name: AtomicU64,)+
            /// Calls that panicked. Not part of a snapshot, as the counters below.
            pub panics: AtomicU64,
            /// Items evicted with samples left (`max_times_sampled`).
            pub evicted_unread_items: AtomicU64,
            /// Whether the first of them was logged.
            pub unread_logged: AtomicBool,
            /// Steps inserted between an item's insertion and its sampling.
            pub sample_age: Histogram,
            /// Version lag of a writer's parameters at its pushes, where known.
            pub version_lag: Histogram,
            /// Version lag of sampled items, where known. Part of a snapshot.
            pub sample_lag: Histogram,
        }

        /// The counters that are part of a snapshot.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct SavedCounts {
            $($(#[$doc])* pub $name: u64,)+
        }

        impl Default for TableCounters {
            fn default() -> Self {
                TableCounters {
                    $($name: AtomicU64::new(0),)+
                    panics: AtomicU64::new(0),
                    evicted_unread_items: AtomicU64::new(0),
                    unread_logged: AtomicBool::new(false),
                    sample_age: Histogram::new(6, 26),
                    version_lag: Histogram::new(0, 10),
                    sample_lag: Histogram::new(0, 10),
                }
            }
        }

        impl TableCounters {
            pub fn saved(&self) -> SavedCounts {
                SavedCounts { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }

            pub fn go_on_from(&self, saved: &SavedCounts) {
                $(self.$name.store(saved.$name, Ordering::Relaxed);)+
            }
        }

        impl SavedCounts {
            pub fn all(&self) -> impl Iterator<Item = u64> {
                [$(self.$name),+].into_iter()
            }
        }
    };
}

counters! {
    inserted_steps,
    inserted_items,
    /// Items that came after their first row had been evicted.
    late_items,
    evicted_steps,
    evicted_items,
    /// Items removed at a draw, for the age of their parameters.
    expired_items,
    sampled_items,
    updated_priorities,
    stale_updates,
    corrupt_items,
    blocked_pushes,
    blocked_samples,
}

impl Table {
    /// Gauges, and counters since the table was made, by the names of `docs/reference/statistics.md`. `bytes` (live and
    /// pinned) has [`CHUNK_BYTES`](crate::TableConfig::CHUNK_BYTES) for each chunk; `total_mass`, after the exponent, is
    /// null for an order of items; `max_priority`, before the exponent, is null while none was above 0; the limiter counts
    /// items since the table was last emptied, without undelivered samples.
    pub fn stats(&self) -> Value {
        let (steps, live_bytes) = {
            // Ignores poisoning: a failed table has statistics, too.
            let arrivals = lock(&self.arrivals);
            (arrivals.steps, arrivals.bytes)
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
        let (leased_items, leases) = self.lease_stats();
        let mut stats = json!({
            "items": self.items.live(),
            "items_with_mass": self.items.tree.live_with_mass(),
            "steps": steps,
            "bytes": bytes,
            "live_bytes": live_bytes,
            "pinned_bytes": bytes.saturating_sub(live_bytes),
            "capacity": self.config.capacity,
            "capacity_bytes": self.held.limit,
            "connected_writers": writers.connected,
            "resumable_writers": writers.resumable,
            "streams": writers.streams,
            "last_push_s": writers.last_push.map(|age| age.as_secs_f64()),
            "without_writers_s": absence.as_secs_f64(),
            "last_writer": last_writer,
            "by_writer": self.writers.stats(),
            "total_mass": (!self.config.sampler.is_ordered()).then(|| self.sampler.total(&self.items).mass),
            "max_priority": self.max_priority.get(&self.items),
            "samples_per_insert": self.config.samples_per_insert,
            "slack": self.config.effective_slack(),
            "min_size": self.config.min_size,
            "queue_size": self.config.queue_size,
            "leased_items": leased_items,
            "leases": leases,
            "max_version_lag": self.config.max_version_lag,
            "version_lag": self.counters.version_lag.stats(1.0),
            "max_sample_lag": self.config.max_sample_lag,
            "sample_lag": self.counters.sample_lag.stats(1.0),
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
        let saved = serde_json::to_value(self.counters.saved()).unwrap_or_default();
        for (name, count) in saved.as_object().into_iter().flatten() {
            stats[name] = count.clone();
        }
        stats
    }

    /// Checks the table at rest: the sum tree adds up, and as many items are live as live chunks have.
    pub fn check_at_rest(&self) -> crate::Result<()> {
        self.items.tree.check_at_rest()?;
        let arrivals = lock(&self.arrivals);
        let handles = (arrivals.first..arrivals.end()).filter_map(|arrival| arrivals.get(arrival));
        let chunks = handles.filter_map(|handle| self.chunks.pin(handle));
        let live = chunks.map(|chunk| lock(&chunk.items).iter().filter(|&&id| self.items.confirm(id)).count());
        let live = live.sum::<usize>() as u64;
        let (counted, free) = (self.items.live(), self.items.free_at_rest() as u64);
        if live != counted || free + live != self.items.capacity() as u64 {
            return Err(crate::Error::Internal(format!(
                "{live} items belong to live chunks, {counted} are counted, {free} slots are free"
            )));
        }
        Ok(())
    }
}

//! The counters of a table.

use serde::{Deserialize, Serialize};

use crate::sync::{AtomicBool, AtomicU64, Ordering};
use base::histogram::Histogram;

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
        }

        /// The counters that are part of a snapshot.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
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
    sampled_items,
    updated_priorities,
    stale_updates,
    corrupt_items,
    blocked_pushes,
    blocked_samples,
}

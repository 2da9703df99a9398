//! One table: streams of chunks in their order of arrival, items over them, sampling, updates, eviction.
//!
//! | file | subject |
//! | --- | --- |
//! | [`items`], [`ids`] | metadata and liveness of items, without a lock; their ids |
//! | `samplers` | the choice of items: prioritized, uniform, by rank, fifo, lifo, heaps; the priority of new items |
//! | [`stored`] | chunks, the bytes that count for them, their order of arrival; eviction of the oldest |
//! | `writers`, `streams` | sequence numbers, fencing; the steps of each stream |
//! | `push`, `prepare` | pushes: checked, and inserted under one short lock |
//! | `sample`, `sampling`, `versions` | when a sample waits; its items, without a lock except in samplers with an order; those that are too old |
//! | `queue` | the steps of a queue: what is read is freed, and nothing else |
//! | [`leases`] | batches that stay with their readers until these acknowledge them |
//! | `returned` | what learners give back: priorities, corrupt items, undelivered samples |
//! | `save`, `restore` | to the records of a snapshot, or all steps in their order of arrival; from these records |
//! | `waiting` | queues of waiting calls; the state of one call |
//! | `counters` | counters and gauges, and their JSON |
//!
//! # Invariant
//!
//! A panic with the insert lock fails the table: its calls raise an error, other tables continue.

pub mod ids;
pub mod items;
pub mod leases;
pub(crate) mod restore;
pub mod stored;

pub(crate) mod counters;
mod prepare;
mod push;
mod queue;
mod returned;
mod sample;
pub(crate) mod samplers;
mod sampling;
pub(crate) mod save;
mod streams;
#[cfg(all(test, not(feature = "model")))]
mod tests;
mod versions;
mod waiting;
pub(crate) mod writers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::budget::Reservation;
use crate::chunk::{RowBlobs, RowLayout};
use crate::error::{Error, Result};
use crate::limiter::Limiter;
use crate::parameters::ParameterStore;
use crate::replay::{OpenWriter, WriterOpened};
use crate::schema::TableConfig;
use crate::slab::Slab;
use crate::sum_tree::Strata;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, is_poisoned};

pub use waiting::{Attempt, PendingCall, Turn};
pub use writers::{WriterConnection, Writers};

use counters::TableCounters;
use ids::{IdSpace, ItemId};
use items::Items;
use leases::Lease;
use samplers::{ItemSampler, MaxPriority};
use stored::{Arrivals, Chunks, Held};

/// A named replay memory. `push.rs` lists the locks.
pub struct Table {
    config: Arc<TableConfig>,
    format: RowFormat,
    items: Items,
    chunks: Chunks,
    /// Under the insert lock.
    arrivals: Mutex<Arrivals>,
    writers: Writers,
    sampler: Box<dyn ItemSampler>,
    limiter: Arc<Limiter>,
    held: Arc<Held>,
    max_priority: MaxPriority,
    counters: TableCounters,
    leases: Mutex<Vec<Lease>>,
    draws: Draws,
    dropped: AtomicBool,
    /// Parameters of the memory, for the version lag of writers.
    parameters: Arc<ParameterStore>,
}

/// What the bytes of rows mean.
struct RowFormat {
    layout: RowLayout,
    /// [`TableConfig::checksum`] without and with the view: what batches are decoded with.
    checksums: [u32; 2],
}

/// The random samples of a table: each follows from the seed and its number.
struct Draws {
    seed: u64,
    /// Number of the next one.
    next: AtomicU64,
}

impl Draws {
    /// Targets of the next sample.
    fn next(&self) -> Strata {
        Strata::new(self.seed, self.next.fetch_add(1, Ordering::Relaxed))
    }
}

impl Table {
    /// Slots for evicted chunks that samples still pin, beside a slot for each step.
    const PINNED_CHUNKS: u32 = 4096;

    /// Bytes of the index of a table, nearly all allocated with the table: about 100 for each step of `capacity`.
    pub fn index_bytes(config: &TableConfig) -> u64 {
        let capacity = config.capacity as u32;
        // Each stored step adds the offset of its blobs and the id of its item.
        let stored = config.capacity * (size_of::<RowBlobs>() + size_of::<ItemId>()) as u64;
        let chunks = Chunks::bytes(capacity + Self::PINNED_CHUNKS) + Arrivals::bytes_of(capacity);
        let samplers = samplers::bytes(config) + MaxPriority::bytes(config);
        Items::bytes(capacity) + samplers + chunks + stored
    }

    /// Bytes of one row without its blobs.
    pub fn row_bytes(&self) -> usize {
        self.format.layout.row_bytes
    }

    /// An empty table of a valid definition.
    pub(crate) fn new(
        config: TableConfig,
        reservation: Reservation,
        parameters: Arc<ParameterStore>,
        seed: u64,
    ) -> Self {
        let capacity = config.capacity as u32;
        let ids = IdSpace::unused();
        Table {
            format: RowFormat {
                layout: RowLayout::of(&config),
                checksums: [false, true].map(|with_view| config.checksum(with_view)),
            },
            items: Items::new(ids, capacity, config.priority_unit_log2, config.max_times_sampled),
            chunks: Slab::new(capacity + Self::PINNED_CHUNKS),
            arrivals: Mutex::new(Arrivals::new(ids.number, capacity as usize)),
            writers: Writers::new(&config.name),
            sampler: samplers::make(&config),
            limiter: Arc::new(Limiter::new(&config)),
            held: Held::new(reservation, config.effective_capacity_bytes()),
            max_priority: MaxPriority::new(&config),
            counters: TableCounters::default(),
            leases: Mutex::default(),
            draws: Draws { seed, next: AtomicU64::new(0) },
            dropped: AtomicBool::new(false),
            parameters,
            config: Arc::new(config),
        }
    }

    /// The definition.
    pub fn config(&self) -> &Arc<TableConfig> {
        &self.config
    }

    /// As [`Writers::open`]. Refuses a window of more steps than the table holds, and any writer of a dropped table.
    pub fn open_writer(&self, open: &OpenWriter) -> Result<WriterOpened> {
        self.check_open()?;
        // Checked for one stream: the others may get no steps.
        self.config.check_window(1, open.window_before, open.window_after)?;
        self.writers.open(open)
    }

    /// The writers, also of a dropped table: only [`Table::open_writer`] and [`Table::resume_writer`] refuse calls then.
    pub fn writers(&self) -> &Writers {
        &self.writers
    }

    /// As [`Writers::resume`]; a dropped table refuses every writer.
    pub fn resume_writer(&self, open: &OpenWriter) -> Result<WriterOpened> {
        self.check_open()?;
        self.writers.resume(open)
    }

    /// Ends a table that was dropped: calls on it fail from now on, its steps are removed.
    pub(crate) fn close(&self) {
        self.dropped.store(true, Ordering::Release);
        // A table that has failed is freed as a whole.
        let _ = self.empty();
        self.end_leases(|_| true);
        self.held.pushes.wake_all();
        self.held.samples.wake_all();
        for line in self.writers.outdated() {
            line.wake_all();
        }
    }

    /// Takes the insert lock.
    fn lock_inserts(&self) -> Result<MutexGuard<'_, Arrivals>> {
        self.arrivals.lock().map_err(|_| self.failed())
    }

    /// Whether a holder of the insert lock has panicked: a push may have been stored in part, without its sequence number,
    /// so nothing is read or written from then on, lest steps appear twice.
    pub fn has_failed(&self) -> bool {
        is_poisoned(&self.arrivals)
    }

    /// Runs a call that changes the table. Its panic is counted, logged and returned as an error, so that a server survives it.
    fn catch_panic<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        // Unwind safe: a panic poisons the insert lock, which guards all state that it may leave inconsistent.
        catch_unwind(AssertUnwindSafe(change)).unwrap_or_else(|panic| {
            self.counters.panics.fetch_add(1, Ordering::Relaxed);
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let reason = text.or(panic.downcast_ref::<&str>().copied());
            let (table, reason) = (&self.config.name, reason.unwrap_or("no reason"));
            let failed = self.has_failed();
            tracing::error!(table, reason, failed, "a call that changes the table panicked");
            Err(match failed {
                true => self.failed(),
                false => Error::Internal(format!("a call that changes table {table:?} panicked: {reason}")),
            })
        })
    }

    /// Fault injection for tests: marks every item as ended, so that the next eviction of one panics while it holds the insert lock. Not
    /// in release builds.
    #[cfg(debug_assertions)]
    #[doc(hidden)]
    pub fn end_items_unnoticed(&self) {
        self.items.end_unnoticed();
    }

    fn failed(&self) -> Error {
        Error::Internal(format!(
            "table {:?} has failed: a call panicked while it changed the table, which may hold a push in part; drop it, and \
             make it again or restore a snapshot",
            self.config.name
        ))
    }

    fn check_open(&self) -> Result<()> {
        if self.has_failed() {
            return Err(self.failed());
        }
        if self.dropped.load(Ordering::Acquire) {
            return Err(Self::was_dropped(&self.config.name));
        }
        Ok(())
    }

    /// The error of calls on a dropped table, even if a new table has its name.
    pub fn was_dropped(name: &str) -> Error {
        Error::UnknownTable { table: name.to_owned(), known: "it was dropped".to_owned() }
    }

    /// The table's number in its ids, which no other table of this process has.
    pub fn number(&self) -> u16 {
        self.items.number()
    }
}

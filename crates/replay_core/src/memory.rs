//! All tables and parameters of one process, under one byte limit, and [`Replay`] on them: its calls go straight to the memory, and block
//! until it admits them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use base::allocation::{self, MemoryLeft};
use base::system::{self, random_number};
use base::wait::Wait;

use crate::budget::{Budget, Reservation};
use crate::error::{Error, Result};
use crate::parameters::ParameterStore;
use crate::replay::{
    ChangeLease, Listing, OpenWriter, Parameters, Push, PushBody, PushChannel, ReadSteps, Replay, SampleChannel,
    SampleRequest, Sampled, StepsRead, UpdateReceipt, WriterId,
};
use crate::schema::TableConfig;
use crate::sync::{AtomicU64, Listener, Mutex, MutexGuard, Ordering, lock};
use crate::table::leases::Reader;
use crate::table::{Attempt, PendingCall, Table, Turn, WriterConnection};

/// Limits of a memory, and the seed of its sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Bytes of all tables at their capacity with their indexes, all parameters and all receive buffers.
    pub max_bytes: u64,
    /// Part of `max_bytes` for receive buffers: a half for pushes, and a half for requests that never wait for them. Longer frames are refused.
    pub receive_bytes: u64,
    /// Makes sampling reproducible where one thread pushes and samples; `None` is a random seed.
    pub seed: Option<u64>,
    /// Origin of a default `max_bytes`, for error messages; `None` if the user has set it.
    pub share: Option<MemoryShare>,
}

/// A share of the memory that a process may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryShare {
    pub percent: u8,
    /// All that the process may have.
    pub of: MemoryLeft,
}

impl MemoryShare {
    pub fn bytes(&self) -> u64 {
        self.of.bytes / 100 * u64::from(self.percent)
    }
}

impl fmt::Display for MemoryShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryShare { percent, of: MemoryLeft { bytes, whose } } = self;
        write!(f, "{percent} % of the {bytes} bytes {whose}")
    }
}

impl Default for MemoryLimits {
    /// No limit, 1 GiB of receive buffers and a random seed: for a memory in the user's own process.
    fn default() -> Self {
        MemoryLimits { max_bytes: u64::MAX, receive_bytes: 1 << 30, seed: None, share: None }
    }
}

/// Tables by name, parameters, and the limit that they share.
pub struct Memory {
    limits: MemoryLimits,
    /// Bytes of tables and parameters.
    kept: Arc<Budget>,
    tables: Mutex<BTreeMap<String, Arc<Table>>>,
    /// Held while a table is made, so that `tables` is not held over its allocation.
    making: Mutex<()>,
    /// Held by a save: a table keeps the state of one save point.
    saving: Mutex<()>,
    parameters: Arc<ParameterStore>,
    incarnation: u64,
    /// Own incarnation, or of the server whose snapshot was restored. Relaxed accesses: it publishes nothing else.
    identity: AtomicU64,
    seed: u64,
    started: Instant,
}

impl Memory {
    pub const MAX_TABLES: usize = 1024;

    /// An empty memory with a new incarnation number.
    ///
    /// # Panics
    /// When the operating system has no random numbers.
    pub fn new(limits: MemoryLimits) -> Arc<Self> {
        let kept = Budget::new(limits.max_bytes.saturating_sub(limits.receive_bytes));
        let incarnation = random_number();
        Arc::new(Memory {
            limits,
            parameters: Arc::new(ParameterStore::new(kept.clone())),
            kept,
            tables: Mutex::new(BTreeMap::new()),
            making: Mutex::new(()),
            saving: Mutex::new(()),
            incarnation,
            identity: AtomicU64::new(incarnation),
            seed: limits.seed.unwrap_or_else(random_number),
            started: system::now(),
        })
    }

    pub(crate) fn saving(&self) -> MutexGuard<'_, ()> {
        lock(&self.saving)
    }

    /// Random number of this memory; it changes when a server restarts.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Random number of this memory, which a server's snapshots keep: memories of the same one are copies, and have the same ids.
    pub fn identity(&self) -> u64 {
        self.identity.load(Ordering::Relaxed)
    }

    /// Goes on as the memory of a restored snapshot.
    pub(crate) fn set_identity(&self, identity: u64) {
        self.identity.store(identity, Ordering::Relaxed);
    }

    /// Reserves `bytes` of the limit of tables and parameters; `None` while fewer are left.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<Reservation> {
        self.kept.reserve(bytes)
    }

    pub fn limits(&self) -> MemoryLimits {
        self.limits
    }

    pub fn parameters(&self) -> &ParameterStore {
        &self.parameters
    }

    /// [`ParameterStore::get`] for a `writer` of a table, which uses this version from now on. An unknown writer is ignored.
    pub fn get_parameters(&self, name: &str, newer_than: u64, writer: Option<(&Table, u64)>) -> Option<Parameters> {
        let newer = self.parameters.get(name, newer_than);
        if let Some((table, writer)) = writer {
            let version = match &newer {
                Some(newer) => newer.version,
                None => newer_than.min(self.parameters.version(name)),
            };
            table.writers().has_parameters(writer, name, version);
        }
        newer
    }

    /// Creates a table, or returns an existing one of the same definition. The bytes of its capacity and of its index
    /// ([`Table::index_bytes`]) are reserved at once.
    ///
    /// # Errors
    /// [`Error::Table`] for an invalid definition, too many tables, or more bytes than are left of the limit or to the process;
    /// [`Error::TableDiffers`] when a table of that name has another definition; [`Error::Io`] without random numbers.
    pub fn create_table(&self, config: &TableConfig) -> Result<Arc<Table>> {
        config.validate()?;
        let _making = lock(&self.making);
        let (found, count) = {
            let tables = lock(&self.tables);
            (tables.get(&config.name).cloned(), tables.len())
        };
        if let Some(table) = found {
            return table.config().check_same(config).map(|()| table);
        }
        let refuse = |reason: String| Error::Table { table: config.name.clone(), reason };
        if count >= Self::MAX_TABLES {
            return Err(refuse(format!("there are {count} tables already")));
        }
        let (steps, index) = (config.effective_capacity_bytes(), Table::index_bytes(config));
        allocation::check("its index", index).map_err(|error| refuse(format!("{error}: lower capacity")))?;
        let reservation = self
            .kept
            .reserve(steps.saturating_add(index))
            .ok_or_else(|| refuse(self.too_large(config, steps, index)))?;
        // Each table has its own sequence of samples, whatever the order of creation.
        let seed = config.name.bytes().fold(self.seed, |seed, byte| seed.rotate_left(8) ^ u64::from(byte));
        let table = Arc::new(Table::new(config.clone(), reservation, self.parameters.clone(), seed));
        lock(&self.tables).insert(config.name.clone(), table.clone());
        Ok(table)
    }

    /// The reason why a table of `steps` and `index` bytes exceeds the limit, and the settings to change.
    fn too_large(&self, config: &TableConfig, steps: u64, index: u64) -> String {
        let left = self.kept.left();
        let advice = match (left.saturating_sub(index), config.capacity_bytes) {
            (0, _) => "lower capacity".to_owned(),
            (most, 0) => format!(
                "set capacity_bytes to at most {most} (unset it reserves space for capacity steps that do not pack), lower \
                 capacity"
            ),
            (most, _) => format!("lower capacity_bytes to at most {most}, or capacity"),
        };
        let limit = self.kept.limit();
        let share = self
            .limits
            .share
            .map_or_else(String::new, |share| format!(" (max_bytes is not set, and by default {share})"));
        format!(
            "its index takes {index} bytes and its steps up to {steps}, and of the {limit} for tables and parameters{share} there \
             are {left} left: {advice}, or raise the memory's max_bytes"
        )
    }

    /// The table of that name. The error names the existing ones.
    pub fn table(&self, name: &str) -> Result<Arc<Table>> {
        let tables = lock(&self.tables);
        tables.get(name).cloned().ok_or_else(|| unknown(name, &tables))
    }

    pub fn tables(&self) -> Vec<Arc<Table>> {
        lock(&self.tables).values().cloned().collect()
    }

    pub fn list(&self) -> Listing {
        let tables = self.tables();
        Listing {
            tables: tables.iter().map(|table| TableConfig::clone(table.config())).collect(),
            parameters: self.parameters.list(),
        }
    }

    /// Removes every step and item of a table, and resets its rate limiter and its largest priority. Writers continue.
    pub fn empty_table(&self, name: &str) -> Result<()> {
        self.table(name)?.empty()
    }

    /// Removes a table. Calls on it fail with [`Error::UnknownTable`]; sampled batches stay valid.
    pub fn drop_table(&self, name: &str) -> Result<()> {
        let table = {
            let mut tables = lock(&self.tables);
            tables.remove(name).ok_or_else(|| unknown(name, &tables))?
        };
        table.close();
        Ok(())
    }

    /// Counters and gauges of everything: `incarnation` and `identity` (16 hexadecimal digits), `uptime_s`, `max_bytes`,
    /// `reserved_bytes` (tables at their capacity with their indexes, and parameters), `bytes` (held by tables),
    /// `tables` (name to [`Table::stats`]) and `parameters` (name to version and bytes).
    pub fn stats(&self) -> Value {
        let tables: Map<String, Value> =
            self.tables().iter().map(|table| (table.config().name.clone(), table.stats())).collect();
        let bytes: u64 = tables.values().filter_map(|t| t["bytes"].as_u64()).sum();
        json!({
            "incarnation": format!("{:016x}", self.incarnation),
            "identity": format!("{:016x}", self.identity()),
            "uptime_s": system::elapsed(self.started).as_secs_f64(),
            "max_bytes": self.limits.max_bytes,
            "reserved_bytes": self.kept.reserved(),
            "bytes": bytes,
            "tables": tables,
            "parameters": self.parameters.stats(),
        })
    }
}

fn unknown(name: &str, tables: &BTreeMap<String, Arc<Table>>) -> Error {
    let known = if tables.is_empty() {
        "the memory has no tables: make it with `create_table`".to_owned()
    } else {
        let names: Vec<_> = tables.keys().map(|name| format!("{name:?}")).collect();
        format!("there are {}", names.join(", "))
    };
    Error::UnknownTable { table: name.to_owned(), known }
}

/// Repeats `attempt` until it is ready, the deadline has passed or the caller is interrupted. Its argument is `true` in the
/// last attempt before the deadline's error.
fn block_on<T>(wait: &Wait<'_>, mut attempt: impl FnMut(bool, &mut Turn) -> Result<Attempt<T>>) -> Result<T> {
    let mut call = PendingCall::new(Turn::default(), wait.deadline, Error::deadline);
    let mut slices = wait.slices(wait.deadline);
    loop {
        match call.poll(system::now, Turn::changed, &mut attempt)? {
            Attempt::Ready(done) => return Ok(done),
            Attempt::Blocked((reason, changed)) => {
                let now = system::now();
                reason.report(wait, now, Wait::REPORT_AFTER);
                // Retries after a change, and at the end of the slice.
                let _ = changed.wait_deadline(slices.next_wake(now)?);
            }
        }
    }
}

impl<E: From<Error>> Replay<E> for Memory {
    fn create_table(&self, config: &TableConfig, _wait: &Wait<'_>) -> Result<(), E> {
        Memory::create_table(self, config)?;
        Ok(())
    }

    fn table_config(&self, table: &str, _wait: &Wait<'_>) -> Result<Arc<TableConfig>, E> {
        Ok(self.table(table)?.config().clone())
    }

    fn drop_table(&self, table: &str, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(Memory::drop_table(self, table)?)
    }

    fn open_writer(&self, table: &str, open: OpenWriter, _wait: &Wait<'_>) -> Result<Box<dyn PushChannel<E>>, E> {
        let table = self.table(table)?;
        let opened = table.open_writer(&open)?;
        let connection = Arc::default();
        table.writers().attach(open.writer, &connection);
        Ok(Box::new(LocalPushes {
            table,
            writer: open.writer,
            epoch: opened.epoch,
            last_sequence: opened.last_sequence,
            connection,
        }))
    }

    fn sample(&self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled, E> {
        let table = self.table(table)?;
        Ok(block_on(wait, |last, turn| table.try_sample(request, last, turn))?)
    }

    /// Each `next` samples: no requests are in flight between calls.
    fn samples(&self, table: &str, request: SampleRequest, _in_flight: usize) -> Result<Box<dyn SampleChannel<E>>, E> {
        let table = self.table(table)?;
        Ok(Box::new(LocalSamples {
            table,
            request,
            counted: false,
            reader: Reader::from("an iterator of this process"),
        }))
    }

    fn change_lease(&self, table: &str, change: ChangeLease, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(self.table(table)?.change_lease(change)?)
    }

    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        _wait: &Wait<'_>,
    ) -> Result<UpdateReceipt, E> {
        Ok(self.table(table)?.update_priorities(ids, priorities)?)
    }

    fn read_steps(&self, table: &str, request: &ReadSteps, _wait: &Wait<'_>) -> Result<StepsRead, E> {
        Ok(self.table(table)?.read_steps(request)?)
    }

    fn report_corrupt(&self, table: &str, id: u64, reason: &str, _wait: &Wait<'_>) -> Result<Option<String>, E> {
        Ok(self.table(table)?.report_corrupt(id, reason))
    }

    fn put_parameters(&self, name: &str, bytes: Bytes, _wait: &Wait<'_>) -> Result<u64, E> {
        Ok(self.parameters().put(name, 0, bytes)?)
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        _wait: &Wait<'_>,
    ) -> Result<Option<Parameters>, E> {
        // A dropped table has no writers.
        let table = writer.and_then(|id| self.table(&id.table).ok());
        let writer = table.as_deref().zip(writer.map(|id| id.writer));
        Ok(Memory::get_parameters(self, name, newer_than, writer))
    }

    fn list(&self, _wait: &Wait<'_>) -> Result<Listing, E> {
        Ok(Memory::list(self))
    }

    fn stats(&self, _wait: &Wait<'_>) -> Result<serde_json::Value, E> {
        Ok(Memory::stats(self))
    }
}

/// A writer's pushes, each applied at once. Dropped without [`PushChannel::close`], the writer is disconnected: it may be taken over.
struct LocalPushes {
    table: Arc<Table>,
    writer: u64,
    epoch: u32,
    last_sequence: u64,
    connection: Arc<WriterConnection>,
}

impl Drop for LocalPushes {
    fn drop(&mut self) {
        self.connection.end(system::now());
    }
}

impl<E: From<Error>> PushChannel<E> for LocalPushes {
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<(), E> {
        let push = Push { writer: self.writer, epoch: self.epoch, sequence: self.last_sequence + 1, body };
        block_on(wait, |_, turn| self.table.try_push(&push, turn))?;
        self.last_sequence = push.sequence;
        Ok(())
    }

    fn flush(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(())
    }

    fn end_steps(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        self.table.writers().has_parameters(self.writer, "", 0);
        Ok(())
    }

    fn close(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(self.table.writers().close(self.writer, self.epoch)?)
    }
}

struct LocalSamples {
    table: Arc<Table>,
    request: SampleRequest,
    /// Whether the wait for the next batch is counted: a call that meets its deadline is continued by the next one.
    counted: bool,
    /// Holder of its leases.
    reader: Reader,
}

impl Drop for LocalSamples {
    fn drop(&mut self) {
        self.table.return_leases(&self.reader);
    }
}

impl<E: From<Error>> SampleChannel<E> for LocalSamples {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled, E> {
        Ok(block_on(wait, |last, turn| {
            turn.counted |= self.counted;
            let attempt = self.table.try_sample(&self.request, last, turn)?;
            self.counted = turn.counted && matches!(attempt, Attempt::Blocked(_));
            Ok(attempt.map(|sampled| self.table.hold(&self.request, sampled, &self.reader)))
        })?)
    }
}

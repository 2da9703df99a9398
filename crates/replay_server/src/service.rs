//! The server's requests against the memory, without sockets, clocks or tasks. For a request that cannot be answered yet the
//! result is [`Attempt::Blocked`]: the caller waits for [`Turn::changed`] and tries again.
//!
//! A connection's first request about a table names it; later ones have the table's number.
//!
//! # Invariant
//!
//! A number always means the same table: iterators, writers and waiting calls end with their table, also if another gets its name.

mod tables;

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rustls::pki_types::UnixTime;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::plugin::Extension;
use crate::receive::ReceiveBudgets;
use crate::reply_budget::{LargeReply, ReplyBudgets};
use crate::snapshots::Snapshots;
use base::allocation::check_size;
use base::histogram::Histogram;
use base::notation::shortened;
use replay_core::memory::Memory;
use replay_core::replay::{Parameters, SampleRequest, Sampled};
use replay_core::schema::TableConfig;
use replay_core::table::leases::Reader;
use replay_core::table::{Attempt, Table, Turn};
use replay_link::carry_out;
use replay_link::error::{Error, Result};
use replay_link::tls::{Dates, RENEW};
use replay_wire::{MAX_NUMBERED_TABLES, OpenOrResume, RELEASE, ReplyBody, ReplySize, Request, RequestBody, Role};

pub use tables::Tables;

/// Most bytes of a name that is kept; the longest name of a table is shorter.
const KEPT: usize = 160;

/// The memory of a server, and its extensions.
pub struct Service {
    /// The served memory.
    pub memory: Arc<Memory>,
    /// Budgets for receive buffers.
    pub receive_budgets: ReceiveBudgets,
    /// Budgets for unread replies.
    pub reply_budgets: ReplyBudgets,
    /// The extensions that this server runs.
    pub extensions: Vec<Arc<dyn Extension>>,
    /// Extensions that it does not run: their names, and the errors for requests to them.
    pub absent: Vec<(&'static str, String)>,
    tables: Arc<Tables>,
    max_frame_bytes: u64,
    snapshots: OnceLock<Arc<Snapshots>>,
    /// The certificate's last second, in Unix time; 0 without TLS.
    certificate_end: AtomicU64,
    /// Counters of the connections, part of [`Service::stats`].
    pub counters: Counters,
}

/// Counters of a server's connections.
#[derive(Debug, Default, Serialize)]
pub struct Counters {
    /// Open connections.
    pub connections: RelaxedCounter,
    /// Connections since the start.
    pub connections_opened: RelaxedCounter,
    /// Connections refused: over the limit.
    pub connections_refused: RelaxedCounter,
    /// Handshakes that failed: TLS, or a missing or wrong token.
    pub failed_logins: RelaxedCounter,
    /// Invalid frames.
    pub bad_frames: RelaxedCounter,
    /// Clients disconnected at the write deadline, or because their unread replies blocked other clients.
    pub slow_readers_dropped: RelaxedCounter,
    /// Requests received.
    pub requests: RelaxedCounter,
    /// Repeated attempts at blocked requests.
    pub retries: RelaxedCounter,
    /// Error replies, except at the end of a wait.
    pub errors: RelaxedCounter,
    /// Bytes of received frames.
    pub bytes_received: RelaxedCounter,
    /// Bytes of sent frames.
    pub bytes_sent: RelaxedCounter,
    /// Times of requests, by their kind.
    pub latency_s: Latencies,
}

/// Relaxed atomic counter: it publishes no other data.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub struct RelaxedCounter(AtomicU64);

impl RelaxedCounter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

impl Service {
    /// Makes the configured tables and serves the memory.
    ///
    /// # Errors
    /// Errors of [`Memory::create_table`].
    pub fn new(
        memory: Arc<Memory>,
        tables: &[TableConfig],
        max_frame_bytes: u64,
        reply_budgets: ReplyBudgets,
    ) -> Result<Self> {
        Ok(Service {
            receive_budgets: ReceiveBudgets::new(&memory.limits()),
            reply_budgets,
            tables: Tables::new(memory.clone(), tables)?,
            memory,
            max_frame_bytes,
            extensions: Vec::new(),
            absent: Vec::new(),
            snapshots: OnceLock::new(),
            certificate_end: AtomicU64::new(0),
            counters: Counters::default(),
        })
    }

    /// Adds the snapshots of the memory, once.
    pub fn save_snapshots(&self, snapshots: Arc<Snapshots>) {
        let _ = self.snapshots.set(snapshots);
    }

    /// Keeps the dates of the server's certificate for [`Self::stats`], and warns if clients refuse it now.
    pub fn note_certificate(&self, dates: Dates) {
        // Relaxed: the number publishes no other data.
        self.certificate_end.store(dates.end.as_secs(), Ordering::Relaxed);
        if let Some(problem) = dates.problem() {
            tracing::warn!("{problem}: {RENEW}");
        }
    }

    /// The snapshots of the memory.
    ///
    /// # Errors
    /// [`Error::Config`] when the server saves none.
    pub fn snapshots(&self) -> Result<&Arc<Snapshots>> {
        self.snapshots
            .get()
            .ok_or_else(|| Error::Config("this server saves no snapshots: start it with --snapshot DIR".to_owned()))
    }

    /// The extension of this name.
    ///
    /// # Errors
    /// [`Error::Config`] when the server does not have it.
    pub fn extension(&self, name: &str) -> Result<&Arc<dyn Extension>> {
        let mut extensions = self.extensions.iter();
        extensions.find(|extension| extension.name() == name).ok_or_else(|| {
            let absent = self.absent.iter().find(|(absent, _)| *absent == name);
            Error::Config(match absent {
                Some((_, error)) => error.clone(),
                None => format!("this program does not know the extension {name:?}"),
            })
        })
    }

    /// The tables, if the request creates, empties or drops one and the server has a memory.
    pub fn table_request(&self, request: &RequestBody) -> Option<&Arc<Tables>> {
        use RequestBody::{CreateTable, DropTable, EmptyTable};
        let handled = matches!(request, CreateTable(_) | EmptyTable(_) | DropTable(_));
        (handled && self.check_there_is_memory(request).is_ok()).then_some(&self.tables)
    }

    /// Answer to a request that `role` does not allow; `None` if it is allowed. Creating a table that exists with the same definition
    /// succeeds for every role, so that actors can run the learner's setup code.
    pub fn refuse(&self, request: &RequestBody, role: Role) -> Option<Result<ReplyBody>> {
        let forbidden = role.check(request).err()?;
        let exists = match request {
            RequestBody::CreateTable(config) => self.tables.find(config),
            _ => None,
        };
        Some(exists.unwrap_or(Err(forbidden.into())))
    }

    /// Memory use of the reply; `None` for a few bytes.
    pub fn large_reply(&self, request: &RequestBody) -> Option<LargeReply> {
        match (request.reply_size(), request) {
            (ReplySize::Few, _) => None,
            (ReplySize::Report, _) => Some(LargeReply::Report),
            (ReplySize::Large, RequestBody::GetParameters(get)) => {
                let newest = self.memory.parameters().newest(&get.name, get.newer_than);
                newest.map(LargeReply::Shared)
            }
            (ReplySize::Large, _) => Some(LargeReply::Copy),
        }
    }

    /// Tries a request once; `table` is the one that it is about. In the `last` attempt a request with `allow_short` samples the
    /// available items. All attempts at one request share its `turn`. Leased batches are held for the `reader`.
    ///
    /// # Errors
    /// The error to answer the request with.
    pub fn attempt(
        &self,
        request: &RequestBody,
        table: Option<&NumberedTable>,
        last: bool,
        turn: &mut Turn,
        reader: &Reader,
    ) -> Result<Attempt<ReplyBody>> {
        self.check_there_is_memory(request)?;
        let of_table = || match table {
            Some(table) => Ok(table.get(&self.memory)?),
            None => Err(Error::protocol(format!("a request {:?} without a table", request.name()))),
        };
        let reply = match request {
            RequestBody::CreateTable(_) | RequestBody::EmptyTable(_) | RequestBody::DropTable(_) => {
                self.tables.answer(request)?
            }
            RequestBody::DescribeTable(name) => ReplyBody::Table(TableConfig::clone(self.memory.table(name)?.config())),
            RequestBody::OpenWriter(OpenOrResume { open, resume }) => {
                let table = of_table()?;
                let opened = if *resume { table.resume_writer(open) } else { table.open_writer(open) };
                ReplyBody::Writer(opened?)
            }
            RequestBody::Push(push) => {
                let pushed = of_table()?.try_push(push, turn)?;
                if base::planted!(EarlyReply) && matches!(pushed, Attempt::Blocked(_)) {
                    return Ok(Attempt::Ready(ReplyBody::Pushed(0)));
                }
                return Ok(pushed.map(ReplyBody::Pushed));
            }
            RequestBody::Sample(request) => {
                let table = of_table()?;
                let sampled = self.sample(&table, request, last, turn)?;
                return Ok(sampled.map(|sampled| ReplyBody::Sampled(table.hold(request, sampled, reader))));
            }
            RequestBody::ChangeLease(change) => {
                of_table()?.change_lease(*change)?;
                ReplyBody::Done
            }
            RequestBody::UpdatePriorities(update) => {
                ReplyBody::Updated(of_table()?.update_priorities(&update.ids, &update.priorities)?)
            }
            RequestBody::ReadSteps(read) => ReplyBody::StepsRead(of_table()?.read_steps(read)?),
            RequestBody::ReportCorrupt(report) => {
                ReplyBody::Corrupt(of_table()?.report_corrupt(report.id, &report.reason))
            }
            RequestBody::PutParameters(put) => {
                let stored = self.memory.parameters();
                ReplyBody::Parameters(Some(Parameters {
                    version: stored.put_version(&put.name, put.id, put.version, put.bytes.clone())?,
                    bytes: bytes::Bytes::new(),
                }))
            }
            RequestBody::GetParameters(get) => {
                let table = table.and_then(|table| table.current(&self.memory));
                let writer = table.as_deref().map(|table| (table, get.writer));
                ReplyBody::Parameters(self.memory.get_parameters(&get.name, get.newer_than, writer))
            }
            RequestBody::List => ReplyBody::Listing(self.memory.list()),
            RequestBody::Stats => ReplyBody::Stats(self.stats().to_string()),
            RequestBody::CloseWriter(close) => {
                // A dropped table has no writers to close.
                if let Ok(table) = of_table() {
                    table.writers().close(close.writer, close.epoch)?;
                }
                ReplyBody::Done
            }
            RequestBody::Hello(_) | RequestBody::Authenticate(_) => {
                let over = "the handshake of this connection is over";
                return Err(Error::protocol(over.to_owned()));
            }
            // `carry_out` refuses what is no command: a snapshot is saved on a thread of its own, an extension answers in its session.
            command => {
                carry_out(&self.memory, command)?;
                ReplyBody::Done
            }
        };
        Ok(Attempt::Ready(reply))
    }

    /// Counters and gauges of the memory, `server`, `tls`, `snapshots` and each extension, under its
    /// name; `receive_bytes` (reserved for receive buffers) and `reply_bytes` (of unread replies). `extensions` maps each extension to JSON
    /// pointers to its objects of named members.
    pub fn stats(&self) -> Value {
        let mut stats = self.memory.stats();
        stats["receive_bytes"] = self.receive_budgets.reserved().into();
        stats["reply_bytes"] = self.reply_budgets.held().into();
        stats["server"] = json!(self.counters);
        stats["server"]["release"] = RELEASE.into();
        for extension in &self.extensions {
            let groups = extension.metrics().iter();
            let named = groups.filter(|group| group.label.is_some());
            let named: Vec<_> = named.map(|group| group.pointer).collect();
            stats["extensions"][extension.name()] = named.into();
            stats[extension.name()] = extension.stats();
        }
        let certificate_end = self.certificate_end.load(Ordering::Relaxed);
        if certificate_end > 0 {
            let left = certificate_end as i64 - UnixTime::now().as_secs() as i64;
            stats["tls"] = json!({"certificate_expires_s": left});
        }
        if let Some(snapshots) = self.snapshots.get() {
            stats["snapshots"] = snapshots.stats();
        }
        stats
    }

    fn check_there_is_memory(&self, request: &RequestBody) -> Result<()> {
        let needs_none = matches!(request, RequestBody::CallExtension(_) | RequestBody::Stats | RequestBody::List);
        let mut extensions = self.extensions.iter();
        match extensions.find_map(|extension| extension.instead_of_memory()) {
            Some(reason) if !needs_none => Err(Error::Config(reason.to_owned())),
            _ => Ok(()),
        }
    }

    fn sample(
        &self,
        table: &Arc<Table>,
        request: &SampleRequest,
        last: bool,
        turn: &mut Turn,
    ) -> Result<Attempt<Sampled>> {
        check_size(
            "a sampled batch, in bytes of rows alone,",
            row_bytes(table, request),
            self.max_frame_bytes,
            "sample fewer items at a time, or start the server with a larger --max-frame-bytes",
        )?;
        Ok(table.try_sample(request, last, turn)?)
    }
}

/// Bytes of the rows in a full batch.
fn row_bytes(table: &Table, request: &SampleRequest) -> u64 {
    let rows = 1 + u64::from(request.before) + u64::from(request.after);
    u64::from(request.count).saturating_mul(rows).saturating_mul(table.row_bytes() as u64)
}

/// Counts an open connection until dropped.
pub struct OpenConnection<'a>(&'a Counters);

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        base::planted!(KeptConnection => return);
        self.0.connections.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    /// Counts a connection.
    pub fn open(&self) -> OpenConnection<'_> {
        self.connections_opened.add(1);
        self.connections.add(1);
        OpenConnection(self)
    }
}

/// Histograms of the time from the arrival of a request to its reply, waits included, by kind of request.
#[derive(Debug)]
pub struct Latencies([Histogram; RequestBody::NAMES.len()]);

impl Default for Latencies {
    fn default() -> Self {
        // Bounds from 1 µs to 69 s, in nanoseconds.
        Latencies(std::array::from_fn(|_| Histogram::new(10, 36)))
    }
}

impl Latencies {
    /// Counts a request that is answered.
    pub fn record(&self, request: &RequestBody, elapsed: Duration) {
        let elapsed = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.0[request.kind()].record(elapsed);
    }
}

/// An object with a histogram, in seconds, for each kind that has been requested.
impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let stats = RequestBody::NAMES.iter().zip(&self.0);
        let stats = stats.map(|(kind, histogram)| (kind, histogram.stats(1e-9)));
        serializer.collect_map(stats.filter(|(_, stats)| stats["count"] != 0))
    }
}

/// A connection's tables, in the order of their numbers.
#[derive(Default)]
pub struct NumberedTables(Vec<Rc<NumberedTable>>);

/// A table that a connection has named.
pub struct NumberedTable {
    name: String,
    /// The first table that had the name. Weak: a dropped table returns its memory at once.
    table: OnceCell<Weak<Table>>,
}

impl NumberedTables {
    /// The table of a request that has arrived, which may name it; `None` for a request that has none.
    ///
    /// # Errors
    /// [`Error::Protocol`](replay_wire::Error::Protocol) for a number that was not named, or not the next one.
    pub fn of(&mut self, request: &Request, memory: &Memory) -> Result<Option<Rc<NumberedTable>>> {
        let number = usize::from(request.table);
        if let Some(name) = &request.table_name {
            if number != self.0.len() + 1 || number > MAX_NUMBERED_TABLES {
                return Err(Error::protocol(format!(
                    "a request names table {number}, and the connection has numbered {} of at most {MAX_NUMBERED_TABLES}",
                    self.0.len()
                )));
            }
            self.0.push(Rc::new(NumberedTable::named(name)));
        }
        let Some(index) = number.checked_sub(1) else { return Ok(None) };
        let Some(table) = self.0.get(index) else {
            return Err(Error::protocol(format!("a request about table {number}, which has no name yet")));
        };
        // An error is the answer to the request.
        let _ = table.get(memory);
        Ok(Some(Rc::clone(table)))
    }
}

impl NumberedTable {
    /// The first table that has the name when it is asked for.
    pub fn named(name: &str) -> Self {
        NumberedTable { name: shortened(name, KEPT).into_owned(), table: OnceCell::new() }
    }

    /// The table that has the name now. For a request that goes to a writer, whose number is random: no other table has it.
    pub fn current(&self, memory: &Memory) -> Option<Arc<Table>> {
        memory.table(&self.name).ok()
    }

    /// The table.
    ///
    /// # Errors
    /// [`UnknownTable`](replay_core::Error::UnknownTable) when there has been none of the name yet, or it was dropped.
    pub fn get(&self, memory: &Memory) -> replay_core::error::Result<Arc<Table>> {
        if let Some(table) = self.table.get() {
            return table.upgrade().ok_or_else(|| Table::was_dropped(&self.name));
        }
        let table = memory.table(&self.name)?;
        self.table.get_or_init(|| Arc::downgrade(&table));
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_request_counts_for_its_kind() {
        let latencies = Latencies::default();
        assert_eq!(json!(latencies), json!({}));
        latencies.record(&RequestBody::Stats, Duration::from_millis(1));
        latencies.record(&RequestBody::Snapshot, Duration::ZERO);
        let stats = json!(latencies);
        let kinds: Vec<_> = stats.as_object().unwrap().keys().collect();
        assert_eq!(kinds, ["snapshot", "stats"]);
        assert_eq!(stats["stats"]["count"], 1);
    }
}

//! The interface of a replay memory: requests, replies and the `Replay` trait. `memory` (this process) and `client` (a server) implement
//! it; the writer, the views and Python use nothing else. Priorities of all requests are checked here.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::view_spec::ViewSpec;

use base::wait::Wait;

/// Opens, or takes over, a writer of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenWriter {
    /// A random number of the client; a second connection with it fences the first one off.
    pub writer: u64,
    /// Display name, for errors and logs.
    pub name: String,
    /// Index of the writer's server among several, modulo their number. Not sent over the wire.
    pub server: Option<u32>,
    /// Number of streams the writer numbers from 0.
    pub streams: u32,
    /// Steps before the anchor of this writer's items.
    pub window_before: u16,
    /// Steps after the anchor of this writer's items.
    pub window_after: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterOpened {
    /// Rises with every connection of the same writer.
    pub epoch: u32,
    /// The last push that was applied; 0 when there was none.
    pub last_sequence: u64,
    /// Steps of the writer that the table has accepted.
    pub steps: u64,
    /// Connected writers of the table, this one included.
    pub connected: u64,
}

/// One chunk of a push: consecutive steps of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHead {
    pub stream: u32,
    pub rows: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
    /// Length in the push's payload.
    pub bytes: u32,
    /// Version of the parameters that its rows come from, see [`TableConfig::parameters`]; 0 is unknown.
    pub version: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NewItem {
    /// The anchor's step number in its stream.
    pub anchor: u64,
    pub stream: u32,
    /// Rows of the window before the anchor that exist: at most the writer's `window_before`.
    pub before: u16,
    /// Rows of the window after the anchor that exist: at most the writer's `window_after`.
    pub after: u16,
    /// Priority before the exponent; `None` takes the table's largest one.
    pub priority: Option<f32>,
}

/// Chunks and items of one push, which is applied as a whole or not at all.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PushBody {
    /// At most one chunk for each stream.
    pub chunks: Vec<ChunkHead>,
    /// Items whose windows are complete with these chunks.
    pub items: Vec<NewItem>,
    /// The chunks' payloads, one after the other.
    pub payload: Bytes,
}

impl PushBody {
    /// Checks the items' priorities.
    pub fn check_priorities(&self) -> Result<()> {
        check_priorities_to(f64::MAX, self.items.iter().map(|item| item.priority.map_or(0.0, f64::from)))
    }
}

/// A [`PushBody`] with the writer, epoch and sequence number by which it applies once.
#[derive(Debug, Clone, PartialEq)]
pub struct Push {
    pub writer: u64,
    /// The writer's connection.
    pub epoch: u32,
    /// 1, 2, 3, ...
    pub sequence: u64,
    pub body: PushBody,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampleRequest {
    pub count: u32,
    pub before: u16,
    pub after: u16,
    /// Return fewer items at the deadline instead of an error.
    pub allow_short: bool,
    /// Also report the smallest probability in the table: costs a scan of it.
    pub min_probability: bool,
    /// For a part of a batch from several memories.
    pub share: Option<BatchShare>,
    /// [`TableConfig::checksum`] of the definition that the batch is decoded with: a table of another one refuses. 0 is any.
    pub definition: u32,
    /// Milliseconds for which the items stay with their reader, from the begin of the batch's lease until it is acknowledged. 0 is no
    /// lease, [`Self::NO_END`] one without an end.
    pub lease_ms: u32,
}

/// One memory's share of a batch from several. It never waits: its reply has as many items as there are, perhaps none, and a [`ShareState`].
/// The client checks [`min_size`](TableConfig::min_size) over all memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShare {
    /// Samples to take from the rate limiter, as far as it admits them: over all memories as many as the client gets items.
    pub take: u32,
}

/// State of a table when one part of a batch was sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareState {
    /// The table's number in its ids, see [`IdSpace`](crate::table::ids::IdSpace). Restored items keep earlier numbers.
    pub number: u16,
    /// Sum of the masses, at the instant of sampling.
    pub total_mass: f64,
    /// Live items, with or without priority.
    pub items: u64,
    /// Samples taken from the rate limiter by this share.
    pub taken: u32,
    /// Samples that the rate limiter would admit after this share; infinite without a ratio.
    pub allowance: f64,
    /// Pushes wait, or the next one would, perhaps for samples.
    pub holds_pushes: bool,
    pub min_size: u64,
    pub samples_per_insert: f64,
    pub max_times_sampled: u32,
}

impl SampleRequest {
    /// [`Self::lease_ms`] of a lease that ends with its reader alone.
    pub const NO_END: u32 = u32::MAX;

    /// A sample of `count` whole items, with the rows that `view` needs.
    pub fn new(count: u32, view: &ViewSpec) -> Self {
        SampleRequest { count, before: view.before(), after: view.after(), ..SampleRequest::default() }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SampledItem {
    /// Its id: names no other item in any table or memory, and stays valid in servers restored from a snapshot of it.
    pub id: u64,
    /// Its probability at the instant of sampling.
    pub probability: f64,
    /// Steps inserted into the table since the item was.
    pub age: u32,
    /// Samples of it so far, this one included.
    pub times_sampled: u32,
    /// Rows before the anchor in the reply: as many as wanted, fewer at an episode's start.
    pub before: u16,
    /// Rows after the anchor in the reply: as many as wanted, fewer at an episode's end.
    pub after: u16,
    /// The smallest [`ChunkHead::version`] of its rows, in a table that names parameters; else 0.
    pub version: u64,
}

/// A sampled batch, still packed: rows are copied, blobs are slices of stored chunks.
#[derive(Default)]
pub struct Sampled {
    /// The items, in the order of the sample.
    pub items: Vec<SampledItem>,
    /// Live items with mass at the instant of sampling.
    pub live_items: u64,
    /// The smallest probability in the table, when it was asked for.
    pub min_probability: Option<f64>,
    /// The table's state, for a share of a batch.
    pub state: Option<ShareState>,
    /// The rows of all items, item after item, in the layout of `schema/innet.capnp`.
    pub rows: Bytes,
    /// The blobs of these rows in the same order, in one or more segments; the blobs of a row never
    /// straddle two segments. In process they are slices of the chunks as they were received.
    pub blobs: Vec<Bytes>,
    /// Lengths of the shares of a batch from several tables or servers, which [`Decoder`](crate::view::Decoder) mixes; empty for one.
    pub shares: Vec<usize>,
    /// Number of the batch's lease; 0 is none.
    pub lease: u64,
    /// Returns undelivered samples to the rate limiter and to items with `max_times_sampled`.
    pub credit: Option<Box<dyn SampleCredit>>,
}

/// Samples taken from the rate limiter and from items with `max_times_sampled`. Dropped undelivered, they are given back.
pub trait SampleCredit: Send + Sync {
    /// The batch has arrived: the samples count, and items end with their last one.
    fn delivered(self: Box<Self>);
}

/// A change of the lease of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeLease {
    /// [`Sampled::lease`].
    pub lease: u64,
    /// The batch has reached its caller, and the time of its lease begins; else it is acknowledged.
    pub begin: bool,
}

/// A request for the stored steps of a table, in the order of their arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadSteps {
    /// Where the last answer ended; the default begins with the oldest steps.
    pub from: ReadPosition,
    /// Bytes of chunks in the answer, unless the first one is larger.
    pub bytes: u32,
}

/// A position in the steps of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadPosition {
    /// Index of the server among several. Not sent over the wire.
    pub server: u32,
    /// The number of the table, see [`IdSpace`](crate::table::ids::IdSpace); a restart of its server keeps it.
    pub number: u16,
    /// Number of the next chunk, in the order of arrival.
    pub next: u64,
    /// Number of the chunk before which the reading ends: it leaves out steps that arrive after its first request. 0 in that request.
    pub end: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSteps {
    /// Number of its writer, which no other writer has.
    pub writer: u64,
    pub stream: u32,
    pub rows: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
    /// [`ChunkHead::version`].
    pub version: u64,
    /// Rows and blobs, as they were pushed.
    pub packed: Bytes,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepsRead {
    /// Chunks in the order of arrival, without those evicted since the last request.
    pub chunks: Vec<StoredSteps>,
    /// Where to go on; `None` at the end.
    pub next: Option<ReadPosition>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UpdateReceipt {
    /// Ids whose priority was set.
    pub applied: u32,
    /// Ids of removed items, or of other tables or memories: counted and ignored.
    pub stale: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterId {
    pub table: String,
    pub writer: u64,
    /// [`PushChannel::server`].
    pub server: usize,
}

/// One version of named parameters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Rises by one with every put; the first is 1.
    pub version: u64,
    pub bytes: Bytes,
}

/// Tables and parameters of a memory, each by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Listing {
    pub tables: Vec<TableConfig>,
    pub parameters: Vec<ListedParameters>,
}

/// Named parameters without their values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedParameters {
    pub name: String,
    pub version: u64,
    pub bytes: u64,
}

/// Pushes of one writer, in order, each applied once.
pub trait PushChannel<E = Error>: Send {
    /// Sends a push. Returns when it is applied (in process), or sent while the window of unacknowledged pushes has
    /// capacity left (remote). After a broken connection unacknowledged pushes are sent again.
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<(), E>;
    fn flush(&mut self, wait: &Wait<'_>) -> Result<(), E>;
    /// Announces the end of the writer's steps: remaining pushes do not wait for newer parameters.
    fn end_steps(&mut self, wait: &Wait<'_>) -> Result<(), E>;
    /// Index of the writer's server; 0 for a memory of one.
    fn server(&self) -> usize {
        0
    }
    /// Flushes and closes the writer on the memory.
    fn close(&mut self, wait: &Wait<'_>) -> Result<(), E>;
}

/// Repeats one sample request, with several in flight.
pub trait SampleChannel<E = Error>: Send {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled, E>;
}

/// Asynchronous updates of priorities: several are in flight, and they apply in order.
pub trait UpdateChannel<E = Error>: Send {
    /// Sends an update. Returns the counts of the updates that were answered since the last call. After an error, which may be an
    /// earlier update's, this update was not sent.
    fn send(&mut self, table: &str, ids: &[u64], priorities: &[f64], wait: &Wait<'_>) -> Result<UpdateReceipt, E>;
    /// Returns when all updates are answered, with the counts since the last call.
    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt, E>;
}

/// A replay memory, in this process or on a server. Every method may block until `wait` ends it. `E` is the error type: a client's wraps
/// [`Error`]; the memory of this process returns any type that [`Error`] converts to.
pub trait Replay<E = Error>: Send + Sync {
    /// Creates a table; an existing one of the same definition is fine.
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<(), E>;
    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>, E>;
    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<(), E>;
    /// Opens a writer and the channel for its pushes.
    fn open_writer(&self, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<Box<dyn PushChannel<E>>, E>;
    /// Samples once. [`Error::TableDiffers`] where the table has another [`SampleRequest::definition`].
    fn sample(&self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled, E>;
    /// Samples one table repeatedly with `in_flight` requests in flight. With 0 each batch is requested on demand; with 2 or more, a
    /// client of a distant server adds as many as its round trip needs. [`Error::UnknownTable`] once the table was dropped, even if a
    /// new table has its name.
    fn samples(&self, table: &str, request: SampleRequest, in_flight: usize) -> Result<Box<dyn SampleChannel<E>>, E>;
    /// Sets priorities (before the exponent). The last value of a repeated id counts.
    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt, E>;
    /// Begins or acknowledges a lease of a table; [`Error::Lease`] when it is over.
    fn change_lease(&self, table: &str, change: ChangeLease, wait: &Wait<'_>) -> Result<(), E>;
    /// Where the stored steps of a table begin and end now: a position for each server, all of which are asked before the first is read.
    fn read_positions(&self, _table: &str, _wait: &Wait<'_>) -> Result<Vec<ReadPosition>, E> {
        Ok(vec![ReadPosition::default()])
    }
    /// Reads a part of the stored steps of a table, at one server.
    fn read_steps(&self, table: &str, request: &ReadSteps, wait: &Wait<'_>) -> Result<StepsRead, E>;
    /// Channel for asynchronous updates; `None` where each update applies within its call.
    fn updates(&self) -> Result<Option<Box<dyn UpdateChannel<E>>>, E> {
        Ok(None)
    }
    /// Removes an item whose blob does not decode; returns the name of its writer, `None` when it is gone.
    fn report_corrupt(&self, table: &str, id: u64, reason: &str, wait: &Wait<'_>) -> Result<Option<String>, E>;
    /// Stores parameters (one safetensors file) and returns their version.
    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64, E>;
    /// The newest version, or `None` when it is not newer than `newer_than`. `writer` uses it from now on, see [`TableConfig::max_version_lag`].
    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        wait: &Wait<'_>,
    ) -> Result<Option<Parameters>, E>;
    fn list(&self, wait: &Wait<'_>) -> Result<Listing, E>;
    /// Counters and gauges of the memory, as one JSON object.
    fn stats(&self, wait: &Wait<'_>) -> Result<serde_json::Value, E>;
}

/// Refuses an update unless it has one good priority for each id: [`Error::Schema`], [`Error::Priority`].
pub fn check_update(table: &str, ids: &[u64], priorities: &[f64]) -> Result<()> {
    if ids.len() != priorities.len() {
        return Err(Error::schema(table, format!("{} ids and {} priorities", ids.len(), priorities.len())));
    }
    check_priorities(priorities)
}

/// Refuses priorities that are NaN, infinite or negative.
pub fn check_priorities(priorities: &[f64]) -> Result<()> {
    check_priorities_to(f64::MAX, priorities.iter().copied())
}

/// [`check_priorities`] of at most `most`; branch-free in the common case.
pub(crate) fn check_priorities_to(most: f64, priorities: impl ExactSizeIterator<Item = f64> + Clone) -> Result<()> {
    let good = |priority: f64| (0.0..=most).contains(&priority);
    if priorities.clone().fold(true, |all, one| all & good(one)) {
        return Ok(());
    }
    let count = priorities.len();
    let bad = priorities.enumerate().find(|(_, priority)| !good(*priority));
    bad.map_or(Ok(()), |(position, value)| Err(Error::Priority { position, count, value }))
}

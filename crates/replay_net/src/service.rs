//! The server's requests against the memory, without sockets, clocks or tasks. For a request that cannot be answered yet the
//! result is [`Outcome::Blocked`]: the caller waits for [`Service::changed`] and tries again.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_listener::EventListener;
use serde_json::{Value, json};

use crate::aggregators::{Aggregators, JoinOutcome};
use crate::receive::ReceiveBudgets;
use gradients::JoinJob;
use replay_core::error::{Error, Result};
use replay_core::memory::Memory;
use replay_core::replay::{Parameters, SampleRequest};
use replay_core::schema::TableConfig;
use replay_core::table::Attempt;
use replay_wire::{GradientsJoined, RELEASE, ReplyBody, RequestBody};

/// Result of one attempt at a request.
pub enum Outcome {
    /// The answer.
    Ready(ReplyBody),
    /// Not yet.
    Blocked {
        /// What has to change first.
        by: BlockedBy,
        /// The reason, for an error at the deadline.
        waited_for: String,
    },
}

/// Cause of a blocked request.
pub enum BlockedBy {
    /// The table of this name.
    Table(String),
    /// The parent of this server in a gradient job.
    Parent,
}

/// The memory and the gradient aggregators behind a server.
pub struct Service {
    memory: Arc<Memory>,
    receive_budgets: ReceiveBudgets,
    /// Tables of the server's own configuration.
    configured: HashSet<String>,
    max_frame_bytes: u64,
    gradients: Option<Aggregators>,
    /// Whether requests to the memory are refused.
    gradients_only: bool,
    /// Counters of the connections, part of [`Service::stats`].
    pub counters: Counters,
}

/// Counters of a server's connections. Relaxed, all of them: no other data is published with a count.
#[derive(Debug, Default)]
pub struct Counters {
    connections: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    bad_frames: AtomicU64,
    slow_readers: AtomicU64,
    requests: AtomicU64,
    errors: AtomicU64,
    bytes_received: AtomicU64,
    bytes_sent: AtomicU64,
}

impl Service {
    /// Makes the configured tables and serves the memory.
    ///
    /// # Errors
    /// Errors of [`Memory::create_table`].
    pub fn new(memory: Arc<Memory>, tables: &[TableConfig], max_frame_bytes: u64) -> Result<Self> {
        for table in tables {
            memory.create_table(table)?;
        }
        Ok(Service {
            receive_budgets: ReceiveBudgets::new(&memory.limits()),
            memory,
            configured: tables.iter().map(|table| table.name.clone()).collect(),
            max_frame_bytes,
            gradients: None,
            gradients_only: false,
            counters: Counters::default(),
        })
    }

    /// Adds gradient aggregators; with `only`, requests to the memory are refused.
    pub fn sum_gradients(&mut self, aggregators: Aggregators, only: bool) {
        self.gradients = Some(aggregators);
        self.gradients_only = only;
    }

    /// The gradient aggregators, if there are any.
    pub fn gradients(&self) -> Option<&Aggregators> {
        self.gradients.as_ref()
    }

    /// The served memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Budgets for receive buffers.
    pub fn receive_budgets(&self) -> &ReceiveBudgets {
        &self.receive_budgets
    }

    /// One attempt at a request. `last` says that no other attempt follows: a draw with `allow_short` then takes the items
    /// there are.
    ///
    /// # Errors
    /// The error to answer the request with.
    pub fn attempt(&self, request: &RequestBody, last: bool) -> Result<Outcome> {
        self.check_there_is_memory(request)?;
        let reply = match request {
            RequestBody::CreateTable(config) => self.create_table(config)?,
            RequestBody::DescribeTable(name) => {
                ReplyBody::Table(TableConfig::clone(self.memory.table(name)?.config()))
            }
            RequestBody::EmptyTable(name) => {
                self.memory.empty_table(name)?;
                ReplyBody::Done
            }
            RequestBody::DropTable(name) => self.drop_table(name)?,
            RequestBody::OpenWriter { open, resume } => {
                let table = self.memory.table(&open.table)?;
                ReplyBody::Writer(match resume {
                    true => table.resume_writer(open)?,
                    false => table.open_writer(open)?,
                })
            }
            RequestBody::Push(push) => match self.memory.table(&push.table)?.try_push(push)? {
                Attempt::Ready(steps) => ReplyBody::Pushed { steps },
                Attempt::Blocked(waited_for) => return Ok(blocked(&push.table, waited_for)),
            },
            RequestBody::Sample(sample) => return self.sample(sample, last),
            RequestBody::UpdatePriorities {
                table,
                keys,
                priorities,
            } => ReplyBody::Updated(
                self.memory
                    .table(table)?
                    .update_priorities(keys, priorities)?,
            ),
            RequestBody::ReportCorrupt { table, key, reason } => {
                ReplyBody::Corrupt(self.memory.table(table)?.report_corrupt(*key, reason))
            }
            RequestBody::PutParameters { name, bytes } => {
                let version = self.memory.parameters().put(name, bytes.clone())?;
                ReplyBody::Parameters(Some(Parameters {
                    version,
                    bytes: bytes::Bytes::new(),
                }))
            }
            RequestBody::GetParameters { name, newer_than } => {
                ReplyBody::Parameters(self.memory.parameters().get(name, *newer_than))
            }
            RequestBody::List => ReplyBody::Listing(self.memory.list()),
            RequestBody::Stats => ReplyBody::Stats(self.stats().to_string()),
            RequestBody::CloseWriter {
                table,
                writer,
                epoch,
            } => {
                self.memory.table(table)?.close_writer(*writer, *epoch)?;
                ReplyBody::Done
            }
            RequestBody::JoinGradients { job, below } => {
                return self.join_gradients(job, *below);
            }
            RequestBody::Hello(_) | RequestBody::Authenticate(_) => {
                return Err(Error::Protocol(
                    "the handshake of this connection is over".to_owned(),
                ));
            }
        };
        Ok(Outcome::Ready(reply))
    }

    /// Listens for the next change of what blocks a request. Attempt again after this call, so that no change is missed.
    ///
    /// # Errors
    /// [`Error::UnknownTable`] when the table is gone.
    pub fn changed(&self, by: &BlockedBy) -> Result<EventListener> {
        match by {
            BlockedBy::Table(table) => Ok(self.memory.table(table)?.changed()),
            BlockedBy::Parent => Ok(self.aggregators()?.changed()),
        }
    }

    /// Ends the membership of a gradient worker whose connection has ended.
    pub fn leave_gradients(&self, at: SocketAddr, session: u32) {
        if let Some(aggregators) = &self.gradients {
            aggregators.leave(at, session);
        }
    }

    /// Counters and gauges: the memory's, `receive_bytes` (reserved for receive buffers), `server`, and `gradients` (jobs).
    pub fn stats(&self) -> Value {
        let mut stats = self.memory.stats();
        stats["receive_bytes"] = self.receive_budgets.reserved().into();
        stats["server"] = self.counters.to_json();
        if let Some(aggregators) = &self.gradients {
            stats["gradients"] = aggregators.stats();
        }
        stats
    }

    fn aggregators(&self) -> Result<&Aggregators> {
        self.gradients.as_ref().ok_or_else(|| {
            Error::Config(
                "this server does not sum gradients: start it with --gradients IP:PORT".to_owned(),
            )
        })
    }

    fn check_there_is_memory(&self, request: &RequestBody) -> Result<()> {
        let needs_none = matches!(
            request,
            RequestBody::JoinGradients { .. } | RequestBody::Stats | RequestBody::List
        );
        if self.gradients_only && !needs_none {
            return Err(Error::Config(
                "this server only sums gradients: start it without --gradients-only for a replay memory and parameters"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn join_gradients(&self, job: &JoinJob, below: Option<u32>) -> Result<Outcome> {
        Ok(match self.aggregators()?.join(job, below)? {
            JoinOutcome::Joined(address, ticket) => {
                Outcome::Ready(ReplyBody::Gradients(GradientsJoined { address, ticket }))
            }
            JoinOutcome::Pending { waited_for } => Outcome::Blocked {
                by: BlockedBy::Parent,
                waited_for,
            },
        })
    }

    fn create_table(&self, config: &TableConfig) -> Result<ReplyBody> {
        match self.memory.create_table(config) {
            Ok(_) => Ok(ReplyBody::Done),
            Err(Error::TableDiffers { table, difference })
                if self.configured.contains(&config.name) =>
            {
                Err(Error::TableDiffers {
                    table,
                    difference: format!(
                        "{difference} (the table is in the server's configuration)"
                    ),
                })
            }
            Err(error) => Err(error),
        }
    }

    fn drop_table(&self, name: &str) -> Result<ReplyBody> {
        if self.configured.contains(name) {
            return Err(Error::Config(format!(
                "table {name:?} is in the server's configuration and cannot be dropped: empty it instead"
            )));
        }
        self.memory.drop_table(name)?;
        Ok(ReplyBody::Done)
    }

    fn sample(&self, request: &SampleRequest, last: bool) -> Result<Outcome> {
        let table = self.memory.table(&request.table)?;
        let rows = 1 + u64::from(request.before) + u64::from(request.after);
        let bytes = u64::from(request.count)
            .saturating_mul(rows)
            .saturating_mul(table.config().row_bytes() as u64);
        if bytes > self.max_frame_bytes {
            return Err(Error::TooLarge {
                what: "a drawn batch, in bytes of rows alone,",
                size: bytes,
                limit: self.max_frame_bytes,
                advice: "draw fewer items at a time, or start the server with a larger --max-frame-bytes",
            });
        }
        Ok(match table.try_sample(request, last)? {
            Attempt::Ready(sampled) => Outcome::Ready(ReplyBody::Sampled(sampled)),
            Attempt::Blocked(waited_for) => blocked(&request.table, waited_for),
        })
    }
}

fn blocked(table: &str, waited_for: String) -> Outcome {
    Outcome::Blocked {
        by: BlockedBy::Table(table.to_owned()),
        waited_for,
    }
}

/// An open connection: dropped, it no longer counts.
pub struct OpenConnection<'a>(&'a Counters);

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    /// Counts a connection.
    pub fn open(&self) -> OpenConnection<'_> {
        add(&self.opened, 1);
        add(&self.connections, 1);
        OpenConnection(self)
    }

    /// Counts a refused connection: over the limit, or without the token.
    pub fn refuse(&self) {
        add(&self.refused, 1);
    }

    /// Counts an invalid frame.
    pub fn bad_frame(&self) {
        add(&self.bad_frames, 1);
    }

    /// Counts a client that was dropped at the write deadline.
    pub fn slow_reader(&self) {
        add(&self.slow_readers, 1);
    }

    /// Counts a request and the bytes of its frame.
    pub fn request(&self, bytes: u64) {
        add(&self.requests, 1);
        add(&self.bytes_received, bytes);
    }

    /// Counts an error reply.
    pub fn error(&self) {
        add(&self.errors, 1);
    }

    /// Counts the bytes of a reply's frame.
    pub fn sent(&self, bytes: u64) {
        add(&self.bytes_sent, bytes);
    }

    fn to_json(&self) -> Value {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "release": RELEASE,
            "connections": get(&self.connections),
            "connections_opened": get(&self.opened),
            "connections_refused": get(&self.refused),
            "bad_frames": get(&self.bad_frames),
            "slow_readers_dropped": get(&self.slow_readers),
            "requests": get(&self.requests),
            "errors": get(&self.errors),
            "bytes_received": get(&self.bytes_received),
            "bytes_sent": get(&self.bytes_sent),
        })
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

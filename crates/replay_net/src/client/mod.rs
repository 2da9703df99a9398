//! `Replay` over a connection to a server: the same calls as in process, over TCP, TLS or a Unix socket.
//!
//! | module | subject |
//! | --- | --- |
//! | [`pipeline`] | requests and replies over any stream, and the handshake |
//! | [`connection`] | sockets, TLS, the runtime inside blocking calls |
//! | `pool` | idle connections, retries after broken ones |
//! | [`push`] | a writer's pushes: pipelined, each applied once |
//! | [`sample`] | draws with several requests in flight |
//! | [`gradients`] | a worker of a gradient job |
//! | [`gradient_updates`] | a worker of an asynchronous one |
//! | [`keys`] | keys across restarts of a server |
//! | [`tls`] | trusted certificates |
//!
//! Calls block, so they must not be made inside a tokio runtime. Every call is idempotent: when a connection breaks before
//! the answer arrived, the client repeats the call on a new connection, until the caller's deadline or for
//! [`ConnectOptions::reconnect_for`].

pub mod connection;
pub mod gradient_updates;
pub mod gradients;
pub mod keys;
pub mod pipeline;
mod pool;
pub mod push;
pub mod sample;
pub mod tls;

use std::cell::Cell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

pub use crate::stack::Address;
use ::gradients::{DpdkConfig, JoinJob};
use connection::Dialer;
pub use gradient_updates::GradientUpdates;
pub use gradients::GradientWorker;
use keys::IncarnationTag;
use pipeline::{is_broken, unexpected};
use pool::{ConnectionPool, Retry};
use replay_core::error::{Error, ErrorCode, Result};
use replay_core::replay::{
    Listing, OpenWriter, Parameters, PushChannel, Replay, SampleChannel, SampleRequest, Sampled,
    UpdateReceipt, Wait,
};
use replay_core::schema::TableConfig;
use replay_wire::{ReplyBody, RequestBody};

/// Options of a connection: credentials, timeouts and limits.
#[derive(Clone)]
pub struct ConnectOptions {
    /// The server's token. It is never sent: both ends prove that they know it.
    pub token: Option<String>,
    /// For `innets://`: a PEM file with the server's certificate, or with its authority's.
    pub tls_ca: Option<PathBuf>,
    /// Poll for answers without sleeping: lower latency, but a waiting call takes a whole core.
    pub spin: bool,
    /// For `innet+fstack://`: F-Stack's configuration file, see [`ServerConfig::stack_config`](crate::config::ServerConfig).
    pub stack_config: Option<PathBuf>,
    /// Longest time for connecting and the handshake.
    pub connect_timeout: Duration,
    /// Longest wait for an answer after a call's deadline. At the deadline the server answers with what the call was
    /// waiting for; the grace covers the network, and ends a call to a server that does not answer.
    pub grace: Duration,
    /// Longest time for which a call reconnects after a broken connection, also without a deadline.
    pub reconnect_for: Duration,
    /// Largest frame accepted from the server, in bytes.
    pub max_frame_bytes: u64,
    /// Unacknowledged pushes of one writer, at least 1.
    pub push_window: usize,
    /// Bytes of unacknowledged pushes, kept for sending them again; a single push may be larger.
    pub push_window_bytes: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            token: None,
            tls_ca: None,
            spin: false,
            stack_config: None,
            connect_timeout: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            reconnect_for: Duration::from_secs(60),
            max_frame_bytes: 1 << 30,
            push_window: 32,
            push_window_bytes: 16 << 20,
        }
    }
}

impl std::fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectOptions")
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("tls_ca", &self.tls_ca)
            .field("spin", &self.spin)
            .field("stack_config", &self.stack_config)
            .field("connect_timeout", &self.connect_timeout)
            .field("grace", &self.grace)
            .field("reconnect_for", &self.reconnect_for)
            .field("max_frame_bytes", &self.max_frame_bytes)
            .field("push_window", &self.push_window)
            .field("push_window_bytes", &self.push_window_bytes)
            .finish()
    }
}

/// A replay memory on a server.
pub struct Client {
    dialer: Arc<Dialer>,
    idle: ConnectionPool,
    /// The server's incarnation and the version of the parameters received last, by name.
    parameters: Mutex<HashMap<String, (IncarnationTag, u64)>>,
}

/// Connects to a server, without retries: a refused connection fails at once, an unanswered one after
/// [`ConnectOptions::connect_timeout`].
///
/// # Errors
/// [`Error::Connect`], [`Error::Authentication`], [`Error::Version`]; [`Error::Config`] when the options do
/// not fit the address.
pub fn connect(address: &Address, options: ConnectOptions) -> Result<Client> {
    Client::connect(address, options, &Wait::forever())
}

impl Client {
    /// [`connect`] with a deadline and an interrupt check.
    ///
    /// # Errors
    /// Errors of [`connect`], and [`Error::Interrupted`].
    pub fn connect(address: &Address, options: ConnectOptions, wait: &Wait<'_>) -> Result<Self> {
        Self::through(Dialer::new(address.clone(), options)?, wait)
    }

    /// [`connect`] through `dialer`.
    ///
    /// # Errors
    /// Errors of [`Client::connect`].
    pub fn through(dialer: Dialer, wait: &Wait<'_>) -> Result<Self> {
        let dialer = Arc::new(dialer);
        let idle = ConnectionPool::default();
        idle.give(dialer.dial(wait)?);
        Ok(Client {
            dialer,
            idle,
            parameters: Mutex::default(),
        })
    }

    /// The server's address.
    pub fn address(&self) -> &Address {
        &self.dialer.address
    }

    /// Joins a gradient job, over a connection of its own: see [`GradientWorker`]. Fails at the job's deadline, or at [`Wait::deadline`] if that
    /// is sooner.
    ///
    /// # Errors
    /// Those of connecting; [`Error::Config`] for a request that differs from those of the other workers, or a server that sums no
    /// gradients; [`Error::Gradients`] when datagrams do not get through.
    pub fn join_gradients(&self, request: &JoinJob, wait: &Wait<'_>) -> Result<GradientWorker> {
        GradientWorker::join(&self.dialer, request, None, None, wait)
    }

    /// [`Client::join_gradients`] with datagrams sent to `via`: a relay, or an address before translation (NAT).
    ///
    /// # Errors
    /// The same.
    pub fn join_gradients_via(
        &self,
        request: &JoinJob,
        via: SocketAddr,
        wait: &Wait<'_>,
    ) -> Result<GradientWorker> {
        GradientWorker::join(&self.dialer, request, Some(via), None, wait)
    }

    /// [`Client::join_gradients`] with datagrams on a DPDK device; the connection uses the kernel's TCP.
    ///
    /// # Errors
    /// Errors of [`Client::join_gradients`]; [`Error::Config`] for a device that cannot be used, or a program that was built without DPDK.
    pub fn join_gradients_on(
        &self,
        request: &JoinJob,
        dpdk: &DpdkConfig,
        wait: &Wait<'_>,
    ) -> Result<GradientWorker> {
        GradientWorker::join(&self.dialer, request, None, Some(dpdk), wait)
    }

    /// Joins an asynchronous gradient job, and contributes to updates up to `last`: see [`GradientUpdates`].
    ///
    /// # Errors
    /// Errors of [`Client::join_gradients`].
    pub fn follow_gradients(
        &self,
        request: &JoinJob,
        last: u64,
        wait: &Wait<'_>,
    ) -> Result<GradientUpdates> {
        GradientUpdates::join(&self.dialer, request, last, wait)
    }

    /// Sends a request, again on a new connection after a broken one. Its argument is the tag of the connection's server,
    /// which may have restarted since the last try.
    fn ask(
        &self,
        wait: &Wait<'_>,
        question: impl Fn(IncarnationTag) -> RequestBody,
    ) -> Result<(ReplyBody, IncarnationTag)> {
        let mut retry = Retry::new(&self.dialer, wait);
        loop {
            let answer = self
                .idle
                .take(&self.dialer, wait)
                .and_then(|mut connection| {
                    let tag = connection.tag;
                    let reply = connection.call(&self.dialer, wait, question(tag));
                    // Any other error leaves a request in flight or a broken connection.
                    match &reply {
                        Ok(_) => self.idle.give(connection),
                        Err(error @ Error::Remote { .. }) if !is_broken(error) => {
                            self.idle.give(connection);
                        }
                        Err(_) => {}
                    }
                    Ok((reply?, tag))
                });
            match answer {
                Err(error) => retry.after(error)?,
                answer => return answer,
            }
        }
    }

    fn ask_done(
        &self,
        wait: &Wait<'_>,
        question: impl Fn(IncarnationTag) -> RequestBody,
    ) -> Result<()> {
        match self.ask(wait, question)? {
            (ReplyBody::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

impl Replay for Client {
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<()> {
        self.ask_done(wait, |_| RequestBody::CreateTable(config.clone()))
    }

    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        match self.ask(wait, |_| RequestBody::DescribeTable(table.into()))? {
            (ReplyBody::Table(config), _) => Ok(Arc::new(config)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn empty_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        self.ask_done(wait, |_| RequestBody::EmptyTable(table.into()))
    }

    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let tries = Cell::new(0);
        let dropped = self.ask_done(wait, |_| {
            tries.set(tries.get() + 1);
            RequestBody::DropTable(table.into())
        });
        match dropped {
            // An earlier try dropped it, and its answer was lost.
            Err(error) if error.code() == ErrorCode::UnknownTable && tries.get() > 1 => Ok(()),
            dropped => dropped,
        }
    }

    fn open_writer(&self, open: OpenWriter, wait: &Wait<'_>) -> Result<Box<dyn PushChannel>> {
        let channel = push::Pushes::open(self.dialer.clone(), open, wait)?;
        Ok(Box::new(channel))
    }

    fn sample(&self, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        match self.ask(wait, |_| RequestBody::Sample(request.clone()))? {
            (ReplyBody::Sampled(sampled), tag) => Ok(sample::with_tagged_keys(sampled, tag)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn sampler(&self, request: SampleRequest, in_flight: usize) -> Result<Box<dyn SampleChannel>> {
        self.dialer.check_process()?;
        let channel = sample::Samples::new(self.dialer.clone(), request, in_flight);
        Ok(Box::new(channel))
    }

    fn update_priorities(
        &self,
        table: &str,
        keys: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        if keys.len() != priorities.len() {
            return Err(Error::Schema {
                table: table.into(),
                reason: format!("{} keys and {} priorities", keys.len(), priorities.len()),
            });
        }
        let (reply, tag) = self.ask(wait, |tag| {
            let (keys, priorities) = std::iter::zip(keys, priorities)
                .filter_map(|(&key, &priority)| Some((tag.untag_key(key)?, priority)))
                .unzip();
            RequestBody::UpdatePriorities {
                table: table.into(),
                keys,
                priorities,
            }
        })?;
        let stale = keys
            .iter()
            .filter(|&&key| tag.untag_key(key).is_none())
            .count() as u32;
        match reply {
            ReplyBody::Updated(receipt) => Ok(UpdateReceipt {
                stale: receipt.stale + stale,
                ..receipt
            }),
            other => Err(unexpected(&other)),
        }
    }

    fn report_corrupt(
        &self,
        table: &str,
        key: u64,
        reason: &str,
        wait: &Wait<'_>,
    ) -> Result<Option<String>> {
        // A key that no item has: the server answers that the item is gone.
        const NO_KEY: u64 = u64::MAX;
        let (reply, _) = self.ask(wait, |tag| RequestBody::ReportCorrupt {
            table: table.into(),
            key: tag.untag_key(key).unwrap_or(NO_KEY),
            reason: reason.into(),
        })?;
        match reply {
            ReplyBody::Corrupt(writer) => Ok(writer),
            other => Err(unexpected(&other)),
        }
    }

    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        // A retry may store the same bytes as a second version, which is harmless.
        let (reply, _) = self.ask(wait, |_| RequestBody::PutParameters {
            name: name.into(),
            bytes: bytes.clone(),
        })?;
        match reply {
            ReplyBody::Parameters(Some(stored)) => Ok(stored.version),
            other => Err(unexpected(&other)),
        }
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        wait: &Wait<'_>,
    ) -> Result<Option<Parameters>> {
        let last = self.lock_parameters().get(name).copied();
        let (reply, tag) = self.ask(wait, |tag| RequestBody::GetParameters {
            name: name.into(),
            // A restarted server counts versions from 1, so all of its versions are newer.
            newer_than: match last {
                Some((of, version)) if of != tag && version == newer_than => 0,
                _ => newer_than,
            },
        })?;
        let ReplyBody::Parameters(parameters) = reply else {
            return Err(unexpected(&reply));
        };
        if let Some(parameters) = &parameters {
            let seen = (tag, parameters.version);
            self.lock_parameters().insert(name.into(), seen);
        }
        Ok(parameters)
    }

    fn list(&self, wait: &Wait<'_>) -> Result<Listing> {
        match self.ask(wait, |_| RequestBody::List)? {
            (ReplyBody::Listing(listing), _) => Ok(listing),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn stats(&self, wait: &Wait<'_>) -> Result<serde_json::Value> {
        match self.ask(wait, |_| RequestBody::Stats)? {
            (ReplyBody::Stats(json), _) => serde_json::from_str(&json)
                .map_err(|e| Error::Protocol(format!("the server's stats are not JSON: {e}"))),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

impl Client {
    fn lock_parameters(&self) -> std::sync::MutexGuard<'_, HashMap<String, (IncarnationTag, u64)>> {
        self.parameters
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

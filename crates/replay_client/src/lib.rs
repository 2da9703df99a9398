//! `Replay` over a connection to a server: the same calls as in process, over TCP, TLS or a Unix socket.
//!
//! | module | subject |
//! | --- | --- |
//! | [`pipeline`] | requests and replies over any stream, and the handshake |
//! | [`dialer`] | opens connections: sockets, TLS, handshake; keeps idle ones |
//! | [`connection`] | an open connection; the runtime inside blocking calls |
//! | `link` | requests in flight: kept until they are answered, sent again after a break |
//! | `outage` | outages of servers: retries of the first connection and after broken ones, their log lines; final shutdowns; no two servers of a list have copies of one memory |
//! | [`push`] | a writer's pushes: pipelined, each applied once |
//! | [`sample`] | sampling with several requests in flight |
//! | [`updates`] | asynchronous updates of priorities |
//! | [`extension`] | a client of an extension of a server |
//! | [`shards`] | one memory over several servers |
//! | [`namespace`] | the names of one run on a shared server |
//! | [`tls`] | trusted certificates |
//! | [`writers_seen`] | the state of a table's writers, for samples that wait |
//!
//! Calls block, so they must not be made inside a tokio runtime. Every call is idempotent: when a connection breaks before the answer
//! arrives, the client repeats the call on a new connection, until the caller's deadline or for [`ConnectOptions::reconnect_for`]. After a
//! restart of the server, the client first creates its tables again.

pub mod connection;
pub mod dialer;
pub mod extension;
mod link;
pub mod namespace;
mod outage;
pub mod pipeline;
pub mod push;
pub mod sample;
pub mod shards;
pub mod tls;
pub mod updates;
pub mod writers_seen;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use dialer::{ConnectionPool, Dialer};
use outage::{first_connection, retry_for, while_broken};
use pipeline::{expect, is_broken, unexpected};

use base::system::random_number;
use base::wait::{Wait, lock};
use replay_core::replay::check_update;
use replay_core::replay::{
    ChangeLease, Listing, OpenWriter, Parameters, PushChannel, ReadSteps, Replay, SampleChannel, SampleRequest,
    Sampled, StepsRead, UpdateChannel, UpdateReceipt, WriterId,
};
use replay_core::schema::TableConfig;
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_wire::{ErrorCode, GetParameters, PutParameters, ReplyBody, ReportCorrupt, RequestBody, UpdatePriorities};

pub use dialer::ConnectOptions;
pub use namespace::Namespace;
pub use replay_link::stack::Address;

/// A replay memory on a server.
pub struct Client {
    dialer: Arc<Dialer>,
    idle: ConnectionPool,
    /// Server incarnation and version of the last received parameters, by name.
    parameters: Mutex<HashMap<String, (u64, u64)>>,
}

/// [`Client::connect`] without a deadline.
///
/// # Errors
/// Errors of that call.
pub fn connect(address: &Address, options: ConnectOptions) -> Result<Client> {
    Client::connect(address, options, &Wait::forever())
}

impl Client {
    /// Connects to a server. Retries a refused connection for [`ConnectOptions::await_server`], and one that breaks, gets no answer or meets a
    /// limit of connections for [`ConnectOptions::connect_timeout`]. A wrong certificate or proof, and another protocol, are final.
    ///
    /// # Errors
    /// [`Error::Connect`], [`replay_wire::Error::Authentication`], [`replay_wire::Error::Version`]; [`Error::Config`] when the options do
    /// not fit the address; [`Error::Interrupted`].
    pub fn connect(address: &Address, options: ConnectOptions, wait: &Wait<'_>) -> Result<Self> {
        Self::through(Dialer::new(address.clone(), options)?, wait)
    }

    /// Opens a writer.
    pub(crate) fn pushes(&self, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<push::Pushes> {
        push::Pushes::open(self.dialer.clone(), table, open, wait)
    }

    /// [`Client::connect`] through `dialer`.
    pub fn through(dialer: Dialer, wait: &Wait<'_>) -> Result<Self> {
        let client = Self::unconnected(dialer);
        client.open(&client.dialer.options, wait)?;
        Ok(client)
    }

    /// A client that connects at its first call.
    fn unconnected(dialer: Dialer) -> Self {
        Client { dialer: Arc::new(dialer), idle: ConnectionPool::default(), parameters: Mutex::default() }
    }

    /// Opens the first connection, with the timeouts of these `options`.
    fn open(&self, options: &ConnectOptions, wait: &Wait<'_>) -> Result<()> {
        self.idle.give(first_connection(&self.dialer, options, None, wait)?);
        Ok(())
    }

    /// The server's address.
    pub fn address(&self) -> &Address {
        &self.dialer.address
    }

    /// How this client connects, for a [`extension`].
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// Sends a request, about `table` or none, and repeats it on a new connection after a broken one. `question` gets the incarnation of
    /// the connection's server, which may have restarted since the last attempt.
    fn ask<R: TryFrom<ReplyBody, Error = ReplyBody>>(
        &self,
        wait: &Wait<'_>,
        table: Option<&str>,
        question: impl Fn(u64) -> RequestBody,
    ) -> Result<(R, u64)> {
        let longest = while_broken(self.dialer.reconnect_calls_for);
        retry_for(longest, &mut None, &self.dialer, wait, || {
            let mut connection = self.idle.take(&self.dialer, wait)?;
            loop {
                let has_number = table.is_some_and(|table| connection.pipeline().has_numbered(table));
                let reply = connection.call(self.dialer.options.grace, wait, table, question(connection.incarnation));
                let incarnation = connection.incarnation;
                match &reply {
                    // The table of this number was dropped: another one may have its name.
                    Err(error) if error.code() == ErrorCode::UnknownTable && has_number => {
                        connection = self.dialer.dial(wait)?;
                        continue;
                    }
                    Ok(_) => self.idle.give(connection),
                    Err(error @ (Error::Remote { .. } | Error::RemoteDeadline { .. })) if !is_broken(error) => {
                        self.idle.give(connection);
                    }
                    // A request may be in flight, or the connection broken.
                    Err(_) => {}
                }
                return Ok((expect(reply?)?, incarnation));
            }
        })
    }

    /// [`Self::ask`] for a request that does not depend on the incarnation.
    fn call<R: TryFrom<ReplyBody, Error = ReplyBody>>(
        &self,
        wait: &Wait<'_>,
        table: Option<&str>,
        request: RequestBody,
    ) -> Result<R> {
        Ok(self.ask(wait, table, |_| request.clone())?.0)
    }

    /// Stores parameters as `version`, or as the next version if `version` is not newer than the newest. The random number `id` identifies
    /// a repeated put, which the server does not store over a newer version; 0 stores a copy from another server, if it is newer.
    fn put_version(&self, name: &str, id: u64, version: u64, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        let put = PutParameters { name: name.into(), id, version, bytes };
        let stored: Option<Parameters> = self.call(wait, None, RequestBody::PutParameters(put))?;
        let stored = stored.ok_or_else(|| unexpected(&ReplyBody::Parameters(None)))?;
        Ok(stored.version)
    }
}

impl Commands for Client {
    fn command(&self, command: RequestBody, wait: &Wait<'_>) -> Result<()> {
        self.call(wait, None, command)
    }
}

impl Replay<Error> for Client {
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<()> {
        // JSON has no numbers that are not finite.
        config.validate()?;
        self.call::<()>(wait, None, RequestBody::CreateTable(config.clone()))?;
        self.dialer.tables().insert(config.name.clone(), config.clone());
        Ok(())
    }

    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        let config: TableConfig = self.call(wait, None, RequestBody::DescribeTable(table.into()))?;
        // Shapes of a hostile server must not be allocated.
        config.validate()?;
        Ok(Arc::new(config))
    }

    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let tries = Cell::new(0);
        let dropped = self.ask(wait, None, |_| {
            tries.set(tries.get() + 1);
            RequestBody::DropTable(table.into())
        });
        let unknown = |error: &Error| error.code() == ErrorCode::UnknownTable;
        if dropped.as_ref().err().is_none_or(unknown) {
            // After a refusal the table still exists, and a restarted server needs it.
            self.dialer.tables().remove(table);
        }
        match dropped {
            // An earlier attempt dropped it, but the answer was lost.
            Err(error) if unknown(&error) && tries.get() > 1 => Ok(()),
            dropped => dropped.map(|((), _)| ()),
        }
    }

    fn open_writer(&self, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<Box<dyn PushChannel<Error>>> {
        Ok(Box::new(self.pushes(table, open, wait)?))
    }

    fn sample(&self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        self.call(wait, Some(table), RequestBody::Sample(*request))
    }

    fn samples(&self, table: &str, request: SampleRequest, in_flight: usize) -> Result<Box<dyn SampleChannel<Error>>> {
        self.dialer.check_process()?;
        let channel = sample::Samples::new(self.dialer.clone(), table, request, in_flight);
        Ok(Box::new(channel))
    }

    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        check_update(table, ids, priorities)?;
        let update = || UpdatePriorities { ids: ids.to_vec(), priorities: priorities.to_vec() };
        Ok(self.ask(wait, Some(table), |_| RequestBody::UpdatePriorities(update()))?.0)
    }

    fn change_lease(&self, table: &str, change: ChangeLease, wait: &Wait<'_>) -> Result<()> {
        self.call(wait, Some(table), RequestBody::ChangeLease(change))
    }

    fn updates(&self) -> Result<Option<Box<dyn UpdateChannel<Error>>>> {
        self.dialer.check_process()?;
        Ok(Some(Box::new(updates::Updates::new(self.dialer.clone()))))
    }

    fn read_steps(&self, table: &str, request: &ReadSteps, wait: &Wait<'_>) -> Result<StepsRead> {
        self.call(wait, Some(table), RequestBody::ReadSteps(*request))
    }

    fn report_corrupt(&self, table: &str, id: u64, reason: &str, wait: &Wait<'_>) -> Result<Option<String>> {
        let report = ReportCorrupt { id, reason: reason.into() };
        self.call(wait, Some(table), RequestBody::ReportCorrupt(report))
    }

    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        self.put_version(name, random_number(), 0, bytes, wait)
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        wait: &Wait<'_>,
    ) -> Result<Option<Parameters>> {
        let seen = || lock(&self.parameters);
        let last = seen().get(name).copied();
        let table = writer.map(|writer| &*writer.table);
        let (parameters, incarnation) = self.ask(wait, table, |incarnation| {
            RequestBody::GetParameters(GetParameters {
                name: name.into(),
                // A restarted server counts versions from 1, so all of its versions are newer.
                newer_than: match last {
                    Some((of, version)) if of != incarnation && version == newer_than => 0,
                    _ => newer_than,
                },
                writer: writer.map_or(0, |writer| writer.writer),
            })
        })?;
        let parameters: Option<Parameters> = parameters;
        if let Some(parameters) = &parameters {
            seen().insert(name.into(), (incarnation, parameters.version));
        }
        Ok(parameters)
    }

    fn list(&self, wait: &Wait<'_>) -> Result<Listing> {
        self.call(wait, None, RequestBody::List)
    }

    fn stats(&self, wait: &Wait<'_>) -> Result<serde_json::Value> {
        let json: String = self.call(wait, None, RequestBody::Stats)?;
        let stats = serde_json::from_str(&json)
            .map_err(|e| Error::protocol(format!("the server's stats are not JSON: {e}")))?;
        Ok(match &self.dialer.options.namespace {
            Some(namespace) => namespace.stats(stats),
            None => stats,
        })
    }
}

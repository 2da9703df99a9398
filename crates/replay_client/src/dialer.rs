//! Opens connections to one server: sockets, TLS, handshake, and what a restarted server has to be told again. Keeps idle ones for later
//! calls. Has the options of connections.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use socket2::SockRef;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::connection::{Connection, Driver};
use super::namespace::Namespace;
use super::outage::{self, MemoryIdentities, Outage};
use super::pipeline::{RequestPipeline, expect, is_closed};
use super::tls;
use base::allocation::TooLarge;
use base::fork::close_in_children;
use base::system;
use base::wait::{Wait, lock};
use replay_core::schema::TableConfig;
use replay_link::error::{Error, Result, refuse};
use replay_link::framing::broken;
use replay_link::stack::plugged::{StackClient, alternatives};
use replay_link::stack::{Address, ByteStream, ServerWait, kernel};
use replay_link::tls::{channel_binding, tls_error};
use replay_wire::auth::{self, ChannelBinding, Secret};
use replay_wire::{ErrorCode, FrameLimits, RequestBody};

/// Options of a connection: credentials, timeouts and limits.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The server's token. It is never sent: both ends prove that they know it.
    pub token: Option<Secret>,
    /// For `innets://`: PEM file with the server's or its authority's certificate.
    pub tls_ca: Option<PathBuf>,
    /// Poll for answers without sleeping: lower latency, but a waiting call takes a whole core.
    pub spin: bool,
    /// For `innet+NAME://`: the configuration file of that stack, as the setting `stack_config` of a server.
    pub stack_config: Option<PathBuf>,
    /// Limit for the first connection with its handshake, including retries while the server is at a limit of connections, closes
    /// connections or does not answer. Zero means one attempt of at most [`grace`](ConnectOptions::grace).
    pub connect_timeout: Duration,
    /// Longest wait for an answer after a call's deadline. At the deadline the server replies with the reason of the wait; the grace covers
    /// the network, and bounds calls to a server that does not answer.
    pub grace: Duration,
    /// Longest time for which a call reconnects after its connection broke, even without a deadline.
    pub reconnect_for: Duration,
    /// Longest time for which the first connection is retried while connections are refused: the server may still be starting. If this
    /// exceeds `connect_timeout`, it also bounds other retries.
    pub await_server: Duration,
    /// Limits the client to the names of a namespace.
    pub namespace: Option<Namespace>,
    /// Largest frame accepted from the server, in bytes.
    pub max_frame_bytes: u64,
    /// Most pushes of one writer in flight, at least 1.
    pub pushes_in_flight: usize,
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
            await_server: Duration::ZERO,
            namespace: None,
            max_frame_bytes: 1 << 30,
            pushes_in_flight: 32,
        }
    }
}

/// Opens a stream to the server.
pub type OpenStream = dyn Fn() -> io::Result<Box<dyn ByteStream>> + Send + Sync;

/// Limit of the first attempt to connect. Each attempt without an answer doubles the limit of the next, [`DOUBLINGS`] times, in favour of
/// slow servers.
const FIRST_ATTEMPT: Duration = Duration::from_secs(3);
const DOUBLINGS: u32 = 3;

/// Opens connections to one server.
pub struct Dialer {
    /// Address of the server.
    pub address: Address,
    /// The user's options.
    pub options: ConnectOptions,
    tls: Option<TlsConnector>,
    /// Opens streams in place of network sockets.
    open: Option<Box<OpenStream>>,
    /// `None` for the kernel's network stack.
    stack: Option<Arc<dyn StackClient>>,
    /// Server incarnation at the last connection, 0 before the first one.
    incarnation: AtomicU64,
    /// Attempts without an answer since the last connection.
    unanswered: AtomicU32,
    /// Tables that this client created, by name.
    tables: Mutex<BTreeMap<String, TableConfig>>,
    /// How long a call or an update reconnects at most. In a list of servers it is short: calls go on with the other servers.
    pub(super) reconnect_calls_for: Duration,
    /// The memories of all servers of a client of several.
    pub(super) identities: Option<Arc<MemoryIdentities>>,
    pub(super) outage: Outage,
    /// The process that connected: a forked child must not use its parent's connections.
    process: u32,
}

impl Dialer {
    /// Reads the certificates of the options, and starts the stack that the address names.
    ///
    /// # Errors
    /// [`Error::Config`] for a short token, options that do not fit the address, or if the stack cannot start.
    pub fn new(address: Address, options: ConnectOptions) -> Result<Self> {
        if let Some(token) = &options.token {
            auth::check_token(&token.0)?;
        }
        let tls = match (&address, &options.tls_ca) {
            (Address::Tcp { port: 0, .. }, _) => {
                return refuse(format!("{address} has port 0: write the port that the server printed at its start"));
            }
            (Address::Tcp { tls: true, .. }, Some(path)) => Some(tls::client_config(path)?.into()),
            (Address::Tcp { tls: true, .. }, None) => {
                return refuse(format!(
                    "{address} needs tls_ca: a PEM file with the server's certificate or its authority's"
                ));
            }
            (_, Some(_)) => {
                return refuse(format!(
                    "tls_ca is set, but {address} does not use TLS: write innets://host:port, or leave tls_ca out"
                ));
            }
            (_, None) => None,
        };
        let stack = match (address.stack().plugged(), &options.stack_config) {
            (None, Some(_)) => {
                let other = alternatives(|stack| format!("innet+{}://address:port", stack.name()));
                let other = other.map_or(String::new(), |other| format!("write {other}, or "));
                return refuse(format!(
                    "{address} uses the kernel's TCP, which has no configuration file: {other}leave the file out"
                ));
            }
            (None, None) => None,
            (Some(stack), _) => Some(stack.client(&address, options.stack_config.as_deref(), options.spin)?),
        };
        Ok(Dialer {
            reconnect_calls_for: options.reconnect_for,
            address,
            options,
            tls,
            open: None,
            stack,
            incarnation: AtomicU64::new(0),
            unanswered: AtomicU32::new(0),
            tables: Mutex::default(),
            identities: None,
            outage: Outage::default(),
            process: std::process::id(),
        })
    }

    /// A dialer over the streams of `open`, without TLS. Errors name the server by `address`.
    pub fn over(address: Address, options: ConnectOptions, open: Box<OpenStream>) -> Result<Self> {
        let mut dialer = Dialer::new(address, options)?;
        dialer.open = Some(open);
        Ok(dialer)
    }

    /// # Errors
    /// [`Error::Config`] in a forked child of the process that connected.
    pub fn check_process(&self) -> Result<()> {
        let here = std::process::id();
        if here != self.process {
            return refuse(format!(
                "the connection to {} belongs to process {}, and this is its fork {here}: connect again after a fork",
                self.address, self.process
            ));
        }
        Ok(())
    }

    /// Opens a connection and completes the handshake, in one attempt until the call's deadline.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Disconnected`], [`replay_wire::Error::Authentication`], [`replay_wire::Error::Version`].
    pub fn dial(&self, wait: &Wait<'_>) -> Result<Connection> {
        let until = wait.deadline.map(|d| d + self.options.grace);
        self.dial_until(until, system::now(), wait)
    }

    /// [`Dialer::dial`] until `until`. Errors report the time since `silent_since`, the first attempt without an answer.
    pub fn dial_until(&self, until: Option<Instant>, silent_since: Instant, wait: &Wait<'_>) -> Result<Connection> {
        self.check_process()?;
        let driver = self.driver()?;
        // Relaxed, as all accesses: only the limit of an attempt depends on it.
        let unanswered = self.unanswered.load(Ordering::Relaxed);
        let own = system::now() + FIRST_ATTEMPT * (1 << unanswered.min(DOUBLINGS));
        let until = until.map_or(own, |until| until.min(own));
        let late = || {
            if until == own {
                self.unanswered.store(unanswered + 1, Ordering::Relaxed);
            }
            let text = format!("no answer within {} ms", system::elapsed(silent_since).as_millis());
            self.unreachable(io::Error::new(io::ErrorKind::TimedOut, text))
        };
        let limits = FrameLimits::new(self.options.max_frame_bytes);
        let server = ServerWait::new(self.address.to_string());
        let (pipeline, peer, incarnation, kept) = driver.drive(wait, Some(until), late, &server, async {
            let Opened { stream, peer, channel_binding } = self.stream().await?;
            let mut pipeline =
                RequestPipeline::new(stream, limits, self.address.to_string()).within(self.options.namespace.clone());
            let token = self.options.token.as_ref().map(|token| &*token.0);
            let incarnation = match pipeline.handshake(token, channel_binding).await {
                Ok(incarnation) => incarnation,
                Err(error) => {
                    pipeline.close().await;
                    return Err(self.explain(error));
                }
            };
            let mut kept = None;
            // Relaxed: a race only sends the tables twice, and creating a table is idempotent.
            let known = self.incarnation.load(Ordering::Relaxed);
            if known != incarnation {
                if known != 0 || self.identities.is_some() {
                    let reply = pipeline.call(u32::MAX, None, RequestBody::Stats).await?;
                    let stats: String = expect(reply)?;
                    let stats = serde_json::from_str(&stats).unwrap_or_default();
                    if let Some(identities) = &self.identities {
                        identities.note(self.address.to_string(), &stats)?;
                    }
                    kept = (known != 0).then(|| outage::kept(&stats));
                }
                // A restarted server may be empty.
                let tables: Vec<_> = self.tables().values().cloned().collect();
                for table in tables {
                    let body = RequestBody::CreateTable(table);
                    match pipeline.call(u32::MAX, None, body).await {
                        Ok(reply) => expect(reply)?,
                        // Actors may not create tables: a learner's client does.
                        Err(error) if error.code() == ErrorCode::Forbidden => {}
                        Err(error) => return Err(error),
                    }
                }
                self.incarnation.store(incarnation, Ordering::Relaxed);
            }
            Ok((pipeline, peer, incarnation, kept))
        })?;
        self.outage.end(&self.address, kept.as_deref());
        self.unanswered.store(0, Ordering::Relaxed);
        let (process, tls) = (self.process, self.tls.is_some());
        Ok(Connection { incarnation, peer, process, tls, open: Some((pipeline, driver)) })
    }

    /// Tables that this client created and did not drop: it creates them again at a restarted server.
    pub(super) fn tables(&self) -> MutexGuard<'_, BTreeMap<String, TableConfig>> {
        lock(&self.tables)
    }

    fn driver(&self) -> Result<Driver> {
        match &self.stack {
            Some(stack) => Ok(Driver::Plugged(stack.clone())),
            None => Driver::runtime(self.options.spin),
        }
    }

    async fn stream(&self) -> Result<Opened> {
        let local = |stream| Opened { stream, peer: None, channel_binding: None };
        if let Some(open) = &self.open {
            return open().map(local).map_err(|e| self.unreachable(e));
        }
        let (host, port) = match &self.address {
            Address::Unix { path } => {
                let stream = UnixStream::connect(path).await.map_err(|e| self.unreachable(e))?;
                close_in_children(&stream);
                return Ok(local(Box::new(stream)));
            }
            Address::Tcp { host, port, .. } => (host.as_str(), *port),
        };
        let (stream, peer) = self.tcp(host, port).await.map_err(|e| self.unreachable(e))?;
        let Some(tls) = &self.tls else {
            return Ok(Opened { stream, peer, channel_binding: None });
        };
        let name =
            ServerName::try_from(host.to_owned()).map_err(|e| Error::Config(format!("{}: {e}", self.address)))?;
        let stream = tls.connect(name, stream).await;
        let stream = stream.map_err(|error| self.tls_failed(error))?;
        let channel_binding = Some(channel_binding(stream.get_ref().1)?);
        Ok(Opened { stream: Box::new(stream), peer, channel_binding })
    }

    async fn tcp(&self, host: &str, port: u16) -> io::Result<(Box<dyn ByteStream>, Option<SocketAddr>)> {
        if let Some(stack) = &self.stack {
            return Ok((stack.connect().await?, None));
        }
        let stream = TcpStream::connect((host, port)).await?;
        kernel::prepare_tcp(&SockRef::from(&stream), kernel::CLIENT_USER_TIMEOUT)?;
        // `None` if the server has closed the connection already: the handshake then fails with the reason.
        let peer = stream.peer_addr().ok();
        Ok((Box::new(stream), peer))
    }

    fn unreachable(&self, source: io::Error) -> Error {
        Error::Connect { address: self.address.to_string(), source }
    }

    /// The error of a failed TLS handshake: a broken connection, or the wrong server.
    fn tls_failed(&self, error: io::Error) -> Error {
        let address = &self.address;
        Error::authentication(match tls_error(&error) {
            None => return self.explain(broken(&address.to_string(), error)),
            Some(error) => format!("TLS with {address} failed: {}", tls::advice(error)),
        })
    }

    /// Adds the usual causes of a failed handshake, unless the server has answered before.
    fn explain(&self, error: Error) -> Error {
        let hint = match self.address {
            Address::Tcp { tls: false, .. } => {
                "is it an innet-replay server, and one without TLS? For one with TLS write innets://"
            }
            _ => "is it an innet-replay server?",
        };
        match error {
            Error::Wire(replay_wire::Error::Protocol(reason)) => Error::protocol(format!("{reason}; {hint}")),
            Error::Disconnected { address, reason } if self.outage.connections() == 0 => Error::Disconnected {
                address,
                reason: format!(
                    "{reason}; {hint} (a server that restarts or is at a limit, max_handshakes or \
                                     max_handshakes_per_address, closes connections like this, too)"
                ),
            },
            // Handshake frames are short: these lengths are the first bytes of another protocol.
            Error::TooLarge(error) => Error::TooLarge(TooLarge { advice: hint, ..error }),
            other => other,
        }
    }
}

/// A stream to the server.
struct Opened {
    stream: Box<dyn ByteStream>,
    peer: Option<SocketAddr>,
    /// The keying material of its TLS session.
    channel_binding: Option<ChannelBinding>,
}

/// Idle connections for later calls.
#[derive(Default)]
pub struct ConnectionPool(Mutex<Vec<Connection>>);

impl ConnectionPool {
    /// Limit of idle connections; further ones are closed.
    const MAX_IDLE: usize = 8;

    /// An idle connection, or a new one.
    pub fn take(&self, dialer: &Arc<Dialer>, wait: &Wait<'_>) -> Result<Connection> {
        dialer.check_process()?;
        loop {
            let idle = lock(&self.0).pop();
            let Some(mut connection) = idle else {
                return dialer.dial(wait);
            };
            match connection.check() {
                Ok(()) => {
                    dialer.outage.used();
                    return Ok(connection);
                }
                Err(error) if is_closed(&error) => dialer.outage.close(),
                Err(_) => {}
            }
        }
    }

    /// Keeps a connection for the next call.
    pub fn give(&self, connection: Connection) {
        let mut idle = lock(&self.0);
        if idle.len() < Self::MAX_IDLE {
            idle.push(connection);
        }
    }
}

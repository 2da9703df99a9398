//! Listeners, I/O threads and shutdown around the connections.
//!
//! [`Server`] is everything but sockets, and runs on any [`Stack`]; [`Server::start`] runs it on kernel sockets
//! with threads of its own, or on F-Stack's one. The first I/O thread accepts, and every I/O thread serves what it is handed until
//! the end: a connection never moves.

use std::future::Future;
use std::net::SocketAddr;
#[cfg(feature = "fstack")]
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::LocalSet;
use tokio_rustls::TlsAcceptor;
use tracing::Instrument;
use tracing::field::Empty;

use crate::aggregators::Aggregators;
use crate::aggregators::ParentServer;
use crate::client::ConnectOptions;
use crate::client::connection::Dialer;
use crate::config::ServerConfig;
use crate::connection::{Connection, Context, Phase, reached};
use crate::service::Service;
use crate::stack::kernel::{self, Kernel};
use crate::stack::{Address, Stack, StackName, until};
use crate::tls;
use gradients::plane::{dpdk_aggregators, udp_aggregators};
use replay_core::error::{Error, Result};
use replay_core::memory::Memory;
use replay_wire::handshake::Handshake;

/// Connections over the limit that are told so at a time; any more are closed without a word.
const MAX_REFUSALS: usize = 16;

/// Pause after a failed accept: out of descriptors, it would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors that a process has open beside its connections.
const OTHER_FILES: u64 = 128;

/// A server without its sockets.
pub struct Server {
    context: Context,
    tls: Option<TlsAcceptor>,
    connections: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    max_connections: u32,
    drain_deadline: Duration,
    phase: watch::Sender<Phase>,
}

/// Raises the limit of open files, which is 1024 on many systems, as far as the process may.
fn make_room_for(connections: u32) {
    let wanted = u64::from(connections) + OTHER_FILES;
    let (limit, _) = rlimit::Resource::NOFILE.get().unwrap_or((u64::MAX, 0));
    if limit < wanted && rlimit::increase_nofile_limit(wanted).unwrap_or(limit) < wanted {
        tracing::warn!(
            limit,
            connections,
            "open files are limited to fewer than max_connections needs: raise the hard limit (ulimit -Hn), or lower \
             max_connections"
        );
    }
}

/// A connection on its way to the I/O thread that will serve it.
pub struct Accepted<I> {
    incoming: I,
    peer: String,
    /// Whether TLS runs over it.
    tls: bool,
    place: Place,
}

/// One of `max_connections`, or, when there was none left, one of the refusals.
struct Place {
    refused: bool,
    _permit: OwnedSemaphorePermit,
}

impl Server {
    /// Checks the configuration, reads the files it names, and makes its tables.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Table`] and [`Error::TableDiffers`] say what to change.
    pub fn new(config: &ServerConfig, memory: Arc<Memory>) -> Result<Self> {
        config.validate()?;
        let longest = memory.limits().receive_bytes / 2;
        if config.max_frame_bytes > longest {
            return Err(Error::Config(format!(
                "max_frame_bytes is {}, but the memory receives frames of at most {longest} bytes: lower the one, or \
                 make the memory with a higher receive_bytes",
                config.max_frame_bytes
            )));
        }
        let token = config.read_token()?;
        let tls = match (&config.tls_cert, &config.tls_key) {
            (Some(certificate), Some(key)) => Some(tls::acceptor(certificate, key)?),
            _ => None,
        };
        let handshake = Handshake::new(token, memory.incarnation(), config.max_frame_bytes);
        Ok(Server {
            context: Context {
                service: Service::new(memory, &config.tables, config.max_frame_bytes)?,
                handshake,
                max_frame_bytes: config.max_frame_bytes,
                handshake_deadline: config.handshake_deadline(),
                write_deadline: config.write_deadline(),
            },
            tls,
            connections: Arc::new(Semaphore::new(config.max_connections as usize)),
            refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
            max_connections: config.max_connections,
            drain_deadline: config.drain_deadline(),
            phase: watch::Sender::new(Phase::Serving),
        })
    }

    /// Serves a memory on the stack that the configuration names, until the answer is shut down or dropped: on kernel
    /// sockets from threads of its own, on F-Stack's from its one thread, which is started if it does not run yet.
    ///
    /// # Errors
    /// Those of [`Server::new`], and [`Error::Io`] or [`Error::Config`] for an address that cannot be bound or a
    /// stack that cannot be started.
    pub fn start(config: &ServerConfig, memory: Arc<Memory>) -> Result<RunningServer> {
        config.stack.check_built_in()?;
        let mut server = Server::new(config, memory)?;
        if let Some(address) = config.gradients {
            let aggregators = start_aggregators(config, address)?;
            let service = &mut server.context.service;
            service.sum_gradients(aggregators, config.gradients_only);
        }
        let server = Arc::new(server);
        let mut running = RunningServer {
            server: server.clone(),
            addresses: Vec::new(),
            parts: Vec::new(),
        };
        let (bound, addresses) = std::sync::mpsc::channel();
        match config.stack {
            StackName::Kernel => server.start_on_kernel(config, bound, &mut running.parts)?,
            #[cfg(feature = "fstack")]
            StackName::Fstack => running.parts.push(server.start_on_fstack(config, bound)?),
            #[cfg(not(feature = "fstack"))]
            StackName::Fstack => {}
        }
        running.addresses = addresses
            .recv()
            .map_err(|_| Error::Internal("an I/O thread ended at its start".into()))??;
        let addresses: Vec<String> = running.addresses.iter().map(Address::to_string).collect();
        tracing::info!(
            addresses = addresses.join(" "),
            io_threads = running.parts.len(),
            tables = config.tables.len(),
            gradients = running.gradients().map(tracing::field::display),
            "listening"
        );
        if config.spin {
            tracing::warn!("spin is set: each I/O thread takes a core whole, also when idle");
        }
        if config.trusted_network {
            tracing::warn!("trusted_network is set: everyone who can connect may read and write");
        }
        Ok(running)
    }

    fn start_on_kernel(
        self: Arc<Self>,
        config: &ServerConfig,
        bound: Bound,
        threads: &mut Vec<Part>,
    ) -> Result<()> {
        make_room_for(config.max_connections);
        let mut others = Vec::new();
        for number in 1..config.effective_io_threads() {
            let (hand_over, accepted) = mpsc::unbounded_channel();
            others.push(hand_over);
            let server = self.clone();
            threads.push(io_thread(number, config.spin, move || async move {
                server.serve_handed_over(Kernel, accepted).await;
            })?);
        }
        let listen = config.listen.clone();
        threads.push(io_thread(0, config.spin, move || {
            self.listen_and_run(Kernel, listen, others, bound)
        })?);
        Ok(())
    }

    #[cfg(feature = "fstack")]
    fn start_on_fstack(self: Arc<Self>, config: &ServerConfig, bound: Bound) -> Result<Part> {
        use crate::stack::{fstack, fstack_config::Config};
        let path = config.stack_config.as_deref().unwrap_or(Path::new(""));
        let reactor = fstack::start(&Config::read(path)?)?;
        let listen = config.listen.clone();
        let (end, ended) = std::sync::mpsc::channel();
        reactor.spawn(move |stack| async move {
            self.listen_and_run(stack, listen, vec![], bound).await;
            let _ = end.send(());
        })?;
        Ok(Part::Task(ended))
    }

    /// Binds the addresses, tells whoever started the server, and serves.
    async fn listen_and_run<S: Stack>(
        self: Arc<Self>,
        stack: S,
        listen: Vec<Address>,
        others: Vec<mpsc::UnboundedSender<Accepted<S::Incoming>>>,
        bound: Bound,
    ) {
        let listeners = listen.iter().map(|a| stack.listen(&self.with_tls(a)));
        match listeners.collect::<Result<Vec<_>>>() {
            Ok(listeners) => {
                let addresses = listeners.iter().map(|l| stack.address(l)).collect();
                let _ = bound.send(Ok(addresses));
                self.run(stack, listeners, others).await;
            }
            Err(error) => drop(bound.send(Err(error))),
        }
    }

    /// The address to listen on: with a certificate, every TCP address speaks TLS.
    fn with_tls(&self, address: &Address) -> Address {
        match address {
            Address::Tcp { host, port, .. } => Address::Tcp {
                host: host.clone(),
                port: *port,
                tls: self.tls.is_some(),
                stack: StackName::Kernel,
            },
            Address::Unix { .. } => address.clone(),
        }
    }

    /// The behaviour behind the connections.
    pub fn service(&self) -> &Service {
        &self.context.service
    }

    /// Begins the end: accepts no more, answers what is under way, sends away what waits.
    pub fn shut_down(&self) {
        self.enter(Phase::Draining);
    }

    /// Drops the connections that are still open.
    pub fn stop(&self) {
        self.enter(Phase::Stopped);
    }

    fn enter(&self, phase: Phase) {
        self.phase.send_if_modified(|now| {
            let later = *now < phase;
            *now = phase.max(*now);
            later
        });
    }

    /// Accepts on `listeners` and spreads the connections over this thread and `others`, in turn, until
    /// shutdown; then waits until every connection has ended, or the drain deadline.
    pub async fn run<S: Stack>(
        self: Arc<Self>,
        stack: S,
        listeners: Vec<S::Listener>,
        others: Vec<mpsc::UnboundedSender<Accepted<S::Incoming>>>,
    ) {
        let (hand_over, accepted) = mpsc::unbounded_channel();
        let mut threads = others;
        threads.push(hand_over);
        let accepting = listeners
            .into_iter()
            .map(|listener| self.accept(stack.clone(), listener, &threads));
        let accept_all = async {
            futures_util::future::join_all(accepting).await;
        };
        let serve = self.clone().serve_handed_over(stack.clone(), accepted);
        let end = async {
            accept_all.await;
            let ended = self.connections.acquire_many(self.max_connections);
            let deadline = stack.now() + self.drain_deadline;
            if until(&stack, deadline, ended).await.is_none() {
                let left = self.max_connections as usize - self.connections.available_permits();
                tracing::warn!(
                    connections = left,
                    "still open at the drain deadline: dropped"
                );
            }
            self.stop();
        };
        tokio::join!(serve, end);
    }

    /// Hands every connection of one listener to the next thread in turn, until shutdown.
    async fn accept<S: Stack>(
        &self,
        stack: S,
        mut listener: S::Listener,
        threads: &[mpsc::UnboundedSender<Accepted<S::Incoming>>],
    ) {
        let mut phase = self.phase.subscribe();
        let tls = matches!(stack.address(&listener), Address::Tcp { tls: true, .. });
        for thread in threads.iter().cycle() {
            let (incoming, peer) = loop {
                let accepted = tokio::select! {
                    biased;
                    () = reached(&mut phase, Phase::Draining) => return,
                    accepted = stack.accept(&mut listener) => accepted,
                };
                match accepted {
                    Ok(accepted) => break accepted,
                    Err(error) => {
                        tracing::warn!(%error, "accepting a connection failed");
                        stack.sleep_until(stack.now() + ACCEPT_PAUSE).await;
                    }
                }
            };
            if let Some(place) = self.place() {
                // A thread that is gone has taken the server with it.
                let _ = thread.send(Accepted {
                    incoming,
                    peer,
                    tls,
                    place,
                });
            }
        }
    }

    fn place(&self) -> Option<Place> {
        let place = |refused, places: &Arc<Semaphore>| {
            let permit = places.clone().try_acquire_owned().ok()?;
            Some(Place {
                refused,
                _permit: permit,
            })
        };
        place(false, &self.connections).or_else(|| {
            self.context.service.counters.refuse();
            place(true, &self.refusals)
        })
    }

    /// Serves what other threads accept, until the server has stopped.
    async fn serve_handed_over<S: Stack>(
        self: Arc<Self>,
        stack: S,
        mut accepted: mpsc::UnboundedReceiver<Accepted<S::Incoming>>,
    ) {
        let mut phase = self.phase.subscribe();
        loop {
            let accepted = tokio::select! {
                biased;
                () = reached(&mut phase, Phase::Stopped) => return,
                Some(accepted) = accepted.recv() => accepted,
            };
            let span = tracing::info_span!("connection", peer = accepted.peer, writer = Empty);
            let serve = self.clone().serve(stack.clone(), accepted);
            stack.spawn(serve.instrument(span));
        }
    }

    /// One connection, from the accept to its end.
    async fn serve<S: Stack>(self: Arc<Self>, stack: S, accepted: Accepted<S::Incoming>) {
        let stream = match stack.open(accepted.incoming) {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "the connection could not be taken over"),
        };
        let mut phase = self.phase.subscribe();
        let connection = Connection {
            context: &self.context,
            stack: &stack,
            peer: &accepted.peer,
            phase: phase.clone(),
        };
        let served = async {
            let Some(acceptor) = self.tls.as_ref().filter(|_| accepted.tls) else {
                return self.converse(&connection, stream, &accepted.place).await;
            };
            let deadline = stack.now() + self.context.handshake_deadline;
            match until(&stack, deadline, acceptor.accept(stream)).await {
                Some(Ok(stream)) => self.converse(&connection, stream, &accepted.place).await,
                Some(Err(error)) => Err(Error::Authentication(format!(
                    "TLS failed: {error}; clients connect to innets:// here"
                ))),
                None => Err(Error::Authentication("the client did not start TLS".into())),
            }
        };
        let end = tokio::select! {
            biased;
            () = reached(&mut phase, Phase::Stopped) => Err(Error::Closed("the server")),
            end = served => end,
        };
        match end {
            Ok(()) => tracing::info!("connection closed"),
            Err(Error::Disconnected { reason, .. }) => {
                tracing::info!(reason, "connection broken");
            }
            Err(error) => tracing::warn!(%error, "connection dropped"),
        }
    }

    async fn converse<S: Stack, T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        connection: &Connection<'_, S>,
        stream: T,
        place: &Place,
    ) -> Result<()> {
        if place.refused {
            let reason = Error::TooLarge {
                what: "the number of connections (max_connections)",
                size: u64::from(self.max_connections) + 1,
                limit: self.max_connections.into(),
                advice: "close others, or start the server with a larger --max-connections",
            };
            connection.refuse(stream, &reason).await;
            return Err(reason);
        }
        let _open = self.context.service.counters.open();
        tracing::info!("connection opened");
        connection.serve(stream).await
    }
}

/// Where the addresses that were bound are told.
type Bound = std::sync::mpsc::Sender<Result<Vec<Address>>>;

/// A server on sockets. Dropped, it shuts down and waits for its end.
pub struct RunningServer {
    server: Arc<Server>,
    addresses: Vec<Address>,
    parts: Vec<Part>,
}

/// Something that has to end before the server has.
enum Part {
    /// An I/O thread.
    Thread(JoinHandle<()>),
    /// A task on a thread that is not the server's; it tells its end.
    #[cfg(feature = "fstack")]
    Task(std::sync::mpsc::Receiver<()>),
}

impl RunningServer {
    /// The addresses it listens on, in the order of the configuration, with the ports that were given for port 0.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// UDP address of the first aggregator, if the server sums gradients.
    pub fn gradients(&self) -> Option<SocketAddr> {
        let aggregators = self.server.service().gradients();
        aggregators.map(Aggregators::address)
    }

    /// The server itself: its behaviour, and the ways to end it.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Begins the end: accepts no more, answers what is under way, sends away what waits.
    pub fn shut_down(&self) {
        self.server.shut_down();
    }

    /// Returns when the server has ended.
    ///
    /// # Errors
    /// [`Error::Internal`] when one of its threads panicked.
    pub fn wait(mut self) -> Result<()> {
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        for part in self.parts.drain(..) {
            let ended = match part {
                Part::Thread(thread) => thread.join().is_ok(),
                #[cfg(feature = "fstack")]
                Part::Task(ended) => ended.recv().is_ok(),
            };
            if !ended {
                return Err(Error::Internal(
                    "an I/O thread of the server panicked".into(),
                ));
            }
        }
        Ok(())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        if self.addresses.is_empty() {
            // The start failed: nothing was accepted, and nobody else would end the threads there are.
            self.server.stop();
        }
        self.shut_down();
        if let Err(error) = self.join() {
            tracing::error!(%error, "the server ended badly");
        }
    }
}

fn start_aggregators(config: &ServerConfig, address: SocketAddr) -> Result<Aggregators> {
    let parent = match &config.parent {
        None => None,
        Some(parent) => {
            let options = ConnectOptions {
                token: config.read_token()?,
                tls_ca: config.parent_tls_ca.clone(),
                ..ConnectOptions::default()
            };
            Some(ParentServer {
                dialer: Dialer::new(parent.clone(), options)?,
                rack: config.rack,
                racks: config.racks,
            })
        }
    };
    let limits = config.gradient_limits();
    let aggregators = match config.gradient_dpdk() {
        None => udp_aggregators(address, config.gradients_threads, limits)?,
        Some(dpdk) => dpdk_aggregators(&dpdk, limits)?,
    };
    Ok(Aggregators::new(aggregators, limits, parent))
}

/// A thread with a tokio runtime of its own, which ends with the future that `start` makes on it.
fn io_thread<F: Future<Output = ()>>(
    number: usize,
    spin: bool,
    start: impl FnOnce() -> F + Send + 'static,
) -> Result<Part> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |source| Error::Io { what, source }
    };
    let runtime = runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(failed("cannot make the runtime of an I/O thread"))?;
    if spin {
        runtime.spawn(kernel::spin());
    }
    thread::Builder::new()
        .name(format!("innet-io-{number}"))
        .spawn(move || LocalSet::new().block_on(&runtime, start()))
        .map(Part::Thread)
        .map_err(failed("cannot start an I/O thread"))
}

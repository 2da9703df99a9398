//! Accepting connections, serving them on I/O threads, and shutdown.
//!
//! [`Server`] is independent of sockets and runs on any [`Stack`]; [`Server::start`] (in `running`) runs it on kernel sockets
//! with its own threads, or on the thread of a plugged-in stack. The first I/O thread accepts connections and distributes them over all I/O
//! threads. A connection stays on its thread.

mod admission;
mod http;
mod running;

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime;
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tracing::Instrument;
use tracing::field::Empty;

use crate::config::ServerConfig;
use crate::connection::{ConnectionHandler, Phase, ServerContext, late_handshake, reached};
use crate::reply_budget::ReplyBudgets;
use crate::service::Service;
use crate::snapshots::Snapshots;
use crate::snapshots::file::Disk;
use base::wait::lock;
use replay_core::memory::Memory;
use replay_core::table::WriterConnection;
use replay_core::table::leases::Reader;
use replay_link::error::{Error, Result};
use replay_link::framing::broken;
use replay_link::stack::{Address, Stack, until};
use replay_link::tls::{self, Dates};
use replay_wire::auth::{ChannelBinding, Handshake};

use admission::Admission;
pub use admission::Permit;
use admission::{StrangerEvent, StrangerLog};

pub use running::{JoinTask, RunningServer, ServeTask, open_files};

/// Pause after a failed accept: without free file descriptors the next accept would fail at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server without its sockets.
pub struct Server {
    context: ServerContext,
    tls: Option<RwLock<TlsAcceptor>>,
    admission: Arc<Admission>,
    strangers: StrangerLog,
    /// Time for the whole handshake, with TLS.
    handshake_deadline: Duration,
    drain_deadline: Duration,
    phase: watch::Sender<Phase>,
    /// Runtimes of the threads for connections and HTTP on kernel sockets.
    runtimes: Mutex<Vec<runtime::Handle>>,
}

/// An accepted connection, to be handed to its I/O thread.
pub struct Accepted<I> {
    incoming: I,
    peer: String,
    /// Whether TLS runs over it.
    tls: bool,
    permit: Permit,
}

impl Server {
    /// Checks the configuration, reads its files and makes its tables.
    ///
    /// # Errors
    /// [`Error::Config`], [`replay_core::Error::Table`] and [`replay_core::Error::TableDiffers`] name the change to make.
    pub fn new(config: &ServerConfig, memory: Arc<Memory>) -> Result<Self> {
        config.validate()?;
        let longest = memory.limits().receive_bytes / 2;
        let frame_bytes = match config.max_frame_bytes {
            // As measured when the memory was made.
            0 => longest.clamp(ServerConfig::MIN_FRAME_BYTES, ServerConfig::MOST_FRAME_BYTES),
            bytes => bytes,
        };
        if frame_bytes > longest {
            return Err(Error::Config(format!(
                "max_frame_bytes is {frame_bytes}, but the memory receives frames of at most {longest} bytes: lower \
                 max_frame_bytes, or make the memory with more receive_bytes"
            )));
        }
        let tokens = config.read_tokens()?;
        let tls = acceptor(config)?;
        // Without a token every client is an operator.
        let reply_budgets = ReplyBudgets::new(config.effective_reply_bytes(frame_bytes), tokens.len());
        let admission = Admission::new(config, tokens.len());
        let handshake = Handshake::new(tokens, memory.incarnation(), frame_bytes);
        let service = Service::new(memory, &config.tables, frame_bytes, reply_budgets)?;
        let tls = tls.map(|(acceptor, dates)| {
            service.note_certificate(dates);
            RwLock::new(acceptor)
        });
        Ok(Server {
            context: ServerContext {
                service,
                handshake,
                max_frame_bytes: frame_bytes,
                write_deadline: Duration::from_millis(config.write_deadline_ms),
                closed: AtomicBool::new(false),
            },
            tls,
            admission,
            strangers: StrangerLog::default(),
            handshake_deadline: Duration::from_millis(config.handshake_deadline_ms),
            drain_deadline: Duration::from_millis(config.drain_deadline_ms),
            phase: watch::Sender::new(Phase::Serving),
            runtimes: Mutex::default(),
        })
    }

    /// Reads the files of `config` with the tokens and the certificate again, for new connections. After an error the server
    /// keeps all of them.
    ///
    /// # Errors
    /// [`Error::Config`] names the file.
    pub fn reload(&self, config: &ServerConfig) -> Result<()> {
        let tokens = config.read_tokens()?;
        if let (Some(current), Some((new, dates))) = (&self.tls, acceptor(config)?) {
            self.context.service.note_certificate(dates);
            *current.write().unwrap_or_else(PoisonError::into_inner) = new;
        }
        self.context.handshake.set_tokens(tokens);
        config.warn_of_open_secrets();
        Ok(())
    }

    /// Restores the newest snapshot in a folder, and saves the later ones there.
    ///
    /// # Errors
    /// Errors of [`Snapshots::open`].
    pub fn restore_from(&self, disk: Box<dyn Disk>, folder: &Path) -> Result<()> {
        let service = &self.context.service;
        let snapshots = Snapshots::open(service.memory.clone(), disk, folder)?;
        service.save_snapshots(snapshots);
        Ok(())
    }

    /// The service behind the connections.
    pub fn service(&self) -> &Service {
        &self.context.service
    }

    /// Returns when every thread of this server has run a task, or has ended. Plugged-in stacks are not asked.
    pub async fn threads_answer(&self) {
        let runtimes = lock(&self.runtimes).clone();
        futures_util::future::join_all(runtimes.iter().map(|runtime| runtime.spawn(async {}))).await;
    }

    /// Begins the shutdown: accepts no more connections, answers running requests, and fails blocked ones. Clients reconnect, in case the
    /// server restarts.
    pub fn shut_down(&self) {
        self.enter(Phase::Draining);
    }

    /// [`Server::shut_down`] for good: calls of clients fail with [`Error::Closed`], and clients do not reconnect.
    pub fn close(&self) {
        // Relaxed: connections read it after the change of the phase, whose lock orders both.
        self.context.closed.store(true, Ordering::Relaxed);
        self.shut_down();
    }

    /// Drops all open connections.
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

    /// Accepts on `listeners` and distributes the connections over this thread and `others`, round robin, until shutdown.
    /// Then waits for all connections to end, at most until the drain deadline.
    pub async fn run<S: Stack>(
        self: Arc<Self>,
        stack: S,
        listeners: Vec<S::Listener>,
        others: Vec<mpsc::UnboundedSender<Accepted<S::Incoming>>>,
    ) {
        let (sender, accepted) = mpsc::unbounded_channel();
        let mut threads = others;
        threads.push(sender);
        let accepting = listeners.into_iter().map(|listener| self.accept(stack.clone(), listener, &threads));
        let accept_all = async {
            futures_util::future::join_all(accepting).await;
        };
        let serve = self.clone().serve_accepted(stack.clone(), accepted);
        let end = async {
            accept_all.await;
            let ended = self.admission.all_ended();
            let deadline = stack.now() + self.drain_deadline;
            if until(&stack, deadline, ended).await.is_none() {
                tracing::warn!(connections = self.admission.open(), "still open at the drain deadline: dropped");
            }
            self.stop();
        };
        tokio::join!(serve, end);
    }

    /// Hands the connections of one listener to the threads, round robin, until shutdown.
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
                        let (event, now) = (StrangerEvent::NotAccepted, stack.now());
                        self.strangers.report(event, "a new client", &error, now);
                        stack.sleep_until(stack.now() + ACCEPT_PAUSE).await;
                    }
                }
            };
            let permit = self.admission.accept(&peer, stack.now());
            if permit.as_ref().is_none_or(|permit| permit.refusal().is_some()) {
                self.context.service.counters.connections_refused.add(1);
            }
            let Some(permit) = permit else {
                let reason = "closed without a reply: too many clients connect at the same time";
                self.strangers.report(StrangerEvent::Refused, &peer, &reason, stack.now());
                continue;
            };
            // An I/O thread ends only with the server.
            let _ = thread.send(Accepted { incoming, peer, tls, permit });
        }
    }

    /// Serves accepted connections on this thread until the server has stopped.
    async fn serve_accepted<S: Stack>(
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
            Err(error) => {
                let (event, now) = (StrangerEvent::NotAccepted, stack.now());
                self.strangers.report(event, &accepted.peer, &error, now);
                return;
            }
        };
        let mut phase = self.phase.subscribe();
        let connection = ConnectionHandler {
            context: &self.context,
            stack: &stack,
            peer: &accepted.peer,
            phase: phase.clone(),
            permit: &accepted.permit,
            handshake_deadline: stack.now() + self.handshake_deadline,
            writers: Arc::<WriterConnection>::default(),
            reader: Reader::from(&*accepted.peer),
        };
        let served = async {
            let Some(current) = self.tls.as_ref().filter(|_| accepted.tls) else {
                return self.converse(&connection, stream, None).await;
            };
            let acceptor = current.read().unwrap_or_else(PoisonError::into_inner).clone();
            let deadline = connection.handshake_deadline;
            match until(&stack, deadline, acceptor.accept(stream)).await {
                Some(Ok(stream)) => {
                    let channel_binding = tls::channel_binding(stream.get_ref().1)?;
                    self.converse(&connection, stream, Some(channel_binding)).await
                }
                Some(Err(error)) => Err(match tls::tls_error(&error) {
                    None => broken(&accepted.peer, error),
                    Some(error @ rustls::Error::AlertReceived(_)) => {
                        Error::authentication(format!("the client ended TLS, {error}: its own error says what to do"))
                    }
                    Some(error) => {
                        Error::authentication(format!("TLS failed: {error}; clients connect to innets:// here"))
                    }
                }),
                None => Err(late_handshake()),
            }
        };
        let end = tokio::select! {
            biased;
            () = reached(&mut phase, Phase::Stopped) => Err(Error::Closed("the server")),
            () = accepted.permit.displaced() => Err(Error::Busy("its handshake made room for that of another client".into())),
            end = served => end,
        };
        match end {
            end if !accepted.permit.is_welcome() => {
                self.report_stranger(&accepted.peer, end, stack.now());
            }
            Ok(()) => tracing::info!("connection closed"),
            Err(Error::Disconnected { reason, .. }) => {
                tracing::info!(reason, "connection broken");
            }
            Err(error) => tracing::warn!(%error, "connection dropped"),
        }
    }

    /// Logs and counts a connection that ended before the end of its handshake.
    fn report_stranger(&self, peer: &str, end: Result<()>, now: Instant) {
        let (event, error): (_, &dyn Display) = match &end {
            Ok(()) => (StrangerEvent::Left, &"the client closed it"),
            Err(Error::Disconnected { reason, .. }) => (StrangerEvent::Left, reason),
            Err(error @ Error::Wire(replay_wire::Error::Authentication(_))) => {
                self.context.service.counters.failed_logins.add(1);
                (StrangerEvent::FailedLogin, error)
            }
            Err(error @ Error::Busy(_)) => (StrangerEvent::Refused, error),
            Err(error) => (StrangerEvent::Dropped, error),
        };
        self.strangers.report(event, peer, error, now);
    }

    async fn converse<S: Stack, T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        connection: &ConnectionHandler<'_, S>,
        stream: T,
        channel_binding: Option<ChannelBinding>,
    ) -> Result<()> {
        if let Some(reason) = connection.permit.refusal() {
            connection.refuse(stream, &reason).await;
            return Err(reason);
        }
        let _open = self.context.service.counters.open();
        connection.serve(stream, channel_binding).await
    }
}

/// The acceptor for the certificate of a configuration, if it has one, and the dates of its chain.
fn acceptor(config: &ServerConfig) -> Result<Option<(TlsAcceptor, Dates)>> {
    match (&config.tls_cert, &config.tls_key) {
        (Some(certificate), Some(key)) => tls::acceptor(certificate, key).map(Some),
        _ => Ok(None),
    }
}

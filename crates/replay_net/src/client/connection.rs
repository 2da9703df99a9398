//! A connection and what drives it: inside blocking calls alone a small runtime, with no thread of its own, so that
//! nothing happens on it between two calls; or F-Stack's reactor, which carries each call out while its caller waits.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

use super::keys::{Incarnations, Stamp};
use super::pipeline::{self, Link};
use super::{ConnectOptions, tls};
use crate::stack::{Address, StackName, kernel};
#[cfg(feature = "fstack")]
use crate::stack::{fstack, fstack_config::Config};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;
use replay_wire::{Limits, ReplyBody, RequestBody};

/// A server that vanished without a word (its machine lost power) is noticed after about this time.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Any stream that a link may run on.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Transport for S {}

/// Opens a stream to the server.
pub type OpenStream = dyn Fn() -> io::Result<Box<dyn Transport>> + Send + Sync;

/// How to reach the server.
pub struct Dialer {
    /// Where it is.
    pub address: Address,
    /// What the user asked for.
    pub options: ConnectOptions,
    tls: Option<TlsConnector>,
    /// In place of the kernel's sockets.
    open: Option<Box<OpenStream>>,
    #[cfg(feature = "fstack")]
    reactor: Option<fstack::Handle>,
    incarnations: Incarnations,
    /// The process that connected; a forked child must not touch what it inherited.
    process: u32,
}

impl Dialer {
    /// Reads the certificates that the options name, and starts F-Stack for an address that goes by it.
    ///
    /// # Errors
    /// [`Error::Config`] when address and options do not fit, or F-Stack cannot start.
    pub fn new(address: Address, options: ConnectOptions) -> Result<Self> {
        let refuse = |reason: String| Err(Error::Config(reason));
        let tls = match (&address, &options.tls_ca) {
            (Address::Tcp { port: 0, .. }, _) => {
                return refuse(format!("{address} has port 0, where no server can be"));
            }
            (Address::Tcp { tls: true, .. }, Some(path)) => Some(tls::client_config(path)?.into()),
            (Address::Tcp { tls: true, .. }, None) => {
                return refuse(format!(
                    "{address} needs tls_ca: a PEM file with the server's certificate or that of its authority"
                ));
            }
            (_, Some(_)) => {
                return refuse(format!(
                    "tls_ca is set, but {address} is without TLS: write innets://host:port"
                ));
            }
            (_, None) => None,
        };
        let over_fstack = match (address.stack(), &options.stack_config) {
            (StackName::Kernel, Some(_)) => {
                return refuse(format!(
                    "{address} goes by the kernel's TCP, which has no configuration file: write innet+fstack://address:port, \
                     or leave the file out"
                ));
            }
            (StackName::Kernel, None) => None,
            (_, _) if options.spin => {
                return refuse(format!("{address} polls by itself: leave spin out"));
            }
            (stack, file) => {
                stack.check_built_in()?;
                let Some(file) = file else {
                    return refuse(format!(
                        "{address} needs F-Stack's configuration file (config)"
                    ));
                };
                Some(file)
            }
        };
        #[cfg(feature = "fstack")]
        let reactor = match over_fstack {
            Some(file) => {
                fstack::socket_address(&address)?;
                Some(fstack::start(&Config::read(file)?)?)
            }
            None => None,
        };
        #[cfg(not(feature = "fstack"))]
        let _ = over_fstack;
        Ok(Dialer {
            address,
            options,
            tls,
            open: None,
            #[cfg(feature = "fstack")]
            reactor,
            incarnations: Incarnations::default(),
            process: std::process::id(),
        })
    }

    /// Reaches the server over streams that `open` makes, without TLS; `address` is its name in errors.
    ///
    /// # Errors
    /// Those of [`Dialer::new`].
    pub fn over(address: Address, options: ConnectOptions, open: Box<OpenStream>) -> Result<Self> {
        let mut dialer = Dialer::new(address, options)?;
        dialer.open = Some(open);
        Ok(dialer)
    }

    /// # Errors
    /// [`Error::Config`] in a process that forked off the one that connected.
    pub fn check_process(&self) -> Result<()> {
        let here = std::process::id();
        if here != self.process {
            return Err(Error::Config(format!(
                "the connection to {} belongs to process {}, this is its fork {here}: connect again after a fork",
                self.address, self.process
            )));
        }
        Ok(())
    }

    /// Opens a connection and shakes hands.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Authentication`], [`Error::Version`].
    pub fn dial(&self, wait: &Wait<'_>) -> Result<Connection> {
        let until = wait.deadline.map(|d| d + self.options.grace);
        self.dial_until(until, wait)
    }

    /// The same, for as long as [`ConnectOptions::connect_timeout`] and `until` allow.
    ///
    /// # Errors
    /// Those of [`Dialer::dial`].
    pub fn dial_until(&self, until: Option<Instant>, wait: &Wait<'_>) -> Result<Connection> {
        self.check_process()?;
        let driver = self.driver()?;
        let begun = Instant::now();
        let longest = begun + self.options.connect_timeout;
        let until = until.map_or(longest, |until| until.min(longest));
        let late = || {
            let text = format!("no answer within {} ms", begun.elapsed().as_millis());
            self.unreachable(io::Error::new(io::ErrorKind::TimedOut, text))
        };
        let limits = Limits::new(self.options.max_frame_bytes);
        let (link, greeting) = driver.drive(wait, Some(until), late, async {
            let stream = self.stream().await?;
            let mut link = Link::new(stream, limits, self.address.to_string());
            let greeting = link
                .handshake(self.options.token.as_deref())
                .await
                .map_err(|error| self.explain(error))?;
            Ok((link, greeting))
        })?;
        Ok(Connection {
            stamp: self.incarnations.stamp(greeting.incarnation)?,
            process: self.process,
            open: Some((link, driver)),
        })
    }

    fn driver(&self) -> Result<Driver> {
        #[cfg(feature = "fstack")]
        if let Some(reactor) = &self.reactor {
            return Ok(Driver::Reactor(reactor.clone()));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| Error::Io {
                what: "starting a connection's runtime".into(),
                source,
            })?;
        if self.options.spin {
            runtime.spawn(kernel::spin());
        }
        Ok(Driver::Runtime(runtime))
    }

    async fn stream(&self) -> Result<Box<dyn Transport>> {
        if let Some(open) = &self.open {
            return open().map_err(|e| self.unreachable(e));
        }
        let (host, port) = match &self.address {
            Address::Unix { path } => {
                let stream = UnixStream::connect(path).await;
                return Ok(Box::new(stream.map_err(|e| self.unreachable(e))?));
            }
            Address::Tcp { host, port, .. } => (host.as_str(), *port),
        };
        let stream = self
            .tcp(host, port)
            .await
            .map_err(|e| self.unreachable(e))?;
        let Some(tls) = &self.tls else {
            return Ok(stream);
        };
        let name = ServerName::try_from(host.to_owned())
            .map_err(|e| Error::Config(format!("{}: {e}", self.address)))?;
        let stream = tls.connect(name, stream).await.map_err(|error| {
            Error::Authentication(format!(
                "TLS with {} failed: {error}; it has to run with --tls-cert and --tls-key, and tls_ca has to hold its certificate or that of its authority",
                self.address
            ))
        })?;
        Ok(Box::new(stream))
    }

    async fn tcp(&self, host: &str, port: u16) -> io::Result<Box<dyn Transport>> {
        #[cfg(feature = "fstack")]
        if self.reactor.is_some() {
            let peer = fstack::socket_address(&self.address).map_err(io::Error::other)?;
            return Ok(Box::new(fstack::socket::Stream::connect(peer).await?));
        }
        let stream = TcpStream::connect((host, port)).await?;
        // A request is one vectored write: nothing is gained by waiting for more.
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Box::new(stream))
    }

    fn unreachable(&self, source: io::Error) -> Error {
        Error::Connect {
            address: self.address.to_string(),
            source,
        }
    }

    /// Adds what a handshake that ends in an odd way often means: something else answers there, or a server with
    /// TLS, which answers plain bytes with a few of its own and hangs up.
    fn explain(&self, error: Error) -> Error {
        let hint = match self.address {
            Address::Tcp { tls: false, .. } => {
                "is it an innet-replay server, and one without TLS (that would be innets://)?"
            }
            _ => "is it an innet-replay server?",
        };
        match error {
            Error::Protocol(reason) => Error::Protocol(format!("{reason}; {hint}")),
            Error::Disconnected { address, reason } => Error::Disconnected {
                address,
                reason: format!("{reason}; {hint}"),
            },
            // No handshake is as long: these lengths are another protocol's first bytes.
            Error::TooLarge {
                what, size, limit, ..
            } => Error::TooLarge {
                what,
                size,
                limit,
                advice: hint,
            },
            other => other,
        }
    }
}

/// An open connection.
pub struct Connection {
    /// Of the server's incarnation.
    pub stamp: Stamp,
    process: u32,
    /// Always there; a forked child takes it out to leak it.
    open: Option<(Link<Box<dyn Transport>>, Driver)>,
}

impl Connection {
    /// Drives `work` on the link until it is done, `until` passes (then the error is `late`) or the call is
    /// interrupted.
    ///
    /// # Errors
    /// [`Error::Interrupted`], and those of `late` and `work`.
    pub fn run<'a, F, T>(
        &'a mut self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        work: impl FnOnce(&'a mut Link<Box<dyn Transport>>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'a,
        T: Send,
    {
        match &mut self.open {
            Some((link, driver)) => driver.drive(wait, until, late, work(link)),
            None => Err(Error::Closed("the connection")),
        }
    }

    /// Queues a request and returns its id.
    ///
    /// # Errors
    /// Those of [`Link::send`].
    pub fn send(&mut self, deadline_ms: u32, body: RequestBody) -> Result<u64> {
        match &mut self.open {
            Some((link, _)) => link.send(deadline_ms, body),
            None => Err(Error::Closed("the connection")),
        }
    }

    /// # Errors
    /// [`Error::TooLarge`] for a frame that the server would refuse.
    pub fn check_frame(&self, bytes: u64) -> Result<()> {
        match &self.open {
            Some((link, _)) => link.check_frame(bytes),
            None => Err(Error::Closed("the connection")),
        }
    }

    /// Writes what is queued for a moment that no interrupt check is due in. What is left then, or fails, is
    /// the next call's.
    pub fn nudge(&mut self) {
        let until = Instant::now() + Wait::CHECK_EVERY;
        let late = || Error::Interrupted;
        if let Err(error) = self.run(&Wait::forever(), Some(until), late, Link::flush) {
            tracing::trace!(%error, "requests are left to the next call");
        }
    }

    /// Asks one question.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the server does not answer; those of [`Link::call`].
    pub fn call(
        &mut self,
        dialer: &Dialer,
        wait: &Wait<'_>,
        body: RequestBody,
    ) -> Result<ReplyBody> {
        let until = wait.deadline.map(|d| d + dialer.options.grace);
        let late = || no_answer(&dialer.address);
        let deadline_ms = deadline_ms(wait.deadline);
        self.run(wait, until, late, |link| link.call(deadline_ms, body))
    }

    /// Whether the connection, on which nothing is under way, still stands.
    pub fn is_alive(&mut self) -> bool {
        let arrived = self.run(&Wait::forever(), None, || Error::Interrupted, Link::arrived);
        matches!(arrived, Ok(None))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Parent and child share the epoll set: to let go of it in order would take the
            // parent's sockets out of it.
            std::mem::forget(self.open.take());
        }
    }
}

/// The error of a server that does not answer in time.
pub fn no_answer(address: &Address) -> Error {
    Error::Deadline {
        waited_for: format!("{address} did not answer"),
    }
}

/// The milliseconds to a deadline, rounded up, as the wire has them.
pub fn deadline_ms(deadline: Option<Instant>) -> u32 {
    let Some(deadline) = deadline else {
        return u32::MAX;
    };
    let left = deadline.saturating_duration_since(Instant::now());
    left.as_nanos()
        .div_ceil(1_000_000)
        .try_into()
        .unwrap_or(u32::MAX)
}

/// Where a connection's work is done.
enum Driver {
    /// On the thread that calls.
    Runtime(Runtime),
    /// On F-Stack's thread, while the one that calls waits.
    #[cfg(feature = "fstack")]
    Reactor(fstack::Handle),
}

impl Driver {
    /// Drives `work` until it is done, `until` passes (then the error is `late`), or the call is interrupted. It is
    /// polled at least once.
    fn drive<T: Send>(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        match self {
            Driver::Runtime(runtime) => drive(runtime, wait, until, late, work),
            #[cfg(feature = "fstack")]
            Driver::Reactor(reactor) => reactor.carry_out(wait, until, late, work),
        }
    }
}

fn drive<T>(
    runtime: &Runtime,
    wait: &Wait<'_>,
    until: Option<Instant>,
    late: impl FnOnce() -> Error,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    runtime.block_on(async {
        let mut work = pin!(work);
        let mut slices = wait.slices(until);
        loop {
            let wake = slices.next_wake(Instant::now())?;
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep_until(wake.into()) => {}
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(late());
            }
        }
    })
}

/// Tries again after a broken connection: at once, then after pauses that double up to a second.
pub struct Retry<'a> {
    wait: &'a Wait<'a>,
    until: Instant,
    pause: Duration,
}

impl<'a> Retry<'a> {
    /// Gives up at the caller's deadline, and after [`ConnectOptions::reconnect_for`].
    pub fn new(dialer: &Dialer, wait: &'a Wait<'a>) -> Self {
        let until = Instant::now() + dialer.options.reconnect_for;
        Retry {
            wait,
            until: wait.deadline.map_or(until, |d| until.min(d)),
            pause: Duration::ZERO,
        }
    }

    /// Returns when it is time for the next try after `error`.
    ///
    /// # Errors
    /// `error` itself when another connection would not help, or time is up; [`Error::Interrupted`].
    pub fn after(&mut self, error: Error) -> Result<()> {
        let next = Instant::now() + self.pause;
        if !pipeline::is_broken(&error) || next >= self.until {
            return Err(error);
        }
        tracing::debug!(%error, pause = ?self.pause, "connecting again");
        self.wait.check()?;
        let mut slices = self.wait.slices(Some(next));
        loop {
            let now = Instant::now();
            if now >= next {
                break;
            }
            std::thread::sleep(slices.next_wake(now)?.saturating_duration_since(now));
        }
        self.pause = (2 * self.pause).clamp(Duration::from_millis(20), Duration::from_secs(1));
        Ok(())
    }
}

/// Connections with nothing under way, for the next blocking calls.
#[derive(Default)]
pub struct Pool(std::sync::Mutex<Vec<Connection>>);

impl Pool {
    /// More are closed: they come from a moment with many threads.
    const MAX_IDLE: usize = 8;

    /// A connection that is free, or a new one.
    ///
    /// # Errors
    /// Those of [`Dialer::dial`].
    pub fn take(&self, dialer: &Arc<Dialer>, wait: &Wait<'_>) -> Result<Connection> {
        dialer.check_process()?;
        loop {
            let idle = self.lock().pop();
            let Some(mut connection) = idle else {
                return dialer.dial(wait);
            };
            if connection.is_alive() {
                return Ok(connection);
            }
        }
    }

    /// Keeps a connection for the next call.
    pub fn give(&self, connection: Connection) {
        let mut idle = self.lock();
        if idle.len() < Self::MAX_IDLE {
            idle.push(connection);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

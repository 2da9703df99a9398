//! A server on sockets: its threads or its task on a plugged-in stack, from the start to the end.
//! Its connections are those that the limit of open files leaves beside files, HTTP and operators.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, thread};

use tokio::runtime;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use base::allocation;
use base::wait::lock;
use replay_core::memory::Memory;
use replay_link::error::{Error, Result, io_error, refuse};
use replay_link::stack::kernel::{self, Kernel};
use replay_link::stack::{Address, Stack, StackName};

use super::admission::{MAX_REFUSALS, OPERATORS};
use super::{Accepted, Server, http};
use crate::config::{HttpAddress, ServerConfig};
use crate::connection::Phase;
use crate::plugin;
use crate::snapshots::check_folder;
use crate::snapshots::file::LocalDisk;

/// Default interval of snapshots.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(60);

/// Receives the bound addresses, or the error of binding them.
type AddressSender = std::sync::mpsc::Sender<Result<Vec<Address>>>;

/// A server on sockets. Dropping shuts it down and waits for its end.
pub struct RunningServer {
    server: Arc<Server>,
    addresses: Vec<Address>,
    http: Option<HttpAddress>,
    tasks: Vec<JoinTask>,
    /// Ends the thread that saves snapshots.
    snapshots: Option<JoinTask>,
}

/// Waits for the end of an I/O thread, or of the task on a plugged-in stack; `false` after a panic.
pub type JoinTask = Box<dyn FnOnce() -> bool + Send>;

impl RunningServer {
    /// The bound addresses, in the order of the configuration, with chosen ports for port 0.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The bound address of statistics over HTTP, if the server has one.
    pub fn http(&self) -> Option<&HttpAddress> {
        self.http.as_ref()
    }

    /// Name and address of each extension that listens on an address.
    pub fn extension_addresses(&self) -> impl Iterator<Item = String> {
        let extensions = self.server.service().extensions.iter();
        extensions.filter_map(|extension| {
            let address = extension.address()?;
            Some(format!("{} {address}", extension.name()))
        })
    }

    /// The server itself.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Returns when the server has ended.
    ///
    /// # Errors
    /// [`Error::Internal`] when one of its threads panicked, [`Error::Io`] when the last snapshot cannot be saved.
    pub fn wait(mut self) -> Result<()> {
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        // Every thread is joined, also after a panic of another.
        let panicked = self.tasks.drain(..).filter_map(|join| (!join()).then_some(()));
        let panicked = panicked.count();
        let saved = self.save_last_snapshot();
        match panicked {
            0 => saved,
            n => Err(Error::Internal(format!("I/O threads of the server panicked: {n}"))),
        }
    }

    /// Saves the memory after the last request, unless the start failed.
    fn save_last_snapshot(&mut self) -> Result<()> {
        if self.snapshots.take().is_some_and(|join| !join()) {
            tracing::error!("the thread that saves snapshots panicked");
        }
        match self.server.service().snapshots() {
            Ok(snapshots) if !std::mem::take(&mut self.addresses).is_empty() => snapshots.save(),
            _ => Ok(()),
        }
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        if self.addresses.is_empty() {
            // The start failed: there are no connections to drain, but threads may run.
            self.server.stop();
        } else if *self.server.phase.borrow() == Phase::Serving {
            let addresses: Vec<String> = self.addresses.iter().map(Address::to_string).collect();
            tracing::warn!(addresses = addresses.join(" "), "the server ends, as its program has dropped it");
        }
        self.server.shut_down();
        if let Err(error) = self.join() {
            tracing::error!(%error, "the server did not end in order");
        }
    }
}

/// A server's task for a plugged-in stack: its listeners and connections.
pub struct ServeTask {
    server: Arc<Server>,
    listen: Vec<Address>,
    bound: AddressSender,
}

impl ServeTask {
    /// Binds the addresses and serves on this thread until the server's end.
    pub async fn run<S: Stack>(self, stack: S) {
        let Self { server, listen, bound } = self;
        server.listen_and_run(stack, listen, Vec::new(), bound).await;
    }
}

/// Starts a thread with its own tokio runtime, which runs the future of `start` to its end. A panic stops the server: it loses the listener or
/// some of the open connections.
fn io_thread<F: Future<Output = ()>>(
    server: &Arc<Server>,
    name: &str,
    spin: bool,
    start: impl FnOnce() -> F + Send + 'static,
) -> Result<JoinTask> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(io_error("cannot make the runtime of an I/O thread"))?;
    if spin {
        runtime.spawn(kernel::spin());
    }
    lock(&server.runtimes).push(runtime.handle().clone());
    let server = Arc::clone(server);
    let serve = move || {
        let served = catch_unwind(AssertUnwindSafe(|| LocalSet::new().block_on(&runtime, start())));
        served.inspect_err(|_| server.stop()).is_ok()
    };
    let thread = thread::Builder::new().name(format!("innet-{name}")).stack_size(allocation::STACK_BYTES).spawn(serve);
    let thread = thread.map_err(io_error("cannot start an I/O thread"))?;
    Ok(Box::new(|| thread.join().unwrap_or(false)))
}

impl Server {
    /// Starts a server on the stack of the configuration: on kernel sockets with its own threads, or on the thread of a plugged-in stack.
    /// It serves until the returned value is shut down or dropped.
    ///
    /// # Errors
    /// Errors of [`Server::new`] and [`Server::restore_from`], and [`Error::Io`] or [`Error::Config`] for an address that cannot be
    /// bound or a stack that cannot be started.
    pub fn start(config: &ServerConfig, memory: Arc<Memory>) -> Result<RunningServer> {
        let config = &within_limits(config)?;
        let mut server = Server::new(config, memory)?;
        // Bound first, so that a port in use fails the start.
        let with_tls = server.tls.is_some();
        let http = config.http.as_ref();
        let http = http.map(|address| http::bind(address, with_tls)).transpose()?;
        for plugin in plugin::of_server(config.stack) {
            match plugin.start(config)? {
                Some(extension) => server.context.service.extensions.push(extension),
                None => server.context.service.absent.push((plugin.name(), plugin.absent())),
            }
        }
        server.phase.send_replace(Phase::Starting);
        let server = Arc::new(server);
        let mut running = RunningServer {
            server: server.clone(),
            addresses: Vec::new(),
            http: http.as_ref().map(|(_, address)| address.clone()),
            tasks: Vec::new(),
            snapshots: None,
        };
        let threads_of_http = usize::from(http.is_some());
        if let Some((listener, _)) = http {
            let serve = server.clone();
            let serve = move || serve.serve_http(listener);
            running.tasks.push(io_thread(&server, "http", false, serve)?);
        }
        if let Some(folder) = &config.snapshot {
            server.restore_from(Box::new(LocalDisk), folder)?;
        }
        let (bound, addresses) = std::sync::mpsc::channel();
        match config.stack.plugged() {
            None => server.clone().start_on_kernel(config, bound, &mut running.tasks)?,
            Some(stack) => {
                let task = ServeTask { server: server.clone(), listen: config.listen.clone(), bound };
                running.tasks.push(plugin::of_stack(stack)?.serve(config, task)?);
            }
        }
        running.addresses =
            addresses.recv().map_err(|_| Error::Internal("an I/O thread ended at its start".into()))??;
        let io_threads = running.tasks.len() - threads_of_http;
        server.enter(Phase::Serving);
        if let Ok(snapshots) = server.service().snapshots() {
            let every = config.snapshot_every.unwrap_or(SNAPSHOT_EVERY);
            if !every.is_zero() {
                running.snapshots = Some(Box::new(snapshots.save_every(every)?));
            }
        }
        let addresses: Vec<String> = running.addresses.iter().map(Address::to_string).collect();
        tracing::info!(
            addresses = addresses.join(" "),
            http = running.http().map(tracing::field::display),
            io_threads,
            tables = server.service().memory.tables().len(),
            extensions = running.extension_addresses().reduce(|all, one| all + " " + &one),
            "listening"
        );
        if config.spin {
            tracing::warn!("spin is set: each I/O thread takes a whole core, busy or idle");
        }
        config.warn_of_open_secrets();
        if let Some(risk) = trusted_with(config) {
            tracing::warn!("trusted_network is set: {risk}");
        }
        Ok(running)
    }

    /// Checks a configuration as [`Self::start`] does, without binding addresses or restoring a snapshot.
    ///
    /// # Errors
    /// Errors of [`Self::start`].
    pub fn check(config: &ServerConfig) -> Result<()> {
        Server::new(&within_limits(config)?, Memory::new(config.memory_limits()))?;
        config.warn_of_open_secrets();
        plugin::of_server(config.stack).try_for_each(|plugin| plugin.check_files(config))?;
        config.snapshot.as_deref().map_or(Ok(()), check_folder)
    }

    fn start_on_kernel(
        self: Arc<Self>,
        config: &ServerConfig,
        bound: AddressSender,
        threads: &mut Vec<JoinTask>,
    ) -> Result<()> {
        let io_threads = config.effective_io_threads();
        allocation::check_threads("the pool of I/O threads", io_threads)?;
        let mut others = Vec::new();
        for number in 1..io_threads {
            let (sender, accepted) = mpsc::unbounded_channel();
            others.push(sender);
            let server = self.clone();
            threads.push(io_thread(&self, &format!("io-{number}"), config.spin, move || async move {
                server.serve_accepted(Kernel, accepted).await;
            })?);
        }
        let listen = config.listen.clone();
        let server = self.clone();
        threads
            .push(io_thread(&self, "io-0", config.spin, move || server.listen_and_run(Kernel, listen, others, bound))?);
        Ok(())
    }

    /// Binds the addresses, sends them to `bound`, and serves.
    async fn listen_and_run<S: Stack>(
        self: Arc<Self>,
        stack: S,
        listen: Vec<Address>,
        others: Vec<mpsc::UnboundedSender<Accepted<S::Incoming>>>,
        bound: AddressSender,
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

    /// The address to listen on: with a certificate, every TCP address uses TLS.
    fn with_tls(&self, address: &Address) -> Address {
        match address {
            Address::Tcp { host, port, .. } => {
                Address::Tcp { host: host.clone(), port: *port, tls: self.tls.is_some(), stack: StackName::KERNEL }
            }
            Address::Unix { .. } => address.clone(),
        }
    }
}

/// Risk that `trusted_network` accepts; `None` if there is none.
fn trusted_with(config: &ServerConfig) -> Option<String> {
    if !config.trusted_network {
        return None;
    }
    let risk = match (config.has_token(), config.tls_cert.is_some()) {
        (false, _) => "everyone who can connect may read and write".to_owned(),
        (true, false) => {
            "clients need a token, but without TLS other hosts can read and change what they send".to_owned()
        }
        (true, true) => {
            let trusts = plugin::of_server(config.stack).filter_map(|plugin| plugin.trust(config));
            trusts.collect::<Vec<_>>().join("; ")
        }
    };
    (!risk.is_empty()).then_some(risk)
}

/// The configuration of a start: its limits fit this process, or the files of its plugged-in stack are read and checked.
fn within_limits(config: &ServerConfig) -> Result<ServerConfig> {
    match config.stack.plugged() {
        None => within_open_files(config),
        Some(stack) => plugin::of_stack(stack)?.check_files(config).map(|()| config.clone()),
    }
}

/// File descriptors of a process for anything but connections, with a reserve.
const OTHER_FILES: u64 = 128;

/// File descriptors of snapshots, and of a thread: its events and their wake-up.
const SNAPSHOT_FILES: u64 = 8;
const THREAD_FILES: u64 = 3;

/// File descriptors of a server with all its connections.
pub fn open_files(config: &ServerConfig) -> u64 {
    u64::from(config.max_connections) + u64::from(config.max_handshakes) + OTHER_FILES
}

/// Raises the soft limit of open files, 1024 on many systems, up to the hard limit. Returns the configuration with as many connections
/// as the limit allows.
///
/// # Errors
/// [`Error::Config`](replay_link::error::Error::Config) if it allows none.
pub fn within_open_files(config: &ServerConfig) -> Result<ServerConfig> {
    let wanted = open_files(config);
    let (limit, _) = rlimit::Resource::NOFILE.get().unwrap_or((u64::MAX, 0));
    let limit = if limit < wanted { rlimit::increase_nofile_limit(wanted).unwrap_or(limit) } else { limit };
    if limit >= wanted {
        return Ok(config.clone());
    }
    let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let threads = config.effective_io_threads() as u64 + u64::from(config.http.is_some());
    let others = open
        + threads * THREAD_FILES
        + config.listen.len() as u64
        + config.http.as_ref().map_or(0, |_| 1 + http::MAX_CONNECTIONS as u64)
        + SNAPSHOT_FILES
        + MAX_REFUSALS as u64
        + u64::from(OPERATORS);
    let left = u32::try_from(limit.saturating_sub(others)).unwrap_or(u32::MAX);
    if left < 2 {
        return refuse(format!(
            "the limit of open files, {limit}, leaves none for connections: raise it to more than {} (ulimit -n, or LimitNOFILE of the \
             service)",
            others + 1
        ));
    }
    let max_handshakes = config.max_handshakes.min((left / 4).max(1));
    let max_connections = config.max_connections.min(left - max_handshakes);
    tracing::warn!(
        limit,
        max_connections,
        max_handshakes,
        "max_connections and max_handshakes are lowered to what the limit of open files allows: raise it (ulimit -Hn, or LimitNOFILE of \
         the service)"
    );
    Ok(ServerConfig { max_connections, max_handshakes, ..config.clone() })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use replay_core::memory::MemoryLimits;

    use super::*;

    #[test]
    fn the_warning_of_a_trusted_network_is_of_what_token_and_tls_leave_open() {
        let risk = |text: &str| {
            let text = format!("trusted_network = true\n{text}");
            trusted_with(&toml::from_str(&text).unwrap()).unwrap_or_default()
        };
        let (token, tls) = ("token = \"a\"\n", "tls_cert = \"c\"\ntls_key = \"k\"\n");
        for open in ["", tls] {
            assert!(risk(open).contains("everyone who can connect"));
        }
        assert!(risk(token).contains("without TLS"));
        assert!(risk("actor_token = \"a\"").contains("without TLS"));
        assert_eq!(risk(&[token, tls].concat()), "");
        assert_eq!(trusted_with(&ServerConfig::default()), None);
    }

    #[test]
    fn a_thread_that_hangs_does_not_answer() {
        let server = Server::new(&ServerConfig::default(), Memory::new(MemoryLimits::default())).unwrap();
        let server = Arc::new(server);
        let (hangs, has_hung) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let join = io_thread(&server, "io-0", false, || async move {
            hangs.send(()).unwrap();
            let _ = released.recv();
        });
        has_hung.recv().unwrap();
        runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let mut answered = std::pin::pin!(server.threads_answer());
            for _ in 0..2 {
                tokio::select! {
                    biased;
                    () = &mut answered => panic!("it hangs"),
                    () = std::future::ready(()) => {}
                }
            }
            drop(release);
            answered.await;
        });
        assert!(join.unwrap()());
    }

    #[test]
    fn a_thread_that_panicked_ends_the_others_before_the_server_has_ended() {
        let config = ServerConfig::default();
        let server = Server::new(&config, Memory::new(MemoryLimits::default())).unwrap();
        let server = Arc::new(server);
        let ended = Arc::new(AtomicBool::new(false));
        let (serving, end) = (server.clone(), ended.clone());
        let tasks = vec![
            io_thread(&server, "io-1", false, || async { panic!("as in the test") }).unwrap(),
            io_thread(&server, "io-2", false, || async move {
                let (_sender, accepted) = mpsc::unbounded_channel();
                serving.serve_accepted(Kernel, accepted).await;
                // Release: pairs with the acquire load of the thread that joins this one.
                end.store(true, Ordering::Release);
            })
            .unwrap(),
        ];
        let running = RunningServer { server, addresses: Vec::new(), http: None, tasks, snapshots: None };
        let error = running.wait().unwrap_err().to_string();
        assert!(error.contains("panicked: 1"), "{error}");
        assert!(ended.load(Ordering::Acquire), "the other one was joined");
    }
}

//! A server, and the network between it and its clients.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::wait::Wait;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::schema::TableConfig;
use replay_server::config::ServerConfig;
use replay_server::server::Server;

use replay_link::stack::{Address, Stack};
use serde_json::Value;
use simulation::{Sim, SimStack, SimStream};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use super::client::TestClient;
use super::messages::TABLE;
use crate::support::{any_port, goes_through_fstack, with_sockets_under_test};

/// A test over sockets that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Duplex for T {}

/// A connection to the server, whatever the network.
pub struct Connection {
    /// What is read and written.
    pub stream: Box<dyn Duplex>,
    /// Makes its end, by dropping the stream, a reset: what is on its way is lost.
    pub cut: Box<dyn FnOnce()>,
}

impl From<SimStream> for Connection {
    fn from(stream: SimStream) -> Self {
        let link = stream.link();
        Connection { stream: Box::new(stream), cut: Box::new(move || link.cut()) }
    }
}

#[derive(Clone)]
enum Network {
    Simulated(SimStack),
    /// The kernel's at the client's end.
    Sockets,
}

/// A server, and the network between it and its clients.
#[derive(Clone)]
pub struct World {
    pub server: Arc<Server>,
    pub memory: Arc<Memory>,
    pub address: Address,
    token: Option<String>,
    network: Network,
}

impl World {
    /// Runs `test` beside a server on each network there is: the simulated one, whose choices follow from `seed`, and
    /// the kernel's sockets; or F-Stack's alone, in the processes that are started for it.
    pub fn run<F: Future<Output = ()> + 'static>(seed: u64, config: ServerConfig, test: impl Fn(World) -> F) {
        if !goes_through_fstack() {
            World::simulated(seed, config.clone(), |world, _| test(world));
        }
        World::over_sockets(config, test);
    }

    /// Runs `test` beside a server on the simulated network alone.
    pub fn simulated<F: Future<Output = ()> + 'static>(
        seed: u64,
        config: ServerConfig,
        test: impl FnOnce(World, SimStack) -> F,
    ) {
        eprintln!("on the simulated network, seed {seed}");
        let sim = Sim::new(seed);
        let stack = sim.stack();
        let memory = memory(&config, Some(seed));
        let server = Arc::new(Server::new(&config, memory.clone()).unwrap());
        let address = config.listen[0].clone();
        let listener = stack.listen(&address).unwrap();
        stack.spawn(server.clone().run(stack.clone(), vec![listener], vec![]));
        let world = World {
            server,
            memory,
            token: operator_token(&config),
            address,
            network: Network::Simulated(stack.clone()),
        };
        sim.run(test(world, stack));
    }

    fn over_sockets<F: Future<Output = ()> + 'static>(config: ServerConfig, test: impl FnOnce(World) -> F) {
        eprintln!("over sockets");
        let config =
            with_sockets_under_test(ServerConfig { listen: vec![any_port("innet").parse().unwrap()], ..config });
        let memory = memory(&config, None);
        let running = Server::start(&config, memory.clone()).unwrap();
        let world = World {
            server: running.server().clone(),
            memory,
            token: operator_token(&config),
            address: running.addresses()[0].clone(),
            network: Network::Sockets,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Its tasks go before the server, which would wait for their connections.
        let tasks = LocalSet::new();
        let test = test(world);
        tasks.block_on(&runtime, async { tokio::time::timeout(PATIENCE, test).await }).expect("the test ends");
    }

    /// A connection that has said nothing yet.
    pub async fn connect(&self) -> Connection {
        self.try_connect().await.unwrap()
    }

    pub async fn try_connect(&self) -> io::Result<Connection> {
        match &self.network {
            Network::Simulated(stack) => Ok(stack.connect(&self.address)?.into()),
            Network::Sockets => {
                let Address::Tcp { host, port, .. } = &self.address else {
                    panic!("{} is no address of TCP", self.address);
                };
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let same = stream.as_fd().try_clone_to_owned()?;
                Ok(Connection {
                    stream: Box::new(stream),
                    cut: Box::new(move || {
                        let at_once = Some(Duration::ZERO);
                        SockRef::from(&same).set_linger(at_once).unwrap();
                    }),
                })
            }
        }
    }

    /// A client that was made welcome.
    pub async fn client(&self) -> TestClient {
        TestClient::welcome(self.connect().await, self.token.as_deref()).await.unwrap()
    }

    /// The time by this network's clock.
    pub fn now(&self) -> Instant {
        match &self.network {
            Network::Simulated(stack) => stack.now(),
            Network::Sockets => Instant::now(),
        }
    }

    /// Waits by this network's clock.
    pub async fn sleep(&self, duration: Duration) {
        match &self.network {
            Network::Simulated(stack) => stack.sleep(duration).await,
            Network::Sockets => tokio::time::sleep(duration).await,
        }
    }

    /// Waits until `done`, for an hour of a simulated network at most; over sockets the whole test has an end.
    pub async fn until(&self, done: impl Fn(&World) -> bool) {
        let late = self.now() + Duration::from_secs(3_600);
        while !done(self) {
            assert!(self.now() < late, "not in time: {:#}", self.stats());
            self.sleep(Duration::from_millis(1)).await;
        }
    }

    /// Asserts that `instant` is hardly over: in a simulation by one check of waiting requests and a few trips of
    /// 2 ms. Elsewhere the machine may be busy, and a late event is one that does not happen within the test's time.
    pub fn assert_soon_after(&self, instant: Instant) {
        let late = self.now().saturating_duration_since(instant);
        let allowed = match &self.network {
            Network::Simulated(_) => Wait::CHECK_EVERY + Duration::from_millis(100),
            Network::Sockets => PATIENCE,
        };
        assert!(late < allowed, "{late:?} late");
    }

    /// What is sent from now on takes longer than everything else, where the network is simulated.
    pub fn slow_down(&self) {
        if let Network::Simulated(stack) = &self.network {
            stack.set_delay(Duration::from_millis(200)..=Duration::from_millis(300));
        }
    }

    /// Runs `task` beside the test, and no longer than it.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        match &self.network {
            Network::Simulated(stack) => stack.spawn(task),
            Network::Sockets => drop(tokio::task::spawn_local(task)),
        }
    }

    pub fn stats(&self) -> Value {
        self.server.service().stats()
    }

    /// Bytes of frames that are arriving or wait to be answered.
    pub fn receive_bytes(&self) -> u64 {
        self.stats()["receive_bytes"].as_u64().unwrap()
    }

    /// Bytes of replies that clients have not read.
    pub fn reply_bytes(&self) -> u64 {
        self.stats()["reply_bytes"].as_u64().unwrap()
    }

    /// A number of the table's statistics.
    pub fn table_stat(&self, name: &str) -> u64 {
        self.stats()["tables"][TABLE][name].as_u64().unwrap()
    }

    /// A number of the server's statistics.
    pub fn server_stat(&self, name: &str) -> u64 {
        self.stats()["server"][name].as_u64().unwrap()
    }
}

fn memory(config: &ServerConfig, seed: Option<u64>) -> Arc<Memory> {
    Memory::new(MemoryLimits { seed, ..config.memory_limits() })
}

fn operator_token(config: &ServerConfig) -> Option<String> {
    let tokens = config.read_tokens().unwrap();
    tokens.into_iter().next().map(|(_, token)| token.0)
}

/// A server whose one table is `table`.
pub fn config(table: TableConfig) -> ServerConfig {
    ServerConfig {
        listen: vec!["innet://127.0.0.1:7710".parse().unwrap()],
        max_bytes: 1 << 30,
        max_frame_bytes: 1 << 20,
        tables: vec![table],
        ..ServerConfig::default()
    }
}

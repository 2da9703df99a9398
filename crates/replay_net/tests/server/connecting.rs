//! Clients that connect: to servers that break off, hang, stop, are killed, at a limit or under a flood, and for how long they try.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use replay_core::replay::Replay;
use replay_net::client::shards::ShardedClient;
use replay_net::client::{Client, ConnectOptions, connect};
use replay_net::config::ServerConfig;
use replay_net::error::{Error, Result};
use replay_net::server::RunningServer;
use replay_net::stack::Address;
use replay_wire::ErrorCode;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use crate::command::Serving;
use crate::kernel::{certificate, options, start, with_tls};
use crate::suite::{config, push, table, writer};
use crate::support::{port, soon, until};

const TOKEN: &str = "secret of the tests";

/// Longer than any test takes.
pub fn patient(options: ConnectOptions) -> ConnectOptions {
    let patience = Duration::from_secs(60);
    ConnectOptions { connect_timeout: patience, await_server: patience, ..options }
}

/// How a connection ends.
#[derive(Debug, Clone, Copy)]
pub enum Ending {
    End,
    Reset,
    Hang,
}

/// Forwards connections to a server. Each one with an even number, from 0, ends after so many bytes, counted over both directions.
pub struct BreakingRelay {
    port: u16,
    connections: Arc<AtomicUsize>,
    cut: Arc<AtomicBool>,
}

impl BreakingRelay {
    pub fn start(to: u16, bytes: usize, ending: Ending) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = BreakingRelay {
            port: listener.local_addr().unwrap().port(),
            connections: Arc::default(),
            cut: Arc::default(),
        };
        let (count, cut) = (relay.connections.clone(), relay.cut.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let number = count.fetch_add(1, Ordering::Relaxed);
                let bytes = if number % 2 == 0 { bytes } else { usize::MAX };
                let (client, cut) = (client.unwrap(), cut.clone());
                thread::spawn(move || forward(client, to, bytes, ending, &cut));
            }
        });
        relay
    }

    pub fn address(&self, scheme: &str) -> Address {
        format!("{scheme}://127.0.0.1:{}", self.port).parse().unwrap()
    }

    /// Ends the open connection.
    fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
        until("a cut", || !self.cut.load(Ordering::Relaxed));
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn forward(client: TcpStream, to: u16, mut left: usize, ending: Ending, cut: &AtomicBool) {
    let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
    let (mut client, server) = (&client, &server);
    client.set_nonblocking(true).unwrap();
    server.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    while left > 0 {
        if cut.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut idle = true;
        for (mut from, mut to) in [(client, server), (server, client)] {
            let most = left.min(buffer.len());
            match from.read(&mut buffer[..most]) {
                Ok(n @ 1..) => {
                    // Small enough for the socket's buffer.
                    if to.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                    left -= n;
                    idle = false;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
        if idle {
            thread::sleep(Duration::from_millis(1));
        }
    }
    match ending {
        Ending::End => drop(client.shutdown(Shutdown::Both)),
        Ending::Reset => drop(SockRef::from(client).set_linger(Some(Duration::ZERO))),
        Ending::Hang => {
            client.set_nonblocking(false).unwrap();
            while client.read(&mut buffer).is_ok_and(|n| n > 0) {}
        }
    }
}

/// Breaks the first connection, and the first one of a call that reconnects, after each of some numbers of bytes.
fn handshakes_that_break(server: &RunningServer, scheme: &str, options: &ConnectOptions) {
    // From before the first byte of a handshake to after the last one, with TLS and without.
    let bytes = [0, 1, 5, 60, 150, 250, 400, 600, 800, 1000, 1300, 1600];
    let to = port(server);
    thread::scope(|scope| {
        for ending in [Ending::End, Ending::Reset, Ending::Hang] {
            for bytes in bytes {
                let options = patient(options.clone());
                scope.spawn(move || {
                    let case = format!("{scheme}, {ending:?} after {bytes} bytes");
                    let relay = BreakingRelay::start(to, bytes, ending);
                    let client =
                        connect(&relay.address(scheme), options).unwrap_or_else(|error| panic!("{case}: {error}"));
                    // A hang after the handshake is one of the call: see `client.rs`.
                    let resumed = bytes > 400 || relay.connections() == 1;
                    if resumed && matches!(ending, Ending::Hang) {
                        return;
                    }
                    if relay.connections() == 2 {
                        relay.cut();
                    }
                    client.stats(&soon()).unwrap_or_else(|error| panic!("{case}: {error}"));
                });
            }
        }
    });
}

#[test]
fn a_handshake_that_breaks_is_tried_again() {
    let server = start(&ServerConfig { listen: vec!["127.0.0.1:0".parse().unwrap()], ..config(table()) });
    handshakes_that_break(&server.unwrap(), "innet", &ConnectOptions::default());
}

#[test]
fn a_tls_handshake_that_breaks_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let server = start(&config).unwrap();
    handshakes_that_break(&server, "innets", &options(TOKEN, config.tls_cert.clone()));
}

#[test]
fn servers_of_one_memory_that_break_off_are_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let config = ServerConfig { tables: vec![], ..with_tls(folder.path()) };
    let servers = [start(&config).unwrap(), start(&config).unwrap()];
    let relays = servers.iter().map(|server| BreakingRelay::start(port(server), 400, Ending::Reset));
    let relays: Vec<_> = relays.collect();
    let addresses: Vec<_> = relays.iter().map(|relay| relay.address("innets")).collect();
    let options = patient(options(TOKEN, config.tls_cert.clone()));
    let client = ShardedClient::connect(&addresses, &options, &soon()).unwrap();
    client.create_table(&table(), &soon()).unwrap();
    for server in &servers {
        let stats = server.server().service().stats();
        assert!(stats["tables"]["steps"].is_object(), "{stats}");
    }
}

#[test]
fn a_client_of_the_wrong_kind_is_told_of_tls_by_its_first_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let server = start(&config).unwrap();
    let plain = format!("innet://127.0.0.1:{}", port(&server));
    let error = connect(&plain.parse().unwrap(), patient(ConnectOptions::default())).err();
    let error = error.unwrap();
    assert_eq!(error.code(), ErrorCode::Config, "{error}");
    assert!(error.to_string().contains("innets://"), "{error}");
    let stats = || server.server().service().stats()["server"].clone();
    until("its end", || stats()["failed_logins"] == 1);
    assert_eq!(stats()["connections_opened"], 0, "one attempt");

    let without = start(&ServerConfig { tls_cert: None, tls_key: None, ..config.clone() });
    let tls = format!("innets://127.0.0.1:{}", port(without.as_ref().unwrap()));
    let patient = patient(options(TOKEN, config.tls_cert));
    let error = connect(&tls.parse().unwrap(), patient).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Authentication, "{error}");
    assert!(error.to_string().contains("without TLS"), "{error}");
}

/// Clients and writers, each over new connections all the time, while the server is killed and started again.
#[test]
fn a_tls_server_that_is_killed_fails_no_call() {
    const KILLS: usize = 6;
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(folder.path());
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap().to_string();
    drop(free);
    let tls = [certificate.to_str().unwrap(), key.to_str().unwrap()];
    let serve = || {
        let [certificate, key] = tls;
        let arguments = ["--tls-cert", certificate, "--tls-key", key, "--token", TOKEN];
        Serving::start(&[&["--listen", &listen, "--log-level=error"], &arguments[..]].concat())
    };
    let mut server = Some(serve());
    let address: Address = format!("innets://{listen}").parse().unwrap();
    let connect = || {
        let options = patient(options(TOKEN, Some(certificate.clone())));
        Client::connect(&address, options, &soon())
    };
    let (over, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let expired = |result: Result<()>| match result {
        Err(error) if error.code() == ErrorCode::Expired => {}
        result => result.unwrap(),
    };
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..32 {
            let (connect, expired, over, calls) = (&connect, &expired, &over, &calls);
            threads.push(scope.spawn(move || {
                let client = connect().unwrap();
                client.create_table(&table(), &soon()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    if number % 2 == 0 {
                        connect().unwrap().stats(&soon()).unwrap();
                    } else {
                        let opened = client.open_writer("steps", writer(number), &soon()).unwrap();
                        expired({ opened }.push(push(1, 0, 0, 0, &[1]).body, &soon()));
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        for _ in 0..KILLS {
            let before = calls.load(Ordering::Relaxed);
            let failed = || threads.iter().any(thread::ScopedJoinHandle::is_finished);
            until("calls", || failed() || calls.load(Ordering::Relaxed) > before + 50);
            server.take().unwrap().stop("KILL");
            server = Some(serve());
        }
        over.store(true, Ordering::Relaxed);
    });
    server.unwrap().stop("TERM");
}

#[test]
fn a_thousand_clients_of_one_host_connect_to_a_server_that_was_stopped() {
    // A client has a socket and a runtime of two or three descriptors.
    let files = rlimit::increase_nofile_limit(8192).unwrap();
    let clients = (files / 6).min(1000) as usize;
    // Errors alone: at INFO the log has two lines for each of a thousand clients.
    let serving = Serving::start(&["--listen", "127.0.0.1:0", "--log-level=error"]);
    let address: Address = serving.address().parse().unwrap();
    // Thousand threads take a busy machine longer to start than clients wait.
    let started = Barrier::new(clients + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|_| {
                let work = || {
                    started.wait();
                    connect(&address, patient(ConnectOptions::default()))
                };
                let thread = thread::Builder::new().stack_size(512 << 10);
                thread.spawn_scoped(scope, work).unwrap()
            })
            .collect();
        serving.signal("STOP");
        started.wait();
        thread::sleep(Duration::from_millis(1500));
        serving.signal("CONT");
        let connected: Vec<Client> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
        let stats = connected[0].stats(&soon()).unwrap();
        assert_eq!(stats["server"]["connections"], clients);
    });
    serving.stop("TERM");
}

/// Connects and sends nothing, a part of a message or bytes that are none, over and over. Counts the connections.
fn flood(port: u16, strangers: &AtomicUsize, over: &AtomicBool) {
    let said: [&[u8]; 4] = [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"];
    for said in said.iter().cycle() {
        if over.load(Ordering::Relaxed) {
            return;
        }
        // The system may refuse a connection of a flood.
        let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else {
            continue;
        };
        let _ = stranger.write_all(said);
        let _ = stranger.shutdown(Shutdown::Write);
        let _ = stranger.set_read_timeout(Some(Duration::from_millis(20)));
        let _ = stranger.read(&mut [0; 1024]);
        strangers.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_flood_of_strangers_neither_keeps_clients_out_nor_fills_the_log() {
    const CLIENTS: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(folder.path());
    let tls = ["--tls-cert", certificate.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    for with_tls in [false, true] {
        let listen = ["--listen", "127.0.0.1:0", "--token", TOKEN];
        let tls = if with_tls { &tls[..] } else { &[] };
        let serving = Serving::start(&[&listen, tls].concat());
        let address: Address = serving.address().parse().unwrap();
        let Address::Tcp { port, .. } = address else {
            panic!("expected a TCP address");
        };
        let (over, strangers) = (AtomicBool::new(false), AtomicUsize::new(0));
        let started = Instant::now();
        let ca = with_tls.then(|| certificate.clone());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| flood(port, &strangers, &over));
            }
            let clients: Vec<_> =
                (0..CLIENTS).map(|_| scope.spawn(|| connect(&address, patient(options(TOKEN, ca.clone()))))).collect();
            let ended: Vec<_> = clients.into_iter().map(|c| c.join().unwrap()).collect();
            until("a flood", || strangers.load(Ordering::Relaxed) > 3000);
            over.store(true, Ordering::Relaxed);
            let _open: Vec<Client> = ended.into_iter().collect::<Result<_>>().unwrap();
        });
        // Of each of six kinds a line a second, and those of the server and its clients.
        let most = 6 * (started.elapsed().as_secs() as usize + 2) + 10 + 3 * CLIENTS;
        let (_, log) = serving.stop("TERM");
        assert!(log.lines().count() <= most, "over {most} lines: {log}");
        assert!(log.contains("unreported="), "{log}");
    }
}

/// Tries with each time-out, all at the same time; returns the errors, after checks of how long each try took.
fn give_up(address: &Address, change: impl Fn(ConnectOptions) -> ConnectOptions) -> Vec<Error> {
    thread::scope(|scope| {
        let tries = [50, 500, 1500, 4000].map(|ms| {
            let timeout = Duration::from_millis(ms);
            let options =
                change(ConnectOptions { connect_timeout: timeout, await_server: timeout, ..ConnectOptions::default() });
            scope.spawn(move || {
                let begun = Instant::now();
                let error = connect(address, options).err().unwrap();
                let took = begun.elapsed();
                let late = timeout + Duration::from_secs(10);
                assert!(timeout <= took && took < late, "{timeout:?}: {took:?}, {error}");
                error
            })
        });
        tries.map(|thread| thread.join().unwrap()).into()
    })
}

#[test]
fn a_client_tries_until_its_timeout_and_says_what_happened() {
    let same = |options| options;
    let tcp = |port: u16| format!("innet://127.0.0.1:{port}").parse().unwrap();
    let says = |errors: Vec<Error>, text: &str| {
        for error in errors {
            assert!(error.to_string().contains(text), "{text}: {error}");
        }
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = tcp(free.local_addr().unwrap().port());
    drop(free);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = (tcp(silent.local_addr().unwrap().port()), silent);
    let stopped = Serving::start(&["--listen", "127.0.0.1:0"]);
    stopped.signal("STOP");
    let full = Serving::start(&["--listen", "127.0.0.1:0", "--max-connections", "1"]);
    let full_address = full.address().parse().unwrap();
    let _only = connect(&full_address, ConnectOptions::default()).unwrap();
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let closing_address = tcp(closing.local_addr().unwrap().port());
    thread::spawn(move || closing.incoming().for_each(drop));

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full.sock");
    let queue = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    queue.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    queue.listen(0).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let full_queue = format!("unix://{}", path.display()).parse().unwrap();

    thread::scope(|scope| {
        for (address, text) in [
            (&nobody, "refused"),
            (&silent.0, "no answer within"),
            (&stopped.address().parse().unwrap(), "no answer within"),
            (&full_address, "--max-connections"),
            (&closing_address, "is it an innet-replay server"),
            (&full_queue, "cannot connect to"),
        ] {
            let address = address.clone();
            scope.spawn(move || says(give_up(&address, same), text));
        }
    });
    stopped.stop("KILL");
    full.stop("TERM");
}

/// Strangers at the address of the client, and twice as many as may connect from anywhere.
#[test]
fn strangers_that_say_nothing_keep_no_client_out() {
    rlimit::increase_nofile_limit(2048).unwrap();
    let serving = Serving::start(&["--listen", "127.0.0.1:0", "--handshake-deadline-ms", "3600000"]);
    let address: Address = serving.address().parse().unwrap();
    let Address::Tcp { port, .. } = address else {
        panic!("expected a TCP address");
    };
    let from = |host: [u8; 4]| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&std::net::SocketAddr::from((host, 0)).into()).unwrap();
        socket.connect(&std::net::SocketAddr::from(([127, 0, 0, 1], port)).into()).unwrap();
        socket
    };
    let at_this_address: Vec<_> = (0..300).map(|_| from([127, 0, 0, 1])).collect();
    connect(&address, ConnectOptions::default()).unwrap().stats(&soon()).unwrap();
    drop(at_this_address);
    let anywhere: Vec<_> = (2..10).flat_map(|host| (0..64).map(move |_| from([127, 0, 0, host]))).collect();
    connect(&address, ConnectOptions::default()).unwrap().stats(&soon()).unwrap();
    drop(anywhere);
    serving.stop("TERM");
}

#[test]
fn a_timeout_of_zero_is_one_attempt() {
    let once = |grace| ConnectOptions { connect_timeout: Duration::ZERO, grace, ..ConnectOptions::default() };
    let grace = Duration::from_millis(300);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: Address = format!("innet://{}", silent.local_addr().unwrap()).parse().unwrap();
    let begun = Instant::now();
    let error = connect(&address, once(grace)).err().unwrap();
    assert!(begun.elapsed() >= grace, "its answer has the grace");
    assert_eq!(error.code(), ErrorCode::Connect, "{error}");
    drop(silent);
    assert!(connect(&address, once(Duration::from_secs(60))).is_err());

    let server = start(&ServerConfig { listen: vec!["127.0.0.1:0".parse().unwrap()], ..config(table()) });
    let address = server.as_ref().unwrap().addresses()[0].clone();
    let client = connect(&address, once(Duration::from_secs(60))).unwrap();
    client.stats(&Wait::forever()).unwrap();
}

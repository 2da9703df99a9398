//! Clients of a server process that is killed, stopped, full or flooded.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use replay_client::{Client, ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::messages::{push, table, writer};
use crate::serve::Serving;
use crate::support::breaking::patient;
use crate::support::{certificate, soon, until};

const TOKEN: &str = "secret of the tests";

fn options(token: &str, tls_ca: Option<PathBuf>) -> ConnectOptions {
    ConnectOptions { token: Some(Secret(token.into())), tls_ca, ..ConnectOptions::default() }
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
        let options = patient(ConnectOptions {
            token: Some(Secret(TOKEN.into())),
            tls_ca: Some(certificate.clone()),
            ..ConnectOptions::default()
        });
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

/// Connects and sends nothing, a part of a message or other bytes, over and over. Counts the connections.
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

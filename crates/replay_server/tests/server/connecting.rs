//! Clients that connect: to servers that break off, hang, stop, are killed, at a limit or under a flood, and for how long they try.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use replay_client::shards::ShardedClient;
use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::stack::Address;
use replay_server::config::ServerConfig;
use replay_server::server::RunningServer;
use replay_wire::ErrorCode;

use crate::kernel::{options, start, with_tls};
use crate::suite::{config, table};
use crate::support::breaking::{BreakingRelay, Ending, patient};
use crate::support::{port, soon, until};

const TOKEN: &str = "secret of the tests";

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

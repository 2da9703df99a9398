//! Kernel sockets: TCP, Unix and TLS, with the client that users have.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{Replay, Wait};
use replay_core::{Error, ErrorCode, Result};
use replay_net::client::{Client, ConnectOptions, connect};
use replay_net::config::ServerConfig;
use replay_net::server::{RunningServer, Server};
use replay_net::stack::Address;
use replay_wire::RequestBody;
use replay_wire::auth::Secret;

use crate::suite::{config, refused, sample, table, writer};
use crate::support::until;

fn start(config: &ServerConfig) -> Result<RunningServer> {
    Server::start(config, Memory::new(MemoryLimits::default()))
}

fn local(addresses: &[&str]) -> ServerConfig {
    ServerConfig {
        listen: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        ..config(table())
    }
}

/// A self-signed certificate for `localhost` and its key, as PEM files.
pub fn certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (certificate, key)
}

fn with_tls(folder: &Path) -> ServerConfig {
    let (certificate, key) = certificate(folder);
    ServerConfig {
        token: Some(Secret("a secret".into())),
        tls_cert: Some(certificate),
        tls_key: Some(key),
        ..local(&["127.0.0.1:0"])
    }
}

fn options(token: &str, tls_ca: Option<PathBuf>) -> ConnectOptions {
    ConnectOptions {
        token: Some(Secret(token.into())),
        tls_ca,
        ..ConnectOptions::default()
    }
}

fn plain(address: &Address) -> Result<Client> {
    connect(address, ConnectOptions::default())
}

#[test]
fn every_address_leads_to_the_same_memory() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix://{}/a.sock", folder.path().display());
    let config = ServerConfig {
        io_threads: 3,
        ..local(&["127.0.0.1:0", "127.0.0.1:0", &socket])
    };
    let running = start(&config).unwrap();
    let addresses = running.addresses().to_vec();
    assert_eq!(addresses[2].to_string(), socket);
    let mut clients = Vec::new();
    for address in &addresses {
        assert!(!address.to_string().ends_with(":0"));
        for _ in 0..3 {
            let client = plain(address).unwrap();
            client.create_table(&table(), &Wait::forever()).unwrap();
            clients.push(client);
        }
    }
    let stats = clients[0].stats(&Wait::forever()).unwrap();
    assert_eq!(stats["server"]["connections"], 9);
    running.shut_down();
    running.wait().unwrap();
    assert!(!folder.path().join("a.sock").exists());
    assert!(plain(&addresses[0]).is_err());
}

#[test]
fn dropping_the_server_ends_it_with_clients_connected() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix://{}/a.sock", folder.path().display());
    let running = start(&local(&[&socket])).unwrap();
    let client = plain(&running.addresses()[0]).unwrap();
    client.stats(&Wait::forever()).unwrap();
    drop(running);
    assert!(!folder.path().join("a.sock").exists());
}

#[test]
fn an_address_in_use_is_an_error_that_names_it() {
    let running = start(&local(&["127.0.0.1:0"])).unwrap();
    let taken = running.addresses()[0].clone();
    let config = ServerConfig {
        listen: vec!["127.0.0.1:0".parse().unwrap(), taken.clone()],
        io_threads: 2,
        ..config(table())
    };
    let (code, message) = refused(start(&config));
    assert_eq!(code, ErrorCode::Io);
    assert!(message.contains(&taken.to_string()), "{message}");
}

#[test]
fn what_is_unsafe_or_impossible_does_not_start() {
    let open = local(&["0.0.0.0:0"]);
    assert_eq!(refused(start(&open)).0, ErrorCode::Config);
    let trusted = ServerConfig {
        trusted_network: true,
        ..open
    };
    start(&trusted).unwrap();
    let no_file = ServerConfig {
        tls_cert: Some("/nowhere/cert.pem".into()),
        tls_key: Some("/nowhere/key.pem".into()),
        ..local(&["127.0.0.1:0"])
    };
    assert!(refused(start(&no_file)).1.contains("/nowhere/cert.pem"));
    let small = Memory::new(MemoryLimits {
        receive_bytes: 1 << 16,
        ..MemoryLimits::default()
    });
    let (code, message) = refused(Server::start(&local(&["127.0.0.1:0"]), small));
    assert_eq!(code, ErrorCode::Config);
    assert!(message.contains("receive_bytes"), "{message}");
    let mut large = table();
    large.capacity_bytes = 1 << 40;
    let too_large = ServerConfig {
        tables: vec![large],
        ..local(&["127.0.0.1:0"])
    };
    let memory = Memory::new(too_large.memory_limits());
    assert_eq!(
        refused(Server::start(&too_large, memory)).0,
        ErrorCode::Table
    );
}

#[test]
fn tls_serves_clients_that_trust_the_certificate_and_know_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    assert!(address.to_string().starts_with("innets://"));

    let client = connect(&address, options("a secret", config.tls_cert.clone())).unwrap();
    client.stats(&Wait::forever()).unwrap();

    let wrong_token = connect(&address, options("a guess", config.tls_cert.clone()));
    assert_eq!(refused(wrong_token).0, ErrorCode::Authentication);

    let other = tempfile::tempdir().unwrap();
    let (other_certificate, _) = certificate(other.path());
    let untrusted = connect(&address, options("a secret", Some(other_certificate)));
    assert_eq!(refused(untrusted).0, ErrorCode::Authentication);
    client.stats(&Wait::forever()).unwrap();
}

#[test]
fn a_client_without_tls_gets_nowhere_and_harms_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    let Address::Tcp { host, port, .. } = &address else {
        panic!("expected a TCP address");
    };
    let mut stream = TcpStream::connect((host.as_str(), *port)).unwrap();
    stream
        .write_all(&[8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8])
        .unwrap();
    let mut answer = Vec::new();
    // An alert or a reset: in no case a reply.
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() < 16, "{answer:?}");
    connect(&address, options("a secret", config.tls_cert.clone())).unwrap();
}

#[test]
fn a_waiting_client_hears_of_the_end() {
    let running = start(&local(&["127.0.0.1:0"])).unwrap();
    let options = ConnectOptions {
        reconnect_for: std::time::Duration::ZERO,
        ..ConnectOptions::default()
    };
    let client = Arc::new(connect(&running.addresses()[0], options).unwrap());
    let sampling = std::thread::spawn({
        let client = client.clone();
        move || {
            let RequestBody::Sample(request) = sample(1) else {
                unreachable!("a sample is a sample");
            };
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(600);
            client
                .sample(&request, &Wait::until(Some(deadline)))
                .map(drop)
        }
    });
    let service = running.server().clone();
    until("a sample waits", || {
        service.service().stats()["tables"]["steps"]["blocked_samples"] != 0
    });
    running.shut_down();
    running.wait().unwrap();
    let error = sampling.join().unwrap().unwrap_err();
    let codes = [
        ErrorCode::Closed,
        ErrorCode::Connect,
        ErrorCode::Disconnected,
    ];
    assert!(codes.contains(&error.code()), "{error}");
    assert!(!matches!(error, Error::Internal(_)));
}

#[test]
fn a_client_tries_again_while_the_server_has_no_room() {
    let config = ServerConfig {
        max_connections: 2,
        ..local(&["127.0.0.1:0"])
    };
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    let client = plain(&address).unwrap();
    let wait = Wait::forever();
    let first = client.open_writer(writer(1), &wait).unwrap();
    assert_eq!(refused(plain(&address)).0, ErrorCode::Connect);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| client.open_writer(writer(2), &wait).map(drop));
        let service = running.server().service();
        // The first refusal was for the other client.
        until("another refusal", || {
            service.stats()["server"]["connections_refused"] != 1
        });
        drop(first);
        second.join().unwrap().unwrap();
    });
}

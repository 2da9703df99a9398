//! Kernel sockets: TCP, Unix and TLS, with the client that users have.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use base::wait::Wait;
use replay_client::{Client, ConnectOptions, connect, tls};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::Replay;
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_server::config::ServerConfig;
use replay_server::server::{RunningServer, Server};
use replay_wire::ErrorCode;
use replay_wire::auth::{self, CHANNEL_BINDING_LABEL, Secret, Side, Transcript};
use replay_wire::{PROTOCOL, RequestBody};

use crate::suite::world::Connection;
use crate::suite::{TestClient, config, refused, sample, table, transcript, writer};
use crate::support::{certificate, until};

/// A test that waits longer has failed.
const LONG: Duration = Duration::from_secs(60);

pub fn start(config: &ServerConfig) -> Result<RunningServer> {
    Server::start(config, Memory::new(MemoryLimits::default()))
}

fn local(addresses: &[&str]) -> ServerConfig {
    ServerConfig { listen: addresses.iter().map(|a| a.parse().unwrap()).collect(), ..config(table()) }
}

pub fn with_tls(folder: &Path) -> ServerConfig {
    let (certificate, key) = certificate(folder);
    ServerConfig {
        token: Some(Secret("secret of the tests".into())),
        tls_cert: Some(certificate),
        tls_key: Some(key),
        ..local(&["127.0.0.1:0"])
    }
}

pub fn options(token: &str, tls_ca: Option<PathBuf>) -> ConnectOptions {
    ConnectOptions { token: Some(Secret(token.into())), tls_ca, ..ConnectOptions::default() }
}

fn plain(address: &Address) -> Result<Client> {
    connect(address, ConnectOptions::default())
}

#[test]
fn every_address_leads_to_the_same_memory() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix://{}/a.sock", folder.path().display());
    let config = ServerConfig { io_threads: 3, ..local(&["127.0.0.1:0", "127.0.0.1:0", &socket]) };
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
    running.server().shut_down();
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
    let config =
        ServerConfig { listen: vec!["127.0.0.1:0".parse().unwrap(), taken.clone()], io_threads: 2, ..config(table()) };
    let (code, message) = refused(start(&config));
    assert_eq!(code, ErrorCode::Io);
    assert!(message.contains(&taken.to_string()), "{message}");
}

#[test]
fn what_is_unsafe_or_impossible_does_not_start() {
    let open = local(&["0.0.0.0:0"]);
    assert_eq!(refused(start(&open)).0, ErrorCode::Config);
    let trusted = ServerConfig { trusted_network: true, ..open };
    start(&trusted).unwrap();
    let no_file = ServerConfig {
        tls_cert: Some("/nowhere/cert.pem".into()),
        tls_key: Some("/nowhere/key.pem".into()),
        ..local(&["127.0.0.1:0"])
    };
    assert!(refused(start(&no_file)).1.contains("/nowhere/cert.pem"));
    let small = Memory::new(MemoryLimits { receive_bytes: 1 << 16, ..MemoryLimits::default() });
    let (code, message) = refused(Server::start(&local(&["127.0.0.1:0"]), small));
    assert_eq!(code, ErrorCode::Config);
    assert!(message.contains("receive_bytes"), "{message}");
    let mut large = table();
    large.capacity_bytes = 1 << 40;
    let too_large = ServerConfig { tables: vec![large], ..local(&["127.0.0.1:0"]) };
    let memory = Memory::new(too_large.memory_limits());
    assert_eq!(refused(Server::start(&too_large, memory)).0, ErrorCode::Table);
}

#[test]
fn tls_serves_clients_that_trust_the_certificate_and_know_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    assert!(address.to_string().starts_with("innets://"));

    let client = connect(&address, options("secret of the tests", config.tls_cert.clone())).unwrap();
    client.stats(&Wait::forever()).unwrap();

    let wrong_token = connect(&address, options("a guess of a stranger", config.tls_cert.clone()));
    assert_eq!(refused(wrong_token).0, ErrorCode::Authentication);

    let other = tempfile::tempdir().unwrap();
    let (other_certificate, _) = certificate(other.path());
    let untrusted = connect(&address, options("secret of the tests", Some(other_certificate)));
    assert_eq!(refused(untrusted).0, ErrorCode::Authentication);
    client.stats(&Wait::forever()).unwrap();
}

#[test]
fn a_refused_certificate_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let mut authority = rcgen::CertificateParams::new(vec![]).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let trusted = file("authority.pem", authority.self_signed(&key).unwrap().pem());
    let issuer = rcgen::Issuer::new(authority, key);
    let refusal = |name: &str, years: [i32; 2], trusted: &Path| {
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        [params.not_before, params.not_after] = years.map(|year| rcgen::date_time_ymd(year, 1, 1));
        let key = rcgen::KeyPair::generate().unwrap();
        let config = ServerConfig {
            tls_cert: Some(file("server.pem", params.signed_by(&key, &issuer).unwrap().pem())),
            tls_key: Some(file("server.key", key.serialize_pem())),
            ..local(&["127.0.0.1:0"])
        };
        let running = start(&config).unwrap();
        let refused = connect(
            &running.addresses()[0],
            ConnectOptions { tls_ca: Some(trusted.to_owned()), ..ConnectOptions::default() },
        );
        refused.map(drop).map_err(|error| error.to_string())
    };
    let other = tempfile::tempdir().unwrap();
    let (other, _) = certificate(other.path());
    for (name, years, trusted, says) in [
        (
            "127.0.0.1",
            [2000, 2001],
            &trusted,
            "expired on Mon, 01 Jan 2001 00:00:00 GMT; start the server with a new one",
        ),
        ("127.0.0.1", [2999, 3000], &trusted, "not valid before Tue, 01 Jan 2999 00:00:00 GMT; check the clock"),
        ("example.org", [2000, 2999], &trusted, "connect to a host that the certificate names"),
        ("127.0.0.1", [2000, 2999], &other, "put the server's certificate or its authority's into tls_ca"),
    ] {
        let message = refusal(name, years, trusted).unwrap_err();
        assert!(message.contains(says) && !message.contains("with --tls-cert and --tls-key"), "{message}");
    }
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
    stream.write_all(&[8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let mut answer = Vec::new();
    // An alert or a reset: in no case a reply.
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() < 16, "{answer:?}");
    connect(&address, options("secret of the tests", config.tls_cert.clone())).unwrap();
}

#[test]
fn a_stranger_that_does_not_finish_tls_holds_a_place_until_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let config = ServerConfig { max_handshakes: 1, handshake_deadline_ms: 300, ..with_tls(folder.path()) };
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    let Address::Tcp { host, port, .. } = &address else {
        panic!("expected a TCP address");
    };
    // The start of a record with a ClientHello of 512 bytes.
    for said in [&b""[..], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"] {
        let mut stranger = TcpStream::connect((host.as_str(), *port)).unwrap();
        stranger.set_read_timeout(Some(LONG)).unwrap();
        stranger.write_all(said).unwrap();
        // It has the only place, and the client tries again until it is free.
        let client = options("secret of the tests", config.tls_cert.clone());
        connect(&address, client).unwrap();
        assert_eq!(stranger.read(&mut [0; 100]).unwrap(), 0, "it is closed");
    }
}

/// TLS by itself, with the certificate that is trusted.
pub async fn dial_tls(host: &str, port: u16, trusted: &Path) -> TlsStream<tokio::net::TcpStream> {
    let stream = tokio::net::TcpStream::connect((host, port)).await.unwrap();
    let connector = TlsConnector::from(tls::client_config(trusted).unwrap());
    let name = ServerName::try_from("localhost").unwrap();
    connector.connect(name, stream).await.unwrap()
}

/// A connection that just ends may have been cut: TLS says the end, and a client that reads on sees an error without it.
#[test]
fn the_server_says_the_end_of_a_tls_connection() {
    const TOKEN: &str = "secret of the tests";
    let folder = tempfile::tempdir().unwrap();
    let config = ServerConfig { max_handshakes: 1, ..with_tls(folder.path()) };
    let running = start(&config).unwrap();
    let Address::Tcp { host, port, .. } = &running.addresses()[0] else {
        panic!("expected a TCP address");
    };
    let trusted = config.tls_cert.as_deref().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = dial_tls(host, *port, trusted).await;
        let session = stream.get_ref().1;
        let channel_binding = session.export_keying_material([0; 32], CHANNEL_BINDING_LABEL, Some(&[])).unwrap();
        let over_tls = |stream| TestClient::new(Connection { stream: Box::new(stream), cut: Box::new(|| {}) });
        let mut served = over_tls(stream);
        let challenge = served.hello(PROTOCOL, [7; 32]).await.unwrap();
        let transcript = Transcript { channel_binding: Some(channel_binding), ..transcript([7; 32], &challenge) };
        let proof = auth::proof(TOKEN, Side::Client, &transcript);
        let authenticate = RequestBody::Authenticate(Some(proof));
        served.ask(authenticate, 0).await.unwrap();
        served.stats().await;
        // It has the only place.
        let stranger = TcpStream::connect((host.as_str(), *port)).unwrap();
        let mut refused = over_tls(dial_tls(host, *port, trusted).await);
        assert_eq!(refused.receive_error().await.1, ErrorCode::Connect);
        assert!(refused.receive().await.unwrap().is_none());
        drop(stranger);
        running.server().shut_down();
        assert!(served.receive().await.unwrap().is_none());
    });
    running.wait().unwrap();
}

#[test]
fn a_waiting_client_hears_of_the_end() {
    let running = start(&local(&["127.0.0.1:0"])).unwrap();
    let options = ConnectOptions { reconnect_for: Duration::ZERO, ..ConnectOptions::default() };
    let client = Arc::new(connect(&running.addresses()[0], options).unwrap());
    let sampling = std::thread::spawn({
        let client = client.clone();
        move || {
            let RequestBody::Sample(request) = sample(1) else {
                unreachable!("a sample is a sample");
            };
            let deadline = std::time::Instant::now() + Duration::from_secs(600);
            client.sample("steps", &request, &Wait::until(Some(deadline))).map(drop)
        }
    });
    let service = running.server().clone();
    until("a sample waits", || service.service().stats()["tables"]["steps"]["blocked_samples"] != 0);
    running.server().shut_down();
    running.wait().unwrap();
    let error = sampling.join().unwrap().unwrap_err();
    let codes = [ErrorCode::Closed, ErrorCode::Connect, ErrorCode::Disconnected];
    assert!(codes.contains(&error.code()), "{error}");
    assert!(!matches!(error, Error::Internal(_)));
}

#[test]
fn a_client_tries_again_while_the_server_has_no_room() {
    let config = ServerConfig { max_connections: 2, ..local(&["127.0.0.1:0"]) };
    let running = start(&config).unwrap();
    let address = running.addresses()[0].clone();
    let client = plain(&address).unwrap();
    let wait = Wait::forever();
    let refusals = || {
        let stats = running.server().service().stats();
        stats["server"]["connections_refused"].as_u64().unwrap()
    };
    let first = client.open_writer("steps", writer(1), &wait).unwrap();
    let impatient = ConnectOptions { connect_timeout: Duration::from_millis(50), ..ConnectOptions::default() };
    let (code, message) = refused(connect(&address, impatient));
    assert_eq!(code, ErrorCode::Connect);
    assert!(message.contains("--max-connections"), "{message}");
    // A call that connects again.
    let before = refusals();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| client.open_writer("steps", writer(2), &wait));
        until("a refusal", || refusals() > before);
        drop(first);
        let second = second.join().unwrap().unwrap();
        // A client that connects for the first time.
        let before = refusals();
        let other = scope.spawn(|| plain(&address).map(drop));
        until("two refusals", || refusals() > before + 1);
        drop(second);
        other.join().unwrap().unwrap();
    });
}

//! Access control: token, TLS, and path validation.

use std::net::UdpSocket;
use std::time::Instant;

use base::wait::Wait;
use gradients::JoinJob;
use gradients::packet::{Ack, PacketHeader, PacketKind, Status};
use gradients_net::GradientWorker;
use gradients_net::worker::{JoinedJob, join_job};
use replay_client::ConnectOptions;
use replay_client::dialer::Dialer;
use replay_client::{Client, connect};
use replay_link::error::Result;
use replay_link::stack::Address;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;

use crate::support::{LONG, Serving, join, request, requests, sum_rounds};

/// Files with a certificate for this machine, its key, and a token.
struct Secrets {
    _folder: tempfile::TempDir,
    certificate: String,
    key: String,
    token: String,
}

const TOKEN: &str = "secret of the tests";

impl Secrets {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]).unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        Secrets {
            certificate: file("cert.pem", &made.cert.pem()),
            key: file("key.pem", &made.signing_key.serialize_pem()),
            token: file("token", TOKEN),
            _folder: folder,
        }
    }

    /// A server that listens on all interfaces, and its address on loopback, where clients also look for the aggregator.
    fn serve(&self) -> (Serving, Address) {
        let serving = Serving::with(&[
            "--listen=0.0.0.0:0",
            "--gradients=0.0.0.0:0",
            "--trusted-network",
            "--token-file",
            &self.token,
            "--tls-cert",
            &self.certificate,
            "--tls-key",
            &self.key,
        ]);
        let here = serving.address.to_string().replace("0.0.0.0", "127.0.0.1");
        (serving, here.parse().unwrap())
    }

    fn connect(&self, address: &Address, token: Option<&str>) -> Result<Client> {
        let tls = matches!(address, Address::Tcp { tls: true, .. });
        let options = ConnectOptions {
            token: token.map(|token| Secret(token.to_owned())),
            tls_ca: tls.then(|| (&self.certificate).into()),
            ..ConnectOptions::default()
        };
        connect(address, options)
    }

    fn join(&self, address: &Address, request: &JoinJob) -> GradientWorker {
        let client = self.connect(address, Some(TOKEN)).unwrap();
        join(&client, request, &Wait::forever()).unwrap()
    }
}

#[test]
fn joining_needs_the_token_and_the_certificate() {
    let secrets = Secrets::new();
    let (_serving, address) = secrets.serve();
    let mut workers: Vec<_> = requests(2).map(|one| secrets.join(&address, &one)).collect();
    sum_rounds(&mut workers, 2, 5000);
    for token in [Some("some other secret"), None] {
        let error = secrets.connect(&address, token).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Authentication, "{error}");
    }
}

#[test]
fn a_server_joins_its_parent_with_its_own_token() {
    let secrets = Secrets::new();
    let (_parent, address) = secrets.serve();
    let below = |rack: u16, token: &str| {
        Serving::start(&[
            "--parent",
            &address.to_string(),
            "--parent-tls-ca",
            &secrets.certificate,
            &format!("--rack={rack}"),
            "--racks=2",
            &format!("--token={token}"),
        ])
    };
    let racks = [below(0, TOKEN), below(1, TOKEN)];
    let request = JoinJob { world: 2, ..request(0, 1) };
    let mut workers = racks.each_ref().map(|rack| secrets.join(&rack.address, &request));
    sum_rounds(&mut workers, 2, 5000);
    let other = below(1, "some other secret");
    let client = secrets.connect(&other.address, Some("some other secret")).unwrap();
    let error = join(&client, &request, &Wait::forever()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Extension);
    assert!(error.to_string().contains("has another token"), "{error}");
}

#[test]
fn an_aggregator_on_the_network_needs_trust_in_it_whatever_protects_the_connections() {
    let secrets = Secrets::new();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_innet-replay"))
        .args(["serve", "--listen=127.0.0.1:0", "--gradients=0.0.0.0:0"])
        .args(["--token-file", &secrets.token, "--tls-cert", &secrets.certificate])
        .args(["--tls-key", &secrets.key])
        .env_remove("INNET_TOKEN")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("gradients 0.0.0.0:0") && message.contains("set trusted_network"), "{message}");
}

/// Joins a job as its only worker, without sending datagrams.
fn join_alone(serving: &Serving) -> JoinedJob {
    let dialer = Dialer::new(serving.address.clone(), ConnectOptions::default()).unwrap();
    let until = Instant::now() + LONG;
    join_job(&dialer, &request(0, 1), until, &Wait::forever()).unwrap()
}

/// A UDP socket that sends datagrams of a session.
struct Source<'a>(UdpSocket, &'a JoinedJob);

impl<'a> Source<'a> {
    fn new(joined: &'a JoinedJob) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        Source(socket, joined)
    }

    fn send(&self, kind: PacketKind, body: &[u8]) {
        let Source(socket, joined) = self;
        let header = PacketHeader::new(kind, joined.ticket.session, joined.ticket.round, 0);
        let datagram = [&header.encode()[..], body].concat();
        socket.send_to(&datagram, joined.ticket.address).unwrap();
    }

    fn validate_path(&self, cookie: &[u8]) -> (PacketKind, Vec<u8>) {
        self.send(PacketKind::Join, &[self.1.ticket.key.as_slice(), cookie].concat());
        self.receive()
    }

    /// The next datagram. On loopback datagrams of one socket arrive in order.
    fn receive(&self) -> (PacketKind, Vec<u8>) {
        let mut bytes = [0; 2000];
        let (length, from) = self.0.recv_from(&mut bytes).unwrap();
        assert_eq!(from, self.1.ticket.address);
        let (header, body) = PacketHeader::decode(&bytes[..length]).unwrap();
        (header.kind, body.to_vec())
    }
}

#[test]
fn no_sum_is_sent_to_an_address_before_path_validation() {
    let serving = Serving::start(&[]);
    let joined = join_alone(&serving);
    let worker = Source::new(&joined);
    // A contribution that would complete a sum, from an address that is not validated.
    worker.send(PacketKind::Float, &1f32.to_le_bytes());
    // The first answer is the cookie, so the sum was not sent.
    let (kind, cookie) = worker.validate_path(&[0; 8]);
    assert_eq!((kind, cookie.len()), (PacketKind::Join, 8));
    // A host with session and key at another address has to return another cookie.
    let elsewhere = Source::new(&joined);
    let (kind, other) = elsewhere.validate_path(&cookie);
    assert_eq!(kind, PacketKind::Join);
    assert_ne!(other, cookie);
    let (kind, first) = worker.validate_path(&[0; 8]);
    assert_eq!(kind, PacketKind::Join);
    let (kind, answer) = worker.validate_path(&first);
    assert_eq!(kind, PacketKind::Ack);
    assert_eq!(Ack::decode(&answer).unwrap().status, Status::Done);
    worker.send(PacketKind::Float, &1f32.to_le_bytes());
    let (kind, sum) = worker.receive();
    assert_eq!((kind, sum), (PacketKind::Float, 1f32.to_le_bytes().to_vec()));
    assert_eq!(serving.stats()["strangers"], 1);
}

#[test]
fn unknown_datagrams_ended_sessions_and_wrong_keys_are_dropped_and_counted() {
    let serving = Serving::start(&[]);
    let joined = join_alone(&serving);
    let worker = Source::new(&joined);
    let (_, cookie) = worker.validate_path(&[0; 8]);
    assert_eq!(worker.validate_path(&cookie).0, PacketKind::Ack);
    // From another address; with a wrong key; of another protocol.
    let elsewhere = Source::new(&joined);
    elsewhere.send(PacketKind::Float, &9f32.to_le_bytes());
    worker.send(PacketKind::Reset, &[0; 16]);
    elsewhere.0.send_to(b"what is this?", joined.ticket.address).unwrap();
    serving.until(|stats| stats["strangers"] == 2 && stats["malformed"] == 1);
    assert_eq!(serving.stats()["counted"], 0);
    let own = worker.0.try_clone().unwrap();
    drop(joined.connection);
    serving.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
    let header = PacketHeader::new(PacketKind::Float, joined.ticket.session, joined.ticket.round, 0);
    let late = [&header.encode()[..], &[0; 4]].concat();
    own.send_to(&late, joined.ticket.address).unwrap();
    serving.until(|stats| stats["strangers"] == 3);
}

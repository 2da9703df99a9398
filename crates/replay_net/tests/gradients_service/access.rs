//! Who may take part: the token, TLS, and the proof that a worker is where it says.

use std::net::UdpSocket;
use std::time::Instant;

use gradients::JoinJob;
use gradients::packet::{Ack, Header, Kind, Status};
use replay_core::ErrorCode;
use replay_core::replay::Wait;
use replay_net::client::ConnectOptions;
use replay_net::client::connection::Dialer;
use replay_net::client::gradients::{Place, take_place};
use replay_net::client::{Client, GradientWorker, connect};
use replay_net::stack::Address;

use crate::support::{LONG, Serving, request, requests, sum_rounds};

/// Files of a certificate for this machine, its key, and a token.
struct Secrets {
    _folder: tempfile::TempDir,
    certificate: String,
    key: String,
    token: String,
}

const TOKEN: &str = "a secret";

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

    /// A server that listens everywhere, and its address here, where the aggregator is looked for, too.
    fn serve(&self) -> (Serving, Address) {
        let serving = Serving::with(&[
            "--listen=0.0.0.0:0",
            "--gradients=0.0.0.0:0",
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

    fn connect(&self, address: &Address, token: Option<&str>) -> replay_core::Result<Client> {
        let tls = matches!(address, Address::Tcp { tls: true, .. });
        let options = ConnectOptions {
            token: token.map(str::to_owned),
            tls_ca: tls.then(|| (&self.certificate).into()),
            ..ConnectOptions::default()
        };
        connect(address, options)
    }

    fn join(&self, address: &Address, request: &JoinJob) -> GradientWorker {
        let client = self.connect(address, Some(TOKEN)).unwrap();
        client.join_gradients(request, &Wait::forever()).unwrap()
    }
}

#[test]
fn only_who_knows_the_token_and_the_certificate_joins() {
    let secrets = Secrets::new();
    let (_serving, address) = secrets.serve();
    let mut workers: Vec<_> = requests(2)
        .map(|one| secrets.join(&address, &one))
        .collect();
    sum_rounds(&mut workers, 2, 5000);
    for token in [Some("another"), None] {
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
    let request = JoinJob {
        world: 2,
        ..request(0, 1)
    };
    let mut workers = racks
        .each_ref()
        .map(|rack| secrets.join(&rack.address, &request));
    sum_rounds(&mut workers, 2, 5000);
    let other = below(1, "another");
    let client = secrets.connect(&other.address, Some("another")).unwrap();
    let error = client
        .join_gradients(&request, &Wait::forever())
        .err()
        .unwrap();
    assert_eq!(error.code(), ErrorCode::Gradients);
    assert!(error.to_string().contains("has another token"), "{error}");
}

#[test]
fn an_aggregator_that_others_reach_needs_a_token_and_tls_or_trust() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_innet-replay"))
        .args(["serve", "--listen=127.0.0.1:0", "--gradients=0.0.0.0:0"])
        .env_remove("INNET_TOKEN")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("gradients 0.0.0.0:0") && message.contains("token"),
        "{message}"
    );
}

/// A worker of a job of its own, without what makes datagrams of it.
fn place(serving: &Serving) -> Place {
    let dialer = Dialer::new(serving.address.clone(), ConnectOptions::default()).unwrap();
    let until = Instant::now() + LONG;
    take_place(&dialer, &request(0, 1), None, until, &Wait::forever()).unwrap()
}

/// An address of this machine that sends datagrams of a place.
struct Source<'a>(UdpSocket, &'a Place);

impl<'a> Source<'a> {
    fn new(place: &'a Place) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        Source(socket, place)
    }

    fn send(&self, kind: Kind, body: &[u8]) {
        let Source(socket, place) = self;
        let header = Header::new(kind, place.ticket.session, place.ticket.round, 0);
        let datagram = [&header.encode()[..], body].concat();
        socket.send_to(&datagram, place.aggregator).unwrap();
    }

    fn prove(&self, cookie: &[u8]) -> (Kind, Vec<u8>) {
        self.send(Kind::Join, &[self.1.ticket.key.as_slice(), cookie].concat());
        self.receive()
    }

    /// The next datagram: those of one socket arrive in their order here.
    fn receive(&self) -> (Kind, Vec<u8>) {
        let mut bytes = [0; 2000];
        let (length, from) = self.0.recv_from(&mut bytes).unwrap();
        assert_eq!(from, self.1.aggregator);
        let (header, body) = Header::decode(&bytes[..length]).unwrap();
        (header.kind, body.to_vec())
    }
}

#[test]
fn nothing_is_sent_to_an_address_before_it_has_returned_what_was_sent_there() {
    let serving = Serving::start(&[]);
    let place = place(&serving);
    let worker = Source::new(&place);
    // A contribution that would complete a sum, from where nobody has shown to be.
    worker.send(Kind::Float, &1f32.to_le_bytes());
    // What comes first is therefore the cookie, and not the sum.
    let (kind, cookie) = worker.prove(&[0; 8]);
    assert_eq!((kind, cookie.len()), (Kind::Join, 8));
    // Somebody elsewhere who knows session and key, but has not seen what was sent there, is not believed.
    let elsewhere = Source::new(&place);
    let (kind, other) = elsewhere.prove(&cookie);
    assert_eq!(kind, Kind::Join);
    assert_ne!(other, cookie);
    let (kind, first) = worker.prove(&[0; 8]);
    assert_eq!(kind, Kind::Join);
    let (kind, answer) = worker.prove(&first);
    assert_eq!(kind, Kind::Ack);
    assert_eq!(Ack::decode(&answer).unwrap().status, Status::Done);
    worker.send(Kind::Float, &1f32.to_le_bytes());
    let (kind, sum) = worker.receive();
    assert_eq!((kind, sum), (Kind::Float, 1f32.to_le_bytes().to_vec()));
    assert_eq!(serving.stats()["strangers"], 1);
}

#[test]
fn strangers_dead_sessions_and_wrong_keys_are_dropped_and_counted() {
    let serving = Serving::start(&[]);
    let place = place(&serving);
    let worker = Source::new(&place);
    let (_, cookie) = worker.prove(&[0; 8]);
    assert_eq!(worker.prove(&cookie).0, Kind::Ack);
    // From elsewhere; with a key that is not its own; with none of this protocol's versions.
    let elsewhere = Source::new(&place);
    elsewhere.send(Kind::Float, &9f32.to_le_bytes());
    worker.send(Kind::Reset, &[0; 16]);
    elsewhere
        .0
        .send_to(b"what is this?", place.aggregator)
        .unwrap();
    serving.until(|stats| stats["strangers"] == 2 && stats["malformed"] == 1);
    assert_eq!(serving.stats()["counted"], 0);
    let own = worker.0.try_clone().unwrap();
    drop(place.connection);
    serving.until(|stats| stats["jobs"].as_object().unwrap().is_empty());
    let header = Header::new(Kind::Float, place.ticket.session, place.ticket.round, 0);
    let late = [&header.encode()[..], &[0; 4]].concat();
    own.send_to(&late, place.aggregator).unwrap();
    serving.until(|stats| stats["strangers"] == 3);
}

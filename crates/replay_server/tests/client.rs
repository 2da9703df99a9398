//! The client against a real server: every call, over every kind of address; tokens, certificates, deadlines.

mod support;

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base::wait::Wait;
use replay_client::{Address, Client, ConnectOptions};
use replay_core::replay::{ChangeLease, Replay, SampleRequest, UpdateReceipt};
use replay_core::schema::{Sampler, TableConfig};
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_wire::auth::Secret;
use replay_wire::{ErrorCode, RequestBody};
use support::*;

/// Every call of the trait, once.
pub fn exercise(replay: &Client) {
    let wait = &soon();
    let config = TableConfig { sampler: Sampler::Prioritized, max_times_sampled: 0, ..queue("steps") };
    replay.create_table(&config, wait).unwrap();
    replay.create_table(&config, wait).unwrap();
    assert_eq!(*replay.table_config("steps", wait).unwrap(), config);
    let other = TableConfig { capacity: 7, ..config.clone() };
    let error = replay.create_table(&other, wait).unwrap_err();
    assert_eq!(error.code(), ErrorCode::TableDiffers, "{error}");

    let mut pushes = replay.open_writer("steps", writer(1), wait).unwrap();
    for first in (0..100).step_by(10) {
        pushes.push(steps(first, 10), wait).unwrap();
    }
    pushes.flush(wait).unwrap();

    let sampled = replay.sample("steps", &sample_request(64), wait).unwrap();
    assert_eq!(numbers(&sampled).len(), 64);
    assert_eq!(sampled.live_items, 100);
    let mut ids: Vec<u64> = sampled.items.iter().map(|item| item.id).collect();
    ids.sort_unstable();
    ids.dedup();
    let receipt = replay.update_priorities("steps", &ids, &vec![2.0; ids.len()], wait).unwrap();
    assert_eq!(receipt, UpdateReceipt { applied: ids.len() as u32, stale: 0 });

    let name = replay.report_corrupt("steps", ids[0], "does not decode", wait).unwrap();
    assert_eq!(name.as_deref(), Some("writer 1"));
    assert_eq!(replay.report_corrupt("steps", ids[0], "again", wait).unwrap(), None);
    let receipt = replay.update_priorities("steps", &ids[..1], &[1.0], wait).unwrap();
    assert_eq!(receipt, UpdateReceipt { applied: 0, stale: 1 });

    assert_eq!(replay.get_parameters("policy", 0, None, wait).unwrap(), None);
    for version in 1..=2 {
        let file = parameters(version as usize * 300_000);
        assert_eq!(replay.put_parameters("policy", file.clone(), wait).unwrap(), version);
        let got = replay.get_parameters("policy", version - 1, None, wait).unwrap().unwrap();
        assert_eq!((got.version, got.bytes), (version, file));
        assert_eq!(replay.get_parameters("policy", version, None, wait).unwrap(), None);
    }

    let stats = replay.stats(wait).unwrap();
    assert!(stats.to_string().contains("steps"), "{stats}");
    pushes.close(wait).unwrap();
    pushes.close(wait).unwrap();
    let error = pushes.push(steps(100, 1), wait).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Closed, "{error}");

    let empty = RequestBody::EmptyTable("steps".into());
    replay.command(empty, wait).unwrap();
    let error = replay.sample("steps", &sample_request(1), &one_try()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Deadline, "{error}");
    exercise_leases(replay);
    replay.drop_table("steps", wait).unwrap();
    let error = replay.sample("steps", &sample_request(1), wait).err().unwrap();
    assert_eq!(error.code(), ErrorCode::UnknownTable, "{error}");
}

/// Batches of a queue over two connections, of which one ends.
fn exercise_leases(replay: &Client) {
    let wait = &soon();
    let config = TableConfig { queue_size: 40, ..queue("queue") };
    replay.create_table(&config, wait).unwrap();
    let mut pushes = replay.open_writer("queue", writer(2), wait).unwrap();
    pushes.push(steps(0, 40), wait).unwrap();
    pushes.flush(wait).unwrap();
    let request = SampleRequest { lease_ms: 60_000, ..sample_request(10) };
    let [mut one, mut other] = [(); 2].map(|()| replay.samples("queue", request, 0).unwrap());
    let batches = [one.next(wait).unwrap(), other.next(wait).unwrap(), other.next(wait).unwrap()];
    assert_eq!(batches.each_ref().map(|batch| numbers(batch)[0]), [0, 10, 20]);
    let change = |batch: usize, begin| {
        let change = ChangeLease { lease: batches[batch].lease, begin };
        replay.change_lease("queue", change, wait).map_err(|error| error.code())
    };
    for (batch, begin) in [(0, true), (1, true), (1, false)] {
        assert_eq!(change(batch, begin), Ok(()));
    }
    pushes.push(steps(40, 11), wait).unwrap();
    pushes.flush(wait).unwrap();
    let short = Wait::until(Some(Instant::now() + Duration::from_millis(300)));
    pushes.push(steps(51, 1), &short).unwrap();
    let error = pushes.flush(&short).unwrap_err().to_string();
    assert!(error.contains("is full: 41 of its items") && error.contains("10 are on their way to reader"), "{error}");
    drop(other);
    let items = || replay.stats(wait).unwrap()["tables"]["queue"]["leases"].as_array().unwrap().len();
    until("the connection's lease has ended", || items() == 1);
    assert_eq!(change(2, true), Err(ErrorCode::Lease));
    assert_eq!(change(0, false), Ok(()));
    pushes.close(wait).unwrap();
    assert_eq!(drain(replay, "queue"), (20..52).collect::<Vec<_>>());
    replay.drop_table("queue", wait).unwrap();
}

#[test]
fn every_call_works_over_tcp() {
    let server = serve(&[&any_port("innet")], |_| {});
    exercise(&connect(&server.addresses()[0], ConnectOptions::default()).unwrap());
}

#[test]
fn every_call_works_over_a_unix_socket_with_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix://{}/replay.sock", folder.path().display());
    let server = serve(&[&address], |config| config.token = Some(Secret("secret of the tests".into())));
    let options = ConnectOptions { token: Some(Secret("secret of the tests".into())), ..ConnectOptions::default() };
    exercise(&connect(&server.addresses()[0], options).unwrap());
}

/// A self-signed certificate and its key, as files.
struct Certificate {
    folder: tempfile::TempDir,
}

impl Certificate {
    /// For `name`; `authority` marks it as `openssl req -x509` does.
    fn new(name: &str, authority: bool) -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        if authority {
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        }
        let folder = tempfile::tempdir().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        std::fs::write(folder.path().join("cert.pem"), pem).unwrap();
        std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).unwrap();
        Certificate { folder }
    }

    fn serve(&self) -> replay_server::server::RunningServer {
        serve(&[&any_port("innets")], |config| {
            config.tls_cert = Some(self.folder.path().join("cert.pem"));
            config.tls_key = Some(self.folder.path().join("key.pem"));
        })
    }

    fn trusted(&self) -> ConnectOptions {
        ConnectOptions { tls_ca: Some(self.folder.path().join("cert.pem")), ..ConnectOptions::default() }
    }
}

#[test]
fn every_call_works_over_tls() {
    let certificate = Certificate::new(host(), false);
    let server = certificate.serve();
    exercise(&connect(&server.addresses()[0], certificate.trusted()).unwrap());
}

#[test]
fn a_certificate_of_openssl_is_trusted_as_it_is() {
    let certificate = Certificate::new("another.name", true);
    let server = certificate.serve();
    let client = connect(&server.addresses()[0], certificate.trusted()).unwrap();
    client.stats(&soon()).unwrap();
}

#[test]
fn a_certificate_that_nobody_trusts_is_refused() {
    let certificate = Certificate::new(host(), false);
    let server = certificate.serve();
    let other = Certificate::new(host(), false);
    let refused = connect(&server.addresses()[0], other.trusted());
    let error = refused.err().unwrap();
    assert_eq!(error.code(), ErrorCode::Authentication, "{error}");
}

#[test]
fn tls_without_certificates_and_certificates_without_tls_are_refused() {
    let certificate = Certificate::new(host(), false);
    let plain: Address = "innet://127.0.0.1:1".parse().unwrap();
    let tls: Address = "innets://127.0.0.1:1".parse().unwrap();
    let missing = ConnectOptions { tls_ca: Some("/no/such.pem".into()), ..Default::default() };
    for (address, options, reason) in [
        (&plain, certificate.trusted(), "innets://"),
        (&tls, ConnectOptions::default(), "needs tls_ca"),
        (&tls, missing, "/no/such.pem"),
    ] {
        let error = connect(address, options).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Config);
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn a_client_without_tls_is_told_of_a_server_with_it() {
    let certificate = Certificate::new(host(), false);
    let server = certificate.serve();
    let plain = format!("innet://{}:{}", host(), port(&server));
    let plain = plain.parse().unwrap();
    let error = connect(&plain, ConnectOptions::default()).err().unwrap();
    assert!(error.to_string().contains("innets://"), "{error}");
}

#[test]
fn tokens_are_checked_at_both_ends() {
    let with = serve(&[&any_port("innet")], |config| {
        config.token = Some(Secret("secret of the tests".into()));
    });
    let without = serve(&[&any_port("innet")], |_| {});
    let attempt = |server: &replay_server::server::RunningServer, token: Option<&str>| {
        let options = ConnectOptions { token: token.map(|token| Secret(token.into())), ..Default::default() };
        connect(&server.addresses()[0], options).map(drop)
    };
    attempt(&with, Some("secret of the tests")).unwrap();
    attempt(&without, None).unwrap();
    for refused in [
        attempt(&with, None),
        attempt(&with, Some("some other secret")),
        attempt(&without, Some("secret of the tests")),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Authentication, "{error}");
    }
}

/// Python may collect a client while the log line of another one, inside of its runtime, runs Python code.
#[test]
fn a_client_may_be_dropped_inside_of_a_runtime() {
    let (_server, client) = connected();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async move { drop(client) });
}

#[test]
fn nobody_at_the_address_is_an_error_at_once() {
    let free = TcpListener::bind((kernel_host(), 0)).unwrap().local_addr().unwrap();
    for address in [format!("innet://{free}"), "unix:///no/such/socket".into()] {
        let address = address.parse().unwrap();
        let error = connect(&address, ConnectOptions::default()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Connect);
        let named = dialed(&address).to_string();
        assert!(error.to_string().contains(&named), "{error}");
    }
}

#[test]
fn a_peer_that_says_nothing_is_given_up() {
    let silent = TcpListener::bind((kernel_host(), 0)).unwrap();
    let address = format!("innet://{}", silent.local_addr().unwrap()).parse().unwrap();
    let options = ConnectOptions { connect_timeout: Duration::from_millis(50), ..ConnectOptions::default() };
    let error = connect(&address, options).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Connect, "{error}");
}

fn connected() -> (replay_server::server::RunningServer, Client) {
    let server = serve(&[&any_port("innet")], |_| {});
    let client = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    client.create_table(&queue("steps"), &soon()).unwrap();
    (server, client)
}

#[test]
fn a_deadline_ends_a_sample_and_says_what_is_missing() {
    let (_server, client) = connected();
    for patience in [0, 30] {
        let deadline = Instant::now() + Duration::from_millis(patience);
        let sampled = client.sample("steps", &sample_request(3), &Wait::until(Some(deadline)));
        let error = sampled.err().unwrap();
        assert_eq!(error.code(), ErrorCode::Deadline);
        assert!(matches!(error, Error::RemoteDeadline { .. }), "the server's reason: {error}");
        assert!(error.to_string().contains("steps"), "{error}");
    }
}

#[test]
fn a_server_that_stops_answering_is_given_up_after_the_grace() {
    let (server, _) = connected();
    let proxy = Proxy::start(port(&server), vec![]);
    let options = ConnectOptions { grace: Duration::from_millis(20), ..Default::default() };
    let client = connect(&proxy.address, options).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 5), &soon()).unwrap();
    let mut batches = client.samples("steps", sample_request(5), 1).unwrap();
    batches.next(&soon()).unwrap();
    proxy.hang();
    pushes.push(steps(5, 5), &soon()).unwrap();
    for error in [
        client.stats(&one_try()).err().unwrap(),
        batches.next(&one_try()).err().unwrap(),
        pushes.flush(&one_try()).err().unwrap(),
    ] {
        // The client's own error: the server's would be `Remote`.
        assert!(matches!(error, Error::Deadline { .. }), "{error:?}");
        assert!(error.to_string().contains(&dialed(&proxy.address).to_string()), "{error}");
    }
}

/// As a server at its limit does, beyond the refusals that get a reply.
#[test]
fn a_first_connection_that_is_closed_without_a_reply_is_tried_again() {
    let (server, _) = connected();
    let proxy = Proxy::start(port(&server), vec![0, 0, 0]);
    let client = connect(&proxy.address, ConnectOptions::default()).unwrap();
    client.stats(&soon()).unwrap();
    assert_eq!(proxy.connections(), 4);

    let closed = Proxy::start(port(&server), vec![0; 1000]);
    let options = ConnectOptions { connect_timeout: Duration::from_millis(50), ..Default::default() };
    let error = connect(&closed.address, options).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
}

#[test]
fn an_interrupt_ends_a_call_and_the_next_one_works() {
    let (_server, client) = connected();
    let asked = AtomicUsize::new(0);
    let interrupted = || asked.fetch_add(1, Ordering::Relaxed) == 1;
    let wait = Wait { interrupted: &interrupted, ..Wait::forever() };
    let error = client.sample("steps", &sample_request(1), &wait).err().unwrap();
    assert!(matches!(error, Error::Interrupted), "{error}");
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    let now = Wait { interrupted: &|| true, ..Wait::forever() };
    let mut batches = client.samples("steps", sample_request(1), 2).unwrap();
    let error = batches.next(&now).err().unwrap();
    assert!(matches!(error, Error::Interrupted), "{error}");
    client.stats(&soon()).unwrap();
}

#[test]
fn a_blocked_sample_goes_on_when_steps_arrive() {
    let (_server, client) = connected();
    std::thread::scope(|scope| {
        let sample = scope.spawn(|| client.sample("steps", &sample_request(5), &soon()));
        let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
        pushes.push(steps(0, 5), &soon()).unwrap();
        pushes.close(&soon()).unwrap();
        let sampled = sample.join().unwrap().unwrap();
        assert_eq!(numbers(&sampled), [0, 1, 2, 3, 4]);
    });
}

/// A connection numbers 4,096 tables: later ones go over another.
#[test]
fn any_number_of_tables_may_be_asked_for() {
    let (_server, client) = connected();
    let mut updates = client.updates().unwrap().unwrap();
    for number in 0..4_200 {
        let name = format!("missing {number}");
        let unknown = |error: Option<Error>| error.map(|error| error.code()) == Some(ErrorCode::UnknownTable);
        assert!(unknown(client.sample(&name, &sample_request(1), &soon()).err()), "{number}");
        let updated = updates.send(&name, &[1], &[1.0], &soon()).and_then(|_| updates.flush(&soon()));
        assert!(unknown(updated.err()), "{number}");
    }
    updates.send("steps", &[1], &[1.0], &soon()).unwrap();
    assert_eq!(updates.flush(&soon()).unwrap().stale, 1);
}

#[test]
fn a_sampler_samples_everything_once_and_in_order() {
    let (_server, client) = connected();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 100), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    let mut batches = client.samples("steps", sample_request(10), 3).unwrap();
    let mut seen = Vec::new();
    for _ in 0..10 {
        seen.extend(numbers(&batches.next(&soon()).unwrap()));
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..100).collect::<Vec<_>>());
    let error = batches.next(&one_try()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Deadline, "{error}");

    // Requests in flight that failed do not affect the next batch.
    let mut pushes = client.open_writer("steps", writer(2), &soon()).unwrap();
    pushes.push(steps(0, 10), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(numbers(&batches.next(&soon()).unwrap()), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_sampler_passes_on_what_is_wrong_with_its_sample() {
    let (_server, client) = connected();
    let mut batches = client.samples("nowhere", sample_request(10), 2).unwrap();
    for _ in 0..3 {
        let error = batches.next(&soon()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::UnknownTable, "{error}");
    }
}

#[test]
fn an_update_with_fewer_priorities_than_keys_is_refused() {
    let (_server, client) = connected();
    let updated: Result<_> = client.update_priorities("steps", &[1, 2], &[1.0], &soon());
    assert_eq!(updated.unwrap_err().code(), ErrorCode::Schema);
}

#[test]
fn many_threads_share_a_client() {
    let (_server, client) = connected();
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let client = &client;
            scope.spawn(move || {
                let name = format!("policy {thread}");
                for version in 1..=5 {
                    let stored = client.put_parameters(&name, parameters(1000), &soon());
                    assert_eq!(stored.unwrap(), version);
                }
            });
        }
    });
}

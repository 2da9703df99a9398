//! What only a simulated network shows: segments that take their time, and connections that break in the middle of one
//! reply.

use std::time::Duration;

use replay_client::tls;
use replay_core::error::WaitReason;
use replay_core::schema::TableConfig;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{GetParameters, PROTOCOL, PutParameters, ReplyBody, RequestBody};
use rustls::pki_types::ServerName;
use simulation::SimStack;
use tokio_rustls::TlsConnector;

use crate::suite::world::Connection;
use crate::suite::*;
use crate::support::certificate;

#[test]
fn delays_change_neither_order_nor_content() {
    for seed in 0..10 {
        World::simulated(seed, config(table()), |world, network| async move {
            network.set_delay(Duration::ZERO..=Duration::from_millis(500));
            let mut client = world.client().await;
            client.open(1).await;
            for sequence in 1..=30 {
                let body = RequestBody::Push(push(1, 1, sequence, sequence - 1, &[sequence as i64]));
                client.send(body, 0).await.unwrap();
            }
            for steps in 1..=30 {
                let reply = client.receive().await.unwrap().unwrap();
                assert!(matches!(reply.body, ReplyBody::Pushed(s) if s == steps));
            }
        });
    }
}

#[test]
fn a_sample_that_arrived_in_part_gives_its_credit_back() {
    for seed in 0..5 {
        World::simulated(seed, config(limited_table()), |world, network| async move {
            cut_sample(&world, &network).await;
            assert_eq!(world.table_stat("limiter_sampled"), 0);
            assert_eq!(world.table_stat("pinned_bytes"), 0);
        });
    }
}

#[test]
fn a_sample_that_arrived_in_part_leaves_its_items_in_their_queue() {
    for seed in 0..5 {
        World::simulated(seed, config(queue()), |world, network| async move {
            let mut writer = cut_sample(&world, &network).await;
            assert_eq!(world.table_stat("items"), 3);
            writer.ask(sample(3), 0).await.unwrap();
            world.until(|world| world.table_stat("items") == 0).await;
        });
    }
}

/// Pushes three items, and breaks the connection of a reader in the middle of a reply with two of them. Returns the writer.
async fn cut_sample(world: &World, network: &SimStack) -> TestClient {
    let mut writer = world.client().await;
    writer.open(1).await;
    writer.ask(RequestBody::Push(push(1, 1, 1, 0, &[1, 2, 3])), 0).await.unwrap();

    let stream = network.connect(&world.address).unwrap();
    let link = stream.link();
    let mut reader = TestClient::welcome(stream.into(), None).await.unwrap();
    link.cut_after_received(20);
    reader.send(sample(2), 0).await.unwrap();
    assert!(reader.receive().await.is_err());
    world.until(|world| world.server_stat("connections") == 1).await;
    writer
}

/// Samples that wait cost attempts of the first of them alone, ten a second.
#[test]
fn parked_samples_are_not_tried_again_by_themselves() {
    const CLIENTS: u64 = 4;
    const SAMPLES: u64 = 16;
    const SECONDS: u64 = 60;
    World::simulated(14, config(table()), |world, _| async move {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut client = world.client().await;
            for _ in 0..SAMPLES {
                client.send(sample(1), u32::MAX).await.unwrap();
            }
            clients.push(client);
        }
        world.until(|world| world.table_stat("blocked_samples") == CLIENTS * SAMPLES).await;
        world.sleep(Duration::from_secs(1)).await;
        let before = world.server_stat("retries");
        // Each looks again after it has taken its place, so that no change is missed.
        assert!(before <= 3 * CLIENTS * SAMPLES, "{before}");
        world.sleep(Duration::from_secs(SECONDS)).await;
        let tried = world.server_stat("retries") - before;
        assert!(tried > 0 && tried <= 11 * SECONDS, "{tried} attempts");
    });
}

/// The reason is sent every five seconds, also of a request behind others, and never of one that is answered before.
#[test]
fn the_reason_of_a_wait_is_sent_to_the_client() {
    World::simulated(19, config(table()), |world, _| async move {
        let mut client = world.client().await;
        let begun = world.now();
        let first = client.send(sample(1), u32::MAX).await.unwrap();
        let second = client.send(sample(1), 12_000).await.unwrap();
        let mut sent = Vec::new();
        for seconds in [5, 5, 10, 10] {
            let reply = client.receive_any().await.unwrap().unwrap();
            world.assert_soon_after(begun + Duration::from_secs(seconds));
            let ReplyBody::Waiting(reason) = reply.body else {
                panic!("a request that waits was answered: {}", reply.body.name());
            };
            sent.push((reply.id, reason));
        }
        sent.sort_by_key(|(id, _)| *id);
        let wait = |ahead: &str| {
            let cause = "holds 0 items of the 1 that min_size asks for; waiting for writers";
            WaitReason::for_writers("steps", format!("{ahead}table \"steps\" {cause}"))
        };
        let both = [(first, wait("")), (second, wait("1 earlier calls wait: "))];
        assert_eq!(sent, [&both[..1], &both[..1], &both[1..], &both[1..]].concat());
        let (answered, code, _) = client.receive_error().await;
        assert_eq!((answered, code), (second, ErrorCode::Deadline));
    });
}

/// The deadline counts from the accept, and no step of the handshake moves it.
#[test]
fn a_client_that_takes_its_time_before_and_after_its_hello_is_closed_at_the_deadline() {
    const ALLOWED: Duration = Duration::from_secs(2);
    const TRIP: Duration = Duration::from_millis(300);
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(folder.path());
    for with_tls in [false, true] {
        let mut config = ServerConfig { handshake_deadline_ms: ALLOWED.as_millis() as u64, ..config(table()) };
        if with_tls {
            config.listen = vec!["innets://127.0.0.1:7710".parse().unwrap()];
            config.tls_cert = Some(certificate.clone());
            config.tls_key = Some(key.clone());
        }
        let trusted = tls::client_config(&certificate).unwrap();
        World::simulated(20, config, |world, network| async move {
            network.set_delay(TRIP..=TRIP);
            for says_hello in [false, true] {
                let deadline = world.now() + ALLOWED;
                let stream = network.connect(&world.address).unwrap();
                let mut client = TestClient::new(match with_tls {
                    false => stream.into(),
                    true => {
                        let connector = TlsConnector::from(trusted.clone());
                        let name = ServerName::try_from("localhost").unwrap();
                        Connection {
                            stream: Box::new(connector.connect(name, stream).await.unwrap()),
                            cut: Box::new(|| {}),
                        }
                    }
                });
                world.sleep(deadline - 4 * TRIP - world.now()).await;
                if says_hello {
                    client.hello(PROTOCOL, [1; 32]).await.unwrap();
                }
                assert!(client.receive().await.unwrap().is_none());
                assert!(world.now() >= deadline);
                world.assert_soon_after(deadline + TRIP);
                drop(client);
                world.until(|world| world.server_stat("connections") == 0).await;
            }
        });
    }
}

#[test]
fn a_frame_has_its_whole_time_to_arrive_once_there_is_room() {
    let config =
        ServerConfig { max_frame_bytes: ServerConfig::MIN_FRAME_BYTES, write_deadline_ms: 2_000, ..config(table()) };
    World::simulated(16, config, |world, network| async move {
        let mut slow = world.client().await;
        let start = [8u32.to_le_bytes(), 60_000u32.to_le_bytes()].concat();
        slow.send_raw(&start).await;
        world.until(|world| world.receive_bytes() > 0).await;

        // It takes a while to arrive, and there is room only when the slow one's time is over.
        network.set_buffer(4096);
        let delay = Duration::from_millis(10);
        network.set_delay(delay..=delay);
        let mut other = world.client().await;
        let put = RequestBody::PutParameters(PutParameters {
            name: "policy".into(),
            version: 0,
            id: 0,
            bytes: parameters(60_000),
        });
        other.ask(put, 0).await.unwrap();
        assert_eq!(slow.receive_error().await.1, ErrorCode::Deadline);
    });
}

#[test]
fn a_table_is_made_emptied_and_dropped_while_others_are_answered() {
    World::simulated(17, config(table()), |world, _| async move {
        let mut maker = world.client().await;
        let mut other = world.client().await;
        let large = TableConfig { name: "large".into(), ..table() };
        let requests = [
            RequestBody::CreateTable(large),
            RequestBody::EmptyTable("large".into()),
            RequestBody::DropTable("large".into()),
        ];
        for (request, there) in requests.into_iter().zip([false, true, true]) {
            let before = world.server_stat("requests");
            maker.send(request, 0).await.unwrap();
            world.until(|world| world.server_stat("requests") == before + 1).await;
            // It has arrived first, and this one is answered first.
            let during = other.stats().await;
            assert_eq!(during["tables"]["large"].is_object(), there);
            let name = maker.receive().await.unwrap().unwrap().body.name();
            assert_eq!(name, "done");
        }
        assert!(other.stats().await["tables"]["large"].is_null());
    });
}

#[test]
fn requests_behind_a_new_table_are_answered_after_it() {
    World::simulated(18, config(table()), |world, _| async move {
        let mut client = world.client().await;
        let another = TableConfig { name: "another".into(), ..table() };
        client.send(RequestBody::CreateTable(another), 0).await.unwrap();
        client.send(RequestBody::DescribeTable("another".into()), 0).await.unwrap();
        for name in ["done", "table"] {
            assert_eq!(client.receive().await.unwrap().unwrap().body.name(), name);
        }
    });
}

/// Each reply that is read lets one of those that wait for it try, not all.
#[test]
fn a_crowd_that_waits_for_readers_is_woken_one_by_one() {
    const CLIENTS: u64 = 32;
    const BYTES: usize = 100_000;
    let config = ServerConfig { reply_bytes: 1, ..config(table()) };
    World::simulated(24, config, |world, network| async move {
        // A version that one of them has would count once.
        for client in 0..CLIENTS {
            let put = RequestBody::PutParameters(PutParameters {
                name: format!("policy {client}"),
                version: 0,
                id: 0,
                bytes: parameters(BYTES),
            });
            world.client().await.ask(put, 0).await.unwrap();
        }
        network.set_buffer(4096);
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let mut client = world.client().await;
            let get = RequestBody::GetParameters(GetParameters {
                name: format!("policy {number}"),
                newer_than: 0,
                writer: 0,
            });
            client.send(get, u32::MAX).await.unwrap();
            clients.push(client);
        }
        world.until(|world| world.server_stat("requests") == 2 * CLIENTS).await;
        let reading = clients.iter_mut().map(|client| async {
            let reply = client.receive().await.unwrap().unwrap();
            assert_eq!(reply.body.name(), "parameters");
        });
        futures_util::future::join_all(reading).await;
        // Attempts of a client: on arrival, again when it listens for room, when it is woken, and once more if another client
        // was quicker.
        let tried = world.server_stat("retries");
        assert!((CLIENTS..5 * CLIENTS).contains(&tried), "{tried} attempts");
    });
}

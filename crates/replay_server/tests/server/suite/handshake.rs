//! Clients that are let in, and the errors of the others.

use std::time::Duration;

use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::auth::{self, Secret, Side};
use replay_wire::{PROTOCOL, RELEASE, RequestBody};

use super::*;

fn with_token() -> ServerConfig {
    ServerConfig { token: Some(Secret("secret of the tests".into())), ..config(table()) }
}

#[test]
fn the_challenge_tells_what_a_client_has_to_know() {
    World::run(1, with_token(), |world| async move {
        let mut client = TestClient::new(world.connect().await);
        let challenge = client.hello(PROTOCOL, [1; 32]).await.unwrap();
        assert_eq!(challenge.release, RELEASE);
        assert_eq!(challenge.incarnation, world.memory.incarnation());
        assert_eq!(challenge.max_frame_bytes, 1 << 20);
        assert!(challenge.token_needed);
        let other = TestClient::new(world.connect().await).hello(PROTOCOL, [1; 32]).await.unwrap();
        assert_ne!(challenge.nonce, other.nonce);
    });
}

#[test]
fn the_token_opens_and_nothing_else_does() {
    World::run(2, with_token(), |world| async move {
        TestClient::welcome(world.connect().await, Some("secret of the tests")).await.unwrap().stats().await;
        for (token, part) in [(None, "INNET_TOKEN"), (Some("a guess of a stranger"), "another token")] {
            let mut client = TestClient::new(world.connect().await);
            let challenge = client.hello(PROTOCOL, [1; 32]).await.unwrap();
            let proof = token.map(|token| {
                let transcript = transcript([1; 32], &challenge);
                auth::proof(token, Side::Client, &transcript)
            });
            let (code, message) = refused(client.ask(RequestBody::Authenticate(proof), 0).await);
            assert_eq!(code, ErrorCode::Authentication);
            assert!(message.contains(part), "{message}");
            assert!(client.receive().await.unwrap().is_none());
        }
    });
}

#[test]
fn the_servers_own_proof_opens_nothing() {
    World::run(3, with_token(), |world| async move {
        let mut client = TestClient::new(world.connect().await);
        let challenge = client.hello(PROTOCOL, [1; 32]).await.unwrap();
        let transcript = transcript([1; 32], &challenge);
        let proof = auth::proof("secret of the tests", Side::Server, &transcript);
        let reflected = RequestBody::Authenticate(Some(proof));
        assert_eq!(refused(client.ask(reflected, 0).await).0, ErrorCode::Authentication);
    });
}

#[test]
fn another_protocol_is_refused_with_both_versions() {
    World::run(4, config(table()), |world| async move {
        let mut client = TestClient::new(world.connect().await);
        let (code, message) = refused(client.hello(PROTOCOL + 1, [1; 32]).await);
        assert_eq!(code, ErrorCode::Version);
        for part in [PROTOCOL.to_string(), (PROTOCOL + 1).to_string(), RELEASE.into()] {
            assert!(message.contains(&part), "{message}");
        }
        assert!(client.receive().await.unwrap().is_none());
    });
}

#[test]
fn nothing_is_served_before_the_welcome() {
    World::run(5, with_token(), |world| async move {
        let mut client = TestClient::new(world.connect().await);
        assert_eq!(refused(client.ask(RequestBody::Stats, 0).await).0, ErrorCode::Protocol);
        assert!(client.receive().await.unwrap().is_none());
        let mut client = TestClient::new(world.connect().await);
        client.hello(PROTOCOL, [1; 32]).await.unwrap();
        let early = client.ask(RequestBody::DropTable(TABLE.into()), 0).await;
        assert_eq!(refused(early).0, ErrorCode::Protocol);
        assert!(client.receive().await.unwrap().is_none());
    });
}

#[test]
fn a_stranger_cannot_make_the_server_allocate() {
    World::run(6, config(table()), |world| async move {
        let mut client = TestClient::new(world.connect().await);
        // Within the limit of a welcome client.
        client.send_raw(&[8u32.to_le_bytes(), (1u32 << 19).to_le_bytes()].concat()).await;
        assert_eq!(client.receive_error().await.1, ErrorCode::TooLarge);
    });
}

#[test]
fn a_client_that_says_nothing_or_too_little_is_closed_at_the_deadline() {
    let config = ServerConfig { handshake_deadline_ms: 300, ..config(table()) };
    World::run(7, config, |world| async move {
        for said in [&b""[..], b"x"] {
            let deadline = world.now() + Duration::from_millis(300);
            let mut client = TestClient::new(world.connect().await);
            client.send_raw(said).await;
            assert!(client.receive().await.unwrap().is_none());
            assert!(world.now() >= deadline);
            world.assert_soon_after(deadline);
            drop(client);
            world.until(|world| world.server_stat("connections") == 0).await;
        }
    });
}

#[test]
fn one_connection_too_many_is_told_so() {
    let config = ServerConfig { max_connections: 2, ..config(table()) };
    World::run(8, config, |world| async move {
        let first = world.client().await;
        let mut second = world.client().await;
        let third = TestClient::welcome(world.connect().await, None).await;
        let (code, message) = refused(third.map(drop));
        assert_eq!(code, ErrorCode::Connect, "clients try again");
        assert!(message.contains("--max-connections"), "{message}");
        assert_eq!(world.server_stat("connections_refused"), 1);
        second.stats().await;
        drop(first);
        world.until(|world| world.server_stat("connections") == 1).await;
        world.client().await.stats().await;
    });
}

#[test]
fn a_flood_of_strangers_keeps_out_no_logged_in_client_and_delays_new_ones() {
    let config =
        ServerConfig { max_connections: 2, max_handshakes: 3, handshake_deadline_ms: 1_000, ..config(table()) };
    World::run(9, config, |world| async move {
        let mut early = world.client().await;
        let mut strangers = Vec::new();
        for _ in 0..3 {
            strangers.push(world.connect().await);
        }
        world.until(|world| world.server_stat("connections") == 4).await;
        let mut late = TestClient::new(world.connect().await);
        let (_, code, message) = late.receive_error().await;
        assert_eq!(code, ErrorCode::Connect, "clients try again");
        assert!(message.contains("max_handshakes"), "{message}");
        assert!(late.receive().await.unwrap().is_none());
        early.stats().await;
        // Their time is over.
        world.until(|world| world.server_stat("connections") == 1).await;
        world.client().await.stats().await;
        drop(strangers);
    });
}

#[test]
fn clients_that_fail_to_log_in_are_counted() {
    World::run(10, with_token(), |world| async move {
        // As a client without a token does.
        let mut leaves = TestClient::new(world.connect().await);
        leaves.hello(PROTOCOL, [1; 32]).await.unwrap();
        drop(leaves);
        world.until(|world| world.server_stat("failed_logins") == 1).await;
        let without = TestClient::welcome(world.connect().await, None).await;
        assert_eq!(refused(without.map(drop)).0, ErrorCode::Authentication);
        world.until(|world| world.server_stat("failed_logins") == 2).await;
        // Connections without a word, and welcome ones, are none of them.
        drop(world.connect().await);
        drop(world.client().await);
        world.until(|world| world.server_stat("connections") == 0).await;
        assert_eq!(world.server_stat("failed_logins"), 2);
    });
}

//! The end of a server.

use std::time::Duration;

use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{NO_REQUEST, ReplyBody, RequestBody};

use super::*;

#[test]
fn who_waits_is_sent_away_and_who_was_served_keeps_the_reply() {
    for seed in 0..5 {
        World::run(seed, config(table()), |world| async move {
            let mut waiting = world.client().await;
            let mut writing = world.client().await;
            writing.open(1).await;
            waiting.send(sample(1), 600_000).await.unwrap();
            world.until(|world| world.table_stat("blocked_samples") > 0).await;
            // Applied, and its reply is on the way.
            world.slow_down();
            let body = RequestBody::Push(push(1, 1, 1, 0, &[1]));
            writing.send(body, 0).await.unwrap();
            world.until(|world| world.table_stat("steps") == 1).await;
            world.server.shut_down();

            let pushed = writing.receive().await.unwrap().unwrap();
            assert!(matches!(pushed.body, ReplyBody::Pushed(1)));
            assert!(writing.receive().await.unwrap().is_none());
            let reply = waiting.receive().await.unwrap().unwrap();
            // The push that came before the end may have let the sample through.
            match reply.body {
                ReplyBody::Error { code, .. } => assert_eq!(code, ErrorCode::Disconnected),
                body => assert_eq!(body.name(), "sampled"),
            }
            assert!(waiting.receive().await.unwrap().is_none());
        });
    }
}

#[test]
fn a_sample_that_nothing_lets_through_hears_that_the_server_ends() {
    World::run(1, config(table()), |world| async move {
        let mut waiting = world.client().await;
        let first = waiting.send(sample(1), 600_000).await.unwrap();
        let second = waiting.send(sample(1), 600_000).await.unwrap();
        // Requests are tried in the order of their arrival: once this one is answered, both samples wait.
        waiting.stats().await;
        world.server.shut_down();
        let mut ids = Vec::new();
        for _ in 0..2 {
            let (id, code, message) = waiting.receive_error().await;
            assert_eq!(code, ErrorCode::Disconnected, "{message}");
            ids.push(id);
        }
        ids.sort_unstable();
        assert_eq!(ids, [first, second]);
        assert!(waiting.receive().await.unwrap().is_none());
    });
}

#[test]
fn nobody_is_accepted_after_the_end_has_begun() {
    World::run(2, config(table()), |world| async move {
        let mut client = world.client().await;
        client.stats().await;
        world.server.shut_down();
        assert!(client.receive().await.unwrap().is_none());
        drop(client);
        while world.try_connect().await.is_ok() {
            world.sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn a_handshake_does_not_hold_up_the_end() {
    World::run(5, config(table()), |world| async move {
        let mut silent = TestClient::new(world.connect().await);
        world.until(|world| world.server_stat("connections") == 1).await;
        let start = world.now();
        world.server.shut_down();
        assert!(silent.receive().await.unwrap().is_none());
        world.assert_soon_after(start);
    });
}

#[test]
fn a_client_that_does_not_read_cannot_hold_up_the_end() {
    let config = ServerConfig {
        drain_deadline_ms: 300,
        write_deadline_ms: 600_000,
        max_frame_bytes: CLOGGABLE,
        ..config(table())
    };
    World::run(3, config, |world| async move {
        let mut client = world.client().await;
        client.clog().await;
        world.until(|world| world.server_stat("requests") == 1 + CLOGGING).await;
        let deadline = world.now() + Duration::from_millis(300);
        world.server.shut_down();
        world.until(|world| world.server_stat("connections") == 0).await;
        assert!(world.now() >= deadline);
        world.assert_soon_after(deadline);
    });
}

#[test]
fn pushes_that_wait_at_the_end_are_not_applied() {
    World::run(4, config(limited_table()), |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        for sequence in 1..=8 {
            let body = RequestBody::Push(push(1, 1, sequence, sequence - 1, &[1]));
            client.send(body, 600_000).await.unwrap();
        }
        for steps in 1..=5 {
            let reply = client.receive().await.unwrap().unwrap();
            assert!(matches!(reply.body, ReplyBody::Pushed(s) if s == steps));
        }
        // What came before this has been tried.
        client.stats().await;
        world.server.shut_down();
        for _ in 6..=8 {
            assert_eq!(client.receive_error().await.1, ErrorCode::Disconnected);
        }
        assert!(client.receive().await.unwrap().is_none());
        assert_eq!(world.table_stat("inserted_steps"), 5);
    });
}

#[test]
fn every_client_of_a_server_that_closes_for_good_hears_of_it() {
    World::run(6, config(table()), |world| async move {
        let mut idle = world.client().await;
        let mut waiting = world.client().await;
        let sample = waiting.send(sample(1), 600_000).await.unwrap();
        // Requests are tried in the order of their arrival: once this one is answered, the sample waits.
        waiting.stats().await;
        world.server.close();
        for expected in [sample, NO_REQUEST] {
            let (id, code, message) = waiting.receive_error().await;
            assert_eq!((id, code), (expected, ErrorCode::Closed), "{message}");
        }
        assert_eq!(idle.receive_error().await.1, ErrorCode::Closed);
        assert!(idle.receive().await.unwrap().is_none());
    });
}

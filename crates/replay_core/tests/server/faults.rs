//! Connections that break, stall and come back: every push is applied once.

use std::time::Duration;

use replay_core::ErrorCode;
use replay_core::net::Stack;
use replay_core::net::sim::SimStream;
use replay_core::replay::{OpenWriter, Push};
use replay_core::table::Writers;
use replay_core::wire::{ReplyBody, Request, RequestBody, encode_request};

use crate::support::*;

/// Bytes of a push's frame on the wire.
async fn frame_bytes(push: &Push) -> usize {
    let request = Request {
        id: 1,
        deadline_ms: 0,
        body: RequestBody::Push(push.clone()),
    };
    let mut bytes = Vec::new();
    encode_request(&request)
        .unwrap()
        .write(&mut bytes, "a buffer")
        .await
        .unwrap();
    bytes.len()
}

/// Takes the writer over on a new connection and sends the push again under the new epoch; returns what the
/// server had applied before.
async fn resend(world: &World, push: &Push) -> (u64, TestClient<SimStream>) {
    let mut client = world.client().await;
    let opened = client.open(push.writer).await;
    let again = Push {
        epoch: opened.epoch,
        ..push.clone()
    };
    let pushed = client.ask(RequestBody::Push(again), 0).await.unwrap();
    assert!(matches!(pushed, ReplyBody::Pushed { steps: 4 }));
    (opened.last_sequence, client)
}

#[test]
fn a_push_that_was_cut_is_applied_once_after_it_was_sent_again() {
    World::run(1, config(table()), |world| async move {
        let length = frame_bytes(&push(1, 1, 1, 0, &[1, 2, 3, 4])).await;
        let mut applied_before = 0;
        for cut in 0..=length {
            let push = push(1000 + cut as u64, 1, 1, 0, &[1, 2, 3, 4]);
            let (mut client, link) = world.client_with_link().await;
            client.open(push.writer).await;
            link.cut_after_sent(cut);
            // It fails here or in the reply, or not at all.
            let _ = client.send(RequestBody::Push(push.clone()), 0).await;
            let _ = client.receive().await;
            let (last_sequence, _) = resend(&world, &push).await;
            applied_before += last_sequence;
            assert_eq!(world.table_stat("inserted_steps"), 4 * (cut as u64 + 1));
        }
        // Only a frame that arrived whole was applied the first time.
        assert_eq!(applied_before, 1);
    });
}

#[test]
fn a_push_whose_reply_was_lost_is_not_applied_again() {
    for seed in 0..5 {
        World::run(seed, config(table()), |world| async move {
            let push = push(1, 1, 1, 0, &[1, 2, 3, 4]);
            let (mut client, link) = world.client_with_link().await;
            client.open(push.writer).await;
            link.cut_after_received(3);
            client
                .send(RequestBody::Push(push.clone()), 0)
                .await
                .unwrap();
            assert!(client.receive().await.is_err());
            let (last_sequence, _) = resend(&world, &push).await;
            assert_eq!(last_sequence, 1);
            assert_eq!(world.table_stat("inserted_steps"), 4);
        });
    }
}

#[test]
fn a_push_whose_reply_was_lost_is_not_applied_again_when_its_writer_has_expired() {
    World::run(6, config(table()), |world| async move {
        let steps = push(1, 1, 1, 0, &[1, 2, 3, 4]);
        let (mut client, link) = world.client_with_link().await;
        client.open(1).await;
        link.cut_after_received(3);
        client.send(RequestBody::Push(steps), 0).await.unwrap();
        assert!(client.receive().await.is_err());
        assert_eq!(world.table_stat("inserted_steps"), 4);

        let mut client = world.client().await;
        let wide = RequestBody::OpenWriter {
            open: OpenWriter {
                streams: Writers::MAX_STREAMS,
                ..writer(2)
            },
            resume: false,
        };
        client.ask(wide, 0).await.unwrap();
        let again = RequestBody::OpenWriter {
            open: writer(1),
            resume: true,
        };
        let (code, message) = refused(client.ask(again, 0).await);
        assert_eq!(code, ErrorCode::Expired);
        assert!(message.contains("writer 1"), "{message}");
    });
}

#[test]
fn a_connection_that_comes_back_after_a_partition_is_fenced_off() {
    for seed in 0..5 {
        World::run(seed, config(table()), |world| async move {
            let push = push(1, 1, 1, 0, &[1, 2, 3, 4]);
            let (mut old, link) = world.client_with_link().await;
            old.open(push.writer).await;
            link.hold();
            old.send(RequestBody::Push(push.clone()), 0).await.unwrap();
            let (last_sequence, _new) = resend(&world, &push).await;
            assert_eq!(last_sequence, 0);
            link.release();
            let (_, code, message) = old.receive_error().await;
            assert_eq!(code, ErrorCode::Fenced);
            assert!(message.contains("writer 1"), "{message}");
            assert_eq!(world.table_stat("inserted_steps"), 4);
        });
    }
}

#[test]
fn a_push_that_waits_is_fenced_off_too() {
    World::run(3, config(limited_table()), |world| async move {
        let mut old = world.client().await;
        old.open(1).await;
        for sequence in 1..=5 {
            let body = RequestBody::Push(push(1, 1, sequence, sequence - 1, &[1]));
            old.ask(body, 0).await.unwrap();
        }
        let body = RequestBody::Push(push(1, 1, 6, 5, &[1]));
        old.send(body, 600_000).await.unwrap();
        world
            .until(|world| world.table_stat("blocked_pushes") > 0)
            .await;
        let start = world.stack.now();
        assert_eq!(world.client().await.open(1).await.last_sequence, 5);
        assert_eq!(old.receive_error().await.1, ErrorCode::Fenced);
        assert!(world.stack.now() - start < Duration::from_secs(1));
    });
}

#[test]
fn delays_change_neither_order_nor_content() {
    for seed in 0..10 {
        World::run(seed, config(table()), |world| async move {
            world
                .stack
                .set_delay(Duration::ZERO..=Duration::from_millis(500));
            let mut client = world.client().await;
            client.open(1).await;
            for sequence in 1..=30 {
                let body =
                    RequestBody::Push(push(1, 1, sequence, sequence - 1, &[sequence as i64]));
                client.send(body, 0).await.unwrap();
            }
            for steps in 1..=30 {
                let reply = client.receive().await.unwrap().unwrap();
                assert!(matches!(reply.body, ReplyBody::Pushed { steps: s } if s == steps));
            }
        });
    }
}

#[test]
fn a_draw_that_never_arrived_gives_its_credit_back() {
    for seed in 0..5 {
        World::run(seed, config(limited_table()), |world| async move {
            let mut writer = world.client().await;
            writer.open(1).await;
            writer
                .ask(RequestBody::Push(push(1, 1, 1, 0, &[1, 2, 3])), 0)
                .await
                .unwrap();

            let (mut reader, link) = world.client_with_link().await;
            link.cut_after_received(20);
            reader.send(draw(2), 0).await.unwrap();
            assert!(reader.receive().await.is_err());
            world
                .until(|world| world.server_stat("connections") == 1)
                .await;
            assert_eq!(world.table_stat("limiter_drawn"), 0);
            assert_eq!(world.table_stat("pinned_bytes"), 0);

            let mut reader = world.client().await;
            reader.ask(draw(2), 0).await.unwrap();
            assert_eq!(world.table_stat("limiter_drawn"), 2);
        });
    }
}

#[test]
fn a_client_that_leaves_takes_its_waiting_draw_with_it() {
    World::run(4, config(table()), |world| async move {
        let mut client = world.client().await;
        client.send(draw(1), u32::MAX).await.unwrap();
        world
            .until(|world| world.table_stat("blocked_draws") > 0)
            .await;
        drop(client);
        world
            .until(|world| world.server_stat("connections") == 0)
            .await;
    });
}

#[test]
fn a_cut_connection_leaves_the_others_alone() {
    World::run(5, config(table()), |world| async move {
        let (mut cut, link) = world.client_with_link().await;
        let mut other = world.client().await;
        cut.send(draw(1), 60_000).await.unwrap();
        link.cut();
        assert!(cut.receive().await.is_err());
        world
            .until(|world| world.server_stat("connections") == 1)
            .await;
        other.stats().await;
    });
}

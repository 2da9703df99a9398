//! Receive buffers within the byte limit: who waits for room, and who does not.

use std::time::Duration;

use replay_core::ErrorCode;
use replay_core::config::ServerConfig;
use replay_core::net::Stack;
use replay_core::schema::TableConfig;
use replay_core::wire::{NO_REQUEST, RequestBody};

use crate::support::*;

#[test]
fn blocked_pushes_keep_out_neither_draws_nor_parameters() {
    const WRITERS: u64 = 6;
    const STEPS: u64 = 3_000;
    let config = ServerConfig {
        max_frame_bytes: ServerConfig::MIN_FRAME_BYTES,
        ..config(TableConfig {
            capacity: 2 * WRITERS * STEPS,
            ..limited_table()
        })
    };
    World::run(15, config, |world| async move {
        // Long pushes of one item each. The sixth is blocked, and two take all the room there is for pushes.
        let long = |writer, sequence, first| {
            let mut push = push(writer, 1, sequence, first, &[1; STEPS as usize]);
            push.body.items.truncate(1);
            RequestBody::Push(push)
        };
        let mut writers = Vec::new();
        for number in 1..=WRITERS {
            let mut client = world.client().await;
            client.open(number).await;
            writers.push(client);
        }
        for (number, client) in (1..).zip(&mut writers).take(5) {
            client.ask(long(number, 1, 0), 0).await.unwrap();
        }
        let mut sending = Vec::new();
        for (number, mut client) in (1..).zip(writers) {
            let (sequence, first) = if number < WRITERS { (2, STEPS) } else { (1, 0) };
            let stack = world.stack.clone();
            let (done, reply) = tokio::sync::oneshot::channel();
            stack.spawn(async move {
                let reply = client.ask(long(number, sequence, first), u32::MAX).await;
                let _ = done.send(reply.map(|reply| reply.name()));
            });
            sending.push(reply);
        }
        world
            .until(|world| world.stats()["receive_bytes"].as_u64().unwrap() > 1 << 15)
            .await;
        // Far beyond the write deadline: those that wait for room are not closed.
        world.stack.sleep(Duration::from_secs(300)).await;

        let mut learner = world.client().await;
        let put = RequestBody::PutParameters {
            name: "policy".into(),
            bytes: parameters(60_000),
        };
        learner.ask(put, 1_000).await.unwrap();
        learner.ask(draw(4), 1_000).await.unwrap();
        learner.ask(draw(4), 60_000).await.unwrap();
        for reply in sending {
            assert_eq!(reply.await.unwrap().unwrap(), "pushed");
        }
        assert_eq!(world.stats()["receive_bytes"], 0);
        assert_eq!(world.table_stat("inserted_steps"), (5 + WRITERS) * STEPS);
    });
}

#[test]
fn a_frame_has_its_whole_time_to_arrive_once_there_is_room() {
    let config = ServerConfig {
        max_frame_bytes: ServerConfig::MIN_FRAME_BYTES,
        write_deadline_ms: 2_000,
        ..config(table())
    };
    World::run(16, config, |world| async move {
        let mut slow = world.client().await;
        let start = [8u32.to_le_bytes(), 60_000u32.to_le_bytes()].concat();
        slow.send_raw(&start).await;
        let taken = |world: &World| world.stats()["receive_bytes"].as_u64().unwrap();
        world.until(|world| taken(world) > 0).await;

        // It takes a while to arrive, and there is room only when the slow one's time is over.
        world.stack.set_buffer(4096);
        let delay = Duration::from_millis(10);
        world.stack.set_delay(delay..=delay);
        let mut other = world.client().await;
        let put = RequestBody::PutParameters {
            name: "policy".into(),
            bytes: parameters(60_000),
        };
        other.ask(put, 0).await.unwrap();
        assert_eq!(slow.receive_error().await.1, ErrorCode::Deadline);
    });
}

#[test]
fn a_connection_holds_only_so_much_of_the_room_for_pushes() {
    let config = ServerConfig {
        max_frame_bytes: 4 << 20,
        ..config(limited_table())
    };
    World::run(17, config, |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        client
            .ask(RequestBody::Push(push(1, 1, 1, 0, &[1; 5])), 0)
            .await
            .unwrap();
        let stack = world.stack.clone();
        stack.spawn(async move {
            for sequence in 2..60 {
                let first = 5 + 1_000 * (sequence - 2);
                let push = push(1, 1, sequence, first, &[1; 1_000]);
                // Ends with the world.
                let _ = client.send(RequestBody::Push(push), u32::MAX).await;
            }
        });
        world.stack.sleep(Duration::from_secs(60)).await;
        let held = world.stats()["receive_bytes"].as_u64().unwrap();
        assert!((900_000..=1 << 20).contains(&held), "{held}");
    });
}

#[test]
fn a_push_comes_over_the_connection_that_opened_its_writer() {
    World::run(18, config(table()), |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        let mut other = world.client().await;
        let body = RequestBody::Push(push(1, 1, 1, 0, &[1]));
        other.send(body.clone(), 0).await.unwrap();
        let (id, code, message) = other.receive_error().await;
        assert_eq!((id, code), (NO_REQUEST, ErrorCode::Protocol));
        assert!(message.contains("open the writer there first"), "{message}");
        client.ask(body, 0).await.unwrap();
    });
}

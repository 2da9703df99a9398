//! Receive buffers within the byte limit: who waits for room, and who does not.

use std::time::Duration;

use replay_core::replay::OpenWriter;
use replay_core::schema::TableConfig;
use replay_core::table::Writers;
use replay_link::error::Error;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{NO_REQUEST, OpenOrResume, PutParameters, ReplyBody, RequestBody};

use super::*;

#[test]
fn blocked_pushes_keep_out_neither_samples_nor_parameters() {
    const WRITERS: u64 = 6;
    const STEPS: u64 = 3_000;
    let config = ServerConfig {
        max_frame_bytes: ServerConfig::MIN_FRAME_BYTES,
        write_deadline_ms: 300,
        ..config(TableConfig { capacity: 2 * WRITERS * STEPS, ..limited_table() })
    };
    World::run(15, config, |world| async move {
        // Long pushes of one item each. The sixth is blocked, and one leaves no room for another one.
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
            let (done, reply) = tokio::sync::oneshot::channel();
            world.spawn(async move {
                let reply = client.ask(long(number, sequence, first), u32::MAX).await;
                let _ = done.send(reply.map(|reply| reply.name()));
            });
            sending.push(reply);
        }
        world.until(|world| world.receive_bytes() > STEPS).await;
        // Far beyond the write deadline: those that wait for room are not closed.
        world.sleep(Duration::from_secs(1)).await;

        let mut learner = world.client().await;
        let put = RequestBody::PutParameters(PutParameters {
            name: "policy".into(),
            version: 0,
            id: 0,
            bytes: parameters(60_000),
        });
        learner.ask(put, 1_000).await.unwrap();
        learner.ask(sample(4), 1_000).await.unwrap();
        learner.ask(sample(4), 60_000).await.unwrap();
        for reply in sending {
            assert_eq!(reply.await.unwrap().unwrap(), "pushed");
        }
        assert_eq!(world.receive_bytes(), 0);
        assert_eq!(world.table_stat("inserted_steps"), (5 + WRITERS) * STEPS);
    });
}

/// A push of 1,000 steps with one item, about 9 KiB, or of `times` as many.
fn long_push(writer: u64, sequence: u64, first: u64, times: usize) -> RequestBody {
    let mut push = push(writer, 1, sequence, first, &vec![1; 1_000 * times]);
    push.body.items.truncate(1);
    RequestBody::Push(push)
}

/// Opens a writer of a table over a connection of its own.
async fn writes_to(world: &World, table: &str, number: u64) -> TestClient {
    let mut client = world.client().await;
    client.turn_to(table);
    let body = RequestBody::OpenWriter(OpenOrResume { open: writer(number), resume: false });
    client.ask(body, 0).await.unwrap();
    client
}

/// Sends pushes of a writer until the server reads no more of them, as of a run whose learner has died.
async fn hold_back(world: &World, mut client: TestClient, writer: u64) {
    world.spawn(async move {
        for sequence in 1.. {
            let push = long_push(writer, sequence, 4_000 * (sequence - 1), 4);
            // Ends with the world.
            if client.send(push, u32::MAX).await.is_err() {
                return;
            }
        }
    });
}

#[test]
fn pushes_that_wait_for_a_table_leave_room_for_another_ones() {
    const WRITERS: u64 = 12;
    const HELD_BACK: [&str; 3] = ["first", "second", "third"];
    let blocked = |name: &str| TableConfig { name: name.into(), capacity: 100_000, ..limited_table() };
    let config = ServerConfig {
        max_frame_bytes: 1 << 20,
        tables: [&HELD_BACK.map(blocked)[..], &[table()]].concat(),
        ..config(table())
    };
    World::run(21, config, |world| async move {
        let mut held = 0;
        for (number, table) in (0..).zip(HELD_BACK) {
            for writer in 1..=WRITERS {
                let number = 100 * number + writer;
                let client = writes_to(&world, table, number).await;
                hold_back(&world, client, number).await;
            }
            // Their pushes wait and hold more and more, up to the table's part.
            world
                .until(|world| {
                    let waits = &world.stats()["tables"][table]["waiting_pushes"];
                    waits.as_u64().unwrap() > 0 && world.receive_bytes() > held + 50_000
                })
                .await;
            held = world.receive_bytes();
        }
        // Writers of a free table, also over a connection with writers of several tables.
        let mut free = writes_to(&world, TABLE, 1_000).await;
        let mut several = writes_to(&world, "first", 2_000).await;
        several.turn_to(TABLE);
        let body = RequestBody::OpenWriter(OpenOrResume { open: writer(2_001), resume: false });
        several.ask(body, 0).await.unwrap();
        for sequence in 1..=5 {
            let first = 4_000 * (sequence - 1);
            let push = |writer| long_push(writer, sequence, first, 4);
            free.ask(push(1_000), 10_000).await.unwrap();
            several.ask(push(2_001), 10_000).await.unwrap();
        }
        assert!(world.receive_bytes() <= 1 << 20);
        let waits = |table: &str| world.stats()["tables"][table]["waiting_pushes"].as_u64();
        assert!(HELD_BACK.iter().all(|table| waits(table).unwrap() > 0));
    });
}

#[test]
fn a_connection_holds_only_so_much_of_the_room_for_pushes() {
    let config = ServerConfig { max_frame_bytes: 4 << 20, ..config(limited_table()) };
    World::run(17, config, |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        client.ask(RequestBody::Push(push(1, 1, 1, 0, &[1; 5])), 0).await.unwrap();
        world.spawn(async move {
            for sequence in 2..60 {
                let first = 5 + 1_000 * (sequence - 2);
                let push = push(1, 1, sequence, first, &[1; 1_000]);
                // Ends with the world.
                let _ = client.send(RequestBody::Push(push), u32::MAX).await;
            }
        });
        world.until(|world| world.receive_bytes() >= 900_000).await;
        let mut other = world.client().await;
        for _ in 0..100 {
            // Where there was time for these, there was time for more pushes.
            other.stats().await;
            let held = world.receive_bytes();
            assert!((900_000..=1 << 20).contains(&held), "{held}");
        }
    });
}

#[test]
fn a_connected_writer_keeps_its_streams_while_its_push_is_not_read() {
    let config = ServerConfig { max_frame_bytes: ServerConfig::MIN_FRAME_BYTES, ..config(table()) };
    World::run(55, config, |world| async move {
        let long = [8u32.to_le_bytes(), 60_000u32.to_le_bytes()].concat();
        let mut first = world.client().await;
        first.open(1).await;
        first.send_raw(&long).await;
        world.until(|world| world.receive_bytes() > 60_000).await;
        let mut second = world.client().await;
        second.open(2).await;
        second.send_raw(&long).await;
        // The server says every second that it does not read this frame yet.
        let reply = second.receive_any().await.unwrap().unwrap();
        assert!(matches!(reply.body, ReplyBody::Waiting(_)));

        let table = world.memory.table(TABLE).unwrap();
        let newcomer = OpenWriter { streams: Writers::MAX_STREAMS, ..writer(3) };
        let open = || table.writers().open(&newcomer);
        drop(first);
        // Its frame is read now, and sends nothing.
        world.until(|world| world.server_stat("connections") == 1).await;
        let (code, message) = refused(open().map_err(Error::from));
        assert_eq!(code, ErrorCode::TooLarge, "{message}");
        assert!(message.contains("its connected writers have 1 of its 131072 streams"), "{message}");
        drop(second);
        world.until(|_| open().is_ok()).await;
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

#[test]
fn a_frame_counts_with_its_decoded_request() {
    const CONTROL: u32 = 40_000;
    World::run(54, config(limited_table()), |world| async move {
        let mut client = world.client().await;
        let header = [CONTROL.to_le_bytes(), 100u32.to_le_bytes()].concat();
        client.send_raw(&header).await;
        let expected = u64::from(2 * CONTROL + 100);
        world.until(|world| world.receive_bytes() == expected).await;
        drop(client);
        world.until(|world| world.receive_bytes() == 0).await;
    });
}

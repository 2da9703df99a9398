//! Connections that break, stall and come back: every push is applied once.

use replay_core::replay::{OpenWriter, Push};
use replay_core::table::Writers;
use replay_link::framing::write_frame;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{CloseWriter, OpenOrResume, ReplyBody, Request, RequestBody, encode_request};

use super::*;

/// A push's frame on the wire.
async fn frame(push: &Push) -> Vec<u8> {
    // To the table of the writer that the connection has opened.
    let request = Request { table: 1, ..Request::new(1, 0, RequestBody::Push(push.clone())) };
    let mut bytes = Vec::new();
    let mut frame = encode_request(&request).unwrap();
    write_frame(&mut frame, &mut bytes, "a buffer").await.unwrap();
    bytes
}

/// Takes the writer over on a new connection and sends the push again under the new epoch; returns what the
/// server had applied before.
async fn resend(world: &World, push: &Push) -> (u64, TestClient) {
    let mut client = world.client().await;
    let opened = client.open(push.writer).await;
    let again = Push { epoch: opened.epoch, ..push.clone() };
    let pushed = client.ask(RequestBody::Push(again), 0).await.unwrap();
    assert!(matches!(pushed, ReplyBody::Pushed(4)));
    (opened.last_sequence, client)
}

/// A writer's first four steps, which each writer of these tests pushes.
fn four_steps(writer: u64) -> Push {
    push(writer, 1, 1, 0, &[1, 2, 3, 4])
}

#[test]
fn a_push_that_ended_early_is_applied_once_after_it_was_sent_again() {
    World::run(1, config(table()), |world| async move {
        let length = frame(&four_steps(0)).await.len();
        let mut applied_before = 0;
        for sent in 0..=length {
            let push = four_steps(1000 + sent as u64);
            let mut client = world.client().await;
            client.open(push.writer).await;
            client.send_raw(&frame(&push).await[..sent]).await;
            client.end_sending().await;
            let _ = client.receive().await;
            let (last_sequence, _) = resend(&world, &push).await;
            applied_before += last_sequence;
            assert_eq!(world.table_stat("inserted_steps"), 4 * (sent as u64 + 1));
        }
        // Only a frame that arrived whole was applied the first time.
        assert_eq!(applied_before, 1);
    });
}

#[test]
fn a_push_that_was_cut_is_applied_once_after_it_was_sent_again() {
    World::run(2, config(table()), |world| async move {
        let length = frame(&four_steps(0)).await.len();
        let mut applied_before = 0;
        for sent in 0..=length {
            let push = four_steps(1000 + sent as u64);
            let mut client = world.client().await;
            client.open(push.writer).await;
            client.send_raw(&frame(&push).await[..sent]).await;
            client.cut();
            let (last_sequence, _) = resend(&world, &push).await;
            applied_before += last_sequence;
            assert_eq!(world.table_stat("inserted_steps"), 4 * (sent as u64 + 1));
        }
        // A frame that was sent whole may have been lost all the same.
        assert!(applied_before <= 1);
    });
}

#[test]
fn a_push_whose_reply_was_lost_is_not_applied_again() {
    for seed in 0..5 {
        World::run(seed, config(table()), |world| async move {
            let push = four_steps(1);
            lose_the_reply(&world, &push).await;
            let (last_sequence, _) = resend(&world, &push).await;
            assert_eq!(last_sequence, 1);
            assert_eq!(world.table_stat("inserted_steps"), 4);
        });
    }
}

/// Opens the push's writer, and breaks the connection off when the push has been applied.
async fn lose_the_reply(world: &World, push: &Push) {
    let mut client = world.client().await;
    client.open(push.writer).await;
    let body = RequestBody::Push(push.clone());
    client.send(body, 0).await.unwrap();
    world.until(|world| world.table_stat("inserted_steps") == 4).await;
    client.cut();
}

#[test]
fn a_push_whose_reply_was_lost_is_not_applied_again_when_its_writer_has_expired() {
    World::run(6, config(table()), |world| async move {
        lose_the_reply(&world, &four_steps(1)).await;
        let mut client = world.client().await;
        let close = RequestBody::CloseWriter(CloseWriter { writer: 1, epoch: 1 });
        client.ask(close, 0).await.unwrap();
        let again = RequestBody::OpenWriter(OpenOrResume { open: writer(1), resume: true });
        let (code, message) = refused(client.ask(again, 0).await);
        assert_eq!(code, ErrorCode::Expired);
        assert!(message.contains("writer 1"), "{message}");
    });
}

#[test]
fn a_connection_that_comes_back_after_a_silence_is_fenced_off() {
    World::run(7, config(table()), |world| async move {
        let length = frame(&four_steps(0)).await.len();
        for (number, sent) in (1..).zip([0, 1, length / 2, length - 1]) {
            let push = four_steps(number);
            let frame = frame(&push).await;
            let mut old = world.client().await;
            old.open(number).await;
            old.send_raw(&frame[..sent]).await;
            let (last_sequence, _new) = resend(&world, &push).await;
            assert_eq!(last_sequence, 0);
            old.send_raw(&frame[sent..]).await;
            let (_, code, message) = old.receive_error().await;
            assert_eq!(code, ErrorCode::Fenced);
            assert!(message.contains(&format!("writer {number}")), "{message}");
            assert_eq!(world.table_stat("inserted_steps"), 4 * number);
        }
    });
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
        world.until(|world| world.table_stat("blocked_pushes") > 0).await;
        let start = world.now();
        assert_eq!(world.client().await.open(1).await.last_sequence, 5);
        assert_eq!(old.receive_error().await.1, ErrorCode::Fenced);
        world.assert_soon_after(start);
    });
}

#[test]
fn a_sample_that_never_arrived_gives_its_credit_back() {
    let config = ServerConfig { max_frame_bytes: CLOGGABLE, ..config(limited_table()) };
    World::run(8, config, |world| async move {
        let mut writer = world.client().await;
        writer.open(1).await;
        writer.ask(RequestBody::Push(push(1, 1, 1, 0, &[1, 2, 3])), 0).await.unwrap();

        let mut reader = world.client().await;
        reader.clog().await;
        reader.send(sample(2), 0).await.unwrap();
        world.until(|world| world.table_stat("limiter_sampled") == 2).await;
        reader.cut();
        world.until(|world| world.server_stat("connections") == 1).await;
        assert_eq!(world.table_stat("limiter_sampled"), 0);
        assert_eq!(world.table_stat("pinned_bytes"), 0);

        let mut reader = world.client().await;
        reader.ask(sample(2), 0).await.unwrap();
        assert_eq!(world.table_stat("limiter_sampled"), 2);
    });
}

#[test]
fn a_client_that_leaves_takes_its_waiting_sample_with_it() {
    World::run(4, config(table()), |world| async move {
        let mut client = world.client().await;
        client.send(sample(1), u32::MAX).await.unwrap();
        world.until(|world| world.table_stat("blocked_samples") > 0).await;
        drop(client);
        world.until(|world| world.server_stat("connections") == 0).await;
    });
}

/// A connection that the server does not read any more: pushes that wait hold all the memory that it may hold, and the
/// ones behind them fill the buffers of both ends.
async fn blocked_writer(world: &World) -> TestClient {
    let mut client = world.client().await;
    client.open(1).await;
    let first = RequestBody::Push(push(1, 1, 1, 0, &[1; 5]));
    client.ask(first, 0).await.unwrap();
    let more = async {
        for sequence in 2.. {
            let first = 5 + 1_000 * (sequence - 2);
            let push = push(1, 1, sequence, first, &[1; 1_000]);
            client.send(RequestBody::Push(push), u32::MAX).await.unwrap();
        }
    };
    let stalled = async {
        world.until(|world| world.receive_bytes() >= 900_000).await;
        // Time for the buffers to fill; with less the test asks less of the server.
        world.sleep(std::time::Duration::from_millis(500)).await;
    };
    tokio::select! {
        () = more => {}
        () = stalled => {}
    }
    client
}

#[test]
fn a_wide_writer_that_left_makes_room_at_once() {
    World::run(22, config(table()), |world| async move {
        for number in 1..=3 {
            let mut client = world.client().await;
            let open = OpenWriter { streams: Writers::MAX_STREAMS, ..writer(number) };
            let resume = false;
            client.ask(RequestBody::OpenWriter(OpenOrResume { open, resume }), 0).await.unwrap();
            drop(client);
            world.until(|world| world.server_stat("connections") == 0).await;
        }
        let mut client = world.client().await;
        client.open(4).await;
    });
}

#[test]
fn a_blocked_writer_that_is_gone_frees_its_slot_and_its_memory() {
    let config = ServerConfig { max_frame_bytes: 4 << 20, ..config(limited_table()) };
    World::run(9, config, |world| async move {
        for killed in [true, false] {
            let client = blocked_writer(&world).await;
            assert!(world.receive_bytes() >= 900_000);
            match killed {
                true => drop(client),
                false => client.cut(),
            }
            world.until(|world| world.server_stat("connections") == 0).await;
            assert_eq!(world.receive_bytes(), 0);
            let mut other = world.client().await;
            other.ask(RequestBody::EmptyTable(TABLE.into()), 0).await.unwrap();
            let close = RequestBody::CloseWriter(CloseWriter { writer: 1, epoch: 1 });
            other.ask(close, 0).await.unwrap();
            drop(other);
        }
    });
}

#[test]
fn a_blocked_writer_that_is_there_waits_as_long_as_it_wants() {
    let config = ServerConfig { max_frame_bytes: 4 << 20, write_deadline_ms: 1_500, ..config(limited_table()) };
    World::run(10, config, |world| async move {
        let mut client = blocked_writer(&world).await;
        let mut other = world.client().await;
        // The server says that it waits, and nothing else.
        for _ in 0..3 {
            let reply = client.receive_any().await.unwrap().unwrap();
            assert_eq!(reply.body.name(), "waiting");
            assert_eq!(reply.id, replay_wire::NO_REQUEST);
        }
        other.ask(sample(4), 0).await.unwrap();
        let reply = client.receive().await.unwrap().unwrap();
        assert_eq!(reply.body.name(), "pushed");
    });
}

#[test]
fn a_cut_connection_leaves_the_others_alone() {
    World::run(5, config(table()), |world| async move {
        let mut cut = world.client().await;
        let mut other = world.client().await;
        cut.send(sample(1), 60_000).await.unwrap();
        cut.cut();
        world.until(|world| world.server_stat("connections") == 1).await;
        other.stats().await;
    });
}

//! Requests, pipelining, deadlines, and bytes that are no frames.

use std::time::Duration;

use bytes::Bytes;
use replay_core::replay::SampleRequest;
use replay_core::schema::TableConfig;
use replay_link::framing::write_frame;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{
    CloseWriter, GetParameters, NO_REQUEST, PutParameters, ReplyBody, Request, RequestBody, UpdatePriorities,
    encode_request,
};

use super::*;

fn safetensors() -> Bytes {
    parameters(1)
}

#[test]
fn what_was_pushed_is_sampled_updated_and_counted() {
    World::run(1, config(table()), |world| async move {
        let mut client = world.client().await;
        let opened = client.open(5).await;
        assert_eq!((opened.epoch, opened.last_sequence), (1, 0));
        let steps = RequestBody::Push(push(5, 1, 1, 0, &[10, 11, 12]));
        assert!(matches!(client.ask(steps, 0).await.unwrap(), ReplyBody::Pushed(3)));
        let ReplyBody::Sampled(sampled) = client.ask(sample(32), 0).await.unwrap() else {
            panic!("expected a batch");
        };
        assert_eq!(sampled.items.len(), 32);
        for row in sampled.rows.chunks(9) {
            let value = i64::from_le_bytes(row[1..].try_into().unwrap());
            assert!((10..=12).contains(&value));
        }
        let id = sampled.items[0].id;
        let update =
            RequestBody::UpdatePriorities(UpdatePriorities { ids: vec![id, id ^ 1], priorities: vec![0.5, 0.5] });
        let ReplyBody::Updated(receipt) = client.ask(update, 0).await.unwrap() else {
            panic!("expected a receipt");
        };
        assert_eq!((receipt.applied, receipt.stale), (1, 1));
        let stats = client.stats().await;
        assert_eq!(stats["tables"][TABLE]["steps"], 3);
        assert_eq!(stats["server"]["connections"], 1);
        assert_eq!(stats["server"]["requests"], 5);
    });
}

#[test]
fn tables_and_parameters_are_served() {
    World::run(2, config(table()), |world| async move {
        let mut client = world.client().await;
        let other = TableConfig { name: "other".into(), ..table() };
        client.ask(RequestBody::CreateTable(other.clone()), 0).await.unwrap();
        let describe = RequestBody::DescribeTable("other".into());
        let ReplyBody::Table(described) = client.ask(describe, 0).await.unwrap() else {
            panic!("expected a table");
        };
        assert_eq!(described, other);
        client.ask(RequestBody::EmptyTable("other".into()), 0).await.unwrap();
        client.ask(RequestBody::DropTable("other".into()), 0).await.unwrap();
        let gone = client.ask(RequestBody::DescribeTable("other".into()), 0).await;
        assert_eq!(refused(gone).0, ErrorCode::UnknownTable);

        let get =
            |newer_than| RequestBody::GetParameters(GetParameters { name: "policy".into(), newer_than, writer: 0 });
        assert!(matches!(client.ask(get(0), 0).await.unwrap(), ReplyBody::Parameters(None)));
        let put = RequestBody::PutParameters(PutParameters {
            name: "policy".into(),
            version: 0,
            id: 0,
            bytes: safetensors(),
        });
        client.ask(put, 0).await.unwrap();
        let ReplyBody::Parameters(Some(got)) = client.ask(get(0), 0).await.unwrap() else {
            panic!("expected parameters");
        };
        assert_eq!((got.version, got.bytes), (1, safetensors()));
        assert!(matches!(client.ask(get(1), 0).await.unwrap(), ReplyBody::Parameters(None)));
    });
}

#[test]
fn the_servers_own_table_wins_over_a_clients() {
    World::run(3, config(table()), |world| async move {
        let mut client = world.client().await;
        client.ask(RequestBody::CreateTable(table()), 0).await.unwrap();
        let other = TableConfig { capacity: 77, ..table() };
        let (code, message) = refused(client.ask(RequestBody::CreateTable(other), 0).await);
        assert_eq!(code, ErrorCode::TableDiffers);
        for part in ["capacity", "10000", "77", "the server's configuration"] {
            assert!(message.contains(part), "{message}");
        }
        let drop_it = client.ask(RequestBody::DropTable(TABLE.into()), 0).await;
        assert_eq!(refused(drop_it).0, ErrorCode::Config);
        client.ask(RequestBody::DescribeTable(TABLE.into()), 0).await.unwrap();
    });
}

#[test]
fn a_sample_that_waits_does_not_hold_up_other_requests() {
    World::run(4, config(table()), |world| async move {
        let mut client = world.client().await;
        let sampling = client.send(sample(1), 60_000).await.unwrap();
        // `ask` takes the next reply only when it is its own.
        client.stats().await;
        client.open(1).await;
        let pushing = client.send(RequestBody::Push(push(1, 1, 1, 0, &[1])), 0).await.unwrap();
        let mut replies = [client.receive().await.unwrap().unwrap(), client.receive().await.unwrap().unwrap()];
        replies.sort_by_key(|reply| reply.id);
        assert_eq!((replies[0].id, replies[1].id), (sampling, pushing));
        assert!(matches!(replies[0].body, ReplyBody::Sampled(_)));
    });
}

#[test]
fn a_request_waits_until_its_deadline_and_no_longer() {
    World::run(5, config(table()), |world| async move {
        let mut client = world.client().await;
        for deadline_ms in [0, 50, 500] {
            let deadline = world.now() + Duration::from_millis(deadline_ms.into());
            let (code, message) = refused(client.ask(sample(1), deadline_ms).await);
            assert_eq!(code, ErrorCode::Deadline);
            assert!(message.contains(TABLE), "{message}");
            assert!(world.now() >= deadline);
            world.assert_soon_after(deadline);
        }
    });
}

#[test]
fn a_short_sample_takes_what_there_is_at_its_deadline() {
    let table = TableConfig { max_times_sampled: 1, ..table() };
    World::run(6, config(table), |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        client.ask(RequestBody::Push(push(1, 1, 1, 0, &[1, 2])), 0).await.unwrap();
        let RequestBody::Sample(request) = sample(5) else {
            unreachable!("a sample is a sample");
        };
        let request = SampleRequest { allow_short: true, ..request };
        let deadline = world.now() + Duration::from_millis(300);
        let body = RequestBody::Sample(request);
        let ReplyBody::Sampled(sampled) = client.ask(body, 300).await.unwrap() else {
            panic!("expected a batch");
        };
        assert_eq!(sampled.items.len(), 2);
        assert!(world.now() >= deadline);
    });
}

#[test]
fn pushes_of_one_writer_stay_in_order_while_they_wait() {
    World::run(7, config(limited_table()), |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        let mut ids = Vec::new();
        for sequence in 1..=20 {
            let body = RequestBody::Push(push(1, 1, sequence, sequence - 1, &[sequence as i64]));
            ids.push(client.send(body, 60_000).await.unwrap());
        }
        let close = RequestBody::CloseWriter(CloseWriter { writer: 1, epoch: 1 });
        ids.push(client.send(close, 0).await.unwrap());
        world.until(|world| world.table_stat("blocked_pushes") > 0).await;
        assert_eq!(world.table_stat("steps"), 5);

        let mut reader = world.client().await;
        for _ in 0..5 {
            reader.ask(sample(4), 60_000).await.unwrap();
        }
        for id in ids {
            let reply = client.receive().await.unwrap().unwrap();
            assert_eq!(reply.id, id);
            if let ReplyBody::Error { message, .. } = reply.body {
                panic!("{message}");
            }
        }
        assert_eq!(world.table_stat("steps"), 20);
        assert_eq!(world.table_stat("connected_writers"), 0);
    });
}

#[test]
fn more_requests_than_may_be_under_way_are_all_answered() {
    World::run(8, config(table()), |world| async move {
        let mut client = world.client().await;
        let mut waiting = std::collections::BTreeSet::new();
        for _ in 0..200 {
            waiting.insert(client.send(sample(1), 100).await.unwrap());
        }
        while !waiting.is_empty() {
            let (id, code, _) = client.receive_error().await;
            assert_eq!(code, ErrorCode::Deadline);
            assert!(waiting.remove(&id));
        }
    });
}

#[test]
fn a_number_stays_its_tables() {
    World::run(13, config(table()), |world| async move {
        let mut other = world.client().await;
        other.ask(RequestBody::CreateTable(TableConfig { name: "second".into(), ..table() }), 0).await.unwrap();
        let mut client = world.client().await;
        client.open(1).await;
        client.ask(RequestBody::Push(push(1, 1, 1, 0, &[7])), 0).await.unwrap();
        client.ask(sample(1), 0).await.unwrap();
        // The first request about a table names it, also if there is none yet.
        client.turn_to("third");
        assert_eq!(refused(client.ask(sample(1), 0).await).0, ErrorCode::UnknownTable);
        let third = RequestBody::CreateTable(TableConfig { name: "third".into(), ..table() });
        other.ask(third.clone(), 0).await.unwrap();
        assert_eq!(refused(client.ask(sample(1), 0).await).0, ErrorCode::Deadline);
        // A new table of the name has another number.
        other.ask(RequestBody::DropTable("third".into()), 0).await.unwrap();
        other.ask(third, 0).await.unwrap();
        let (code, message) = refused(client.ask(sample(1), 0).await);
        assert_eq!((code, &*message), (ErrorCode::UnknownTable, "there is no table \"third\"; it was dropped"));
    });
}

#[test]
fn a_number_without_a_name_ends_the_connection() {
    for (number, name) in [(1, None), (2, Some("steps")), (u16::MAX, Some("steps")), (0, Some("steps"))] {
        World::run(14, config(table()), move |world| async move {
            let mut client = world.client().await;
            let numbered =
                Request { table: number, table_name: name.map(str::to_owned), ..Request::new(9, 0, sample(1)) };
            client.send_as_is(&numbered).await.unwrap();
            let (id, code, message) = client.receive_error().await;
            assert_eq!((id, code), (NO_REQUEST, ErrorCode::Protocol), "{message}");
            assert!(client.receive().await.unwrap().is_none());
        });
    }
}

#[test]
fn a_bad_frame_closes_its_own_connection_alone() {
    World::run(9, config(table()), |world| async move {
        let mut other = world.client().await;
        for (number, (bytes, expected)) in (1..).zip(bad_frames()) {
            let mut client = world.client().await;
            client.send_raw(&bytes).await;
            let (id, code, message) = client.receive_error().await;
            assert_eq!((id, code), (NO_REQUEST, expected), "{message}");
            assert!(client.receive().await.unwrap().is_none());
            let stats = other.stats().await;
            assert_eq!(stats["server"]["bad_frames"], number);
        }
    });
}

/// What is no frame, and what a server says to it.
fn bad_frames() -> [(Vec<u8>, ErrorCode); 5] {
    let oversized = [8u32.to_le_bytes(), (2u32 << 20).to_le_bytes()].concat();
    let wide_control = [(1u32 << 30).to_le_bytes(), 0u32.to_le_bytes()].concat();
    let garbage = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    let zeros = [vec![64, 0, 0, 0, 0, 0, 0, 0], vec![0; 64]].concat();
    let noise = [vec![64, 0, 0, 0, 0, 0, 0, 0], vec![0xA5; 64]].concat();
    [
        (oversized, ErrorCode::TooLarge),
        (wide_control, ErrorCode::TooLarge),
        (garbage, ErrorCode::Protocol),
        (zeros, ErrorCode::Protocol),
        (noise, ErrorCode::Protocol),
    ]
}

#[test]
fn a_truncated_frame_changes_nothing() {
    let request = |body| Request::new(1, 0, body);
    World::run(10, config(table()), |world| async move {
        let frame = encode_request(&request(RequestBody::Push(push(1, 1, 1, 0, &[1])))).unwrap();
        let mut bytes = Vec::new();
        let mut frame = frame;
        write_frame(&mut frame, &mut bytes, "a buffer").await.unwrap();
        for end in 1..bytes.len() {
            let mut client = world.client().await;
            client.open(end as u64 + 100).await;
            client.send_raw(&bytes[..end]).await;
            client.end_sending().await;
            while client.receive().await.is_ok_and(|reply| reply.is_some()) {}
        }
        assert_eq!(world.table_stat("steps"), 0);
        world.until(|world| world.server_stat("connections") == 0).await;
        world.client().await.stats().await;
    });
}

#[test]
fn a_client_that_has_ended_sending_is_still_answered() {
    World::run(15, config(table()), |world| async move {
        let mut client = world.client().await;
        let id = client.send(RequestBody::Stats, 0).await.unwrap();
        client.end_sending().await;
        let reply = client.receive().await.unwrap().unwrap();
        assert_eq!(reply.id, id);
        assert!(matches!(reply.body, ReplyBody::Stats(_)));
        assert!(client.receive().await.unwrap().is_none());
        world.until(|world| world.server_stat("connections") == 0).await;
    });
}

#[test]
fn a_handshake_in_the_middle_is_an_error_of_its_request() {
    World::run(11, config(table()), |world| async move {
        let mut client = world.client().await;
        let again = client.ask(RequestBody::Authenticate(None), 0).await;
        assert_eq!(refused(again).0, ErrorCode::Protocol);
        client.stats().await;
    });
}

#[test]
fn a_reply_over_the_frame_limit_is_an_error_of_its_request() {
    let config = ServerConfig { max_frame_bytes: ServerConfig::MIN_FRAME_BYTES, ..config(table()) };
    World::run(12, config, |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        client.ask(RequestBody::Push(push(1, 1, 1, 0, &[1, 2, 3])), 0).await.unwrap();
        // The rows alone are too many, then the rows with what is said about each.
        for count in [8_000, 2_000] {
            let (code, message) = refused(client.ask(sample(count), 0).await);
            assert_eq!(code, ErrorCode::TooLarge, "{message}");
        }
        client.ask(sample(100), 0).await.unwrap();
    });
}

#[test]
fn a_reply_over_the_frame_limit_takes_no_item_from_a_queue() {
    const ITEMS: u64 = 2_000;
    let config = ServerConfig { max_frame_bytes: ServerConfig::MIN_FRAME_BYTES, ..config(queue()) };
    World::run(19, config, |world| async move {
        let mut client = world.client().await;
        client.open(1).await;
        for step in 0..ITEMS {
            let body = RequestBody::Push(push(1, 1, step + 1, step, &[step as i64]));
            client.ask(body, 0).await.unwrap();
        }
        for _ in 0..3 {
            let (code, message) = refused(client.ask(sample(ITEMS as u32), 0).await);
            assert_eq!(code, ErrorCode::TooLarge, "{message}");
            assert_eq!(world.table_stat("items"), ITEMS);
        }
        for _ in 0..ITEMS / 100 {
            client.ask(sample(100), 0).await.unwrap();
        }
        world.until(|world| world.table_stat("items") == 0).await;
    });
}

#[test]
fn a_reader_that_does_not_read_is_dropped_and_pins_nothing() {
    let config = ServerConfig { write_deadline_ms: 1_000, max_frame_bytes: CLOGGABLE, ..config(limited_table()) };
    World::run(13, config, |world| async move {
        let mut writer = world.client().await;
        writer.open(1).await;
        for sequence in 1..=5 {
            let body = RequestBody::Push(push(1, 1, sequence, sequence - 1, &[1]));
            writer.ask(body, 0).await.unwrap();
        }
        let mut reader = world.client().await;
        reader.clog().await;
        reader.send(sample(3), 0).await.unwrap();
        world.until(|world| world.table_stat("limiter_sampled") == 3).await;
        let latest = world.now() + Duration::from_secs(1);
        world.until(|world| world.server_stat("slow_readers_dropped") == 1).await;
        world.assert_soon_after(latest);
        world.until(|world| world.table_stat("limiter_sampled") == 0).await;
        assert_eq!(world.table_stat("pinned_bytes"), 0);
        writer.stats().await;
    });
}

#[test]
fn a_frame_that_stops_in_the_middle_ends_with_its_connection() {
    let config = ServerConfig { write_deadline_ms: 300, ..config(table()) };
    World::run(14, config, |world| async move {
        let mut client = world.client().await;
        assert_eq!(world.receive_bytes(), 0);
        let start = [8u32.to_le_bytes(), (1u32 << 19).to_le_bytes()].concat();
        client.send_raw(&start).await;
        world.until(|world| world.receive_bytes() >= 1 << 19).await;
        let (id, code, _) = client.receive_error().await;
        assert_eq!((id, code), (NO_REQUEST, ErrorCode::Deadline));
        assert!(client.receive().await.unwrap().is_none());
        assert_eq!(world.receive_bytes(), 0);
    });
}

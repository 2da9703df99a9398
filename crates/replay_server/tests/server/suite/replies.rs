//! Replies that clients have not read: their memory is limited for each connection and each role.

use bytes::Bytes;
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, PushBody, SampleRequest};
use replay_core::schema::{Codec, Column, Dtype, TableConfig, flags};
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{GetParameters, OpenOrResume, PutParameters, ReplyBody, RequestBody};

use super::*;

/// Replies of [`LARGE`] bytes that the connections of a role may leave unread; one connection leaves one.
pub(super) const UNREAD: u64 = 3;

/// Replies that one client asks for.
pub(super) const ASKED: usize = 6;

/// Rows before the anchor of a sampled item.
const BEFORE: u16 = 1_000;

/// Parameters, and a sample, which is as large by its rows.
#[derive(Clone, Copy)]
pub(super) enum Ask {
    Parameters,
    Sample,
}

pub(super) const BOTH: [Ask; 2] = [Ask::Parameters, Ask::Sample];

impl Ask {
    pub(super) fn body(self) -> RequestBody {
        match self {
            Ask::Parameters => {
                RequestBody::GetParameters(GetParameters { name: "large".into(), newer_than: 0, writer: 0 })
            }
            Ask::Sample => {
                RequestBody::Sample(SampleRequest { count: 450, before: BEFORE, ..SampleRequest::default() })
            }
        }
    }

    pub(super) fn is_answered_by(self, reply: &ReplyBody) -> bool {
        let bytes = match (self, reply) {
            (Ask::Parameters, ReplyBody::Parameters(Some(got))) => got.bytes.len(),
            (Ask::Sample, ReplyBody::Sampled(got)) => got.rows.len(),
            _ => 0,
        };
        bytes > LARGE
    }
}

pub(super) fn limited() -> ServerConfig {
    ServerConfig {
        max_frame_bytes: 5 * LARGE as u64 / 2,
        reply_bytes: UNREAD * LARGE as u64,
        write_deadline_ms: 600_000,
        ..config(table())
    }
}

/// Puts what both ask for.
pub(super) async fn fill(world: &World) {
    let mut client = world.client().await;
    let open = OpenWriter { window_before: BEFORE, ..writer(9) };
    let open = RequestBody::OpenWriter(OpenOrResume { open, resume: false });
    client.ask(open, 0).await.unwrap();
    let mut long = push(9, 1, 1, 0, &[1; BEFORE as usize + 1]);
    let last = long.body.items.pop().unwrap();
    long.body.items = vec![NewItem { before: BEFORE, ..last }];
    client.ask(RequestBody::Push(long), 0).await.unwrap();
    let put =
        RequestBody::PutParameters(PutParameters { name: "large".into(), version: 0, id: 0, bytes: parameters(LARGE) });
    client.ask(put, 0).await.unwrap();
}

/// Clients that ask for more than they may leave unread, and read nothing yet.
pub(super) async fn slow_readers(world: &World, ask: Ask, count: usize) -> Vec<TestClient> {
    let mut readers = Vec::new();
    for _ in 0..count {
        let mut reader = world.client().await;
        for _ in 0..ASKED {
            reader.send(ask.body(), u32::MAX).await.unwrap();
        }
        readers.push(reader);
    }
    readers
}

async fn read_all(reader: &mut TestClient, ask: Ask) {
    for _ in 0..ASKED {
        let reply = reader.receive().await.unwrap().unwrap();
        assert!(ask.is_answered_by(&reply.body), "{}", reply.body.name());
    }
}

#[test]
fn one_connection_leaves_only_so_many_replies_unread() {
    for ask in BOTH {
        World::run(21, limited(), move |world| async move {
            fill(&world).await;
            let mut reader = slow_readers(&world, ask, 1).await.remove(0);
            world.until(|world| world.reply_bytes() > LARGE as u64).await;
            let mut other = world.client().await;
            for _ in 0..100 {
                // Where there was time for these, there was time for more replies.
                other.stats().await;
                let unread = world.reply_bytes();
                assert!(unread < 2 * LARGE as u64, "{unread}");
            }
            for also in BOTH {
                let reply = other.ask(also.body(), 0).await.unwrap();
                assert!(also.is_answered_by(&reply));
            }
            read_all(&mut reader, ask).await;
            world.until(|world| world.reply_bytes() == 0).await;
        });
    }
}

#[test]
fn a_sample_that_waits_for_room_stays_on_its_table() {
    World::simulated(24, limited(), |world, _| async move {
        fill(&world).await;
        let second = TableConfig { name: "second".into(), ..table() };
        let mut other = world.client().await;
        let create = RequestBody::CreateTable(second);
        other.ask(create.clone(), 0).await.unwrap();
        let mut reader = world.client().await;
        let parameters = Ask::Parameters.body();
        reader.send(parameters, u32::MAX).await.unwrap();
        world.until(|world| world.reply_bytes() > LARGE as u64).await;
        reader.turn_to("second");
        reader.send(Ask::Sample.body(), 2_000).await.unwrap();
        for _ in 0..100 {
            other.stats().await;
        }
        let drop_it = RequestBody::DropTable("second".into());
        other.ask(drop_it, 0).await.unwrap();
        other.ask(create, 0).await.unwrap();
        reader.receive().await.unwrap().unwrap();
        let reply = reader.receive().await.unwrap().unwrap();
        let ReplyBody::Error { code, message, .. } = reply.body else {
            panic!("expected an error, got {}", reply.body.name());
        };
        assert_eq!(code, ErrorCode::UnknownTable, "{message}");
    });
}

/// Over sockets a slow machine would take so long that the readers are dropped.
#[test]
fn all_connections_leave_only_so_many_replies_unread() {
    World::simulated(22, limited(), |world, _| async move {
        fill(&world).await;
        let mut readers = slow_readers(&world, Ask::Sample, 4).await;
        world.until(|world| world.reply_bytes() >= UNREAD * LARGE as u64).await;
        let mut other = world.client().await;
        for _ in 0..100 {
            other.stats().await;
            // The server has one I/O thread.
            let unread = world.reply_bytes();
            assert!(unread < (UNREAD + 2) * LARGE as u64, "{unread}");
        }
        for also in BOTH {
            let (code, message) = refused(other.ask(also.body(), 0).await);
            assert_eq!(code, ErrorCode::Deadline);
            assert!(message.contains("--reply-bytes"), "{message}");
        }
        other.open(1).await;
        let mut without_items = push(1, 1, 1, 0, &[1]);
        without_items.body.items.clear();
        other.ask(RequestBody::Push(without_items), 0).await.unwrap();
        // Nothing is newer, and an empty reply needs no room.
        let newer = RequestBody::GetParameters(GetParameters { name: "large".into(), newer_than: 1, writer: 0 });
        other.ask(newer, 0).await.unwrap();
        // A waiting client gets its reply when the others have read their replies.
        other.send(Ask::Sample.body(), u32::MAX).await.unwrap();
        let reading = readers.iter_mut().map(|reader| read_all(reader, Ask::Sample));
        futures_util::future::join_all(reading).await;
        let reply = other.receive().await.unwrap().unwrap();
        assert!(Ask::Sample.is_answered_by(&reply.body));
        world.until(|world| world.reply_bytes() == 0).await;
        assert_eq!(world.server_stat("slow_readers_dropped"), 0);
    });
}

#[test]
fn a_version_of_parameters_counts_once_for_all_its_readers() {
    World::run(25, limited(), |world| async move {
        fill(&world).await;
        let mut readers = slow_readers(&world, Ask::Parameters, 10).await;
        let mut other = world.client().await;
        for _ in 0..100 {
            other.stats().await;
            let unread = world.reply_bytes();
            assert!(unread < 2 * LARGE as u64, "{unread}");
        }
        for also in BOTH {
            let reply = other.ask(also.body(), 0).await.unwrap();
            assert!(also.is_answered_by(&reply));
        }
        let reading = readers.iter_mut().map(|reader| read_all(reader, Ask::Parameters));
        futures_util::future::join_all(reading).await;
        world.until(|world| world.reply_bytes() == 0).await;
    });
}

/// Bytes of a step of [`blobs`].
const BLOB: usize = 1 << 20;

/// A table that no configuration keeps. Its samples are slices of what was pushed, and count for its items.
fn blobs() -> TableConfig {
    let frame = Column {
        name: "frame".into(),
        dtype: Dtype::Uint8,
        shape: vec![BLOB as u32],
        codec: Codec::Lz4,
        finite: true,
        max_length: 0,
    };
    TableConfig { max_times_sampled: 1_000, ..TableConfig::new("blobs", vec![frame], 10) }
}

fn blob() -> Vec<u8> {
    (0..BLOB).map(|i| (i / 7) as u8).collect()
}

/// One step with an item.
async fn fill_blobs(client: &mut TestClient) {
    client.ask(RequestBody::CreateTable(blobs()), 0).await.unwrap();
    client.turn_to("blobs");
    let open = RequestBody::OpenWriter(OpenOrResume { open: writer(1), resume: false });
    client.ask(open, 0).await.unwrap();
    let mut payload = vec![flags::FIRST];
    payload.extend((BLOB as u32).to_le_bytes());
    payload.extend(blob());
    let mut push = push(1, 1, 1, 0, &[1]);
    push.body = PushBody {
        chunks: vec![ChunkHead { bytes: payload.len() as u32, ..push.body.chunks[0] }],
        payload: Bytes::from(payload),
        ..push.body
    };
    client.ask(RequestBody::Push(push), 0).await.unwrap();
}

#[test]
fn a_table_that_goes_leaves_unread_samples_whole_and_then_gives_its_memory_back() {
    const SAMPLES: usize = 6;
    const COUNT: u32 = 4;
    let config = ServerConfig {
        // A quarter for one connection.
        reply_bytes: 8 * (SAMPLES * COUNT as usize * BLOB) as u64,
        ..limited()
    };
    for dropped in [false, true] {
        World::run(24, config.clone(), move |world| async move {
            let held = |world: &World| match dropped {
                true => world.stats()["reserved_bytes"].as_u64().unwrap(),
                false => world.stats()["tables"]["blobs"]["bytes"].as_u64().unwrap_or(0),
            };
            let before = held(&world);
            let mut owner = world.client().await;
            fill_blobs(&mut owner).await;
            let filled = held(&world);
            assert!(filled > before);
            let mut reader = world.client().await;
            reader.turn_to("blobs");
            for _ in 0..SAMPLES {
                reader.send(sample(COUNT), 0).await.unwrap();
            }
            let sampled = SAMPLES as u64 * u64::from(COUNT);
            world.until(|world| world.stats()["tables"]["blobs"]["sampled_items"] == sampled).await;
            let go = match dropped {
                true => RequestBody::DropTable("blobs".into()),
                false => RequestBody::EmptyTable("blobs".into()),
            };
            owner.ask(go, 0).await.unwrap();
            assert!(world.reply_bytes() > LARGE as u64, "unread");
            assert_eq!(held(&world), filled, "the unread replies hold it");
            for _ in 0..SAMPLES {
                let reply = reader.receive().await.unwrap().unwrap();
                let ReplyBody::Sampled(sampled) = reply.body else {
                    panic!("expected a sample, got {}", reply.body.name());
                };
                let bytes: Vec<u8> = sampled.blobs.concat();
                assert!(bytes == blob().repeat(COUNT as usize));
            }
            world.until(|world| world.reply_bytes() == 0 && held(world) == before).await;
        });
    }
}

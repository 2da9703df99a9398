//! Replies that clients do not read: their memory is limited for each connection and for all.

use replay_core::ErrorCode;
use replay_net::config::ServerConfig;
use replay_wire::{ReplyBody, RequestBody};

use super::*;

/// Replies of [`LARGE`] bytes that all connections may leave unread.
const UNREAD: u64 = 3;

/// Replies that one client asks for.
const ASKED: usize = 6;

fn get() -> RequestBody {
    RequestBody::GetParameters {
        name: "large".into(),
        newer_than: 0,
        writer: None,
    }
}

fn limited() -> ServerConfig {
    ServerConfig {
        // Two replies of each connection.
        max_frame_bytes: 5 * LARGE as u64 / 2,
        reply_bytes: UNREAD * LARGE as u64,
        write_deadline_ms: 600_000,
        ..config(table())
    }
}

async fn put_large(world: &World) {
    let put = RequestBody::PutParameters {
        name: "large".into(),
        version: 0,
        id: 0,
        bytes: parameters(LARGE),
    };
    world.client().await.ask(put, 0).await.unwrap();
}

/// Clients that ask for more than they may leave unread, and read nothing yet.
async fn slow_readers(world: &World, count: usize) -> Vec<TestClient> {
    let mut readers = Vec::new();
    for _ in 0..count {
        let mut reader = world.client().await;
        for _ in 0..ASKED {
            reader.send(get(), u32::MAX).await.unwrap();
        }
        readers.push(reader);
    }
    readers
}

async fn read_all(reader: &mut TestClient) {
    for _ in 0..ASKED {
        let reply = reader.receive().await.unwrap().unwrap();
        assert!(matches!(reply.body, ReplyBody::Parameters(Some(_))));
    }
}

#[test]
fn one_connection_leaves_only_so_many_replies_unread() {
    World::run(21, limited(), |world| async move {
        put_large(&world).await;
        let mut reader = slow_readers(&world, 1).await.remove(0);
        world
            .until(|world| world.reply_bytes() > LARGE as u64)
            .await;
        let mut other = world.client().await;
        for _ in 0..100 {
            // Where there was time for these, there was time for more replies.
            other.stats().await;
            let unread = world.reply_bytes();
            assert!(unread < 3 * LARGE as u64, "{unread}");
        }
        other.ask(get(), 0).await.unwrap();
        read_all(&mut reader).await;
        world.until(|world| world.reply_bytes() == 0).await;
    });
}

#[test]
fn all_connections_leave_only_so_many_replies_unread() {
    World::run(22, limited(), |world| async move {
        put_large(&world).await;
        let mut readers = slow_readers(&world, 4).await;
        world
            .until(|world| world.reply_bytes() >= UNREAD * LARGE as u64)
            .await;
        let mut other = world.client().await;
        for _ in 0..100 {
            other.stats().await;
            // The server has one I/O thread.
            let unread = world.reply_bytes();
            assert!(unread < (UNREAD + 2) * LARGE as u64, "{unread}");
        }
        let (code, message) = refused(other.ask(get(), 0).await);
        assert_eq!(code, ErrorCode::Deadline);
        assert!(message.contains("--reply-bytes"), "{message}");
        other.open(1).await;
        other
            .ask(RequestBody::Push(push(1, 1, 1, 0, &[1])), 0)
            .await
            .unwrap();
        // A waiting client gets its reply when the others have read their replies.
        other.send(get(), u32::MAX).await.unwrap();
        futures_util::future::join_all(readers.iter_mut().map(read_all)).await;
        let reply = other.receive().await.unwrap().unwrap();
        assert!(matches!(reply.body, ReplyBody::Parameters(Some(_))));
        world.until(|world| world.reply_bytes() == 0).await;
    });
}

#[test]
fn a_reader_that_leaves_gives_the_memory_of_its_replies_back() {
    World::run(23, limited(), |world| async move {
        put_large(&world).await;
        let readers = slow_readers(&world, 4).await;
        world
            .until(|world| world.reply_bytes() >= UNREAD * LARGE as u64)
            .await;
        drop(readers);
        world
            .until(|world| world.server_stat("connections") == 0 && world.reply_bytes() == 0)
            .await;
    });
}

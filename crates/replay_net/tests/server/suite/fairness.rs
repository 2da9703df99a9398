//! The order of requests that wait.

use std::time::Duration;

use replay_net::config::ServerConfig;
use replay_wire::ErrorCode;
use replay_wire::{Pushed, ReplyBody, RequestBody};

use super::*;

#[test]
fn pushes_that_wait_are_applied_in_rounds() {
    const WRITERS: u64 = 4;
    const PUSHES: u64 = 6;
    World::run(31, config(limited_table()), |world| async move {
        let mut clients = Vec::new();
        for number in 1..=WRITERS {
            let mut client = world.client().await;
            client.open(number).await;
            clients.push(client);
        }
        // The first writer fills the table as far as the limiter lets it.
        let steps = &[1; 5];
        let first = RequestBody::Push(push(1, 1, 1, 0, steps));
        clients[0].ask(first, 0).await.unwrap();
        for (number, client) in (1..).zip(&mut clients) {
            for sequence in 1..=PUSHES {
                let (sequence, before) = match number {
                    1 => (sequence + 1, sequence),
                    _ => (sequence, sequence - 1),
                };
                let body = RequestBody::Push(push(number, 1, sequence, 5 * before, steps));
                client.send(body, u32::MAX).await.unwrap();
            }
            world.until(|world| world.table_stat("blocked_pushes") >= number).await;
        }
        let mut reader = world.client().await;
        for _round in 0..PUSHES {
            for client in &mut clients {
                // One sample makes room for one push, the one that has waited longest.
                reader.ask(sample(5), u32::MAX).await.unwrap();
                let reply = client.receive().await.unwrap().unwrap();
                assert!(matches!(reply.body, ReplyBody::Pushed(Pushed { .. })));
            }
        }
        let stats = world.stats();
        for writer in stats["tables"][TABLE]["by_writer"].as_array().unwrap() {
            assert_eq!(writer["blocked_pushes"], PUSHES, "{writer}");
            assert!(writer["waited_s"].as_f64().unwrap() > 0.0);
        }
    });
}

#[test]
fn a_push_that_is_sent_again_waits_behind_the_others() {
    const HELD: Duration = Duration::from_secs(2);
    let config = ServerConfig { max_wait_ms: HELD.as_millis() as u64, ..config(limited_table()) };
    World::simulated(32, config, |world, _| async move {
        let steps = &[1; 5];
        let body = |number, sequence| RequestBody::Push(push(number, 1, sequence, 5 * (sequence - 1), steps));
        let (mut first, mut second) = (world.client().await, world.client().await);
        first.open(1).await;
        second.open(2).await;
        first.ask(body(1, 1), 0).await.unwrap();
        first.send(body(1, 2), u32::MAX).await.unwrap();
        world.sleep(HELD / 2).await;
        second.send(body(2, 1), u32::MAX).await.unwrap();
        let (_, code, message) = first.receive_error().await;
        assert_eq!(code, ErrorCode::Renew, "{message}");
        first.send(body(1, 2), u32::MAX).await.unwrap();
        let mut reader = world.client().await;
        for client in [&mut second, &mut first] {
            reader.ask(sample(5), u32::MAX).await.unwrap();
            let reply = client.receive().await.unwrap().unwrap();
            assert!(matches!(reply.body, ReplyBody::Pushed(Pushed { .. })));
        }
    });
}

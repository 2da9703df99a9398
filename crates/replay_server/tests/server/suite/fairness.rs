//! The order of requests that wait.

use replay_wire::{ReplyBody, RequestBody};

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
                assert!(matches!(reply.body, ReplyBody::Pushed(_)));
            }
        }
        let stats = world.stats();
        for writer in stats["tables"][TABLE]["by_writer"].as_array().unwrap() {
            assert_eq!(writer["blocked_pushes"], PUSHES, "{writer}");
            assert!(writer["waited_s"].as_f64().unwrap() > 0.0);
        }
    });
}

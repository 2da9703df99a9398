//! Clients that do not read their replies: they hold up no other role, and are dropped for clients of their own that wait.

use std::time::Duration;

use replay_core::replay::OpenWriter;
use replay_server::config::ServerConfig;
use replay_wire::{OpenOrResume, PutParameters, RequestBody};

use super::replies::{ASKED, Ask, BOTH, UNREAD, fill, limited, slow_readers};
use super::roles::{ACTOR, LEARNER, as_role, with_roles};
use super::*;

/// Time without progress after which a reader makes room for others.
const STALLED: Duration = Duration::from_secs(2);

/// Longest wait of a request beside clients that do not read. A server that waits for these readers takes 600 s.
const PATIENT_MS: u32 = 30_000;

/// The server that [`limited`] makes, with a token for each role, each of which may leave [`UNREAD`] replies.
fn limited_roles() -> ServerConfig {
    ServerConfig { reply_bytes: 3 * UNREAD * LARGE as u64, ..with_roles(limited()) }
}

/// Asks until `times` batches came, each in time; by a simulated clock in `longest`.
async fn sample_beside(world: &World, learner: &mut TestClient, times: u32, longest: Duration) {
    for _ in 0..times {
        let begun = world.now();
        let reply = learner.ask(Ask::Sample.body(), PATIENT_MS).await.unwrap();
        assert!(Ask::Sample.is_answered_by(&reply));
        world.assert_soon_after(begun + longest);
    }
}

#[test]
fn actors_that_read_no_parameters_hold_up_no_learner() {
    const VERSIONS: u64 = 8;
    World::run(26, limited_roles(), |world| async move {
        fill(&world).await;
        let mut attackers = Vec::new();
        for _ in 0..60 {
            let mut attacker = as_role(&world, ACTOR).await;
            for _ in 0..ASKED {
                attacker.send(Ask::Parameters.body(), u32::MAX).await.unwrap();
            }
            attackers.push(attacker);
        }
        let mut learner = as_role(&world, LEARNER).await;
        sample_beside(&world, &mut learner, 20, Duration::ZERO).await;
        // Unread replies keep older versions, which count apart.
        for _ in 0..VERSIONS {
            let put = RequestBody::PutParameters(PutParameters {
                name: "large".into(),
                version: 0,
                id: 0,
                bytes: parameters(LARGE),
            });
            learner.ask(put, PATIENT_MS).await.unwrap();
            sample_beside(&world, &mut learner, 1, Duration::ZERO).await;
            let mut attacker = as_role(&world, ACTOR).await;
            attacker.send(Ask::Parameters.body(), u32::MAX).await.unwrap();
            attackers.push(attacker);
        }
        let mut actor = as_role(&world, ACTOR).await;
        let got = actor.ask(Ask::Parameters.body(), PATIENT_MS).await;
        assert!(Ask::Parameters.is_answered_by(&got.unwrap()));
        let most = (UNREAD + 2) * LARGE as u64;
        assert!(world.reply_bytes() < most, "{}", world.reply_bytes());
    });
}

#[test]
fn learners_that_read_no_samples_are_dropped_for_one_that_does() {
    World::run(27, limited_roles(), |world| async move {
        fill(&world).await;
        let mut learner = as_role(&world, LEARNER).await;
        let mut attackers = Vec::new();
        for attack in 1..=2 {
            for _ in 0..12 {
                let mut attacker = as_role(&world, LEARNER).await;
                for _ in 0..ASKED {
                    // The connection is open until another one waits for room.
                    let _ = attacker.send(Ask::Sample.body(), u32::MAX).await;
                }
                attackers.push(attacker);
            }
            world.until(|world| world.reply_bytes() >= UNREAD * LARGE as u64).await;
            // Four times: there is room for three.
            sample_beside(&world, &mut learner, 5, 4 * STALLED).await;
            let dropped = world.server_stat("slow_readers_dropped");
            assert!(dropped >= attack, "{dropped} dropped");
        }
    });
}

/// By a simulated clock: a busy machine may stand still for longer than a reader may.
#[test]
fn a_reader_that_is_slow_and_reads_is_not_dropped() {
    let config = ServerConfig { reply_bytes: LARGE as u64, write_deadline_ms: 30_000, ..limited() };
    World::simulated(28, config, |world, network| async move {
        fill(&world).await;
        // 64 KiB at a time: a reply takes about ten seconds.
        let delay = Duration::from_millis(160);
        network.set_delay(delay..=delay);
        let mut slow = world.client().await;
        slow.send(Ask::Sample.body(), u32::MAX).await.unwrap();
        world.until(|world| world.reply_bytes() > LARGE as u64).await;
        let begun = world.now();
        let mut other = world.client().await;
        other.send(Ask::Sample.body(), u32::MAX).await.unwrap();
        for client in [&mut slow, &mut other] {
            let reply = client.receive().await.unwrap().unwrap();
            assert!(Ask::Sample.is_answered_by(&reply.body));
            assert!(world.now() > begun + 2 * STALLED);
        }
        assert_eq!(world.server_stat("slow_readers_dropped"), 0);
    });
}

/// A client that takes a little now and then, too little to have read its reply in time.
#[test]
fn a_reader_that_trickles_is_dropped_for_one_that_reads() {
    let config = ServerConfig { reply_bytes: LARGE as u64, write_deadline_ms: 30_000, ..limited() };
    World::simulated(29, config, |world, network| async move {
        fill(&world).await;
        // Some kilobytes a second.
        network.set_buffer(16);
        let mut trickling = world.client().await;
        network.set_buffer(64 << 10);
        trickling.send(Ask::Sample.body(), u32::MAX).await.unwrap();
        world.spawn(async move {
            // An error is the end of the connection.
            let _ = trickling.receive().await;
        });
        world.until(|world| world.reply_bytes() > LARGE as u64).await;
        let mut other = world.client().await;
        sample_beside(&world, &mut other, 1, 2 * STALLED).await;
        assert_eq!(world.server_stat("slow_readers_dropped"), 1);
    });
}

#[test]
fn statistics_that_nobody_reads_hold_up_nobody_and_are_limited() {
    const CLIENTS: u64 = 30;
    /// Unread bytes of a connection up to which its reports are made even without room.
    const SMALL: u64 = 64 << 10;
    let config = ServerConfig { reply_bytes: 3 * 8 * SMALL, ..limited_roles() };
    World::simulated(30, config, |world, network| async move {
        fill(&world).await;
        for number in 101..=200 {
            // Each has its part of the report.
            let open = OpenWriter { name: "a writer with a long name".repeat(4), ..writer(number) };
            let open = RequestBody::OpenWriter(OpenOrResume { open, resume: false });
            world.client().await.ask(open, 0).await.unwrap();
        }
        network.set_buffer(4 << 10);
        let mut attackers = Vec::new();
        for _ in 0..CLIENTS {
            let mut attacker = as_role(&world, ACTOR).await;
            for _ in 0..60 {
                attacker.send(RequestBody::Stats, u32::MAX).await.unwrap();
            }
            attackers.push(attacker);
        }
        world.until(|world| world.reply_bytes() >= CLIENTS * SMALL).await;
        network.set_buffer(64 << 10);
        let mut learner = as_role(&world, LEARNER).await;
        sample_beside(&world, &mut learner, 3, Duration::from_secs(1)).await;
        let report = world.stats().to_string().len() as u64;
        assert!(60 * report > 4 * SMALL, "{report}");
        let unread = world.reply_bytes();
        assert!(unread < 8 * SMALL + CLIENTS * (SMALL + report), "{unread}");
        // An honest one has none to read.
        as_role(&world, ACTOR).await.stats().await;
    });
}

#[test]
fn a_reader_that_leaves_gives_the_memory_of_its_replies_back() {
    for ask in BOTH {
        World::run(23, limited(), move |world| async move {
            fill(&world).await;
            let readers = slow_readers(&world, ask, 4).await;
            let unread = match ask {
                Ask::Parameters => 1,
                Ask::Sample => UNREAD,
            };
            world.until(|world| world.reply_bytes() >= unread * LARGE as u64).await;
            drop(readers);
            world.until(|world| world.server_stat("connections") == 0 && world.reply_bytes() == 0).await;
            let reply = world.client().await.ask(ask.body(), 0).await.unwrap();
            assert!(ask.is_answered_by(&reply));
        });
    }
}

//! What a client makes of broken connections, servers that were started again, and limits that hold it back.

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use base::allocation::TooLarge;
use base::wait::Wait;
use replay_client::{Client, ConnectOptions};
use replay_core::replay::{PushChannel, Replay, Sampled, UpdateReceipt};
use replay_core::schema::{Sampler, TableConfig};
use replay_link::error::Error;
use replay_server::server::RunningServer;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;
use support::*;

fn client(server: &RunningServer) -> Client {
    connect(&server.addresses()[0], ConnectOptions::default()).unwrap()
}

fn server_with_a_queue() -> (RunningServer, Client) {
    let server = serve(&[&any_port("innet")], |_| {});
    let client = client(&server);
    client.create_table(&queue("steps"), &soon()).unwrap();
    (server, client)
}

#[test]
fn pushes_through_cut_connections_are_applied_once_each() {
    // Single calls take the first connection. Connections of the writer are cut after so many bytes of requests,
    // of acknowledgements, or of the handshake.
    for cut in (400..6_000).step_by(353) {
        let (server, direct) = server_with_a_queue();
        let proxy = Proxy::start(port(&server), vec![usize::MAX, cut, 2 * cut, 130, cut + 777]);
        let through = connect(&proxy.address, ConnectOptions::default()).unwrap();
        let mut pushes = through.open_writer("steps", writer(1), &soon()).unwrap();
        for first in (0..300).step_by(5) {
            pushes.push(steps(first, 5), &soon()).unwrap();
        }
        pushes.flush(&soon()).unwrap();
        assert!(proxy.connections() > 3, "cut {cut}: {}", proxy.connections());
        assert_eq!(drain(&direct, "steps"), (0..300).collect::<Vec<_>>(), "cut {cut}");
        pushes.close(&soon()).unwrap();
    }
}

#[test]
fn a_frame_that_pauses_for_longer_than_its_server_waits_is_sent_again() {
    let server = serve(&[&any_port("innet")], |config| config.write_deadline_ms = 1_000);
    let direct = client(&server);
    direct.create_table(&queue("steps"), &soon()).unwrap();
    // Connections of single calls, of the writer, of updates and of the sampler.
    for after in [900, 1_300, 2_100] {
        let pausing = Proxy::pausing(port(&server), vec![usize::MAX, after, usize::MAX, 400, usize::MAX, 400]);
        let through = connect(&pausing.address, ConnectOptions::default()).unwrap();
        let mut pushes = through.open_writer("steps", writer(after as u64), &soon()).unwrap();
        for first in (0..300).step_by(5) {
            pushes.push(steps(first, 5), &soon()).unwrap();
        }
        pushes.flush(&soon()).unwrap();
        assert_eq!(pausing.connections(), 3, "after {after}");
        let mut updates = through.updates().unwrap().unwrap();
        // A send returns the counts of updates that were answered meanwhile.
        let mut stale: u32 = (0..20).map(|_| updates.send("steps", &[1], &[1.0], &soon()).unwrap().stale).sum();
        stale += updates.flush(&soon()).unwrap().stale;
        assert_eq!(stale, 20, "after {after}");
        assert_eq!(pausing.connections(), 5, "after {after}");
        let mut samples = through.samples("steps", sample_request(5), 2).unwrap();
        let steps = (0..60).flat_map(|_| numbers(&samples.next(&soon()).unwrap()));
        assert_eq!(steps.collect::<Vec<_>>(), (0..300).collect::<Vec<_>>(), "after {after}");
        assert_eq!(pausing.connections(), 7, "after {after}");
        pushes.close(&soon()).unwrap();
    }
}

#[test]
fn calls_go_on_over_new_connections() {
    let (server, _direct) = server_with_a_queue();
    let cuts = (0..40).map(|n| 700 + 13 * n).collect();
    let proxy = Proxy::start(port(&server), cuts);
    let through = connect(&proxy.address, ConnectOptions::default()).unwrap();
    for _ in 0..60 {
        assert_eq!(through.table_config("steps", &soon()).unwrap().name, "steps");
    }
    assert!(proxy.connections() > 10, "{}", proxy.connections());
}

#[test]
fn a_table_is_dropped_once_even_if_the_answer_is_lost() {
    let (server, direct) = server_with_a_queue();
    // After each number of bytes from the handshake's end to the answer's, whichever that is.
    for cut in (300..700).step_by(8) {
        direct.create_table(&queue("once"), &soon()).unwrap();
        let proxy = Proxy::start(port(&server), vec![cut]);
        let Ok(through) = connect(&proxy.address, ConnectOptions::default()) else {
            direct.drop_table("once", &soon()).unwrap();
            continue;
        };
        through.drop_table("once", &soon()).unwrap();
        let error = direct.drop_table("once", &soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::UnknownTable, "{error}");
    }
}

#[test]
fn parameters_are_put_once_even_if_the_answer_is_lost() {
    let (server, direct) = server_with_a_queue();
    let mut version = 0;
    // After each number of bytes from the handshake's end to the answer's, whichever that is.
    for cut in (300..700).step_by(8) {
        let proxy = Proxy::start(port(&server), vec![cut]);
        let Ok(through) = connect(&proxy.address, ConnectOptions::default()) else {
            continue;
        };
        let put = through.put_parameters("policy", parameters(8), &soon());
        version += 1;
        assert_eq!(put.unwrap(), version, "cut {cut}");
    }
    assert!(version > 10);
    let newest = direct.get_parameters("policy", 0, None, &soon()).unwrap();
    assert_eq!(newest.unwrap().version, version);
}

#[test]
fn a_sampler_asks_again_over_a_new_connection() {
    let (server, direct) = server_with_a_queue();
    let mut pushes = direct.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 1000), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    let proxy = Proxy::start(port(&server), vec![usize::MAX, 2000, 3000]);
    let through = connect(&proxy.address, ConnectOptions::default()).unwrap();
    let mut batches = through.samples("steps", sample_request(10), 3).unwrap();
    for _ in 0..30 {
        assert_eq!(numbers(&batches.next(&soon()).unwrap()).len(), 10);
    }
    assert_eq!(proxy.connections(), 4);
}

#[test]
fn without_a_server_a_call_gives_up_after_its_time() {
    let (server, _) = server_with_a_queue();
    let options = ConnectOptions { reconnect_for: Duration::from_millis(50), ..Default::default() };
    let client = connect(&server.addresses()[0], options).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    drop(server);
    let error = client.stats(&Wait::forever()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Connect, "{error}");
    let error = pushes.push(steps(0, 1), &Wait::forever()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Connect, "{error}");
}

#[test]
fn only_a_server_that_never_answered_may_be_another_program() {
    let (server, _direct) = server_with_a_queue();
    let options = ConnectOptions {
        connect_timeout: Duration::from_millis(50),
        reconnect_for: Duration::from_millis(50),
        ..Default::default()
    };
    let in_handshakes = vec![100; 1000];
    let broken = Proxy::start(port(&server), in_handshakes.clone());
    let error = connect(&broken.address, options.clone()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    let hint = "; is it an innet-replay server, and one without TLS? For one with TLS write innets:// (a server that restarts or \
                is at a limit, max_handshakes or max_handshakes_per_address, closes connections like this, too)";
    assert!(error.to_string().ends_with(hint), "{error}");
    let breaking = Proxy::start(port(&server), [vec![usize::MAX], in_handshakes].concat());
    let client = connect(&breaking.address, options).unwrap();
    breaking.cut();
    let error = client.stats(&soon()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    assert!(!error.to_string().contains("is it"), "{error}");
}

#[test]
fn a_call_that_waited_for_long_connects_again_for_its_whole_time() {
    let (server, direct) = server_with_a_queue();
    let limited = TableConfig { samples_per_insert: 1.0, slack: 10.0, ..queue("limited") };
    direct.create_table(&limited, &soon()).unwrap();
    let proxy = Proxy::start(port(&server), vec![]);
    // The call below has waited for longer when its connection breaks.
    let reconnect_for = Duration::from_millis(1);
    let options = ConnectOptions { reconnect_for, ..Default::default() };
    let through = connect(&proxy.address, options).unwrap();
    let mut pushes = through.open_writer("limited", writer(1), &soon()).unwrap();
    for first in (0..30).step_by(5) {
        pushes.push(steps(first, 5), &soon()).unwrap();
    }
    let stats = || server.server().service().stats()["tables"]["limited"].clone();
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| pushes.flush(&Wait::forever()));
        until("a push waits", || stats()["blocked_pushes"] != 0);
        let waited = Instant::now();
        until("it waits for longer", || waited.elapsed() > reconnect_for);
        proxy.cut();
        let mut seen = Vec::new();
        while seen.len() < 30 {
            let sampled = direct.sample("limited", &sample_request(5), &soon());
            seen.extend(numbers(&sampled.unwrap()));
        }
        flushed.join().unwrap().unwrap();
        assert_eq!(seen, (0..30).collect::<Vec<_>>());
    });
}

#[test]
fn a_newer_connection_of_a_writer_fences_the_older_off() {
    let (_server, client) = server_with_a_queue();
    let mut old = client.open_writer("steps", writer(7), &soon()).unwrap();
    old.push(steps(0, 5), &soon()).unwrap();
    old.flush(&soon()).unwrap();
    let mut new = client.open_writer("steps", writer(7), &soon()).unwrap();
    new.push(steps(5, 5), &soon()).unwrap();
    new.flush(&soon()).unwrap();
    let push_and_flush =
        |pushes: &mut dyn PushChannel<Error>| pushes.push(steps(5, 5), &soon()).and_then(|()| pushes.flush(&soon()));
    for _ in 0..2 {
        let error = push_and_flush(old.as_mut()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Fenced, "{error}");
    }
    assert_eq!(drain(&client, "steps"), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_push_that_the_table_refuses_ends_the_writer() {
    let (_server, client) = server_with_a_queue();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    let mut wrong = steps(0, 2);
    wrong.chunks[0].rows = 3;
    pushes.push(wrong, &soon()).unwrap();
    for _ in 0..2 {
        let error = pushes.flush(&soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Schema, "{error}");
    }
    assert!(drain(&client, "steps").is_empty());
}

#[test]
fn a_push_over_the_servers_limit_is_refused_and_the_writer_goes_on() {
    let server = serve(&[&any_port("innet")], |config| config.max_frame_bytes = 1 << 16);
    let client = client(&server);
    client.create_table(&queue("steps"), &soon()).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    let error = pushes.push(steps(0, 5000), &soon()).unwrap_err();
    assert!(matches!(error, Error::TooLarge(TooLarge { limit: 65536, .. })), "{error}");
    assert!(error.to_string().contains("--max-frame-bytes"), "{error}");
    pushes.push(steps(0, 5), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(drain(&client, "steps"), [0, 1, 2, 3, 4]);
}

#[test]
fn pushes_that_the_rate_limiter_holds_back_are_taken_when_it_lets_them() {
    let (_server, client) = server_with_a_queue();
    let limited = TableConfig { samples_per_insert: 1.0, slack: 10.0, ..queue("limited") };
    client.create_table(&limited, &soon()).unwrap();
    let mut pushes = client.open_writer("limited", writer(1), &soon()).unwrap();
    let mut taken = 0;
    let error = loop {
        let deadline = Instant::now() + Duration::from_millis(20);
        match pushes.push(steps(taken, 5), &Wait::until(Some(deadline))) {
            Ok(()) => taken += 5,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), ErrorCode::Deadline);
    assert!(error.to_string().contains("limited"), "the server's reason: {error}");
    let error = pushes.flush(&one_try()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Deadline, "{error}");
    let interrupted = Wait { interrupted: &|| true, ..Wait::forever() };
    let error = pushes.push(steps(taken, 5), &interrupted).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");

    // What was taken arrives, in order and once, as samples make room for it.
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| pushes.flush(&soon()));
        let mut seen = Vec::new();
        while (seen.len() as u64) < taken {
            seen.extend(numbers(&client.sample("limited", &sample_request(5), &soon()).unwrap()));
        }
        flushed.join().unwrap().unwrap();
        assert_eq!(seen, (0..taken).collect::<Vec<_>>());
    });
    assert!(drain(&client, "limited").is_empty());
}

fn ids(sampled: &Sampled) -> Vec<u64> {
    sampled.items.iter().map(|item| item.id).collect()
}

/// An address at which servers are started one after another.
struct RestartableServer {
    address: String,
    _folder: tempfile::TempDir,
}

impl RestartableServer {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        RestartableServer { address: fixed_address(&folder), _folder: folder }
    }

    fn serve(&self) -> RunningServer {
        let replay = TableConfig { sampler: Sampler::Prioritized, max_times_sampled: 0, ..queue("replay") };
        serve(&[&self.address], |config| config.tables = vec![queue("steps"), replay])
    }
}

#[test]
fn keys_of_a_server_that_was_started_again_are_stale() {
    const ITEMS: u32 = 10;
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    let fill = || {
        let mut pushes = client.open_writer("replay", writer(1), &soon()).unwrap();
        pushes.push(steps(0, ITEMS), &soon()).unwrap();
        pushes.close(&soon()).unwrap();
    };
    // Items of the same mass, as many as are sampled: one from each stratum.
    let all = sample_request(ITEMS);
    fill();
    let old = ids(&client.sample("replay", &all, &soon()).unwrap());
    drop(server);

    let _server = restartable.serve();
    fill();
    let mut batches = client.samples("replay", all, 1).unwrap();
    let new = ids(&batches.next(&soon()).unwrap());
    let distinct: BTreeSet<_> = old.iter().chain(&new).collect();
    assert_eq!(distinct.len(), 2 * ITEMS as usize);

    // The old items' priorities would take the newcomers' mass.
    let priorities = [[1.0; ITEMS as usize], [0.0; ITEMS as usize]].concat();
    let receipt = client.update_priorities("replay", &[new, old.clone()].concat(), &priorities, &soon()).unwrap();
    assert_eq!(receipt, UpdateReceipt { applied: ITEMS, stale: ITEMS });
    for id in old {
        let writer = client.report_corrupt("replay", id, "x", &soon()).unwrap();
        assert_eq!(writer, None);
    }
    let left = client.sample("replay", &all, &soon()).unwrap();
    assert_eq!(left.live_items, u64::from(ITEMS));
}

#[test]
fn a_table_whose_drop_was_refused_is_made_again_on_a_restarted_server() {
    const LEARNER: &str = "token of the learners";
    let restartable = RestartableServer::new();
    let secret = |token: &str| Some(Secret(token.to_owned()));
    let start = || {
        serve(&[&restartable.address], |config| {
            config.token = secret("token of the operator");
            config.learner_token = secret(LEARNER);
        })
    };
    let server = start();
    let options = ConnectOptions { token: secret(LEARNER), ..Default::default() };
    let client = connect(&server.addresses()[0], options).unwrap();
    client.create_table(&queue("own"), &soon()).unwrap();
    let error = client.drop_table("own", &soon()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Forbidden, "{error}");
    drop(server);

    let _server = start();
    assert_eq!(client.table_config("own", &soon()).unwrap().name, "own");
}

#[test]
fn a_writer_whose_acknowledged_pushes_are_gone_has_expired() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 10), &soon()).unwrap();
    pushes.flush(&soon()).unwrap();
    drop(server);

    let _server = restartable.serve();
    for _ in 0..2 {
        let error = pushes.push(steps(10, 10), &soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Expired, "{error}");
        assert!(error.to_string().contains("had acknowledged 10 steps"), "{error}");
    }
    assert!(drain(&client, "steps").is_empty());
}

#[test]
fn a_writer_is_not_opened_anew_behind_its_back() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 10), &soon()).unwrap();
    drop(server);

    // The client has read no acknowledgement, but the push may have been applied.
    let _server = restartable.serve();
    for _ in 0..2 {
        let error = pushes.push(steps(10, 10), &soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Expired, "{error}");
    }
    assert!(drain(&client, "steps").is_empty());
}

#[test]
fn a_writer_that_has_sent_nothing_is_opened_anew() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    drop(server);

    let _server = restartable.serve();
    pushes.push(steps(0, 10), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(drain(&client, "steps"), (0..10).collect::<Vec<_>>());
}

#[test]
fn parameters_of_a_server_that_was_started_again_are_newer_than_the_old_ones() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    for _ in 0..3 {
        client.put_parameters("policy", parameters(10), &soon()).unwrap();
    }
    let old = client.get_parameters("policy", 0, None, &soon()).unwrap().unwrap();
    assert_eq!(old.version, 3);
    drop(server);

    let _server = restartable.serve();
    assert_eq!(client.get_parameters("policy", old.version, None, &soon()).unwrap(), None);
    client.put_parameters("policy", parameters(20), &soon()).unwrap();
    let new = client.get_parameters("policy", old.version, None, &soon()).unwrap().unwrap();
    assert_eq!((new.version, new.bytes), (1, parameters(20)));
    assert_eq!(client.get_parameters("policy", new.version, None, &soon()).unwrap(), None);
}

#[test]
fn a_sampler_with_short_deadlines_waits_for_its_server() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    // As many as one sample takes: the next one cannot be answered before the server is gone.
    let fill = |id| {
        let mut pushes = client.open_writer("steps", writer(id), &soon()).unwrap();
        pushes.push(steps(0, 4), &soon()).unwrap();
        pushes.close(&soon()).unwrap();
    };
    fill(1);
    let mut batches = client.samples("steps", sample_request(4), 1).unwrap();
    batches.next(&soon()).unwrap();
    drop(server);
    for _ in 0..3 {
        let error = batches.next(&one_try()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Deadline, "{error}");
    }
    let _server = restartable.serve();
    fill(2);
    assert_eq!(numbers(&batches.next(&soon()).unwrap()), [0, 1, 2, 3]);
}

#[test]
fn a_sampler_with_short_deadlines_gives_up_after_its_time() {
    let (server, _) = server_with_a_queue();
    let options = ConnectOptions { reconnect_for: Duration::ZERO, ..Default::default() };
    let client = connect(&server.addresses()[0], options).unwrap();
    let mut batches = client.samples("steps", sample_request(1), 1).unwrap();
    drop(server);
    let error = batches.next(&one_try()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Connect, "{error}");
}

#[test]
fn a_sample_that_waits_while_its_server_shuts_down_is_answered_by_the_next_one() {
    let restartable = RestartableServer::new();
    let server = restartable.serve();
    let client = client(&server);
    std::thread::scope(|scope| {
        let sampled = scope.spawn(|| {
            let mut batches = client.samples("steps", sample_request(4), 2).unwrap();
            numbers(&batches.next(&soon()).unwrap())
        });
        let stats = || server.server().service().stats();
        until("a sample waits", || stats()["tables"]["steps"]["blocked_samples"] != 0);
        server.server().shut_down();
        server.wait().unwrap();

        let server = restartable.serve();
        let filling = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
        let mut pushes = filling.open_writer("steps", writer(1), &soon()).unwrap();
        pushes.push(steps(0, 10), &soon()).unwrap();
        pushes.close(&soon()).unwrap();
        assert_eq!(sampled.join().unwrap(), [0, 1, 2, 3]);
    });
}

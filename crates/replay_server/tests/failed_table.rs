//! A table of a server in which a push has panicked: its clients get one error, and the other tables go on.
#![cfg(debug_assertions)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;

use replay_client::ConnectOptions;
use replay_core::replay::Replay;
use replay_core::schema::TableConfig;
use replay_link::Commands;
use replay_link::error::Error;
use replay_server::server::RunningServer;
use replay_wire::{ErrorCode, RequestBody};
use support::*;

/// Lines of the server's log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

fn metrics(server: &RunningServer) -> String {
    let url = server.http().unwrap().to_string();
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_panic_in_an_insert_fails_its_table_alone() {
    let log = Log::default();
    let lines = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || lines.clone()).init();
    let server = serve(&["innet://127.0.0.1:0"], |config| {
        config.http = Some("127.0.0.1:0".parse().unwrap());
    });
    let connect = || connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    let (client, reader, wait) = (connect(), connect(), &soon());
    let [mut failing, mut other] = ["failing", "other"].map(|name| {
        let config = TableConfig { capacity: 8, ..queue(name) };
        client.create_table(&config, wait).unwrap();
        let mut pushes = client.open_writer(name, writer(1), wait).unwrap();
        pushes.push(steps(0, 8), wait).unwrap();
        pushes.flush(wait).unwrap();
        pushes
    });
    let memory = &server.server().service().memory;
    let half = client.sample("failing", &sample_request(4), wait).unwrap();
    assert_eq!(numbers(&half), [0, 1, 2, 3]);
    let waiting = thread::spawn(move || reader.sample("failing", &sample_request(8), &soon()));
    until("a sample waits", || memory.stats()["tables"]["failing"]["waiting_samples"] == 1);

    // The next push evicts an item whose slot is free already.
    memory.table("failing").unwrap().end_items_unnoticed();
    failing.push(steps(8, 8), wait).unwrap();
    let refused = |error: Error| {
        assert_eq!(error.code(), ErrorCode::Internal, "{error}");
        let text = error.to_string();
        assert!(text.contains("table \"failing\" has failed"), "{text}");
        assert!(text.contains("drop it, and make it again"), "{text}");
    };
    refused(failing.flush(wait).unwrap_err());
    refused(failing.push(steps(16, 1), wait).unwrap_err());
    refused(waiting.join().unwrap().err().unwrap());
    let request = sample_request(1);
    refused(client.sample("failing", &request, wait).err().unwrap());
    refused(client.update_priorities("failing", &[1], &[1.0], wait).unwrap_err());
    refused(client.open_writer("failing", writer(2), wait).err().unwrap());
    let empty = RequestBody::EmptyTable("failing".into());
    refused(client.command(empty, wait).unwrap_err());

    other.push(steps(8, 8), wait).unwrap();
    other.flush(wait).unwrap();
    assert_eq!(drain(&client, "other"), Vec::from_iter(8..16));

    let stats = client.stats(wait).unwrap();
    let tables = &stats["tables"];
    assert_eq!((&tables["failing"]["failed"], &tables["failing"]["panics"]), (&true.into(), &1.into()));
    assert_eq!((&tables["other"]["failed"], &tables["other"]["panics"]), (&false.into(), &0.into()));
    // Of the push, the waiting sample and four calls: the writer's second push is not sent.
    assert_eq!(stats["server"]["errors"], 6);
    let metrics = metrics(&server);
    for line in [
        "innet_table_failed{table=\"failing\"} 1",
        "innet_table_panics_total{table=\"failing\"} 1",
        "innet_table_panics_total{table=\"other\"} 0",
        "innet_server_errors_total 6",
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line}: {metrics}");
    }
    let log = log.text();
    let of_panic = |line: &&str| line.contains(" ERROR ") && line.contains("table=\"failing\"");
    let lines: Vec<_> = log.lines().filter(of_panic).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("an item ends once"), "{log}");

    client.drop_table("failing", wait).unwrap();
    client.create_table(&queue("failing"), wait).unwrap();
    let mut pushes = client.open_writer("failing", writer(3), wait).unwrap();
    pushes.push(steps(0, 3), wait).unwrap();
    pushes.flush(wait).unwrap();
    assert_eq!(drain(&client, "failing"), [0, 1, 2]);
}

#[test]
fn a_failed_table_of_the_configuration_is_made_again_when_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let table = TableConfig { capacity: 8, ..queue("steps") };
    let server = serve(&["innet://127.0.0.1:0"], |config| {
        config.tables = vec![table.clone()];
        config.snapshot = Some(folder.path().into());
    });
    let (client, wait) = (connect(&server.addresses()[0], ConnectOptions::default()).unwrap(), &soon());
    let mut pushes = client.open_writer("steps", writer(1), wait).unwrap();
    pushes.push(steps(0, 8), wait).unwrap();
    pushes.flush(wait).unwrap();
    let refused = client.drop_table("steps", wait).unwrap_err();
    assert!(refused.to_string().contains("cannot be dropped: empty it instead"), "{refused}");

    server.server().service().memory.table("steps").unwrap().end_items_unnoticed();
    pushes.push(steps(8, 8), wait).unwrap();
    pushes.flush(wait).unwrap_err();
    let refused = client.command(RequestBody::Snapshot, wait).unwrap_err();
    assert!(refused.to_string().contains("table \"steps\" has failed"), "{refused}");

    client.drop_table("steps", wait).unwrap();
    client.create_table(&table, wait).unwrap();
    let mut pushes = client.open_writer("steps", writer(2), wait).unwrap();
    pushes.push(steps(0, 3), wait).unwrap();
    pushes.flush(wait).unwrap();
    client.command(RequestBody::Snapshot, wait).unwrap();
    assert_eq!(drain(&client, "steps"), [0, 1, 2]);
}

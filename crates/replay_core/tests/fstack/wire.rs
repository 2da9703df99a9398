//! What a server on F-Stack makes of odd peers, which are sockets of the kernel here.

use std::future::Future;
use std::time::Duration;

use replay_core::ErrorCode;
use replay_core::net::Address;
use replay_core::server::RunningServer;
use replay_core::wire::{ReplyBody, RequestBody};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::support::{any_port, host, port, serve};
use crate::wire_client::{TABLE, TestClient, parameters, push, table};

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let test = async { tokio::time::timeout(Duration::from_secs(60), test).await };
    runtime.unwrap().block_on(test).expect("the server answers");
}

fn server() -> RunningServer {
    serve(&[&any_port("innet")], |config| {
        config.tables = vec![table()];
        config.write_deadline_ms = 300;
    })
}

async fn dial(server: &RunningServer) -> TcpStream {
    TcpStream::connect((host(), port(server))).await.unwrap()
}

async fn welcome(server: &RunningServer) -> TestClient<TcpStream> {
    TestClient::welcome(dial(server).await, None).await.unwrap()
}

fn count(server: &RunningServer, name: &str) -> u64 {
    server.server().service().stats()["server"][name]
        .as_u64()
        .unwrap()
}

async fn until(done: impl Fn() -> bool) {
    while !done() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
#[ignore = "run by `links`"]
fn a_client_that_has_ended_sending_is_still_answered() {
    let server = server();
    assert!(matches!(server.addresses()[0], Address::Tcp { .. }));
    run(async {
        let mut client = welcome(&server).await;
        let id = client.send(RequestBody::Stats, 0).await.unwrap();
        client.end_sending().await;
        let reply = client.receive().await.unwrap().unwrap();
        assert_eq!(reply.id, id);
        assert!(matches!(reply.body, ReplyBody::Stats(_)));
        assert!(client.receive().await.unwrap().is_none());
        until(|| count(&server, "connections") == 0).await;
    });
}

#[test]
#[ignore = "run by `links`"]
fn a_frame_that_breaks_off_changes_nothing() {
    let server = server();
    run(async {
        let mut other = welcome(&server).await;
        let mut client = welcome(&server).await;
        let epoch = client.open(1).await.epoch;
        let body = RequestBody::Push(push(1, epoch, 1, 0, &[1, 2, 3]));
        client.ask(body, 0).await.unwrap();
        // The header of another push, and a reset: unread replies make the kernel send one.
        client.send(RequestBody::Stats, 0).await.unwrap();
        client.send_raw(&[0, 0, 0]).await;
        drop(client);
        until(|| count(&server, "connections") == 1).await;
        let stats = other.stats().await;
        assert_eq!(stats["tables"][TABLE]["items"], 3);
    });
}

#[test]
#[ignore = "run by `links`"]
fn a_bad_frame_closes_its_own_connection_alone() {
    let server = server();
    run(async {
        let mut other = welcome(&server).await;
        let mut client = welcome(&server).await;
        client.send_raw(&[0xff; 64]).await;
        let (_, code, message) = client.receive_error().await;
        assert!(
            matches!(code, ErrorCode::Protocol | ErrorCode::TooLarge),
            "{message}"
        );
        assert!(client.receive().await.unwrap().is_none());
        assert_eq!(count(&server, "bad_frames"), 1);
        other.stats().await;
    });
}

#[test]
#[ignore = "run by `links`"]
fn a_reader_that_does_not_read_is_dropped() {
    let server = server();
    run(async {
        let mut other = welcome(&server).await;
        let file = parameters(10_000_000);
        let put = RequestBody::PutParameters {
            name: "large".into(),
            bytes: file,
        };
        other.ask(put, 0).await.unwrap();
        let mut client = welcome(&server).await;
        for _ in 0..4 {
            let get = RequestBody::GetParameters {
                name: "large".into(),
                newer_than: 0,
            };
            client.send(get, 0).await.unwrap();
        }
        until(|| count(&server, "slow_readers_dropped") == 1).await;
        other.stats().await;
    });
}

#[test]
#[ignore = "run by `links`"]
fn a_stranger_is_closed_at_the_deadline() {
    let server = serve(&[&any_port("innet")], |config| {
        config.handshake_deadline_ms = 50;
    });
    run(async {
        let mut stranger = dial(&server).await;
        stranger.write_all(b"x").await.unwrap();
        until(|| count(&server, "connections_opened") == 1 && count(&server, "connections") == 0)
            .await;
    });
}

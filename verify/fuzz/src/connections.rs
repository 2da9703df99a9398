//! Bytes to a server, and bytes to a client.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt, join, sink, split};

use crate::calls::ledger::table_config;
use replay_client::pipeline::RequestPipeline;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::view::{DecodeOptions, Decoder, ViewSpec, Window};
use replay_link::framing::write_frame;
use replay_link::stack::{Address, Stack, until};
use replay_server::config::ServerConfig;
use replay_server::server::Server;
use replay_wire::{
    Challenge, FrameLimits, Hello, OutgoingFrame, PROTOCOL, RELEASE, Reply, ReplyBody, Request, RequestBody,
    encode_reply, encode_request,
};
use simulation::Sim;

/// Longest time for a server to end a connection whose client has said everything: far beyond every deadline.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Sends the bytes to a server, after a handshake if the first one is odd, and ends the stream. The server has to end the connection, with
/// replies that decode, and to answer the next client.
///
/// # Panics
/// When it does not.
pub fn to_server(input: &[u8]) {
    let Some(sent) = after_handshake(input, handshake) else {
        return;
    };
    let address: Address = "innet://127.0.0.1:7710".parse().expect("an address");
    let config = ServerConfig {
        listen: vec![address.clone()],
        max_bytes: 64 << 20,
        max_frame_bytes: 1 << 20,
        tables: vec![table_config("one", 0, 64)],
        ..ServerConfig::default()
    };
    let memory = Memory::new(MemoryLimits { seed: Some(1), ..config.memory_limits() });
    let server = Arc::new(Server::new(&config, memory).expect("a valid configuration"));
    let sim = Sim::new(1);
    let stack = sim.stack();
    let listener = stack.listen(&address).expect("a free address");
    stack.spawn(server.run(stack.clone(), vec![listener], vec![]));
    sim.run(async move {
        let stream = stack.connect(&address).expect("the server listens");
        let (mut read, mut write) = split(stream);
        // An error means that the server has ended the connection already.
        let _ = write.write_all(&sent).await;
        let _ = write.shutdown().await;
        let mut replies = Vec::new();
        let end = read.read_to_end(&mut replies);
        let end = until(&stack, stack.now() + PATIENCE, end).await;
        let _ = end.expect("the server ends the connection");
        crate::frames::decode(&replies);

        let next = stack.connect(&address).expect("the server listens");
        let mut next = RequestPipeline::new(next, FrameLimits::default(), "the server".into());
        next.handshake(None, None).await.expect("a handshake");
        let stats = next.call(0, None, RequestBody::Stats).await.expect("an answer");
        assert!(matches!(stats, ReplyBody::Stats(_)));
    });
}

/// The input without its first byte, behind the `handshake` if that byte is odd; `None` for an empty one.
fn after_handshake(input: &[u8], handshake: fn() -> Vec<u8>) -> Option<Vec<u8>> {
    let (first, bytes) = input.split_first()?;
    let mut all = match first % 2 {
        0 => Vec::new(),
        _ => handshake(),
    };
    all.extend(bytes);
    Some(all)
}

/// The client's side of a handshake without a token.
fn handshake() -> Vec<u8> {
    let hello = Hello { protocol: PROTOCOL, release: RELEASE.into(), nonce: [7; 32] };
    let bodies = [RequestBody::Hello(hello), RequestBody::Authenticate(None)];
    let requests = (1..).zip(bodies).map(|(id, body)| Request::new(id, 0, body));
    requests.flat_map(|request| bytes_of(encode_request(&request).expect("a valid request"))).collect()
}

/// The bytes of a frame.
fn bytes_of(mut frame: OutgoingFrame) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = write_frame(&mut frame, &mut bytes, "a buffer").now_or_never();
    written.expect("a buffer takes everything").expect("no error");
    bytes
}

/// The server's side of a handshake without a token.
fn welcome() -> Vec<u8> {
    let challenge = Challenge {
        protocol: PROTOCOL,
        release: RELEASE.into(),
        incarnation: 1,
        nonce: [9; 32],
        token_needed: false,
        max_frame_bytes: 1 << 20,
    };
    let bodies = [ReplyBody::Challenge(challenge), ReplyBody::Welcome(None)];
    let replies = (1..).zip(bodies).map(|(id, body)| Reply { id, body });
    replies.flat_map(|reply| bytes_of(encode_reply(reply).expect("a valid reply"))).collect()
}

/// A client reads the bytes as a server's, after the handshake if the first one is odd. Samples among the replies are decoded.
///
/// # Panics
/// When the client waits for more after the end.
pub fn to_client(input: &[u8]) {
    let Some(received) = after_handshake(input, welcome) else {
        return;
    };
    let table = table_config("one", 0, 64);
    let options = DecodeOptions { threads: 1, ..DecodeOptions::default() };
    let view = ViewSpec::Window(Window { before: 2, after: 2 });
    let decoder = Decoder::new(&table, &view, options).expect("a valid view");
    let stream = join(received.as_slice(), sink());
    let mut client = RequestPipeline::new(stream, FrameLimits::new(1 << 20), "a server".into());
    let read = async {
        client.handshake(None, None).await?;
        loop {
            let id = client.send(0, None, RequestBody::Stats)?;
            let reply = client.reply().await?;
            assert!(id > 0);
            if let ReplyBody::Sampled(sampled) = reply.body {
                // Rows of a hostile server are an error, or numbers.
                let _ = decoder.decode(&sampled, 0.4);
            }
        }
    };
    let end: replay_link::error::Result<()> = read.now_or_never().expect("the bytes and their end are there");
    assert!(end.is_err(), "the stream ends");
}

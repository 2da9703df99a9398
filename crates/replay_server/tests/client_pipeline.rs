//! The client's side of a connection against a server that a test plays, frame by frame, in memory.

use std::cell::Cell;

use bytes::Bytes;
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

use base::allocation::TooLarge;
use replay_client::pipeline::RequestPipeline;
use replay_link::error::{Error, Result};
use replay_link::framing::{FrameReader, write_frame};
use replay_wire::ErrorCode;
use replay_wire::auth::{self, Side, Transcript};
use replay_wire::*;

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// The server's end.
struct Server {
    frames: FrameReader<DuplexStream>,
    write: DuplexStream,
}

/// A client's stream and the server's end of it: one pipe for each direction.
fn pipes() -> (impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin, Server) {
    let (client_read, server_write) = duplex(64);
    let (client_write, server_read) = duplex(64);
    let server =
        Server { frames: FrameReader::new(server_read, FrameLimits::default(), "client"), write: server_write };
    (tokio::io::join(client_read, client_write), server)
}

impl Server {
    async fn request(&mut self) -> Request {
        decode_request(self.frames.frame().await.unwrap().unwrap()).unwrap()
    }

    async fn reply(&mut self, id: u64, body: ReplyBody) {
        let mut outgoing = encode_reply(Reply { id, body }).unwrap();
        write_frame(&mut outgoing, &mut self.write, "client").await.unwrap();
    }

    /// Answers the hello with what `challenge` makes of it and returns the request after it.
    async fn challenge(&mut self, challenge: impl FnOnce([u8; 32]) -> Challenge) -> Request {
        let request = self.request().await;
        let RequestBody::Hello(hello) = request.body else {
            panic!("{request:?} comes before hello");
        };
        assert_eq!(hello.protocol, PROTOCOL);
        assert_eq!(hello.release, RELEASE);
        let challenge = challenge(hello.nonce);
        self.reply(request.id, ReplyBody::Challenge(challenge)).await;
        self.request().await
    }
}

fn open_challenge() -> Challenge {
    Challenge {
        protocol: PROTOCOL,
        release: "9.9.9".into(),
        incarnation: 77,
        nonce: [9; 32],
        token_needed: false,
        max_frame_bytes: 4096,
    }
}

/// A handshake with `token` against a server that challenges so and welcomes everybody with a proof; with what the client
/// proved.
fn handshake(
    token: Option<&str>,
    challenge: impl FnOnce([u8; 32]) -> Challenge,
    server_proof: impl Fn() -> Option<[u8; 32]>,
) -> (Result<u64>, Option<[u8; 32]>) {
    block_on(async {
        let (stream, mut server) = pipes();
        let mut pipeline = RequestPipeline::new(stream, FrameLimits::default(), "the server".into());
        let mut proved = None;
        let serve = async {
            let request = server.challenge(challenge).await;
            let RequestBody::Authenticate(proof) = request.body else {
                panic!("{request:?} comes after the challenge");
            };
            proved = proof;
            let welcome = ReplyBody::Welcome(server_proof());
            server.reply(request.id, welcome).await;
            std::future::pending().await
        };
        let incarnation = tokio::select! {
            incarnation = pipeline.handshake(token, BINDING) => incarnation,
            () = serve => unreachable!(),
        };
        (incarnation, proved)
    })
}

const TOKEN: &str = "secret of the tests";
const BINDING: Option<auth::ChannelBinding> = Some([5; 32]);

fn needs_token() -> Challenge {
    Challenge { token_needed: true, ..open_challenge() }
}

fn transcript(client_nonce: [u8; 32], channel_binding: Option<[u8; 32]>) -> Transcript {
    Transcript { client_nonce, server_nonce: [9; 32], channel_binding }
}

#[test]
fn without_a_token_nothing_is_proved() {
    let (incarnation, proof) = handshake(None, |_| open_challenge(), || None);
    assert_eq!(incarnation.unwrap(), 77);
    assert_eq!(proof, None);
}

#[test]
fn both_ends_prove_that_they_know_the_token_on_this_tls_session() {
    let cases = [(TOKEN, BINDING, true), (TOKEN, None, false), ("another one", BINDING, false)];
    for (token, binding, right) in cases {
        let nonce = Cell::new([0; 32]);
        let challenge = |client| {
            nonce.set(client);
            needs_token()
        };
        let server_proof = || {
            let transcript = transcript(nonce.get(), binding);
            Some(auth::proof(token, Side::Server, &transcript))
        };
        let (incarnation, proof) = handshake(Some(TOKEN), challenge, server_proof);
        let here = transcript(nonce.get(), BINDING);
        assert!(auth::verify(TOKEN, Side::Client, &here, &proof.unwrap()));
        match incarnation {
            Ok(incarnation) => assert_eq!((incarnation, right), (77, true)),
            Err(error) => {
                assert_eq!((error.code(), right), (ErrorCode::Authentication, false));
                assert!(error.to_string().contains("did not prove"), "{error}");
            }
        }
    }
}

#[test]
fn nothing_is_proved_to_a_server_that_needs_no_token_or_when_there_is_none() {
    for (token, challenge, reason) in [
        (None, needs_token(), "pass one, or set the environment variable INNET_TOKEN"),
        (Some(TOKEN), open_challenge(), "asks for no token"),
    ] {
        let (result, proof) = handshake(token, |_| challenge, || None);
        let error = result.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Authentication, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(proof, None);
    }
}

#[test]
fn a_long_frame_before_the_servers_proof_is_refused() {
    for at_the_challenge in [true, false] {
        let error = block_on(async {
            let (stream, mut server) = pipes();
            let mut pipeline = RequestPipeline::new(stream, FrameLimits::default(), "the server".into());
            let serve = async {
                match at_the_challenge {
                    true => drop(server.request().await),
                    false => drop(server.challenge(|_| open_challenge()).await),
                }
                let header = [8u32.to_le_bytes(), (1u32 << 20).to_le_bytes()].concat();
                server.write.write_all(&header).await.unwrap();
                std::future::pending().await
            };
            tokio::select! {
                incarnation = pipeline.handshake(None, None) => incarnation.unwrap_err(),
                () = serve => unreachable!(),
            }
        });
        assert_eq!(error.code(), ErrorCode::TooLarge, "{error}");
    }
}

#[test]
fn another_protocol_version_is_an_error_that_names_both() {
    let challenge = |_| Challenge { protocol: 8, ..open_challenge() };
    let (result, _) = handshake(None, challenge, || None);
    let error = result.unwrap_err().to_string();
    for part in ["8", "9.9.9", &PROTOCOL.to_string(), RELEASE] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
}

/// What a client that asked for stats makes of `answer`.
fn stats(answer: impl AsyncFnOnce(&mut Server, u64)) -> Result<ReplyBody> {
    block_on(async {
        let (stream, mut server) = pipes();
        let limits = FrameLimits { max_frame_bytes: 1024, max_control_bytes: 512 };
        let mut pipeline = RequestPipeline::new(stream, limits, "the server".into());
        let serve = async {
            let authenticate = server.challenge(|_| open_challenge()).await;
            let welcome = ReplyBody::Welcome(None);
            server.reply(authenticate.id, welcome).await;
            let request = server.request().await;
            answer(&mut server, request.id).await;
            // Hangs up.
            drop(server);
            std::future::pending().await
        };
        let ask = async {
            pipeline.handshake(None, None).await.unwrap();
            pipeline.call(0, None, RequestBody::Stats).await
        };
        tokio::select! {
            reply = ask => reply,
            () = serve => unreachable!(),
        }
    })
}

#[test]
fn an_error_reply_is_the_callers_error() {
    let error = stats(async |server, id| {
        let (code, message) = (ErrorCode::NoMass, "nothing here".into());
        let body = ReplyBody::Error { code, message, waited_for: None };
        server.reply(id, body).await;
    });
    let error = error.err().unwrap();
    assert!(matches!(&error, Error::Remote { code: ErrorCode::NoMass, .. }), "{error}");
    assert_eq!(error.to_string(), "nothing here");
}

#[test]
fn an_error_of_the_connection_is_the_callers_error() {
    let error = stats(async |server, _| {
        let (code, message) = (ErrorCode::Protocol, "that was no request".into());
        server.reply(NO_REQUEST, ReplyBody::Error { code, message, waited_for: None }).await;
    });
    assert_eq!(error.err().unwrap().to_string(), "that was no request");
}

#[test]
fn a_server_that_hangs_up_is_a_broken_connection() {
    let error = stats(async |_, _| {}).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    assert!(error.to_string().contains("the server closed it"), "{error}");
}

#[test]
fn a_reply_cut_short_is_a_broken_connection() {
    let error = stats(async |server, id| {
        let reply = encode_reply(Reply { id, body: ReplyBody::Stats("{}".into()) }).unwrap();
        let header = (reply.control().len() as u32).to_le_bytes();
        server.write.write_all(&header).await.unwrap();
        server.write.write_all(&[0; 4]).await.unwrap();
        server.write.write_all(&reply.control()[..20]).await.unwrap();
    });
    let error = error.err().unwrap();
    assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
    assert!(error.to_string().contains("within a frame"), "{error}");
}

#[test]
fn a_reply_over_the_clients_limit_is_refused() {
    let error = stats(async |server, id| {
        let json = "x".repeat(600);
        let mut reply = encode_reply(Reply { id, body: ReplyBody::Stats(json) }).unwrap();
        // The client stops reading.
        let _ = write_frame(&mut reply, &mut server.write, "client").await;
    });
    assert_eq!(error.err().unwrap().code(), ErrorCode::TooLarge);
}

#[test]
fn a_reply_to_another_request_is_refused() {
    let error = stats(async |server, id| {
        server.reply(id + 1, ReplyBody::Done).await;
    });
    assert_eq!(error.err().unwrap().code(), ErrorCode::Protocol);
}

#[test]
fn a_request_over_the_servers_limit_is_not_sent() {
    block_on(async {
        let (stream, mut server) = pipes();
        let mut pipeline = RequestPipeline::new(stream, FrameLimits::default(), "the server".into());
        let serve = async {
            let request = server.challenge(|_| open_challenge()).await;
            server.reply(request.id, ReplyBody::Welcome(None)).await;
            server.request().await
        };
        let ask = async {
            pipeline.handshake(None, None).await.unwrap();
            let bytes = Bytes::from(vec![0; 4096]);
            let put = RequestBody::PutParameters(PutParameters { name: "p".into(), version: 0, id: 0, bytes });
            let error = pipeline.call(0, None, put).await.err().unwrap();
            assert!(matches!(error, Error::TooLarge(TooLarge { limit: 4096, .. })), "{error}");
            // The pipeline is as good as before.
            pipeline.send(0, None, RequestBody::Stats).unwrap();
            pipeline.flush().await.unwrap();
        };
        let (request, ()) = tokio::join!(serve, ask);
        assert_eq!(request.body, RequestBody::Stats);
    });
}

#[test]
fn replies_are_read_while_requests_are_written() {
    // Both pipes are smaller than the frames in flight in either direction.
    block_on(async {
        let (stream, mut server) = pipes();
        let mut pipeline = RequestPipeline::new(stream, FrameLimits::default(), "the server".into());
        let serve = async {
            for _ in 0..20 {
                let request = server.request().await;
                server.reply(request.id, ReplyBody::Stats("y".repeat(500))).await;
            }
        };
        let ask = async {
            let ids: Vec<u64> =
                (0..20).map(|_| pipeline.send(0, None, RequestBody::DescribeTable("x".repeat(500))).unwrap()).collect();
            pipeline.flush().await.unwrap();
            for id in ids {
                assert_eq!(pipeline.reply().await.unwrap().id, id);
            }
        };
        tokio::join!(serve, ask);
    });
}

#[test]
fn a_flush_to_a_server_that_has_answered_and_gone_ends() {
    block_on(async {
        let (stream, mut server) = pipes();
        let mut client = RequestPipeline::new(stream, FrameLimits::default(), "the server".into());
        client.send(0, None, RequestBody::Stats).unwrap();
        let (sent, request) = tokio::join!(client.flush(), server.request());
        sent.unwrap();
        server.reply(request.id, ReplyBody::Done).await;
        drop(server);
        client.send(0, None, RequestBody::Stats).unwrap();
        let error = client.flush().await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Disconnected, "{error}");
        assert_eq!(client.reply().await.unwrap().id, request.id);
    });
}

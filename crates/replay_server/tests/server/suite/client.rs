//! A small client made of the wire's codec.

use replay_client::pipeline::answer;
use replay_link::error::{Error, Result};
use replay_link::framing::{FrameReader, write_frame};
use replay_wire::ErrorCode;
use replay_wire::auth::{self, Side, Transcript};
use replay_wire::{
    Challenge, FrameLimits, GetParameters, Hello, OpenOrResume, PROTOCOL, PutParameters, RELEASE, Reply, ReplyBody,
    Request, RequestBody, decode_reply, encode_request,
};
use serde_json::Value;
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};

use super::messages::{TABLE, parameters, writer};
use super::world::{Connection, Duplex};

/// Bytes of the parameters of [`TestClient::clog`].
pub const LARGE: usize = 4_000_000;

/// How often it asks for them: more than the buffers of both ends hold.
pub const CLOGGING: u64 = 5;

/// Bytes of the longest frame with which a connection may have that many unread replies and more.
pub const CLOGGABLE: u64 = 8 * LARGE as u64;

/// The transcript of a connection without TLS.
pub fn transcript(client_nonce: [u8; 32], challenge: &Challenge) -> Transcript {
    Transcript { client_nonce, server_nonce: challenge.nonce, channel_binding: None }
}

fn is_about_a_table(body: &RequestBody) -> bool {
    use RequestBody::{ChangeLease, CloseWriter, OpenWriter, Push, ReadSteps, ReportCorrupt, Sample, UpdatePriorities};
    matches!(
        body,
        OpenWriter(_)
            | Push(_)
            | Sample(_)
            | UpdatePriorities(_)
            | ChangeLease(_)
            | ReadSteps(_)
            | ReportCorrupt(_)
            | CloseWriter(_)
    )
}

/// A client that sends exactly the given messages.
pub struct TestClient {
    frames: FrameReader<ReadHalf<Box<dyn Duplex>>>,
    write: WriteHalf<Box<dyn Duplex>>,
    cut: Box<dyn FnOnce()>,
    next_id: u64,
    /// Tables that were named, in the order of their numbers.
    tables: Vec<String>,
    /// The table of the next requests.
    table: String,
}

impl TestClient {
    /// No handshake yet.
    pub fn new(connection: Connection) -> Self {
        let (read, write) = tokio::io::split(connection.stream);
        TestClient {
            frames: FrameReader::new(read, FrameLimits::default(), "the server"),
            write,
            cut: connection.cut,
            next_id: 1,
            tables: Vec::new(),
            table: TABLE.to_owned(),
        }
    }

    /// A client that was made welcome.
    pub async fn welcome(connection: Connection, token: Option<&str>) -> Result<Self> {
        let mut client = Self::new(connection);
        let nonce = [7; 32];
        let challenge = client.hello(PROTOCOL, nonce).await?;
        let transcript = transcript(nonce, &challenge);
        let proof = token.map(|t| auth::proof(t, Side::Client, &transcript));
        let proof = match client.ask(RequestBody::Authenticate(proof), 0).await? {
            ReplyBody::Welcome(proof) => proof,
            other => panic!("expected welcome, got {}", other.name()),
        };
        if let (Some(token), true) = (token, challenge.token_needed) {
            let proof = proof.expect("the server proves that it knows the token");
            assert!(auth::verify(token, Side::Server, &transcript, &proof));
        }
        Ok(client)
    }

    pub async fn hello(&mut self, protocol: u32, nonce: [u8; 32]) -> Result<Challenge> {
        let hello = Hello { protocol, release: RELEASE.into(), nonce };
        match self.ask(RequestBody::Hello(hello), 0).await? {
            ReplyBody::Challenge(challenge) => Ok(challenge),
            other => panic!("expected a challenge, got {}", other.name()),
        }
    }

    /// Sends a request and returns its id.
    pub async fn send(&mut self, body: RequestBody, deadline_ms: u32) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = Request::new(id, deadline_ms, body);
        if is_about_a_table(&request.body) {
            let known = self.tables.iter().position(|name| *name == self.table);
            request.table = 1 + known.unwrap_or(self.tables.len()) as u16;
            if known.is_none() {
                self.tables.push(self.table.clone());
                request.table_name = Some(self.table.clone());
            }
        }
        let mut frame = encode_request(&request)?;
        write_frame(&mut frame, &mut self.write, "the server").await?;
        Ok(id)
    }

    /// Sends a request as it is.
    pub async fn send_as_is(&mut self, request: &Request) -> Result<()> {
        write_frame(&mut encode_request(request)?, &mut self.write, "the server").await
    }

    /// The table of the requests from now on.
    pub fn turn_to(&mut self, table: &str) {
        self.table = table.to_owned();
    }

    /// Sends bytes as they are.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        // What the server makes of them shows in its reply.
        let _ = self.write.write_all(bytes).await;
    }

    /// Says that no more will come; replies still do.
    pub async fn end_sending(&mut self) {
        self.write.shutdown().await.unwrap();
    }

    /// Breaks the connection off: the server sees a reset, and what was on its way is lost.
    pub fn cut(self) {
        (self.cut)();
    }

    /// Asks for more than a connection holds and reads none of it: no reply to what is asked from now on can be written.
    pub async fn clog(&mut self) {
        let put = RequestBody::PutParameters(PutParameters {
            name: "large".into(),
            version: 0,
            id: 0,
            bytes: parameters(LARGE),
        });
        self.ask(put, 0).await.unwrap();
        for _ in 0..CLOGGING {
            let get = RequestBody::GetParameters(GetParameters { name: "large".into(), newer_than: 0, writer: 0 });
            self.send(get, 0).await.unwrap();
        }
    }

    /// The next reply to a request, `None` when the server ended the connection.
    pub async fn receive(&mut self) -> Result<Option<Reply>> {
        loop {
            match self.receive_any().await? {
                Some(reply) if matches!(reply.body, ReplyBody::Waiting(_)) => {}
                reply => return Ok(reply),
            }
        }
    }

    /// [`TestClient::receive`], with messages that clients ignore.
    pub async fn receive_any(&mut self) -> Result<Option<Reply>> {
        match self.frames.frame().await? {
            Some(frame) => Ok(Some(decode_reply(frame)?)),
            None => Ok(None),
        }
    }

    /// Sends a request and receives its reply, which has to be the next one; an error reply is an error.
    pub async fn ask(&mut self, body: RequestBody, deadline_ms: u32) -> Result<ReplyBody> {
        let id = self.send(body, deadline_ms).await?;
        let reply = self.receive().await?.ok_or(Error::Closed("the connection"))?;
        let body = answer(reply.body)?;
        assert_eq!(reply.id, id);
        Ok(body)
    }

    pub async fn open(&mut self, number: u64) -> replay_core::replay::WriterOpened {
        let open = RequestBody::OpenWriter(OpenOrResume { open: writer(number), resume: false });
        match self.ask(open, 0).await {
            Ok(ReplyBody::Writer(opened)) => opened,
            Ok(other) => panic!("expected a writer, got {}", other.name()),
            Err(error) => panic!("{error}"),
        }
    }

    pub async fn stats(&mut self) -> Value {
        match self.ask(RequestBody::Stats, 0).await.unwrap() {
            ReplyBody::Stats(text) => serde_json::from_str(&text).unwrap(),
            other => panic!("expected stats, got {}", other.name()),
        }
    }

    /// The code and the message of the next reply, which has to be an error, and its id.
    pub async fn receive_error(&mut self) -> (u64, ErrorCode, String) {
        let reply = self.receive().await.unwrap().expect("the connection is open");
        match answer(reply.body) {
            Err(error) => (reply.id, error.code(), error.to_string()),
            Ok(other) => panic!("expected an error, got {}", other.name()),
        }
    }
}

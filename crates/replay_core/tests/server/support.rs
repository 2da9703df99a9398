//! A small client made of the wire's codec, and a server in a simulated network to point it at.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use replay_core::auth::{self, Role};
use replay_core::config::ServerConfig;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::net::sim::{Link, Sim, SimStack, SimStream};
use replay_core::net::{Address, Stack};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody, SampleRequest};
use replay_core::schema::{Codec, Column, Dtype, TableConfig};
use replay_core::server::Server;
use replay_core::wire::{
    Challenge, FrameReader, Hello, Limits, PROTOCOL, RELEASE, Reply, ReplyBody, Request,
    RequestBody, decode_reply, encode_request,
};
use replay_core::{Error, ErrorCode, Result};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

pub const TABLE: &str = "steps";

/// A table of one 64-bit column, so that a row's value tells which row it is.
pub fn table() -> TableConfig {
    let value = Column {
        name: "value".into(),
        dtype: Dtype::Int64,
        shape: vec![],
        codec: Codec::None,
    };
    TableConfig::new(TABLE, vec![value], 10_000)
}

/// The table with a rate limiter that blocks the sixth one-item push until something is drawn, and a draw
/// before the first push.
pub fn limited_table() -> TableConfig {
    TableConfig {
        samples_per_insert: 1.0,
        slack: 4.0,
        ..table()
    }
}

/// A writer of one stream whose items have no row but their anchor.
pub fn writer(number: u64) -> OpenWriter {
    OpenWriter {
        table: TABLE.into(),
        writer: number,
        name: format!("writer {number}"),
        streams: 1,
        window_before: 0,
        window_after: 0,
    }
}

/// `values.len()` steps with an item each; the steps before it were pushed.
pub fn push(writer: u64, epoch: u32, sequence: u64, first_step: u64, values: &[i64]) -> Push {
    let mut payload = Vec::new();
    for (step, value) in (first_step..).zip(values) {
        let first = if step == 0 {
            replay_core::schema::flags::FIRST
        } else {
            0
        };
        payload.push(first);
        payload.extend_from_slice(&value.to_le_bytes());
    }
    let items = (first_step..)
        .take(values.len())
        .map(|anchor| NewItem {
            anchor,
            stream: 0,
            before: 0,
            after: 0,
            priority: Some(1.0),
        })
        .collect();
    let chunk = ChunkHead {
        stream: 0,
        rows: values.len() as u32,
        first_step,
        bytes: payload.len() as u32,
    };
    Push {
        table: TABLE.into(),
        writer,
        epoch,
        sequence,
        body: PushBody {
            chunks: vec![chunk],
            items,
            payload: Bytes::from(payload),
        },
    }
}

pub fn draw(count: u32) -> RequestBody {
    RequestBody::Sample(SampleRequest {
        table: TABLE.into(),
        count,
        before: 0,
        after: 0,
        allow_short: false,
        min_probability: false,
    })
}

/// A safetensors file with one tensor of `bytes` bytes.
pub fn parameters(bytes: usize) -> Bytes {
    let header =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + bytes, 9);
    Bytes::from(file)
}

/// A client that says exactly what it is told to say.
pub struct TestClient<T> {
    frames: FrameReader<ReadHalf<T>>,
    write: WriteHalf<T>,
    next_id: u64,
}

impl<T: AsyncRead + AsyncWrite + Unpin> TestClient<T> {
    /// No handshake yet.
    pub fn new(stream: T) -> Self {
        let (read, write) = tokio::io::split(stream);
        TestClient {
            frames: FrameReader::new(read, Limits::default(), "the server"),
            write,
            next_id: 1,
        }
    }

    /// A client that was made welcome.
    pub async fn welcome(stream: T, token: Option<&str>) -> Result<Self> {
        let mut client = Self::new(stream);
        let nonce = [7; 32];
        let challenge = client.hello(PROTOCOL, nonce).await?;
        if let (Some(token), Some(proof)) = (token, &challenge.proof) {
            assert!(auth::verify(
                token,
                Role::Server,
                &nonce,
                &challenge.nonce,
                proof
            ));
        }
        let proof = token.map(|t| auth::proof(t, Role::Client, &nonce, &challenge.nonce));
        match client.ask(RequestBody::Authenticate(proof), 0).await? {
            ReplyBody::Welcome => Ok(client),
            other => panic!("expected welcome, got {}", other.name()),
        }
    }

    pub async fn hello(&mut self, protocol: u32, nonce: [u8; 32]) -> Result<Challenge> {
        let hello = Hello {
            protocol,
            release: RELEASE.into(),
            nonce,
        };
        match self.ask(RequestBody::Hello(hello), 0).await? {
            ReplyBody::Challenge(challenge) => Ok(challenge),
            other => panic!("expected a challenge, got {}", other.name()),
        }
    }

    /// Sends a request and returns its id.
    pub async fn send(&mut self, body: RequestBody, deadline_ms: u32) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let request = Request {
            id,
            deadline_ms,
            body,
        };
        let mut frame = encode_request(&request)?;
        frame.write(&mut self.write, "the server").await?;
        Ok(id)
    }

    /// Sends bytes as they are.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        // What the server makes of them shows in its reply.
        let _ = self.write.write_all(bytes).await;
    }

    pub async fn end_sending(&mut self) {
        self.write.shutdown().await.unwrap();
    }

    /// The next reply, `None` when the server ended the connection.
    pub async fn receive(&mut self) -> Result<Option<Reply>> {
        match self.frames.frame().await? {
            Some(frame) => decode_reply(frame).map(Some),
            None => Ok(None),
        }
    }

    /// Sends a request and receives its reply, which has to be the next one; an error reply is an error.
    pub async fn ask(&mut self, body: RequestBody, deadline_ms: u32) -> Result<ReplyBody> {
        let id = self.send(body, deadline_ms).await?;
        let reply = self
            .receive()
            .await?
            .ok_or(Error::Closed("the connection"))?;
        if let ReplyBody::Error { code, message } = reply.body {
            return Err(Error::Remote { code, message });
        }
        assert_eq!(reply.id, id);
        Ok(reply.body)
    }

    pub async fn open(&mut self, number: u64) -> replay_core::replay::WriterOpened {
        let open = RequestBody::OpenWriter {
            open: writer(number),
            resume: false,
        };
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
        let reply = self
            .receive()
            .await
            .unwrap()
            .expect("the connection is open");
        match reply.body {
            ReplyBody::Error { code, message } => (reply.id, code, message),
            other => panic!("expected an error, got {}", other.name()),
        }
    }
}

/// A server in a simulated network.
#[derive(Clone)]
pub struct World {
    pub stack: SimStack,
    pub server: Arc<Server>,
    pub memory: Arc<Memory>,
    pub token: Option<String>,
    address: Address,
}

impl World {
    /// Runs `test` beside a server that has one table.
    pub fn run<F: Future<Output = ()> + 'static>(
        seed: u64,
        config: ServerConfig,
        test: impl FnOnce(World) -> F,
    ) {
        let sim = Sim::new(seed);
        let stack = sim.stack();
        let memory = Memory::new(MemoryLimits {
            seed: Some(seed),
            ..config.memory_limits()
        });
        let server = Arc::new(Server::new(&config, memory.clone()).unwrap());
        let address = config.listen[0].clone();
        let listener = stack.listen(&address).unwrap();
        stack.spawn(server.clone().run(stack.clone(), vec![listener], vec![]));
        let token = config.read_token().unwrap();
        sim.run(test(World {
            stack,
            server,
            memory,
            token,
            address,
        }));
    }

    pub fn connect(&self) -> SimStream {
        self.stack.connect(&self.address).unwrap()
    }

    /// A client that was made welcome.
    pub async fn client(&self) -> TestClient<SimStream> {
        self.client_with_link().await.0
    }

    /// A client that was made welcome, and the faults of its connection.
    pub async fn client_with_link(&self) -> (TestClient<SimStream>, Link) {
        let stream = self.connect();
        let link = stream.link();
        let client = TestClient::welcome(stream, self.token.as_deref()).await;
        (client.unwrap(), link)
    }

    /// Waits, by the simulation's clock, until `done`.
    pub async fn until(&self, done: impl Fn(&World) -> bool) {
        while !done(self) {
            self.stack.sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn stats(&self) -> Value {
        self.server.service().stats()
    }

    /// A number of the table's statistics.
    pub fn table_stat(&self, name: &str) -> u64 {
        self.stats()["tables"][TABLE][name].as_u64().unwrap()
    }

    /// A number of the server's statistics.
    pub fn server_stat(&self, name: &str) -> u64 {
        self.stats()["server"][name].as_u64().unwrap()
    }
}

/// A server whose one table is `table`.
pub fn config(table: TableConfig) -> ServerConfig {
    ServerConfig {
        listen: vec!["innet://127.0.0.1:7710".parse().unwrap()],
        max_bytes: 1 << 30,
        max_frame_bytes: 1 << 20,
        tables: vec![table],
        ..ServerConfig::default()
    }
}

/// The code and the message of a refusal.
pub fn refused<T>(result: Result<T>) -> (ErrorCode, String) {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => (error.code(), error.to_string()),
    }
}

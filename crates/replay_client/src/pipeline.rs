//! The client's protocol over any stream: the handshake, pipelined requests and their replies. No sockets, no deadlines:
//! every future here is cancel safe, so a caller drops it at its deadline and calls again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_immediate;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf, split};

use super::namespace::Namespace;
use base::allocation::check_size;
use base::system::{self, random};
use replay_link::error::{Error, Result};
use replay_link::framing::{FrameReader, write_frame};
use replay_link::stack::ServerWait;
use replay_wire::auth::{self, ChannelBinding, Side, Transcript, printable_release};
use replay_wire::{
    Challenge, ErrorCode, FrameLimits, Hello, MAX_NUMBERED_TABLES, NO_REQUEST, OutgoingFrame, PROTOCOL, Proof, RELEASE,
    Reply, ReplyBody, Request, RequestBody, decode_reply, encode_request,
};

/// Pipelined requests over one stream: several may be in flight, and replies are matched by id.
pub struct RequestPipeline<S> {
    reader: FrameReader<BufReader<ReadHalf<S>>>,
    writer: WriteHalf<S>,
    queue: VecDeque<OutgoingFrame>,
    arrived: VecDeque<Reply>,
    /// Shared state of waits for replies.
    pub server: Arc<ServerWait>,
    namespace: Option<Namespace>,
    /// Numbers of the tables that requests were about, from 1.
    tables: HashMap<String, u16>,
    last_id: u64,
    /// Limits of replies after the handshake.
    limits: FrameLimits,
    max_frame_bytes: u64,
    /// Round trip to the server: the shorter of the handshake's two.
    pub round_trip: Duration,
}

impl<S: AsyncRead + AsyncWrite + Unpin> RequestPipeline<S> {
    /// A pipeline over `stream`. Errors name the server by `peer`. Refuses replies beyond `limits`, and beyond [`FrameLimits::HANDSHAKE`]
    /// until the handshake is complete.
    pub fn new(stream: S, limits: FrameLimits, peer: String) -> Self {
        let (reader, writer) = split(stream);
        RequestPipeline {
            reader: FrameReader::new(BufReader::new(reader), FrameLimits::HANDSHAKE, peer.clone()),
            writer,
            queue: VecDeque::new(),
            arrived: VecDeque::new(),
            server: Arc::new(ServerWait::new(peer)),
            namespace: None,
            tables: HashMap::new(),
            last_id: NO_REQUEST,
            limits,
            max_frame_bytes: FrameLimits::HANDSHAKE.max_frame_bytes,
            round_trip: Duration::ZERO,
        }
    }

    /// Adds the namespace to names of requests, and limits replies to it.
    pub fn within(mut self, namespace: Option<Namespace>) -> Self {
        self.namespace = namespace;
        self
    }

    /// Compares protocol versions, then proves knowledge of the token in both directions, the client first. Over TLS, `channel_binding`
    /// identifies the TLS session. Returns the server's incarnation, a random number chosen at its start.
    ///
    /// # Errors
    /// [`replay_wire::Error::Version`] with both versions; [`replay_wire::Error::Authentication`] when either side does not know the token.
    pub async fn handshake(&mut self, token: Option<&str>, channel_binding: Option<ChannelBinding>) -> Result<u64> {
        let nonce = random();
        let hello = RequestBody::Hello(Hello { protocol: PROTOCOL, release: RELEASE.into(), nonce });
        let begun = system::now();
        let reply = match self.call(0, None, hello).await {
            Err(_) if is_tls_alert(self.reader.received()) => {
                return Err(Error::Config(format!(
                    "{} answers with TLS: connect to innets://, with the server's certificate or its authority's in tls_ca",
                    self.server.peer
                )));
            }
            reply => reply?,
        };
        self.round_trip = system::elapsed(begun);
        let challenge: Challenge = expect(reply)?;
        if challenge.protocol != PROTOCOL {
            return Err(replay_wire::Error::Version {
                server: challenge.protocol,
                server_release: printable_release(&challenge.release),
                client: PROTOCOL,
                client_release: RELEASE.into(),
            }
            .into());
        }
        let peer = self.server.peer.clone();
        let refuse = |reason: String| Err(Error::authentication(reason));
        match (token, challenge.token_needed) {
            (None, true) => {
                return refuse(format!(
                    "{peer} asks for a token, and none was given: pass one, or set the environment variable INNET_TOKEN"
                ));
            }
            (Some(_), false) => {
                return refuse(format!(
                    "{peer} asks for no token, so it cannot prove that it is the right server: start it with the token, or connect without one (unset INNET_TOKEN, too)"
                ));
            }
            _ => {}
        }
        let transcript = Transcript { client_nonce: nonce, server_nonce: challenge.nonce, channel_binding };
        let proof = token.map(|token| auth::proof(token, Side::Client, &transcript));
        let begun = system::now();
        let reply = self.call(0, None, RequestBody::Authenticate(proof)).await?;
        self.round_trip = self.round_trip.min(system::elapsed(begun));
        let proof: Proof = expect(reply)?;
        let proved = |token| proof.is_some_and(|proof| auth::verify(token, Side::Server, &transcript, &proof));
        if !token.is_none_or(proved) {
            return refuse(format!(
                "{peer} did not prove that it knows the token: it is another program, or a relay to the server"
            ));
        }
        self.reader.set_limits(self.limits);
        self.max_frame_bytes = challenge.max_frame_bytes;
        Ok(challenge.incarnation)
    }

    /// Whether requests were about this table. The number stays with it when it is dropped; another one may then have its name.
    pub fn has_numbered(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    /// Queues a request and returns its id. The first request about a table names it, and the server then knows it by its number.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a frame that the server would refuse; it is not queued. [`Error::Disconnected`] for one more table than a
    /// connection numbers.
    pub fn send(&mut self, deadline_ms: u32, table: Option<&str>, mut body: RequestBody) -> Result<u64> {
        let id = self.last_id + 1;
        if let Some(namespace) = &self.namespace {
            body.named().for_each(|name| *name = namespace.full(name));
        }
        let mut request = Request::new(id, deadline_ms, body);
        if let Some(table) = table {
            (request.table, request.table_name) = self.number(table)?;
        }
        let outgoing = encode_request(&request)?;
        self.check_frame(outgoing.frame_bytes())?;
        self.queue.push_back(outgoing);
        self.last_id = id;
        if let (Some(table), Some(_)) = (table, request.table_name) {
            self.tables.insert(table.to_owned(), request.table);
        }
        Ok(id)
    }

    /// The number of a table, and its name at the server if the number is new.
    fn number(&self, table: &str) -> Result<(u16, Option<String>)> {
        if let Some(number) = self.tables.get(table) {
            return Ok((*number, None));
        }
        if self.tables.len() >= MAX_NUMBERED_TABLES {
            let reason = format!("this connection has numbered {MAX_NUMBERED_TABLES} tables");
            return Err(Error::Disconnected { address: self.server.peer.clone(), reason });
        }
        let name = self.namespace.as_ref().map_or_else(|| table.to_owned(), |namespace| namespace.full(table));
        Ok((self.tables.len() as u16 + 1, Some(name)))
    }

    /// # Errors
    /// [`Error::TooLarge`] for a frame that the server would refuse.
    pub fn check_frame(&self, bytes: u64) -> Result<()> {
        Ok(check_size(
            "a request, in bytes,",
            bytes,
            self.max_frame_bytes,
            "send less at a time (a writer: fewer streams or a smaller chunk_steps), or start the server with a larger --max-frame-bytes",
        )?)
    }

    /// Writes the queue. Replies that arrive meanwhile are kept.
    pub async fn flush(&mut self) -> Result<()> {
        while !self.queue.is_empty() {
            if let Some(reply) = self.transfer().await? {
                self.arrived.push_back(reply);
            }
        }
        Ok(())
    }

    /// Writes the queue and returns the next reply.
    ///
    /// # Errors
    /// [`Error::Disconnected`], [`replay_wire::Error::Protocol`] and [`Error::TooLarge`]; [`Error::Remote`] when the server ends the
    /// connection. After an error nothing can be sent; replies that are kept can still be read.
    pub async fn reply(&mut self) -> Result<Reply> {
        loop {
            if let Some(reply) = self.arrived.pop_front() {
                return Ok(reply);
            }
            if let Some(reply) = self.transfer().await? {
                return Ok(reply);
            }
        }
    }

    /// The next reply, if one has arrived already.
    pub async fn arrived(&mut self) -> Result<Option<Reply>> {
        match self.arrived.pop_front() {
            Some(reply) => Ok(Some(reply)),
            None => self.just_arrived().await,
        }
    }

    /// The next reply behind those that are kept, if it has arrived already.
    async fn just_arrived(&mut self) -> Result<Option<Reply>> {
        // Lets the runtime poll the socket.
        tokio::task::yield_now().await;
        poll_immediate(next_reply(&mut self.reader, &self.server, self.namespace.as_ref())).await.transpose()
    }

    /// Sends the end of the stream, without waiting for that of the server.
    pub async fn close(&mut self) {
        // Errors are ignored: a broken connection has ended.
        let _ = self.writer.shutdown().await;
    }

    /// Closes the connection, and returns when the server has closed its end.
    pub async fn finish(&mut self) -> Result<()> {
        self.close().await;
        while self.reader.frame().await?.is_some() {}
        Ok(())
    }

    /// Sends a request while none is in flight, and returns its reply.
    ///
    /// # Errors
    /// [`Error::Remote`] with the server's error; errors of [`RequestPipeline::send`] and [`RequestPipeline::reply`].
    pub async fn call(&mut self, deadline_ms: u32, table: Option<&str>, body: RequestBody) -> Result<ReplyBody> {
        let id = self.send(deadline_ms, table, body)?;
        let reply = self.reply().await?;
        if reply.id != id {
            return Err(Error::protocol(format!(
                "{} answered request {} while request {id} was in flight",
                self.server.peer, reply.id
            )));
        }
        answer(reply.body)
    }

    /// Writes the queue and reads a reply concurrently, until either is done; `None` if the queue is written. Writing alone
    /// could deadlock: the server stops reading when its own replies are not read.
    async fn transfer(&mut self) -> Result<Option<Reply>> {
        if self.queue.is_empty() {
            return next_reply(&mut self.reader, &self.server, self.namespace.as_ref()).await.map(Some);
        }
        let written = async {
            while let Some(outgoing) = self.queue.front_mut() {
                write_frame(outgoing, &mut self.writer, &self.server.peer).await?;
                self.queue.pop_front();
            }
            Ok(())
        };
        let error = tokio::select! {
            // The order would be random otherwise, and a simulated world would not repeat itself.
            biased;
            written = written => match written {
                Ok(()) => return Ok(None),
                Err(error) => error,
            },
            reply = next_reply(&mut self.reader, &self.server, self.namespace.as_ref()) => return reply.map(Some),
        };
        // The server may have sent the reason before it closed the connection.
        match self.just_arrived().await {
            Ok(Some(reply)) => Ok(Some(reply)),
            Err(said) if !is_broken(&said) => Err(said),
            _ => Err(error),
        }
    }
}

/// The next reply to a request. Cancel safe.
async fn next_reply<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    server: &ServerWait,
    namespace: Option<&Namespace>,
) -> Result<Reply> {
    loop {
        let Some(frame) = reader.frame().await? else {
            return Err(Error::Disconnected { address: server.peer.clone(), reason: "the server closed it".into() });
        };
        let mut reply = decode_reply(frame)?;
        if let Some(namespace) = namespace {
            namespace.limit(&mut reply.body);
        }
        server.note(&reply);
        match reply.body {
            ReplyBody::Waiting(_) => {}
            // An error about the whole connection, which the server then closes.
            body if reply.id == NO_REQUEST => {
                return match answer(body) {
                    // A frame of this client paused for longer than the server waits: the requests may go over another connection.
                    Err(Error::RemoteDeadline { waited_for }) => {
                        Err(Error::Disconnected { address: server.peer.clone(), reason: waited_for.to_string() })
                    }
                    body => Ok(Reply { id: NO_REQUEST, body: body? }),
                };
            }
            _ => return Ok(reply),
        }
    }
}

/// Converts an error reply to [`Error::Remote`], or to the error of a wait that ended.
pub fn answer(body: ReplyBody) -> Result<ReplyBody> {
    match body {
        ReplyBody::Error { code, message, waited_for } => Err(match (code, waited_for) {
            (ErrorCode::Deadline, Some(waited_for)) => Error::RemoteDeadline { waited_for },
            (code, _) => Error::Remote { code, message },
        }),
        body => Ok(body),
    }
}

/// The content of a reply of the expected kind.
pub fn expect<R: TryFrom<ReplyBody, Error = ReplyBody>>(body: ReplyBody) -> Result<R> {
    R::try_from(body).map_err(|other| unexpected(&other))
}

/// The error for a reply of the wrong kind.
pub fn unexpected(body: &ReplyBody) -> Error {
    Error::protocol(format!("the server answered with {:?}", body.name()))
}

/// Broken connection, or a restarting server: a new connection may help.
pub fn is_broken(error: &Error) -> bool {
    matches!(error, Error::Closed(_)) || matches!(error.code(), ErrorCode::Disconnected | ErrorCode::Connect)
}

/// Connection refused. The server may still be starting.
pub fn is_absent(error: &Error) -> bool {
    use std::io::ErrorKind;
    let absent = [
        ErrorKind::ConnectionRefused,
        // The Unix socket's file is missing.
        ErrorKind::NotFound,
        ErrorKind::HostUnreachable,
        ErrorKind::NetworkUnreachable,
    ];
    matches!(error, Error::Connect { source, .. } if absent.contains(&source.kind()))
}

/// Connect timeout.
pub fn is_timeout(error: &Error) -> bool {
    matches!(error, Error::Connect { source, .. } if source.kind() == std::io::ErrorKind::TimedOut)
}

/// The server is at a limit of connections.
pub fn is_busy(error: &Error) -> bool {
    matches!(error, Error::Remote { code, .. } if *code == ErrorCode::Connect)
}

/// The connection ended without a reason from the server.
pub fn is_cut_off(error: &Error) -> bool {
    matches!(error, Error::Disconnected { .. })
}

/// TLS alert record, with which a TLS server answers plain bytes: content type 21, version 3.x, length 2 (RFC 8446, sections 5.1 and 6).
fn is_tls_alert(bytes: &[u8]) -> bool {
    matches!(bytes, [21, 3, _, 0, 2, ..])
}

/// The server was closed for good.
pub fn is_closed(error: &Error) -> bool {
    matches!(error, Error::Remote { code, .. } if *code == ErrorCode::Closed)
}

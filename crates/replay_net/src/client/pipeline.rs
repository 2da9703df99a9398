//! Requests and replies over any stream: the part of the client that knows neither sockets nor waiting.
//! Everything here may be dropped between two polls and called again.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf, split};

use crate::framing::{FrameReader, write_frame};
use replay_core::error::{Error, ErrorCode, Result};
use replay_wire::auth::{self, Role};
use replay_wire::{
    Frame, Hello, Limits, NO_REQUEST, Outgoing, PROTOCOL, RELEASE, Reply, ReplyBody, Request,
    RequestBody, decode_reply, encode_request,
};

/// A connection that pipelines: requests queue up, replies come by their ids.
pub struct Link<S> {
    reader: FrameReader<BufReader<ReadHalf<S>>>,
    writer: WriteHalf<S>,
    queue: VecDeque<Outgoing>,
    arrived: VecDeque<Reply>,
    peer: String,
    last_id: u64,
    max_frame_bytes: u64,
}

/// What [`Link::turn`] came to.
enum Turn {
    Written,
    Reply(Reply),
}

/// What the server said of itself in the handshake.
#[derive(Debug, Clone, Copy)]
pub struct Greeting {
    /// Keys of another incarnation name nothing.
    pub incarnation: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Link<S> {
    /// Speaks over `stream` to a server that errors call `peer`; frames up to `limits` are taken from it.
    pub fn new(stream: S, limits: Limits, peer: String) -> Self {
        let (reader, writer) = split(stream);
        Link {
            reader: FrameReader::new(BufReader::new(reader), limits, peer.clone()),
            writer,
            queue: VecDeque::new(),
            arrived: VecDeque::new(),
            peer,
            last_id: NO_REQUEST,
            max_frame_bytes: Limits::HANDSHAKE.max_frame_bytes,
        }
    }

    /// Shows who both ends are, and that they speak the same protocol.
    ///
    /// # Errors
    /// [`Error::Version`] that names both versions; [`Error::Authentication`] when either end does not know
    /// the token.
    pub async fn handshake(&mut self, token: Option<&str>) -> Result<Greeting> {
        let nonce = auth::nonce()?;
        let hello = RequestBody::Hello(Hello {
            protocol: PROTOCOL,
            release: RELEASE.into(),
            nonce,
        });
        let challenge = match self.call(0, hello).await? {
            ReplyBody::Challenge(challenge) => challenge,
            other => return Err(unexpected(&other)),
        };
        if challenge.protocol != PROTOCOL {
            return Err(Error::Version {
                server: challenge.protocol,
                server_release: challenge.release,
                client: PROTOCOL,
                client_release: RELEASE.into(),
            });
        }
        let peer = &self.peer;
        let refuse = |reason: String| Err(Error::Authentication(reason));
        let proof = match (token, challenge.proof) {
            (None, _) if challenge.token_needed => {
                return refuse(format!(
                    "{peer} asks for a token, and none was given: pass one, or set the environment variable INNET_TOKEN"
                ));
            }
            (None, _) => None,
            (Some(_), None) => {
                return refuse(format!(
                    "{peer} did not show that it knows the token: start it with the token, or connect without one (INNET_TOKEN counts, too)"
                ));
            }
            (Some(token), Some(proof)) => {
                if !auth::verify(token, Role::Server, &nonce, &challenge.nonce, &proof) {
                    return refuse(format!("{peer} has another token"));
                }
                Some(auth::proof(token, Role::Client, &nonce, &challenge.nonce))
            }
        };
        match self.call(0, RequestBody::Authenticate(proof)).await? {
            ReplyBody::Welcome => {}
            other => return Err(unexpected(&other)),
        }
        self.max_frame_bytes = challenge.max_frame_bytes;
        Ok(Greeting {
            incarnation: challenge.incarnation,
        })
    }

    /// Queues a request and returns its id.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the server would refuse the frame: nothing is queued then.
    pub fn send(&mut self, deadline_ms: u32, body: RequestBody) -> Result<u64> {
        let id = self.last_id + 1;
        let request = Request {
            id,
            deadline_ms,
            body,
        };
        let outgoing = encode_request(&request)?;
        self.check_frame(outgoing.frame_bytes())?;
        self.queue.push_back(outgoing);
        self.last_id = id;
        Ok(id)
    }

    /// # Errors
    /// [`Error::TooLarge`] for a frame that the server would refuse.
    pub fn check_frame(&self, bytes: u64) -> Result<()> {
        if bytes > self.max_frame_bytes {
            return Err(Error::TooLarge {
                what: "a request, in bytes,",
                size: bytes,
                limit: self.max_frame_bytes,
                advice: "send less at a time (a writer: fewer streams or a smaller chunk_steps), or start the server with a larger --max-frame-bytes",
            });
        }
        Ok(())
    }

    /// Writes what is queued; replies that come in meanwhile are kept.
    ///
    /// # Errors
    /// Those of [`Link::reply`].
    pub async fn flush(&mut self) -> Result<()> {
        while !self.queue.is_empty() {
            if let Turn::Reply(reply) = self.turn().await? {
                self.arrived.push_back(reply);
            }
        }
        Ok(())
    }

    /// The next reply, after what is queued is written.
    ///
    /// # Errors
    /// [`Error::Disconnected`], [`Error::Protocol`] and [`Error::TooLarge`]; [`Error::Remote`] where the server
    /// gives the connection up. The link is of no more use then.
    pub async fn reply(&mut self) -> Result<Reply> {
        loop {
            if let Some(reply) = self.arrived.pop_front() {
                return Ok(reply);
            }
            if let Turn::Reply(reply) = self.turn().await? {
                return Ok(reply);
            }
        }
    }

    /// The next reply that is already here.
    ///
    /// # Errors
    /// Those of [`Link::reply`].
    pub async fn arrived(&mut self) -> Result<Option<Reply>> {
        if let Some(reply) = self.arrived.pop_front() {
            return Ok(Some(reply));
        }
        // Lets the runtime look at the socket once.
        tokio::task::yield_now().await;
        let mut frame = pin!(self.reader.frame());
        let frame = poll_fn(|context| match frame.as_mut().poll(context) {
            Poll::Ready(frame) => Poll::Ready(Some(frame)),
            Poll::Pending => Poll::Ready(None),
        });
        match frame.await {
            Some(frame) => take_reply(frame, &self.peer).map(Some),
            None => Ok(None),
        }
    }

    /// Ends the connection, and returns when the server has seen the end.
    ///
    /// # Errors
    /// Those of a connection that broke: then it has ended, too.
    pub async fn finish(&mut self) -> Result<()> {
        // One that is broken shows so when it is read.
        let _ = self.writer.shutdown().await;
        while self.reader.frame().await?.is_some() {}
        Ok(())
    }

    /// Asks one question with nothing else under way.
    ///
    /// # Errors
    /// [`Error::Remote`] with the server's error; those of [`Link::send`] and [`Link::reply`].
    pub async fn call(&mut self, deadline_ms: u32, body: RequestBody) -> Result<ReplyBody> {
        let id = self.send(deadline_ms, body)?;
        let reply = self.reply().await?;
        if reply.id != id {
            return Err(Error::Protocol(format!(
                "{} answered request {} where request {id} was under way",
                self.peer, reply.id
            )));
        }
        answer(reply.body)
    }

    /// Writes what is queued and reads at the same time, until either is done: both ends may have more
    /// under way than their buffers hold.
    async fn turn(&mut self) -> Result<Turn> {
        if self.queue.is_empty() {
            return take_reply(self.reader.frame().await, &self.peer).map(Turn::Reply);
        }
        let written = async {
            while let Some(outgoing) = self.queue.front_mut() {
                write_frame(outgoing, &mut self.writer, &self.peer).await?;
                self.queue.pop_front();
            }
            Ok(())
        };
        let error = tokio::select! {
            frame = self.reader.frame() => return take_reply(frame, &self.peer).map(Turn::Reply),
            written = written => match written {
                Ok(()) => return Ok(Turn::Written),
                Err(error) => error,
            },
        };
        // A server that gives a connection up says why before it closes it.
        match self.arrived().await {
            Ok(Some(reply)) => Ok(Turn::Reply(reply)),
            Err(said) if !is_broken(&said) => Err(said),
            _ => Err(error),
        }
    }
}

fn take_reply(frame: Result<Option<Frame>>, peer: &str) -> Result<Reply> {
    let Some(frame) = frame? else {
        return Err(Error::Disconnected {
            address: peer.into(),
            reason: "the server closed it".into(),
        });
    };
    let reply = decode_reply(frame)?;
    match reply.body {
        // The connection's own error, before the server closes it.
        ReplyBody::Error { code, message } if reply.id == NO_REQUEST => {
            Err(Error::Remote { code, message })
        }
        _ => Ok(reply),
    }
}

/// The answer, or the error that it is.
pub fn answer(body: ReplyBody) -> Result<ReplyBody> {
    match body {
        ReplyBody::Error { code, message } => Err(Error::Remote { code, message }),
        body => Ok(body),
    }
}

/// An answer to another question.
pub fn unexpected(body: &ReplyBody) -> Error {
    Error::Protocol(format!("the server answered with {:?}", body.name()))
}

/// Whether another connection may do better: this one broke, or its server is going away.
pub fn is_broken(error: &Error) -> bool {
    matches!(
        error.code(),
        ErrorCode::Disconnected | ErrorCode::Connect | ErrorCode::Closed
    )
}

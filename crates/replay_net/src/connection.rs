//! The coroutine of one connection. After the handshake three parts run side by side in it, joined by
//! queues: `receive` reads frames, `answer` tries requests and keeps those that have to wait, `send` writes
//! replies from where their blobs lie. So a draw that waits holds up nothing but itself, and a client that
//! does not read holds up nobody else.

mod membership;
mod quota;
mod welcome;
mod writer_order;

use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, watch};

use membership::Membership;
use quota::{Inbox, Room, UnderWay};
use writer_order::{Lanes, Turn, lane};

use crate::framing::{FrameReader, write_frame};
use crate::service::{Outcome, Service};
use crate::stack::{Stack, until};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;
use replay_wire::handshake::Handshake;
use replay_wire::{Limits, NO_REQUEST, Outgoing, Reply, ReplyBody, Request, RequestBody};

/// Bytes read from the connection at a time; larger payloads go straight to their own buffer.
const READ_BUFFER: usize = 16 << 10;

/// After the last reply the connection is read, and what comes is thrown away, until the client closes it or
/// this time is over: closing with bytes unread would reset it and lose the reply on its way.
const LINGER: Duration = Duration::from_secs(1);

/// Longest error message: it may quote what a client sent.
const MAX_MESSAGE: usize = 4096;

/// What all connections of a server share.
pub struct Context {
    /// The behaviour.
    pub service: Service,
    /// The handshake.
    pub handshake: Handshake,
    /// Longest frame, either way.
    pub max_frame_bytes: u64,
    /// From the first byte to the welcome.
    pub handshake_deadline: Duration,
    /// For a reply to be taken, and for a frame to arrive that there is room for.
    pub write_deadline: Duration,
}

/// How far a server is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Not near.
    Serving,
    /// No new requests; those under way are answered, and those that wait are sent away.
    Draining,
    /// Connections that are still open are dropped.
    Stopped,
}

/// Completes when the server has come to `phase`.
pub async fn reached(server: &mut watch::Receiver<Phase>, phase: Phase) {
    // The sender is gone only with the server itself.
    let _ = server.wait_for(|now| *now >= phase).await;
}

/// One connection.
pub struct Connection<'a, S> {
    /// What it shares with the others.
    pub context: &'a Context,
    /// Its stack: clock and timers.
    pub stack: &'a S,
    /// The other end's name, for logs.
    pub peer: &'a str,
    /// How far the server is from its end.
    pub phase: watch::Receiver<Phase>,
}

/// A request that has arrived.
struct Received {
    request: Request,
    deadline: Instant,
    permit: UnderWay,
    _room: Room,
}

/// What a request came to.
struct Answer {
    id: u64,
    reply: Result<ReplyBody>,
    permit: UnderWay,
}

/// Replies in the order of their writing.
type Outbox = mpsc::UnboundedSender<(Outgoing, Option<UnderWay>)>;

impl<S: Stack> Connection<'_, S> {
    /// Serves `stream` until the client ends it, breaks the protocol, or the server closes.
    ///
    /// # Errors
    /// Why it ended, unless the client closed it between two frames.
    pub async fn serve<T: AsyncRead + AsyncWrite + Unpin>(&self, stream: T) -> Result<()> {
        let (read, mut write) = tokio::io::split(stream);
        let mut read = BufReader::with_capacity(READ_BUFFER, read);
        let mut frames = FrameReader::new(&mut read, Limits::HANDSHAKE, self.peer);
        let end = self.converse(&mut frames, &mut write).await;
        let linger = async {
            let _ = write.shutdown().await;
            let _ = tokio::io::copy_buf(&mut read, &mut tokio::io::sink()).await;
        };
        until(self.stack, self.stack.now() + LINGER, linger).await;
        end
    }

    /// Tells a client why it is not served.
    pub async fn refuse<T: AsyncRead + AsyncWrite + Unpin>(&self, mut stream: T, reason: &Error) {
        let reply = async {
            let _ = self.write_error(&mut stream, NO_REQUEST, reason).await;
            let _ = stream.shutdown().await;
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        };
        until(self.stack, self.stack.now() + LINGER, reply).await;
    }

    async fn converse<R, W>(&self, frames: &mut FrameReader<R>, write: &mut W) -> Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let allowed = self.context.handshake_deadline;
        let deadline = self.stack.now() + allowed;
        let mut phase = self.phase.clone();
        let welcomed = tokio::select! {
            biased;
            () = reached(&mut phase, Phase::Draining) => return Err(Error::Closed("the server")),
            welcomed = until(self.stack, deadline, self.welcome(frames, write)) => welcomed,
        };
        match welcomed {
            Some(Ok(true)) => {}
            Some(Ok(false)) => return Ok(()),
            Some(Err(error)) => return Err(error),
            None => {
                return Err(Error::Deadline {
                    waited_for: format!(
                        "the client did not finish the handshake in {} ms",
                        allowed.as_millis()
                    ),
                });
            }
        }
        frames.set_limits(Limits::new(self.context.max_frame_bytes));
        let (requests, incoming) = mpsc::channel(1);
        let (replies, outbox) = mpsc::unbounded_channel();
        let work = async {
            let mut answer = pin!(self.answer(incoming, replies));
            tokio::select! {
                biased;
                end = &mut answer => end,
                () = self.receive(frames, requests) => answer.await,
            }
        };
        // An error of `work` has its reply in the outbox, which `send` still writes; an error of `send`
        // means that nobody listens, and ends all.
        let (end, ()) = tokio::try_join!(async { Ok(work.await) }, self.send(outbox, write))?;
        end
    }

    async fn write_reply<W: AsyncWrite + Unpin>(
        &self,
        write: &mut W,
        id: u64,
        body: ReplyBody,
    ) -> Result<()> {
        let mut outgoing = replay_wire::encode_reply(Reply { id, body })?;
        write_frame(&mut outgoing, write, self.peer).await
    }

    async fn write_error<W: AsyncWrite + Unpin>(
        &self,
        write: &mut W,
        id: u64,
        error: &Error,
    ) -> Result<()> {
        self.write_reply(write, id, error_reply(error)).await
    }

    /// Reads requests until the client ends the connection or sends what is none.
    async fn receive<R: AsyncRead + Unpin>(
        &self,
        frames: &mut FrameReader<R>,
        requests: mpsc::Sender<Result<Received>>,
    ) {
        let mut inbox = Inbox::new(self.context.service.receive_rooms());
        loop {
            let received = self.receive_one(frames, &mut inbox).await.transpose();
            let Some(received) = received else { return };
            let last = received.is_err();
            if requests.send(received).await.is_err() || last {
                return;
            }
        }
    }

    async fn receive_one<R: AsyncRead + Unpin>(
        &self,
        frames: &mut FrameReader<R>,
        inbox: &mut Inbox<'_>,
    ) -> Result<Option<Received>> {
        let permit = inbox.next_request().await;
        let Some(header) = frames.header().await? else {
            return Ok(None);
        };
        let bytes = header.frame_bytes();
        let room = inbox.reserve(bytes).await;
        // From here on: the room may have been others' for as long as their pushes had to wait.
        let deadline = self.stack.now() + self.context.write_deadline;
        let arrived = until(self.stack, deadline, frames.body()).await;
        let frame = arrived.unwrap_or_else(|| {
            Err(Error::Deadline {
                waited_for: format!(
                    "a frame of {bytes} bytes did not arrive within {} ms",
                    self.context.write_deadline.as_millis()
                ),
            })
        })?;
        let request = replay_wire::decode_request(frame)?;
        self.context.service.counters.request(bytes);
        let room = inbox.admit(&request.body, room)?;
        let allowed = Duration::from_millis(request.deadline_ms.into());
        Ok(Some(Received {
            deadline: self.stack.now() + allowed,
            request,
            permit,
            _room: room,
        }))
    }

    /// Tries each request when it arrives, and those that have to wait again when their table changes. The
    /// first frame that is no request ends it.
    async fn answer(
        &self,
        mut incoming: mpsc::Receiver<Result<Received>>,
        replies: Outbox,
    ) -> Result<()> {
        let membership = Membership::new(&self.context.service, self.phase.clone());
        let mut waiting = FuturesUnordered::new();
        let mut lanes = Lanes::default();
        let mut phase = self.phase.clone();
        loop {
            tokio::select! {
                biased;
                () = reached(&mut phase, Phase::Draining) => break,
                Some(answer) = waiting.next() => self.reply(&replies, answer),
                received = incoming.recv() => match received {
                    None => return Ok(()),
                    Some(Ok(received)) => match self.try_at_once(received, &mut lanes, &membership) {
                        Tried::Answered(answer) => self.reply(&replies, answer),
                        Tried::Waits(received, turn) => waiting.push(self.wait(received, turn, &membership)),
                    },
                    Some(Err(error)) => {
                        self.count_bad_frame(&error);
                        self.reply_error(&replies, NO_REQUEST, &error, None);
                        return Err(error);
                    }
                },
            }
        }
        while let Some(answer) = waiting.next().await {
            self.reply(&replies, answer);
        }
        Ok(())
    }

    fn try_at_once(
        &self,
        received: Received,
        lanes: &mut Lanes,
        membership: &Membership<'_>,
    ) -> Tried {
        let body = &received.request.body;
        let lane = lane(body);
        if lane.is_none_or(|writer| lanes.is_free(writer)) {
            let last = received.request.deadline_ms == 0;
            let reply = match membership.attempt(body, last) {
                Ok(Outcome::Ready(reply)) => Some(Ok(reply)),
                Ok(Outcome::Blocked { waited_for, .. }) if last => {
                    Some(Err(Error::Deadline { waited_for }))
                }
                Ok(Outcome::Blocked { .. }) => None,
                Err(error) => Some(Err(error)),
            };
            if let Some(reply) = reply {
                log_opened(body, &reply);
                return Tried::Answered(Answer {
                    id: received.request.id,
                    reply,
                    permit: received.permit,
                });
            }
        }
        let turn = lane.map(|writer| lanes.enter(writer)).unwrap_or_default();
        Tried::Waits(received, turn)
    }

    /// Answers a request when its turn has come and what it waits for lets it through, or at its deadline.
    async fn wait(&self, received: Received, turn: Turn, membership: &Membership<'_>) -> Answer {
        let Turn { ahead, done } = turn;
        if let Some(ahead) = ahead {
            // It ends by being dropped.
            let _ = ahead.await;
        }
        let reply = self.wait_for_change(&received, membership).await;
        drop(done);
        Answer {
            id: received.request.id,
            reply,
            permit: received.permit,
        }
    }

    async fn wait_for_change(
        &self,
        received: &Received,
        membership: &Membership<'_>,
    ) -> Result<ReplyBody> {
        let service = &self.context.service;
        let body = &received.request.body;
        let mut phase = self.phase.clone();
        let mut listening = None;
        loop {
            if *phase.borrow_and_update() >= Phase::Draining {
                return Err(Error::Closed("the server"));
            }
            let last = self.stack.now() >= received.deadline;
            let by = match membership.attempt(body, last)? {
                Outcome::Ready(reply) => return Ok(reply),
                Outcome::Blocked { waited_for, .. } if last => {
                    return Err(Error::Deadline { waited_for });
                }
                Outcome::Blocked { by, .. } => by,
            };
            let Some(changed) = listening.take() else {
                // It may have changed since the attempt: listen, then look again.
                listening = Some(service.changed(&by)?);
                continue;
            };
            let again = self.stack.now() + Wait::CHECK_EVERY;
            tokio::select! {
                biased;
                () = reached(&mut phase, Phase::Draining) => {}
                () = changed => {}
                () = self.stack.sleep_until(again.min(received.deadline)) => {}
            }
        }
    }

    /// Counts what ended a connection, if it was a frame that is no request here.
    fn count_bad_frame(&self, error: &Error) {
        if matches!(error, Error::Protocol(_) | Error::TooLarge { .. }) {
            self.context.service.counters.bad_frame();
        }
    }

    fn reply(&self, replies: &Outbox, answer: Answer) {
        let Answer { id, reply, permit } = answer;
        let outgoing = reply.and_then(|body| {
            let outgoing = replay_wire::encode_reply(Reply { id, body })?;
            match outgoing.frame_bytes() {
                size if size > self.context.max_frame_bytes => Err(Error::TooLarge {
                    what: "a reply, in bytes,",
                    size,
                    limit: self.context.max_frame_bytes,
                    advice: "ask for less at a time, or start the server with a larger --max-frame-bytes",
                }),
                _ => Ok(outgoing),
            }
        });
        match outgoing {
            // A connection whose sender is gone has no use for replies.
            Ok(outgoing) => drop(replies.send((outgoing, Some(permit)))),
            Err(error) => self.reply_error(replies, id, &error, Some(permit)),
        }
    }

    fn reply_error(&self, replies: &Outbox, id: u64, error: &Error, permit: Option<UnderWay>) {
        tracing::debug!(id, %error, "request failed");
        self.context.service.counters.error();
        let body = error_reply(error);
        match replay_wire::encode_reply(Reply { id, body }) {
            Ok(outgoing) => drop(replies.send((outgoing, permit))),
            Err(error) => tracing::error!(id, %error, "an error could not be encoded"),
        }
    }

    /// Writes replies until nobody makes any more. A client that does not take one in time is an error.
    async fn send<W: AsyncWrite + Unpin>(
        &self,
        mut outbox: mpsc::UnboundedReceiver<(Outgoing, Option<UnderWay>)>,
        write: &mut W,
    ) -> Result<()> {
        let counters = &self.context.service.counters;
        while let Some((mut outgoing, permit)) = outbox.recv().await {
            let allowed = self.context.write_deadline;
            let deadline = self.stack.now() + allowed;
            match until(
                self.stack,
                deadline,
                write_frame(&mut outgoing, write, self.peer),
            )
            .await
            {
                Some(written) => written?,
                None => {
                    counters.slow_reader();
                    return Err(Error::Deadline {
                        waited_for: format!(
                            "the client did not take a reply of {} bytes in {} ms",
                            outgoing.frame_bytes(),
                            allowed.as_millis()
                        ),
                    });
                }
            }
            counters.sent(outgoing.frame_bytes());
            drop(permit);
        }
        Ok(())
    }
}

enum Tried {
    Answered(Answer),
    Waits(Received, Turn),
}

/// Names the writer behind a connection: the lines that follow in its span are about this writer.
fn log_opened(request: &RequestBody, reply: &Result<ReplyBody>) {
    if let (RequestBody::OpenWriter { open, .. }, Ok(ReplyBody::Writer(opened))) = (request, reply)
    {
        tracing::Span::current().record("writer", &open.name);
        tracing::info!(
            table = open.table,
            streams = open.streams,
            epoch = opened.epoch,
            last_sequence = opened.last_sequence,
            "writer opened"
        );
    }
}

fn error_reply(error: &Error) -> ReplyBody {
    let mut message = error.to_string();
    if message.len() > MAX_MESSAGE {
        let end = (0..=MAX_MESSAGE)
            .rev()
            .find(|&i| message.is_char_boundary(i));
        message.truncate(end.unwrap_or(0));
        message.push_str("...");
    }
    ReplyBody::Error {
        code: error.code(),
        message,
    }
}

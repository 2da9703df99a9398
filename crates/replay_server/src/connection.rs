//! The coroutine of one connection. After the handshake it runs three parts concurrently, joined by queues: `receive`
//! reads frames, `answer` tries requests and keeps the blocked ones, `send` writes replies without copying their blobs.
//! A blocked request delays no other one, and a client that does not read delays no other client.

mod dispatch;
mod in_flight;

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, watch};

use dispatch::Dispatcher;
use in_flight::{FrameReservation, Position, ReceiveQuota, ReplySender, RequestPermit, WriterOrder};

use crate::reply_budget::UnreadReplies;
use crate::server::Permit;
use crate::service::{NumberedTable, NumberedTables, Service};
use base::system;
use base::wait::Wait;
use replay_core::error::WaitReason;
use replay_core::replay::{OpenWriter, SampleRequest, WriterOpened};
use replay_core::table::leases::Reader;
use replay_core::table::{Attempt, PendingCall, Table, Turn, WriterConnection};
use replay_link::error::{Error, Result};
use replay_link::framing::FrameReader;
use replay_link::stack::{Stack, until};
use replay_wire::auth::{ChannelBinding, Handshake};
use replay_wire::{ErrorCode, FrameLimits, NO_REQUEST, OpenOrResume, ReplyBody, Request, RequestBody, Role};

/// Bytes of one read. Larger payloads are read into their own buffer directly.
const READ_BUFFER: usize = 16 << 10;

/// Interval of [`ReplyBody::Waiting`] to a client whose connection is not read; a waiting request has [`Wait::REPORT_AFTER`]. Without
/// reading, the server cannot see the end of the stream behind a killed client's last bytes. A reply makes the client's kernel answer with
/// a reset.
const WAITING_EVERY: Duration = Duration::from_secs(1);

/// Longest wait for the client to close the connection after the last reply. Meanwhile its bytes are read and dropped:
/// closing a socket with unread bytes resets it, and the client would lose the reply.
const LINGER: Duration = Duration::from_secs(1);

/// State that all connections of a server share.
pub struct ServerContext {
    /// Answers requests.
    pub service: Service,
    /// Answers handshakes.
    pub handshake: Handshake,
    /// Longest frame in either direction.
    pub max_frame_bytes: u64,
    /// Time for the client to read a reply, and for a frame to arrive once memory is reserved for it.
    pub write_deadline: Duration,
    /// Final shutdown: clients must not reconnect. Written before the phase changes, whose lock orders both.
    pub closed: AtomicBool,
}

impl ServerContext {
    /// Error of requests and handshakes cut off by the shutdown. Clients reconnect unless it is [`Error::Closed`].
    fn end(&self) -> Error {
        // Relaxed, as the store in `Server::close`: the phase's lock orders both.
        if self.closed.load(Ordering::Relaxed) {
            return Error::Closed("the server");
        }
        Error::Disconnected { address: "the server".into(), reason: "it is shutting down".into() }
    }
}

/// Phase of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Restores a snapshot and binds its addresses.
    Starting,
    /// No shutdown yet.
    Serving,
    /// No new requests. Running requests are answered; blocked ones fail with an error.
    Draining,
    /// Open connections are dropped.
    Stopped,
}

/// Completes when the server is in `phase` or a later one.
pub async fn reached(server: &mut watch::Receiver<Phase>, phase: Phase) {
    // An error means that the server was dropped.
    let _ = server.wait_for(|now| *now >= phase).await;
}

/// Serves one connection.
pub struct ConnectionHandler<'a, S> {
    /// State shared with the other connections.
    pub context: &'a ServerContext,
    /// Stack of the connection: clock and timers.
    pub stack: &'a S,
    /// Name of the client, for logs.
    pub peer: &'a str,
    /// Phase of the server.
    pub phase: watch::Receiver<Phase>,
    /// Admission permit of the connection.
    pub permit: &'a Permit,
    /// Deadline of the handshake.
    pub handshake_deadline: Instant,
    /// The connection, as tables know it from its writers.
    pub writers: Arc<WriterConnection>,
    /// The connection as the reader of its leased batches.
    pub reader: Reader,
}

impl<S> Drop for ConnectionHandler<'_, S> {
    /// Disconnects the writers and returns leased batches, also of a connection that panicked or whose thread has ended.
    fn drop(&mut self) {
        self.writers.end(system::now());
        for table in self.context.service.memory.tables() {
            table.return_leases(&self.reader);
        }
    }
}

/// A received request.
struct Received {
    request: Request,
    /// The table that it is about.
    table: Option<Rc<NumberedTable>>,
    /// Time at which its frame was complete.
    arrived: Instant,
    /// Its deadline.
    until: Instant,
    permit: RequestPermit,
    _reservation: FrameReservation,
}

impl Received {
    /// The request as a call that may block.
    fn call(&self) -> PendingCall<Error> {
        let ended = |reason: WaitReason| Error::deadline(reason);
        PendingCall::new(Turn::default(), Some(self.until), ended)
    }
}

impl<S: Stack> ConnectionHandler<'_, S> {
    /// Serves `stream` until the client closes it or breaks the protocol, or the server shuts down. Over TLS, `channel_binding` identifies
    /// the TLS session.
    ///
    /// # Errors
    /// The reason for the end, unless the client closed the connection between two frames.
    pub async fn serve<T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: T,
        channel_binding: Option<ChannelBinding>,
    ) -> Result<()> {
        let (read, mut write) = tokio::io::split(stream);
        let mut read = BufReader::with_capacity(READ_BUFFER, read);
        let mut frames = FrameReader::new(&mut read, FrameLimits::HANDSHAKE, self.peer);
        let end = self.converse(&mut frames, &mut write, channel_binding).await;
        let linger = async {
            let _ = write.shutdown().await;
            let _ = tokio::io::copy_buf(&mut read, &mut tokio::io::sink()).await;
        };
        until(self.stack, self.stack.now() + LINGER, linger).await;
        end
    }

    /// Sends `reason` to a client that is not served.
    pub async fn refuse<T: AsyncRead + AsyncWrite + Unpin>(&self, mut stream: T, reason: &Error) {
        let reply = async {
            let _ = self.write_reply(&mut stream, NO_REQUEST, reason.into()).await;
            let _ = stream.shutdown().await;
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        };
        until(self.stack, self.stack.now() + LINGER, reply).await;
    }

    async fn converse<R, W>(
        &self,
        frames: &mut FrameReader<R>,
        write: &mut W,
        channel_binding: Option<ChannelBinding>,
    ) -> Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut phase = self.phase.clone();
        let welcome = self.welcome(frames, write, channel_binding);
        let welcomed = tokio::select! {
            biased;
            () = reached(&mut phase, Phase::Draining) => return Err(self.context.end()),
            welcomed = until(self.stack, self.handshake_deadline, welcome) => welcomed,
        };
        let Some(role) = welcomed.ok_or_else(late_handshake)?? else {
            return Ok(());
        };
        // Not before the welcome: see `StrangerLog`.
        tracing::info!("connection opened");
        frames.set_limits(FrameLimits::new(self.context.max_frame_bytes));
        frames.allow_reset();
        let (requests, incoming) = mpsc::channel(1);
        let unread = UnreadReplies::new(self.context.service.reply_budgets.of(role));
        let (replies, outbox) = ReplySender::new(Rc::clone(&unread));
        let work = async {
            let mut answer = pin!(self.answer(incoming, replies.clone(), Rc::clone(&unread), role));
            tokio::select! {
                biased;
                end = &mut answer => end,
                () = self.receive(frames, requests, replies) => answer.await,
            }
        };
        // An error of `work` is already in the outbox, which `send` still writes. An error of `send` ends the connection
        // at once: the client does not read.
        match tokio::try_join!(async { Ok(work.await) }, self.send(outbox, &unread, write)) {
            Ok((end, ())) => end,
            Err(Error::Closed(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reads requests until the client ends the connection or sends an invalid frame.
    async fn receive<R: AsyncRead + Unpin>(
        &self,
        frames: &mut FrameReader<R>,
        requests: mpsc::Sender<Result<Received>>,
        replies: ReplySender,
    ) {
        let service = &self.context.service;
        let mut quota = ReceiveQuota::new(&service.memory, &service.receive_budgets);
        let mut tables = NumberedTables::default();
        loop {
            let received = self.receive_one(frames, &mut quota, &mut tables, &replies).await;
            let received = received.transpose();
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
        quota: &mut ReceiveQuota<'_>,
        tables: &mut NumberedTables,
        replies: &ReplySender,
    ) -> Result<Option<Received>> {
        let permit = self.unread_until(replies, in_flight::ANSWERS, quota.next_request()).await;
        let Some(header) = frames.header().await? else {
            return Ok(None);
        };
        let bytes = header.frame_bytes();
        let reservation = self.unread_until(replies, in_flight::RECEIVE_MEMORY, quota.reserve(header)).await;
        // Starts after the reservation, which may have waited for other connections' pushes.
        let deadline = self.stack.now() + self.context.write_deadline;
        let arrived = until(self.stack, deadline, frames.body()).await;
        let late = || {
            Error::deadline(format!(
                "a frame of {bytes} bytes did not arrive within {} ms",
                self.context.write_deadline.as_millis()
            ))
        };
        let request = replay_wire::decode_request(arrived.ok_or_else(late)??)?;
        self.context.service.counters.requests.add(1);
        self.context.service.counters.bytes_received.add(bytes);
        let table = tables.of(&request, &self.context.service.memory)?;
        let reservation = quota.admit(&request.body, table.as_deref(), reservation)?;
        let arrived = self.stack.now();
        Ok(Some(Received {
            table,
            arrived,
            // A share of a batch never waits, also not for room for its reply: other servers may have theirs.
            until: match &request.body {
                RequestBody::Sample(SampleRequest { share: Some(_), .. }) => arrived,
                _ => arrived + Duration::from_millis(request.deadline_ms.into()),
            },
            request,
            permit,
            _reservation: reservation,
        }))
    }

    /// Waits for `space` without reading the connection (backpressure). Meanwhile sends the client the `reason`, which also shows whether
    /// the client is still there.
    async fn unread_until<T>(&self, replies: &ReplySender, reason: WaitReason, space: impl Future<Output = T>) -> T {
        let mut space = pin!(space);
        // Fast path: usually there is space, and no timer is needed.
        if let Some(space) = space.as_mut().now_or_never() {
            return space;
        }
        loop {
            let next = self.stack.now() + WAITING_EVERY;
            if let Some(space) = until(self.stack, next, &mut space).await {
                return space;
            }
            self.queue(replies, NO_REQUEST, ReplyBody::Waiting(reason.clone()), None);
        }
    }

    /// Tries each request on arrival, and a blocked one again when its table changes. The first invalid frame ends the
    /// connection.
    async fn answer(
        &self,
        mut incoming: mpsc::Receiver<Result<Received>>,
        replies: ReplySender,
        unread: Rc<UnreadReplies>,
        role: Role,
    ) -> Result<()> {
        let dispatcher = Dispatcher::new(&self.context.service, unread, self.phase.clone(), Arc::clone(&self.reader));
        let mut waiting = FuturesUnordered::new();
        let mut writers = WriterOrder::default();
        let mut phase = self.phase.clone();
        loop {
            tokio::select! {
                biased;
                () = reached(&mut phase, Phase::Draining) => break,
                Some((received, reply)) = waiting.next() => self.reply(&replies, received, reply),
                received = incoming.recv() => match received {
                    None => return Ok(()),
                    Some(Ok(received)) => {
                        let about_table = self.answer_about_table(&received, role);
                        let answered = self.meanwhile(about_table, &mut waiting, &replies).await;
                        let mut call = received.call();
                        let at_once = || self.try_at_once(&received, &mut writers, &dispatcher, &mut call);
                        match answered.or_else(at_once) {
                            Some(reply) => self.reply(&replies, received, reply),
                            None => {
                                let position = writers.enter(&received.request.body);
                                waiting.push(self.wait(received, position, call, &dispatcher, &replies));
                            }
                        }
                    }
                    Some(Err(error)) => {
                        self.count_bad_frame(&error);
                        self.reply_error(&replies, NO_REQUEST, &error, None);
                        return Err(error);
                    }
                },
            }
        }
        while let Some((received, reply)) = waiting.next().await {
            self.reply(&replies, received, reply);
        }
        let end = self.context.end();
        if matches!(end, Error::Closed(_)) {
            // Tells idle clients too: they read this error at their next call.
            self.reply_error(&replies, NO_REQUEST, &end, None);
        }
        Ok(())
    }

    /// Runs `work`, and answers `waiting` requests meanwhile.
    async fn meanwhile<T>(
        &self,
        work: impl Future<Output = T>,
        waiting: &mut FuturesUnordered<impl Future<Output = (Received, Result<ReplyBody>)>>,
        replies: &ReplySender,
    ) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                Some((received, reply)) = waiting.next() => self.reply(replies, received, reply),
            }
        }
    }

    /// Answers requests that the role does not allow and, on another thread, requests to create, empty or drop a table or to save a
    /// snapshot; `None` for other requests. The connection's later requests are tried afterwards, in order of arrival.
    async fn answer_about_table(&self, received: &Received, role: Role) -> Option<Result<ReplyBody>> {
        let refused = self.context.service.refuse(&received.request.body, role);
        if refused.is_some() {
            return refused;
        }
        if received.request.body == RequestBody::Snapshot {
            return Some(self.save_snapshot().await);
        }
        let tables = self.context.service.table_request(&received.request.body)?;
        let _alone = tables.one_at_a_time.lock().await;
        let (tables, request) = (Arc::clone(tables), received.request.body.clone());
        let answer = self.stack.run_blocking(move || tables.answer(&request));
        Some(answer.await.and_then(|reply| reply))
    }

    async fn save_snapshot(&self) -> Result<ReplyBody> {
        let snapshots = Arc::clone(self.context.service.snapshots()?);
        let save = self.stack.run_blocking(move || snapshots.save_on_request());
        save.await?.map(|()| ReplyBody::Done)
    }

    /// Tries a request on arrival; `None` if it has to wait, for an earlier one of its writer or for a change.
    fn try_at_once(
        &self,
        received: &Received,
        writers: &mut WriterOrder,
        dispatcher: &Dispatcher<'_>,
        call: &mut PendingCall<Error>,
    ) -> Option<Result<ReplyBody>> {
        let body = &received.request.body;
        if !writers.is_free(body) {
            return None;
        }
        let table = received.table.as_deref();
        let attempt = |last, turn: &mut Turn| dispatcher.attempt(body, table, last, turn);
        let reply = match call.attempt(|| received.arrived, attempt) {
            Ok(Attempt::Blocked(_)) => return None,
            Ok(Attempt::Ready(reply)) => Ok(reply),
            Err(error) => Err(error),
        };
        if let (RequestBody::OpenWriter(OpenOrResume { open, .. }), Ok(ReplyBody::Writer(opened))) = (body, &reply) {
            // An error means that the table was dropped since.
            if let Some(Ok(table)) = table.map(|table| table.get(&self.context.service.memory)) {
                table.writers().attach(open.writer, &self.writers);
                log_opened(&table, open, opened);
            }
        }
        Some(reply)
    }

    /// Answers a request after its writer's earlier ones, once it is no longer blocked, or at its deadline.
    async fn wait(
        &self,
        received: Received,
        position: Position,
        call: PendingCall<Error>,
        dispatcher: &Dispatcher<'_>,
        replies: &ReplySender,
    ) -> (Received, Result<ReplyBody>) {
        let Position { ahead, done } = position;
        if let Some(ahead) = ahead {
            // An error is the normal end: the sender is dropped.
            let _ = ahead.await;
        }
        let reply = self.wait_for_change(&received, call, dispatcher, replies).await;
        drop(done);
        (received, reply)
    }

    /// Tries a request until it is no longer blocked, or until its deadline. Meanwhile the client is sent the reason.
    async fn wait_for_change(
        &self,
        received: &Received,
        mut call: PendingCall<Error>,
        dispatcher: &Dispatcher<'_>,
        replies: &ReplySender,
    ) -> Result<ReplyBody> {
        let (id, body) = (received.request.id, &received.request.body);
        let mut phase = self.phase.clone();
        let mut report = self.stack.now() + Wait::REPORT_AFTER;
        loop {
            if *phase.borrow_and_update() >= Phase::Draining {
                return Err(self.context.end());
            }
            let attempt = |last, turn: &mut Turn| {
                self.context.service.counters.retries.add(1);
                dispatcher.attempt(body, received.table.as_deref(), last, turn)
            };
            let listen = |turn: &Turn| dispatcher.changed(body, turn);
            let (reason, changed) = match call.poll(|| self.stack.now(), listen, attempt)? {
                Attempt::Ready(reply) => return Ok(reply),
                Attempt::Blocked(blocked) => blocked,
            };
            // Not `Wait::slices`: there is no interrupt to check, and the stack's clock may be a simulated one.
            let woken = Dispatcher::waits_for_readers(body, call.turn());
            let again = call.again(self.stack.now(), woken).unwrap_or(received.until);
            let mut woken = pin!(async {
                tokio::select! {
                    biased;
                    () = reached(&mut phase, Phase::Draining) => {}
                    () = changed => {}
                    () = self.stack.sleep_until(again) => {}
                }
            });
            while until(self.stack, report, &mut woken).await.is_none() {
                // A request that queues behind others reports its position, which needs no attempt.
                let reason = call.turn().behind().unwrap_or_else(|| reason.clone());
                self.queue(replies, id, ReplyBody::Waiting(reason), None);
                report += Wait::REPORT_AFTER;
            }
        }
    }

    /// Counts the error that ended a connection, if it was an invalid frame.
    fn count_bad_frame(&self, error: &Error) {
        if matches!(error.code(), ErrorCode::Protocol | ErrorCode::TooLarge) {
            self.context.service.counters.bad_frames.add(1);
        }
    }
}

/// The error of a handshake that took too long.
pub fn late_handshake() -> Error {
    Error::deadline("the client did not finish the handshake (handshake_deadline_ms)")
}

/// Logs an opened writer, and adds its name to the log lines of its connection.
fn log_opened(table: &Table, open: &OpenWriter, opened: &WriterOpened) {
    tracing::Span::current().record("writer", &open.name);
    tracing::info!(
        table = table.config().name,
        streams = open.streams,
        epoch = opened.epoch,
        last_sequence = opened.last_sequence,
        "writer opened"
    );
}

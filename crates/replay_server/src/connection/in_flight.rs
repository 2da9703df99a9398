//! Unanswered requests of one connection (their limits, memory for its receive buffers, the order of each writer's requests), and its replies:
//! encoded, counted in the reply budget while unread, written in order.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWrite;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use base::allocation::check_size;
use replay_core::error::WaitReason;
use replay_core::memory::Memory;
use replay_link::error::{Error, Result};
use replay_link::framing::{broken, is_closed, write_frame, write_part};
use replay_link::stack::{Stack, until};
use replay_wire::{CloseWriter, Header, OutgoingFrame, Reply, ReplyBody, RequestBody};

use super::{ConnectionHandler, Received};
use crate::receive::{Line, ReceiveBudgets, ReceivePermit};
use crate::reply_budget::{ReplyShare, UnreadReplies};
use crate::service::NumberedTable;

/// Limit of requests between their first byte and the last byte of their reply. At the limit the connection is not read (TCP backpressure).
const MAX_REQUESTS: usize = 64;

/// Limit of the bytes of unanswered long frames. At the limit the connection is not read. A longer frame is received alone.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Longest frame that is received even at the byte limit: the pushes that occupy the memory may wait for a sample request.
const SMALL_FRAME: u64 = 16 << 10;

/// Reading is paused: the connection has [`MAX_REQUESTS`] unanswered requests.
pub const ANSWERS: WaitReason =
    WaitReason::new("the server reads no further request of this connection until it has answered earlier ones");

/// Reading is paused: there is no memory for the next frame.
pub const RECEIVE_MEMORY: WaitReason = WaitReason::new(
    "the server's receive memory is full of pushes that wait: this writer has 1 MiB there, or its table its share of --max-frame-bytes",
);

/// Line of connections that write to several tables, or to a missing one: a frame's table is unknown before the frame is read. No table has
/// this name.
const SEVERAL_TABLES: &str = "";

/// Permit of one request, from its first byte until its reply is written.
pub type RequestPermit = OwnedSemaphorePermit;

/// The receiving side of one connection.
pub struct ReceiveQuota<'a> {
    memory: &'a Memory,
    budgets: &'a ReceiveBudgets,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// Line of its frames: the table's line once it has opened a writer.
    line: Line,
    writes: bool,
}

/// A frame's share of the memory's byte limit and of its connection's quota.
#[derive(Default)]
pub struct FrameReservation {
    _buffer: Option<ReceivePermit>,
    _share: Option<OwnedSemaphorePermit>,
}

impl<'a> ReceiveQuota<'a> {
    /// Quota of a new connection to this memory.
    pub fn new(memory: &'a Memory, budgets: &'a ReceiveBudgets) -> Self {
        ReceiveQuota {
            memory,
            budgets,
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            bytes: Arc::new(Semaphore::new(MAX_FRAME_BYTES as usize)),
            line: budgets.others.line(SEVERAL_TABLES),
            writes: false,
        }
    }

    /// Waits until another request may be received.
    pub async fn next_request(&self) -> RequestPermit {
        acquire(&self.requests, 1).await
    }

    /// Reserves memory for a frame and its decoded request before either is allocated. Waits for free memory unless the frame is small.
    pub async fn reserve(&self, header: Header) -> FrameReservation {
        let bytes = header.memory_bytes();
        if header.frame_bytes() <= SMALL_FRAME {
            return FrameReservation { _buffer: self.line.try_reserve(bytes), _share: None };
        }
        // The connection's own quota first: a frame that waits for it delays no other connection.
        let permits = u32::try_from(bytes).map_or(MAX_FRAME_BYTES, |bytes| bytes.min(MAX_FRAME_BYTES));
        let share = acquire(&self.bytes, permits).await;
        FrameReservation { _buffer: Some(self.line.reserve(bytes).await), _share: Some(share) }
    }

    /// Admits a received request. Returns the part of its `reservation` to hold until the answer.
    ///
    /// # Errors
    /// [`replay_wire::Error::Protocol`] for a push without an open writer: it could wait within the budget that waiting requests must not
    /// use.
    pub fn admit(
        &mut self,
        request: &RequestBody,
        table: Option<&NumberedTable>,
        reservation: FrameReservation,
    ) -> Result<FrameReservation> {
        if base::planted!(KeptReservation) {
            std::mem::forget(reservation);
            return Ok(FrameReservation::default());
        }
        match request {
            RequestBody::OpenWriter(_) => self.writes_to(table),
            RequestBody::Push(_) if !self.writes => {
                return Err(Error::protocol(
                    "a push came over a connection that has opened no writer: open the writer there first".to_owned(),
                ));
            }
            // A sample may wait, so it returns its frame's memory now.
            RequestBody::Sample(_) => return Ok(FrameReservation::default()),
            _ => {}
        }
        Ok(reservation)
    }

    fn writes_to(&mut self, table: Option<&NumberedTable>) {
        let table = table.and_then(|table| table.get(self.memory).ok());
        let table = table.as_ref().map_or(SEVERAL_TABLES, |table| &table.config().name);
        let other = self.writes && self.line.name() != table;
        self.line = self.budgets.pushes.line(if other { SEVERAL_TABLES } else { table });
        self.writes = true;
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    let semaphore = Arc::clone(semaphore);
    semaphore.acquire_many_owned(permits).await.expect("the semaphore is never closed")
}

/// Waiting requests of a connection's writers. A writer's requests are applied in the order of their arrival, even if one
/// has to wait.
#[derive(Default)]
pub struct WriterOrder {
    /// End of each writer's last waiting request.
    last: HashMap<u64, oneshot::Receiver<()>>,
}

/// Position of a request behind its writer's earlier ones.
#[derive(Default)]
pub struct Position {
    /// Ends when the request ahead is answered.
    pub ahead: Option<oneshot::Receiver<()>>,
    /// Dropped when this request is answered.
    pub done: Option<oneshot::Sender<()>>,
}

impl WriterOrder {
    /// Whether no request waits that has to be applied before this one.
    pub fn is_free(&mut self, request: &RequestBody) -> bool {
        let last = ordered_writer(request).and_then(|writer| self.last.get_mut(&writer));
        last.is_none_or(is_over)
    }

    /// Position of a request behind its writer's waiting ones.
    pub fn enter(&mut self, request: &RequestBody) -> Position {
        let Some(writer) = ordered_writer(request) else {
            return Position::default();
        };
        // Bounds the map: idle writers are forgotten, so it has at most one entry for each waiting request.
        self.last.retain(|_, last| !is_over(last));
        let (done, last) = oneshot::channel();
        Position { ahead: self.last.insert(writer, last), done: Some(done) }
    }
}

fn is_over(last: &mut oneshot::Receiver<()>) -> bool {
    !matches!(last.try_recv(), Err(oneshot::error::TryRecvError::Empty))
}

/// The writer of a request that is applied in order; `None` for other requests.
fn ordered_writer(request: &RequestBody) -> Option<u64> {
    match request {
        RequestBody::Push(push) => Some(push.writer),
        RequestBody::CloseWriter(CloseWriter { writer, .. }) => Some(*writer),
        _ => None,
    }
}

/// A reply to write.
pub(super) struct QueuedReply {
    frame: OutgoingFrame,
    _permit: Option<RequestPermit>,
    _share: ReplyShare,
}

/// Time for which a client that reads a reply may stall before it is disconnected, if replies to other clients of its role are blocked.
/// Packet loss may silence a link for a second.
const STALLED: Duration = Duration::from_secs(2);

/// Queue of replies to write, which count in the reply budget.
#[derive(Clone)]
pub(super) struct ReplySender {
    queue: mpsc::UnboundedSender<QueuedReply>,
    unread: Rc<UnreadReplies>,
}

impl ReplySender {
    /// A queue's sender and receiver.
    pub(super) fn new(unread: Rc<UnreadReplies>) -> (Self, mpsc::UnboundedReceiver<QueuedReply>) {
        let (queue, outbox) = mpsc::unbounded_channel();
        (ReplySender { queue, unread }, outbox)
    }

    /// `shared` is the memory's buffer in the frame, or empty.
    fn send(&self, frame: OutgoingFrame, permit: Option<RequestPermit>, shared: Bytes) {
        let share = self.unread.hold(frame.frame_bytes(), shared);
        // An error means that the connection has ended.
        let _ = self.queue.send(QueuedReply { frame, _permit: permit, _share: share });
    }
}

impl<S: Stack> ConnectionHandler<'_, S> {
    pub(super) async fn write_reply<W: AsyncWrite + Unpin>(
        &self,
        write: &mut W,
        id: u64,
        body: ReplyBody,
    ) -> Result<()> {
        let mut outgoing = replay_wire::encode_reply(Reply { id, body })?;
        write_frame(&mut outgoing, write, self.peer).await
    }

    pub(super) fn reply(&self, replies: &ReplySender, received: Received, reply: Result<ReplyBody>) {
        let id = received.request.id;
        let latencies = &self.context.service.counters.latency_s;
        let elapsed = self.stack.now().saturating_duration_since(received.arrived);
        latencies.record(&received.request.body, elapsed);
        let permit = Some(received.permit);
        let shared = match &reply {
            Ok(ReplyBody::Parameters(Some(parameters))) => parameters.bytes.clone(),
            _ => Bytes::new(),
        };
        let outgoing = reply.and_then(|body| {
            let outgoing = replay_wire::encode_reply(Reply { id, body })?;
            check_size(
                "a reply, in bytes,",
                outgoing.frame_bytes(),
                self.context.max_frame_bytes,
                "ask for less at a time, or start the server with a larger --max-frame-bytes",
            )?;
            Ok(outgoing)
        });
        match outgoing {
            Ok(outgoing) => replies.send(outgoing, permit, shared),
            Err(error) => self.reply_error(replies, id, &error, permit),
        }
    }

    /// Queues a short reply.
    pub(super) fn queue(&self, replies: &ReplySender, id: u64, body: ReplyBody, permit: Option<RequestPermit>) {
        match replay_wire::encode_reply(Reply { id, body }) {
            Ok(frame) => replies.send(frame, permit, Bytes::new()),
            Err(error) => tracing::error!(id, %error, "a reply could not be encoded"),
        }
    }

    pub(super) fn reply_error(&self, replies: &ReplySender, id: u64, error: &Error, permit: Option<RequestPermit>) {
        tracing::debug!(id, %error, "request failed");
        // The end of a wait is no failure: the client repeats the request, or its deadline has passed.
        if error.waited_for().is_none() {
            self.context.service.counters.errors.add(1);
        }
        self.queue(replies, id, error.into(), permit);
    }

    /// Writes replies until all senders of the queue are gone.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the client does not read a reply in time; [`Error::Closed`] when it has closed the connection.
    pub(super) async fn send<W: AsyncWrite + Unpin>(
        &self,
        mut outbox: mpsc::UnboundedReceiver<QueuedReply>,
        unread: &UnreadReplies,
        write: &mut W,
    ) -> Result<()> {
        let counters = &self.context.service.counters;
        while let Some(mut queued) = outbox.recv().await {
            let outgoing = &mut queued.frame;
            self.write_in_time(outgoing, unread, write).await?;
            counters.bytes_sent.add(outgoing.frame_bytes());
        }
        Ok(())
    }

    /// Writes a frame, unless the client is too slow.
    async fn write_in_time<W: AsyncWrite + Unpin>(
        &self,
        frame: &mut OutgoingFrame,
        unread: &UnreadReplies,
        write: &mut W,
    ) -> Result<()> {
        let (begun, bytes, allowed) = (self.stack.now(), frame.frame_bytes(), self.context.write_deadline);
        let (mut last, mut written) = (begun, 0);
        loop {
            // A client stalls if it makes no progress, or falls behind the average rate that meets the deadline.
            let average = begun + allowed.mul_f64((written as f64 / bytes.max(1) as f64).min(1.0));
            let needed = async {
                self.stack.sleep_until(average.min(last) + STALLED).await;
                unread.budget().needed().await;
            };
            let written_now = tokio::select! {
                biased;
                written = write_part(frame, write) => written,
                needed = until(self.stack, begun + allowed, needed) => {
                    self.context.service.counters.slow_readers_dropped.add(1);
                    let others = match needed {
                        Some(()) => " while other clients of its role wait for room (--reply-bytes)",
                        None => "",
                    };
                    let elapsed = (self.stack.now() - begun).as_millis();
                    let progress = format!("{written} of the {bytes} bytes of a reply within {elapsed} ms");
                    return Err(Error::deadline(format!("the client read {progress}{others}")));
                }
            };
            match written_now {
                Ok(0) => return Ok(()),
                Ok(part) => (last, written) = (self.stack.now(), written + part as u64),
                // Expected from clients that close before they have read prefetched batches.
                Err(error) if is_closed(&error) => return Err(Error::Closed("the client")),
                Err(error) => return Err(broken(self.peer, error)),
            }
        }
    }
}

//! Replies of a connection: encoded, counted in the reply budget while unread, written in order.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;

use super::quota::RequestPermit;
use super::{ConnectionHandler, Received};
use crate::reply_budget::{ReplyShare, UnreadReplies};
use base::error::check_size;
use replay_link::error::{Error, Result};
use replay_link::framing::{broken, is_closed, write_frame, write_part};
use replay_link::stack::{Stack, until};
use replay_wire::{OutgoingFrame, Reply, ReplyBody};

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

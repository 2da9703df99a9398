//! Replies of a connection: encoded, counted while they wait, written in order.

use tokio::io::AsyncWrite;
use tokio::sync::mpsc;

use super::quota::RequestPermit;
use super::{ConnectionHandler, Received};
use crate::framing::write_frame;
use crate::reply_budget::ReplyShare;
use crate::stack::{Stack, until};
use replay_core::error::{Error, ErrorCode, Result, shortened};
use replay_wire::{OutgoingFrame, Reply, ReplyBody};

/// Longest error message in bytes; a message may quote the client's data.
const MAX_MESSAGE: usize = 4096;

/// A reply to write.
pub(super) struct QueuedReply {
    frame: OutgoingFrame,
    _permit: Option<RequestPermit>,
    _share: ReplyShare,
}

/// Queue of replies to write.
pub(super) type ReplySender = mpsc::UnboundedSender<QueuedReply>;

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

    pub(super) fn reply(
        &self,
        replies: &ReplySender,
        received: Received,
        reply: Result<ReplyBody>,
    ) {
        let id = received.request.id;
        let latencies = &self.context.service.counters.latency_s;
        let elapsed = self.stack.now().saturating_duration_since(received.arrived);
        latencies.record(&received.request.body, elapsed);
        let permit = Some(received.permit);
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
            Ok(outgoing) => self.enqueue(replies, outgoing, permit),
            Err(error) => self.reply_error(replies, id, &error, permit),
        }
    }

    fn enqueue(&self, replies: &ReplySender, frame: OutgoingFrame, permit: Option<RequestPermit>) {
        let share = self
            .context
            .service
            .reply_budget()
            .hold(frame.frame_bytes());
        // An error means that the connection has ended.
        let _ = replies.send(QueuedReply {
            frame,
            _permit: permit,
            _share: share,
        });
    }

    /// Queues a short reply.
    pub(super) fn queue(
        &self,
        replies: &ReplySender,
        id: u64,
        body: ReplyBody,
        permit: Option<RequestPermit>,
    ) {
        match replay_wire::encode_reply(Reply { id, body }) {
            Ok(frame) => self.enqueue(replies, frame, permit),
            Err(error) => tracing::error!(id, %error, "a reply could not be encoded"),
        }
    }

    pub(super) fn reply_error(
        &self,
        replies: &ReplySender,
        id: u64,
        error: &Error,
        permit: Option<RequestPermit>,
    ) {
        tracing::debug!(id, %error, "request failed");
        // At the end of a wait the client asks again, or gives up as it announced.
        if !matches!(error.code(), ErrorCode::Deadline | ErrorCode::Renew) {
            self.context.service.counters.errors.add(1);
        }
        self.queue(replies, id, error_reply(error), permit);
    }

    /// Writes replies until all senders of the queue are gone.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the client does not read a reply in time.
    pub(super) async fn send<W: AsyncWrite + Unpin>(
        &self,
        mut outbox: mpsc::UnboundedReceiver<QueuedReply>,
        write: &mut W,
    ) -> Result<()> {
        let counters = &self.context.service.counters;
        while let Some(mut queued) = outbox.recv().await {
            let outgoing = &mut queued.frame;
            let allowed = self.context.write_deadline;
            let deadline = self.stack.now() + allowed;
            let writing = write_frame(outgoing, write, self.peer);
            let Some(written) = until(self.stack, deadline, writing).await else {
                counters.slow_readers_dropped.add(1);
                return Err(Error::Deadline {
                    waited_for: format!(
                        "the client did not read a reply of {} bytes within {} ms",
                        outgoing.frame_bytes(),
                        allowed.as_millis()
                    ),
                });
            };
            written?;
            counters.bytes_sent.add(outgoing.frame_bytes());
        }
        Ok(())
    }
}

pub(super) fn error_reply(error: &Error) -> ReplyBody {
    ReplyBody::Error {
        code: error.code(),
        message: shortened(error.to_string(), MAX_MESSAGE).into_owned(),
    }
}

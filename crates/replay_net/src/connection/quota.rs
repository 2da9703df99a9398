//! Limits on the unanswered requests and unread replies of one connection, and memory for its receive buffers.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::receive::{ReceiveBudgets, ReceivePermit};
use replay_core::error::{Error, Result};
use replay_wire::{Header, RequestBody};

/// Requests of one connection between their first byte and the last byte of their reply. At the limit the connection is
/// not read, and TCP stops the client.
const MAX_REQUESTS: usize = 64;

/// Bytes of one connection's unanswered long frames. At the limit the connection is not read, and TCP stops the client;
/// a longer frame is received alone.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Longest frame that is received even when the byte limit is reached. It may be a sample request, and the pushes that
/// occupy the memory may wait for it.
const SMALL_FRAME: u64 = 16 << 10;

/// Reason for not reading a connection with [`MAX_REQUESTS`].
pub const ANSWERS: &str =
    "the server reads no further request of this connection: 64 wait for their answers";

/// Reason for not reading a connection whose frame finds no receive memory.
pub const RECEIVE_MEMORY: &str = "the server's receive memory is full of pushes that wait: 1 MiB of this writer, or \
                                  --max-frame-bytes of all";

/// Reason for not reading a connection with too many unread replies.
pub const REPLIES: &str = "the server makes no further reply until this client has read the earlier ones (--max-frame-bytes)";

/// Permit of one request, from its first byte until its reply is written, and of the reply once its size is estimated.
pub struct RequestPermit {
    _request: OwnedSemaphorePermit,
    _reply: Option<OwnedSemaphorePermit>,
}

/// The receiving side of one connection.
pub struct ReceiveQuota<'a> {
    budgets: &'a ReceiveBudgets,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// Bytes of unread replies. At the limit the connection is not read; the longest reply is made alone.
    replies: Arc<Semaphore>,
    max_reply_bytes: u32,
    /// Whether the connection has opened a writer.
    writes: bool,
}

/// A frame's share of the memory's byte limit and of its connection's quota.
#[derive(Default)]
pub struct FrameReservation {
    _buffer: Option<ReceivePermit>,
    _share: Option<OwnedSemaphorePermit>,
}

impl<'a> ReceiveQuota<'a> {
    /// Quota of a new connection, whose unread replies have up to `max_reply_bytes`.
    pub fn new(budgets: &'a ReceiveBudgets, max_reply_bytes: u64) -> Self {
        let max_reply_bytes = u32::try_from(max_reply_bytes).unwrap_or(u32::MAX);
        ReceiveQuota {
            budgets,
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            bytes: Arc::new(Semaphore::new(MAX_FRAME_BYTES as usize)),
            replies: Arc::new(Semaphore::new(max_reply_bytes as usize)),
            max_reply_bytes,
            writes: false,
        }
    }

    /// Waits until another request may be received.
    pub async fn next_request(&self) -> RequestPermit {
        RequestPermit {
            _request: acquire(&self.requests, 1).await,
            _reply: None,
        }
    }

    /// Waits until the client has read enough earlier replies for one of `bytes`.
    pub async fn reserve_reply(&self, permit: &mut RequestPermit, bytes: u64) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if bytes > 0 {
            let bytes = bytes.min(self.max_reply_bytes);
            permit._reply = Some(acquire(&self.replies, bytes).await);
        }
    }

    /// Reserves memory for a frame and its decoded request, before either is allocated. Waits for free memory, unless the frame is
    /// small.
    pub async fn reserve(&self, header: Header) -> FrameReservation {
        let budget = match self.writes {
            true => &self.budgets.pushes,
            false => &self.budgets.others,
        };
        let bytes = u32::try_from(header.memory_bytes()).unwrap_or(u32::MAX);
        if header.frame_bytes() <= SMALL_FRAME {
            return FrameReservation {
                _buffer: budget.try_reserve(bytes),
                _share: None,
            };
        }
        // The connection's own quota first: a frame that waits for it delays no other connection.
        let share = acquire(&self.bytes, bytes.min(MAX_FRAME_BYTES)).await;
        FrameReservation {
            _buffer: Some(budget.reserve(bytes).await),
            _share: Some(share),
        }
    }

    /// Admits a received request, and returns the part of its `reservation` that it keeps until its answer.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a push without an open writer: it would wait in the budget that is kept free of waiting
    /// requests.
    pub fn admit(
        &mut self,
        request: &RequestBody,
        reservation: FrameReservation,
    ) -> Result<FrameReservation> {
        match request {
            RequestBody::OpenWriter { .. } => self.writes = true,
            RequestBody::Push(_) if !self.writes => {
                return Err(Error::Protocol(
                    "a push came over a connection that has opened no writer: open the writer there first".to_owned(),
                ));
            }
            // A request for samples may wait, and keeps nothing of its frame.
            RequestBody::Sample(_) => return Ok(FrameReservation::default()),
            _ => {}
        }
        Ok(reservation)
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    let semaphore = Arc::clone(semaphore);
    semaphore
        .acquire_many_owned(permits)
        .await
        .expect("the semaphore is never closed")
}

//! Unanswered requests of one connection: their limits, memory for its receive buffers, and the order of each writer's requests.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::receive::{Line, ReceiveBudgets, ReceivePermit};
use crate::service::NumberedTable;
use replay_core::error::WaitReason;
use replay_core::memory::Memory;
use replay_link::error::{Error, Result};
use replay_wire::{CloseWriter, Header, RequestBody};

/// Limit of requests between their first byte and the last byte of their reply. At the limit the connection is not read (TCP backpressure).
const MAX_REQUESTS: usize = 64;

/// Limit of the bytes of unanswered long frames. At the limit the connection is not read (TCP backpressure). A longer frame is received
/// alone.
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
    /// Line of its frames, that of its table once it has opened a writer.
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

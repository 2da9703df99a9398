//! Limits on the unanswered requests of one connection, and memory for its receive buffers.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::receive::{PushPermit, ReceiveBudgets, ReceivePermit, TableWrites};
use crate::service::NumberedTable;
use replay_core::cause::WaitReason;
use replay_core::memory::Memory;
use replay_link::error::{Error, Result};
use replay_wire::{Header, RequestBody};

/// Limit of requests between their first byte and the last byte of their reply. At the limit the connection is not read (TCP backpressure).
const MAX_REQUESTS: usize = 64;

/// Limit of the bytes of unanswered long frames. At the limit the connection is not read (TCP backpressure). A longer frame is received
/// alone.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Longest frame that is received even at the byte limit: the pushes that occupy the memory may wait for a sample request.
const SMALL_FRAME: u64 = 16 << 10;

/// Reading is paused: the connection has [`MAX_REQUESTS`] unanswered requests.
pub const ANSWERS: WaitReason = WaitReason::Answers(MAX_REQUESTS as u32);

/// Budget for connections that write to several tables, or to a missing one: a frame's table is unknown before the frame is read. No table
/// has this name.
const SEVERAL_TABLES: &str = "";

/// Permit of one request, from its first byte until its reply is written.
pub type RequestPermit = OwnedSemaphorePermit;

/// The receiving side of one connection.
pub struct ReceiveQuota<'a> {
    memory: &'a Memory,
    budgets: &'a ReceiveBudgets,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// Table that the connection writes to, once it has opened a writer.
    writes: Option<TableWrites>,
}

/// A frame's share of the memory's byte limit and of its connection's quota.
#[derive(Default)]
pub struct FrameReservation {
    _buffer: Option<ReceivePermit>,
    _push: Option<PushPermit>,
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
            writes: None,
        }
    }

    /// Waits until another request may be received.
    pub async fn next_request(&self) -> RequestPermit {
        acquire(&self.requests, 1).await
    }

    /// Reserves memory for a frame and its decoded request before either is allocated. Waits for free memory unless the frame is small.
    pub async fn reserve(&self, header: Header) -> FrameReservation {
        let bytes = header.memory_bytes();
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        let others = &self.budgets.others;
        let small = header.frame_bytes() <= SMALL_FRAME;
        let mut reservation = FrameReservation::default();
        if !small {
            // The connection's own quota first: a frame that waits for it delays no other connection.
            reservation._share = Some(acquire(&self.bytes, permits.min(MAX_FRAME_BYTES)).await);
        }
        match &self.writes {
            Some(table) if small => reservation._push = table.try_reserve(bytes),
            Some(table) => reservation._push = Some(table.reserve(bytes).await),
            None if small => reservation._buffer = others.try_reserve(permits),
            None => reservation._buffer = Some(others.reserve(permits).await),
        }
        reservation
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
            RequestBody::Push(_) if self.writes.is_none() => {
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
        let table = match &self.writes {
            Some(before) if before.table() != table => SEVERAL_TABLES,
            _ => table,
        };
        self.writes = Some(self.budgets.pushes.writes(table));
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    let semaphore = Arc::clone(semaphore);
    semaphore.acquire_many_owned(permits).await.expect("the semaphore is never closed")
}

//! What one connection may send before it is answered, and where its frames find room.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::receive::{ReceiveBuffer, ReceiveRooms};
use replay_core::error::{Error, Result};
use replay_wire::RequestBody;

/// Requests of one connection between their first byte and the last byte of their reply. Beyond it the
/// connection is not read, and the client's own sending waits.
const MAX_UNDER_WAY: usize = 64;

/// Bytes of one connection's longer frames that may wait for their answer. Beyond it the connection is not read, and
/// what its client pushes waits with the client; a frame that is longer by itself comes alone.
const MAX_BYTES_UNDER_WAY: u32 = 1 << 20;

/// A frame that is received also where the memory's byte limit has no room for it: it may be the draw for which the
/// pushes that hold the room are waiting.
const SMALL_FRAME: u32 = 16 << 10;

/// Held from a request's first byte until its reply is written.
pub type UnderWay = OwnedSemaphorePermit;

/// The receiving side of one connection.
pub struct Inbox<'a> {
    rooms: &'a ReceiveRooms,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    writes: bool,
}

/// A frame's part of the memory's byte limit, and of what its connection may have under way.
#[derive(Default)]
pub struct Room {
    _buffer: Option<ReceiveBuffer>,
    _share: Option<OwnedSemaphorePermit>,
}

impl<'a> Inbox<'a> {
    /// Of a connection that has sent nothing yet.
    pub fn new(rooms: &'a ReceiveRooms) -> Self {
        Inbox {
            rooms,
            requests: Arc::new(Semaphore::new(MAX_UNDER_WAY)),
            bytes: Arc::new(Semaphore::new(MAX_BYTES_UNDER_WAY as usize)),
            writes: false,
        }
    }

    /// Waits until another request may come.
    pub async fn next_request(&self) -> UnderWay {
        acquire(&self.requests, 1).await
    }

    /// Counts a receive buffer before it is allocated; waits where there is no room, unless the frame is small.
    pub async fn reserve(&self, bytes: u64) -> Room {
        let room = match self.writes {
            true => &self.rooms.pushes,
            false => &self.rooms.others,
        };
        // Within `max_frame_bytes`, which is.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if bytes <= SMALL_FRAME {
            return Room {
                _buffer: room.try_reserve(bytes),
                _share: None,
            };
        }
        // Its own share first: who waits for that keeps nobody else waiting.
        let share = acquire(&self.bytes, bytes.min(MAX_BYTES_UNDER_WAY)).await;
        Room {
            _buffer: Some(room.reserve(bytes).await),
            _share: Some(share),
        }
    }

    /// Takes note of a request that has arrived in `room`, and returns what it goes on holding.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a push where no writer was opened: it would wait where nothing may.
    pub fn admit(&mut self, request: &RequestBody, room: Room) -> Result<Room> {
        match request {
            RequestBody::OpenWriter { .. } => self.writes = true,
            RequestBody::Push(_) if !self.writes => {
                return Err(Error::Protocol(
                    "a push came over a connection that has opened no writer: open the writer there first".to_owned(),
                ));
            }
            // It may wait, and keeps nothing of its frame.
            RequestBody::Sample(_) => return Ok(Room::default()),
            _ => {}
        }
        Ok(room)
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    let semaphore = Arc::clone(semaphore);
    semaphore
        .acquire_many_owned(permits)
        .await
        .expect("nobody closes the semaphore")
}

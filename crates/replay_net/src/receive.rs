//! Room for receive buffers, within a memory's byte limit: [`MemoryLimits::receive_bytes`].
//!
//! Pushes may have to wait for draws. So connections that have opened a writer share one half of the room, and all
//! others (the learner's parameters, say) the other: these wait only for frames that are arriving or being answered.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use replay_core::memory::MemoryLimits;

/// The two halves of a server's room for receive buffers.
pub struct ReceiveRooms {
    /// For the frames of connections that have opened a writer.
    pub pushes: ReceiveRoom,
    /// For the frames of all other connections.
    pub others: ReceiveRoom,
}

impl ReceiveRooms {
    /// The rooms within a memory's limits.
    pub fn new(limits: &MemoryLimits) -> Self {
        let half = limits.receive_bytes.min(limits.max_bytes) / 2;
        ReceiveRooms {
            pushes: ReceiveRoom::new(half),
            others: ReceiveRoom::new(half),
        }
    }

    /// Bytes taken now.
    pub fn reserved(&self) -> u64 {
        self.pushes.reserved() + self.others.reserved()
    }
}

/// Room for receive buffers, given in the order in which it is asked for: a long frame is not overtaken for ever by
/// short ones.
pub struct ReceiveRoom {
    limit: usize,
    left: Arc<Semaphore>,
}

/// Room that a receive buffer takes until this is dropped.
pub type ReceiveBuffer = OwnedSemaphorePermit;

impl ReceiveRoom {
    /// Room for `limit` bytes.
    pub fn new(limit: u64) -> Self {
        let limit = usize::try_from(limit).map_or(Semaphore::MAX_PERMITS, |limit| {
            limit.min(Semaphore::MAX_PERMITS)
        });
        ReceiveRoom {
            limit,
            left: Arc::new(Semaphore::new(limit)),
        }
    }

    /// Waits for room for `bytes`, which have to be within the limit.
    pub async fn reserve(&self, bytes: u32) -> ReceiveBuffer {
        let left = Arc::clone(&self.left);
        left.acquire_many_owned(bytes)
            .await
            .expect("nobody closes the semaphore")
    }

    /// Room for `bytes`; `None` where it would have to be waited for.
    pub fn try_reserve(&self, bytes: u32) -> Option<ReceiveBuffer> {
        Arc::clone(&self.left).try_acquire_many_owned(bytes).ok()
    }

    /// Bytes taken now, and those set aside for whoever waits first.
    pub fn reserved(&self) -> u64 {
        (self.limit - self.left.available_permits()) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_long_frame_is_not_overtaken() {
        let room = ReceiveRoom::new(100);
        let first = room.try_reserve(60).unwrap();
        let mut long = pin!(room.reserve(80));
        assert!(long.as_mut().now_or_never().is_none());
        assert!(room.try_reserve(10).is_none(), "it is behind the long one");
        drop(first);
        let long = long.now_or_never().expect("there is room now");
        assert_eq!(room.reserved(), 80);
        assert!(room.try_reserve(20).is_some());
        drop(long);
        assert_eq!(room.reserved(), 0);
    }
}

//! The byte limit of a memory: whoever keeps bytes reserves them before it allocates, so the process stays within
//! the limit whatever clients ask for. Tables and parameters share one [`Budget`]; receive buffers have rooms of their
//! own, so that a full memory can still receive what makes it evict.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes that may be reserved, and those that are.
pub struct Budget {
    limit: u64,
    reserved: AtomicU64,
}

/// Reserved bytes; they go back to the budget when this is dropped.
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Budget {
            limit,
            reserved: AtomicU64::new(0),
        })
    }

    /// Reserves `bytes`; `None` while so many are not left.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let fits = |reserved: u64| {
            reserved
                .checked_add(bytes)
                .filter(|&after| after <= self.limit)
        };
        // A count, no data is published with it.
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .ok()
            .map(|_| Reservation {
                budget: Arc::clone(self),
                bytes,
            })
    }

    /// Bytes that may be reserved in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are left now.
    pub fn left(&self) -> u64 {
        self.limit - self.reserved()
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget
            .reserved
            .fetch_sub(self.bytes, Ordering::Relaxed);
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
    fn reserves_up_to_the_limit_and_takes_back() {
        let budget = Budget::new(100);
        let first = budget.reserve(60).unwrap();
        assert_eq!(budget.left(), 40);
        assert!(budget.reserve(41).is_none());
        assert!(budget.reserve(u64::MAX).is_none());
        drop(first);
        assert_eq!(budget.reserved(), 0);
        assert!(budget.reserve(100).is_some());
    }

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

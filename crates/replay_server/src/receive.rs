//! Memory for receive buffers, within [`MemoryLimits::receive_bytes`] of the memory's byte limit.
//!
//! A push may wait until items are sampled. Connections with an open writer therefore share one half of the receive memory, divided by
//! table ([`PushBudget`]). All other connections (for example the learner's parameters) share the other half, in which no request waits.

mod pushes;

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use replay_core::memory::MemoryLimits;

pub use pushes::{PushBudget, PushPermit, TableWrites};

/// A server's two budgets for receive buffers.
pub struct ReceiveBudgets {
    /// Frames of connections with an open writer.
    pub pushes: Arc<PushBudget>,
    /// Frames of all other connections.
    pub others: ReceiveBudget,
}

impl ReceiveBudgets {
    /// The budgets within a memory's limits.
    pub fn new(limits: &MemoryLimits) -> Self {
        let half = limits.receive_bytes.min(limits.max_bytes) / 2;
        ReceiveBudgets { pushes: PushBudget::new(half), others: ReceiveBudget::new(half) }
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.pushes.reserved() + self.others.reserved()
    }
}

/// Budget for receive buffers, granted in order of request, so that short frames do not starve a long one.
pub struct ReceiveBudget {
    limit: usize,
    left: Arc<Semaphore>,
}

/// Bytes of one receive buffer, returned when dropped.
pub type ReceivePermit = OwnedSemaphorePermit;

impl ReceiveBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        let limit = usize::try_from(limit).map_or(Semaphore::MAX_PERMITS, |limit| limit.min(Semaphore::MAX_PERMITS));
        ReceiveBudget { limit, left: Arc::new(Semaphore::new(limit)) }
    }

    /// Waits for `bytes`, capped at the limit: with its decoded request, a frame of maximum length takes up to 16 MiB more than the
    /// limit.
    pub async fn reserve(&self, bytes: u32) -> ReceivePermit {
        let left = Arc::clone(&self.left);
        let bytes = u32::try_from(self.limit).map_or(bytes, |limit| bytes.min(limit));
        left.acquire_many_owned(bytes).await.expect("the semaphore is never closed")
    }

    /// Reserves `bytes` without waiting; `None` when they are not free.
    pub fn try_reserve(&self, bytes: u32) -> Option<ReceivePermit> {
        Arc::clone(&self.left).try_acquire_many_owned(bytes).ok()
    }

    /// Bytes reserved now, including bytes set aside for the first waiting frame.
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
    fn a_frame_beyond_the_budget_takes_all_of_it() {
        let budget = ReceiveBudget::new(100);
        let first = budget.try_reserve(1).unwrap();
        let mut long = pin!(budget.reserve(120));
        assert!(long.as_mut().now_or_never().is_none());
        drop(first);
        let _long = long.now_or_never().expect("memory is free now");
        assert_eq!(budget.reserved(), 100);
    }

    #[test]
    fn a_long_frame_is_not_overtaken() {
        let budget = ReceiveBudget::new(100);
        let first = budget.try_reserve(60).unwrap();
        let mut long = pin!(budget.reserve(80));
        assert!(long.as_mut().now_or_never().is_none());
        assert!(budget.try_reserve(10).is_none(), "it is behind the long one");
        drop(first);
        let long = long.now_or_never().expect("memory is free now");
        assert_eq!(budget.reserved(), 80);
        assert!(budget.try_reserve(20).is_some());
        drop(long);
        assert_eq!(budget.reserved(), 0);
    }
}

//! The byte limit of a memory: bytes are reserved before they are allocated, so the process stays within the limit
//! whatever clients ask for. Tables and parameters share one [`Budget`]; a server's receive buffers have their
//! own, so that a full memory can still receive the push that makes it evict.
//!
//! # Invariant
//!
//! The limit covers live chunks, evicted chunks that are still pinned, indexes at capacity, and received frames
//! with their decoded requests (except short frames received while no memory is free, and decoded requests of the
//! longest frames). Lengths are checked before allocation.

use std::sync::Arc;

use bytes::Bytes;

use crate::sync::{AtomicU64, Ordering};

/// Byte limit, and the bytes reserved of it.
pub struct Budget {
    limit: u64,
    reserved: AtomicU64,
}

/// Reserved bytes, returned to the budget on drop.
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Budget { limit, reserved: AtomicU64::new(0) })
    }

    /// Reserves `bytes`; `None` while fewer are left.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let fits = |reserved: u64| reserved.checked_add(bytes).filter(|&after| after <= self.limit);
        // Relaxed: no data is published with the count.
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .ok()
            .map(|_| Reservation { budget: Arc::clone(self), bytes })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Unreserved bytes.
    pub fn left(&self) -> u64 {
        self.limit - self.reserved()
    }

    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes with what counts them (`kept`) for as long as there is a slice of them. Dropped in this order: they are free when they are given back.
pub(crate) struct Counted<T> {
    bytes: Bytes,
    _kept: T,
}

impl<T: Send + 'static> Counted<T> {
    /// The bytes, which keep `kept`.
    pub fn bytes(bytes: Bytes, kept: T) -> Bytes {
        Bytes::from_owner(Counted { bytes, _kept: kept })
    }
}

impl<T> AsRef<[u8]> for Counted<T> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
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
}

//! The memory under the arrays of a batch: one buffer that Rust fills and then lends to Python, which may write to it. A buffer returns to its
//! pool when its last array is dropped, so a batch does not change while it is used, and the system clears the megabytes of a batch only once.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use base::allocation::{self, check_size};
use base::wait::lock;

use crate::error::Result;
use crate::processor::advise_huge_pages;

/// Smaller buffers are allocated anew: that is cheaper than to keep them.
const SMALLEST_KEPT: usize = 8 << 10;
/// Buffers that a pool keeps for reuse.
const MOST_KEPT: usize = 16;
/// Most bytes of the arrays of a batch.
const LARGEST: u64 = 16 << 30;

/// Bytes on the heap, or of another library, which are freed on drop.
pub struct Storage {
    start: NonNull<u8>,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the owner may be dropped by any thread. The bytes are reached through a `Buffer`: its methods on a shared reference only read
// them or return their address. A write through the address is sound only while no other thread uses the bytes, which `as_mut_ptr`
// demands of its users.
unsafe impl Send for Storage {}
// SAFETY: as for `Send`.
unsafe impl Sync for Storage {}

impl Storage {
    /// The `len` bytes at `start`, which `owner` frees when it is dropped.
    ///
    /// # Safety
    /// `start` is a multiple of [`Buffer::ALIGNMENT`]. Until `owner` is dropped, the bytes are valid for reads and writes, and have no other user.
    pub unsafe fn lent(start: NonNull<u8>, len: usize, owner: impl Any + Send + Sync) -> Self {
        Storage { start, len, _owner: Box::new(owner) }
    }

    fn zeros(len: usize) -> Result<Self> {
        let mut bytes = Vec::from(allocation::zeros("an array", len + Buffer::ALIGNMENT)?);
        advise_huge_pages(&bytes);
        let first = bytes.as_ptr().align_offset(Buffer::ALIGNMENT);
        let start = NonNull::from(&mut bytes[first..]).cast();
        // SAFETY: `len` bytes are left from the aligned one on. A vector can be moved without its bytes, and this one is only dropped.
        Ok(unsafe { Storage::lent(start, len, bytes) })
    }
}

impl Default for Storage {
    fn default() -> Self {
        Storage { start: NonNull::dangling(), len: 0, _owner: Box::new(()) }
    }
}

/// Lends new storage of at least as many bytes as it is asked for, or `None`.
pub type Lender = dyn Fn(usize) -> Option<Storage> + Send + Sync;

/// The memory of arrays. It starts at a multiple of 64 bytes, and returns to its pool on drop.
pub struct Buffer {
    storage: Storage,
    len: usize,
    pool: Weak<BufferPool>,
}

impl Buffer {
    /// Alignment of buffers, and so of arrays: a cache line, and the widest vector register.
    pub const ALIGNMENT: usize = 64;

    /// A buffer of `len` zeros without a pool.
    pub fn zeros(len: usize) -> Result<Self> {
        Ok(Buffer::over(Storage::zeros(len)?, len, Weak::new()))
    }

    fn over(storage: Storage, len: usize, pool: Weak<BufferPool>) -> Self {
        assert!(len <= storage.len, "storage of {} bytes for {len}", storage.len);
        Buffer { storage, len, pool }
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes are the buffer's, and a write through the address is sound only while no slice of them is in use.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the bytes are the buffer's, and the reference to it is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }

    /// The address of the bytes, which do not move, for another language. It may write there while nobody else uses the buffer.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.storage.start.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            pool.give_back(std::mem::take(&mut self.storage));
        }
    }
}

/// Buffers of finished batches, for the next ones.
#[derive(Default)]
pub(super) struct BufferPool {
    free: Mutex<Vec<Storage>>,
    lender: Option<Box<Lender>>,
}

impl BufferPool {
    pub(super) fn lent_by(lender: Option<Box<Lender>>) -> Self {
        BufferPool { lender, ..BufferPool::default() }
    }

    /// A buffer of `len` bytes with any content.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<Buffer> {
        check_size(
            "the arrays of a batch, in bytes,",
            len as u64,
            LARGEST,
            "sample fewer items at a time, or with a narrower view",
        )?;
        if len < SMALLEST_KEPT {
            return Buffer::zeros(len);
        }
        let kept = {
            let mut free = lock(&self.free);
            // Not one much larger: a short batch would hold on to the memory of a long one.
            let fits = |storage: &Storage| (len..=2 * len).contains(&storage.len);
            let smallest = free.iter().enumerate().filter(|(_, storage)| fits(storage)).min_by_key(|(_, s)| s.len);
            smallest.map(|(at, _)| at).map(|at| free.swap_remove(at))
        };
        let storage = match kept.or_else(|| self.lender.as_ref()?(len)) {
            Some(storage) => storage,
            None => Storage::zeros(len)?,
        };
        Ok(Buffer::over(storage, len, Arc::downgrade(self)))
    }

    fn give_back(&self, storage: Storage) {
        if cfg!(debug_assertions) {
            // Poison: tests fail on a late read, and on a part that is never filled.
            // SAFETY: free storage has no other user.
            unsafe { storage.start.write_bytes(0xa5, storage.len) };
        }
        let mut free = lock(&self.free);
        if free.len() == MOST_KEPT {
            free.remove(0);
        }
        free.push(storage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_reused_only_after_its_last_array() {
        let pool = Arc::new(BufferPool::default());
        let take = || pool.take(2 * SMALLEST_KEPT).unwrap();
        let buffer = Arc::new(take());
        let address = buffer.as_slice().as_ptr();
        assert_eq!(address as usize % Buffer::ALIGNMENT, 0);
        let first = buffer.clone();
        let second = buffer;
        drop(first);
        let other = take();
        assert_ne!(other.as_slice().as_ptr(), address);
        drop(second);
        assert_eq!(take().as_slice().as_ptr(), address);
        drop(other);
    }

    #[test]
    fn a_pool_keeps_a_bounded_number_of_buffers() {
        let pool = Arc::new(BufferPool::default());
        let buffers: Vec<_> = (0..2 * MOST_KEPT).map(|_| pool.take(SMALLEST_KEPT).unwrap()).collect();
        drop(buffers);
        assert_eq!(lock(&pool.free).len(), MOST_KEPT);
    }

    #[test]
    fn lent_storage_is_filled_reused_and_returned() {
        let lent = Arc::new(Mutex::new(Vec::new()));
        let lends = lent.clone();
        let lender = move |len| {
            let mut lent = lock(&lends);
            // Once: the second buffer is the pool's own.
            let storage = lent.is_empty().then(|| Storage::zeros(len).unwrap())?;
            let (start, owner) = (storage.start, Arc::new(storage));
            lent.push((start.addr().get(), Arc::downgrade(&owner)));
            // SAFETY: the bytes belong to storage that has no other user and is dropped with the owner.
            Some(unsafe { Storage::lent(start, len, owner) })
        };
        let pool = Arc::new(BufferPool::lent_by(Some(Box::new(lender))));
        for _ in 0..3 {
            let buffer = pool.take(2 * SMALLEST_KEPT).unwrap();
            let other = pool.take(2 * SMALLEST_KEPT).unwrap();
            let (address, owner) = lock(&lent)[0].clone();
            assert_eq!(buffer.as_slice().as_ptr().addr(), address);
            assert_ne!(other.as_slice().as_ptr().addr(), address);
            assert_eq!(owner.strong_count(), 1);
            // The first that is given back is the next that is taken.
            drop(buffer);
            drop(other);
        }
        drop(pool);
        let lent = lock(&lent);
        assert_eq!((lent.len(), lent[0].1.strong_count()), (1, 0));
    }
}

//! Memory of a batch: bytes on the heap that Rust fills and then lends to Python, which may write to them; copies that bypass the caches.
//!
//! A large batch is evicted from the caches before it is used. An ordinary store reads each line before it overwrites it,
//! and evicts rows that the next item needs; a streamed store does neither. Streaming shortens the unpacking of 512 stacks
//! of frames by a fifth (`cargo bench -p replay_core --bench views decode`).

use std::cell::UnsafeCell;

use crate::error::Result;
use crate::memory_hints::advise_huge_pages;
use base::allocation;

/// Bytes on the heap, written through an exclusive reference, and by holders of the pointer once they are shared.
#[derive(Default)]
pub(super) struct Storage(Box<[UnsafeCell<u8>]>);

// SAFETY: methods on a shared reference only read the bytes or return their address. A write through the address is
// sound only while no other thread uses the bytes, which `as_mut_ptr` demands of its users.
unsafe impl Sync for Storage {}

impl Storage {
    /// `len` zeros.
    pub(super) fn zeros(len: usize) -> Result<Self> {
        let bytes = allocation::zeros("an array", len)?;
        advise_huge_pages(&bytes);
        let bytes = Box::into_raw(bytes);
        // SAFETY: UnsafeCell<u8> has the layout of u8, and the pointer is the whole of a box that was just taken apart.
        Ok(Storage(unsafe { Box::from_raw(bytes as *mut [UnsafeCell<u8>]) }))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The address of the bytes, which do not move. A write there is sound only while no other thread uses them.
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.0.as_ptr())
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: address and length are the box's, and a write through the address is sound only while no slice of the
        // bytes is in use.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len()) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: address and length are the box's, and the reference to it is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

/// Copies of one thread into a batch. Other threads may read the bytes after it is dropped.
pub(super) struct Copies {
    streamed: bool,
}

/// Length from which values are streamed: stores to a part of a cache line are slower past the caches.
const SHORTEST: usize = 512;

impl Copies {
    /// Copies to a batch of `bytes`, streamed if the batch is larger than the caches.
    pub(super) fn to_batch(bytes: usize) -> Self {
        /// About one core's share of the caches. A smaller batch is read before it is evicted.
        const CACHED: usize = 4 << 20;
        Copies { streamed: cfg!(target_arch = "x86_64") && bytes > CACHED }
    }

    pub(super) fn streams(&self, bytes: usize) -> bool {
        self.streamed && bytes >= SHORTEST
    }

    /// Copies a value. Panics when the two are of different sizes.
    pub(super) fn copy(&self, from: &[u8], to: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if self.streams(from.len()) {
            return stream(from, to);
        }
        to.copy_from_slice(from);
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.streamed {
            // SAFETY: SSE is a part of x86_64.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn stream(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    assert_eq!(from.len(), to.len(), "a value has the size of its slot");
    let ahead = to.as_ptr().align_offset(align_of::<__m128i>()).min(to.len());
    let (head, rest) = from.split_at(ahead);
    let (to_head, to_rest) = to.split_at_mut(ahead);
    to_head.copy_from_slice(head);
    let (blocks, tail) = rest.as_chunks::<16>();
    let (to_blocks, to_tail) = to_rest.as_chunks_mut::<16>();
    to_tail.copy_from_slice(tail);
    for (block, to_block) in blocks.iter().zip(to_blocks) {
        // SAFETY: SSE2 is a part of x86_64. Both blocks are 16 bytes, and the one that is written begins at a multiple of
        // 16. A streamed store is seen by its own thread at once and by others after a fence: `Copies` has one in its
        // `drop`, and the borrow of the batch that it fills ends later.
        unsafe { _mm_stream_si128(to_block.as_mut_ptr().cast(), _mm_loadu_si128(block.as_ptr().cast())) };
    }
}

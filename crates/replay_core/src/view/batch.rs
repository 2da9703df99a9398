//! A batch of arrays, and the memory under them: buffers that Rust fills and then lends to Python, which may write to them.
//!
//! Several arrays may share a buffer, as `observation` and `next_observation` do. A buffer returns to its pool when its
//! last array is dropped, so a batch does not change while it is used, and the system clears the megabytes of a window
//! buffer only once.
//!
//! A large batch is evicted from the caches before it is used. An ordinary store reads each line before it overwrites it,
//! and evicts rows that the next item needs; a streamed store does neither. Streaming shortens the unpacking of 512 stacks
//! of frames by a fifth (`cargo bench -p replay_core --bench views decode`).

use std::cell::UnsafeCell;
use std::sync::{Arc, Mutex, Weak};

use base::allocation::{self, check_size};
use base::wait::lock;

use crate::chunk::RowLayout;
use crate::error::Result;
use crate::processor::advise_huge_pages;
use crate::schema::{Column, Dtype};

/// Smaller buffers are allocated anew: that is cheaper than to keep them.
const SMALLEST_KEPT: usize = 64 << 10;
/// Buffers that a pool keeps for reuse.
const MOST_KEPT: usize = 16;
/// Most bytes of one array of a batch.
const LARGEST: u64 = 16 << 30;

/// The memory of arrays. It starts at a multiple of 64 bytes, and returns to its pool on drop.
pub struct Buffer {
    storage: Storage,
    start: usize,
    len: usize,
    pool: Weak<BufferPool>,
}

impl Buffer {
    /// Alignment of buffers, and so of arrays: a cache line, and the widest vector register.
    pub const ALIGNMENT: usize = 64;

    /// A buffer of `len` zeros without a pool.
    pub fn zeros(len: usize) -> Result<Self> {
        Ok(Buffer::over(Storage::zeros(len + Self::ALIGNMENT)?, len, Weak::new()))
    }

    fn over(storage: Storage, len: usize, pool: Weak<BufferPool>) -> Self {
        let start = storage.as_mut_ptr().align_offset(Self::ALIGNMENT);
        Buffer { storage, start, len, pool }
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.storage.as_slice()[self.start..self.start + self.len]
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.storage.as_mut_slice()[self.start..self.start + self.len]
    }

    /// The address of the bytes, which do not move, for another language. It may write there while nobody else uses the buffer.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.storage.as_mut_ptr().wrapping_add(self.start)
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
}

impl BufferPool {
    /// A buffer of `items` times `item_bytes` with any content.
    pub(super) fn take(self: &Arc<Self>, items: usize, item_bytes: usize) -> Result<Buffer> {
        let len = items.saturating_mul(item_bytes);
        check_size(
            "an array of a batch, in bytes,",
            len as u64,
            LARGEST,
            "sample fewer items at a time, or with a narrower view",
        )?;
        if len < SMALLEST_KEPT {
            return Buffer::zeros(len);
        }
        let needed = len + Buffer::ALIGNMENT;
        let kept = {
            let mut free = lock(&self.free);
            // Not one much larger: a short batch would hold on to the memory of a long one.
            let fits = |storage: &Storage| (needed..=2 * needed).contains(&storage.len());
            let smallest = free.iter().enumerate().filter(|(_, storage)| fits(storage)).min_by_key(|(_, s)| s.len());
            smallest.map(|(at, _)| at).map(|at| free.swap_remove(at))
        };
        let storage = match kept {
            Some(kept) => kept,
            None => Storage::zeros(needed)?,
        };
        Ok(Buffer::over(storage, len, Arc::downgrade(self)))
    }

    fn give_back(&self, mut storage: Storage) {
        if cfg!(debug_assertions) {
            // Poison: tests fail on a late read, and on a part that is never filled.
            storage.as_mut_slice().fill(0xa5);
        }
        let mut free = lock(&self.free);
        if free.len() == MOST_KEPT {
            free.remove(0);
        }
        free.push(storage);
    }
}

/// A named array with NumPy's description: element type, shape, strides and an offset into its buffer.
#[derive(Clone)]
pub struct Array {
    pub name: String,
    pub dtype: Dtype,
    /// Elements along each dimension; the first is the batch.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each dimension.
    pub strides: Vec<usize>,
    /// Byte offset of the first element in the buffer.
    pub offset: usize,
    /// The buffer, which other arrays may share.
    pub buffer: Arc<Buffer>,
    /// Whether other elements, of this array or of another one, may be the same bytes: true for observation stacks.
    pub shared: bool,
}

impl Array {
    /// Overlapping windows of the slots along the second dimension, from slot `first` on. That dimension becomes one for
    /// each of `counts`, all with a stride of one slot.
    pub(super) fn overlapping(&self, name: &str, first: usize, counts: &[usize]) -> Self {
        let slot = self.strides[1];
        let mut view = self.clone();
        view.name = name.to_owned();
        view.offset += first * slot;
        view.shape.splice(1..2, counts.iter().copied());
        view.strides.splice(1..2, counts.iter().map(|_| slot));
        view
    }

    /// `count` items from `first` on, `step` apart, in the same buffer.
    pub fn items(&self, first: usize, count: usize, step: usize) -> Self {
        let mut items = self.clone();
        // Without items the offset stays in the buffer.
        items.offset += first * self.strides[0] * usize::from(count > 0);
        items.shape[0] = count;
        if count > 1 {
            items.strides[0] *= step;
        }
        items
    }

    /// Offset in the buffer of the end of the last element.
    pub fn end(&self) -> usize {
        if self.shape.contains(&0) {
            return self.offset;
        }
        let dimensions = self.shape.iter().zip(&self.strides);
        let last: usize = dimensions.map(|(&n, &stride)| (n - 1) * stride).sum();
        self.offset + last + self.dtype.bytes()
    }

    /// Whether every element is aligned and within the buffer: for arrays from outside.
    pub fn is_within_buffer(&self) -> bool {
        let size = self.dtype.bytes();
        let aligned = self.strides.iter().chain([&self.offset]).all(|bytes| bytes % size == 0);
        let mut end = Some(self.offset);
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            let last = n.saturating_sub(1).checked_mul(stride);
            end = end.zip(last).and_then(|(end, last)| end.checked_add(last));
        }
        let end = end.and_then(|end| end.checked_add(size));
        let empty = self.shape.contains(&0);
        self.shape.len() == self.strides.len()
            && !self.shape.is_empty()
            && aligned
            && end.is_some_and(|end| end <= self.buffer.len() || empty && self.offset <= self.buffer.len())
    }

    /// The elements in row-major order, as a copy.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.gather(0, self.offset, &mut out);
        out
    }

    fn gather(&self, axis: usize, at: usize, out: &mut Vec<u8>) {
        if axis == self.shape.len() {
            out.extend_from_slice(&self.buffer.as_slice()[at..at + self.dtype.bytes()]);
            return;
        }
        for index in 0..self.shape[axis] {
            self.gather(axis + 1, at + index * self.strides[axis], out);
        }
    }
}

/// An item that was left out of a batch because its data does not decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The item's id, for [`crate::Replay::report_corrupt`].
    pub id: u64,
    pub item: usize,
    /// The reason, with the column's name.
    pub reason: String,
}

pub struct Batch {
    /// Items: the first dimension of every array. Fewer than were sampled where some are rejected.
    pub len: usize,
    pub arrays: Vec<Array>,
    /// Index in the sample of each item that is kept.
    pub items: Vec<usize>,
    /// Items whose data does not decode, to be reported.
    pub rejected: Vec<Rejected>,
}

impl Batch {
    /// Adds an array of one byte for each item.
    pub fn add_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut buffer = Buffer::zeros(bytes.len())?;
        buffer.as_mut_slice().copy_from_slice(bytes);
        let spec = ArraySpec::new(name, Dtype::Uint8, vec![]);
        self.arrays.push(spec.array(bytes.len(), Arc::new(buffer)));
        Ok(())
    }

    pub fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.iter().find(|array| array.name == name)
    }
}

/// An array of a batch that is still to be filled: each item has the same number of bytes of its buffer.
pub(super) struct ArraySpec {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl ArraySpec {
    pub(super) fn new(name: &str, dtype: Dtype, shape: Vec<usize>) -> Self {
        ArraySpec { name: name.to_owned(), dtype, shape }
    }

    /// An array of `steps` values of a column for each item; without that dimension where `steps` is `None`.
    pub(super) fn of_column(layout: &RowLayout, column: usize, steps: Option<usize>) -> Self {
        let Column { name, dtype, shape, .. } = &layout.columns[column].column;
        let shape = shape.iter().map(|&n| n as usize);
        ArraySpec::new(name, *dtype, steps.into_iter().chain(shape).collect())
    }

    /// Bytes of one item; saturates, [`BufferPool::take`] bounds it.
    pub(super) fn item_bytes(&self) -> usize {
        self.shape.iter().fold(self.dtype.bytes(), |bytes, &n| bytes.saturating_mul(n))
    }

    /// The contiguous array of `items` in a filled buffer.
    pub(super) fn array(&self, items: usize, buffer: Arc<Buffer>) -> Array {
        let mut shape = vec![items];
        shape.extend(&self.shape);
        let mut strides = vec![self.dtype.bytes(); shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Array { name: self.name.clone(), dtype: self.dtype, shape, strides, offset: 0, buffer, shared: false }
    }
}

/// One array in each filled buffer.
pub(super) fn whole_arrays(specs: &[ArraySpec], items: usize, buffers: Vec<Arc<Buffer>>) -> Vec<Array> {
    specs.iter().zip(buffers).map(|(spec, buffer)| spec.array(items, buffer)).collect()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_reused_only_after_its_last_array() {
        let pool = Arc::new(BufferPool::default());
        let buffer = Arc::new(pool.take(2, SMALLEST_KEPT).unwrap());
        let address = buffer.as_slice().as_ptr();
        assert_eq!(address as usize % Buffer::ALIGNMENT, 0);
        let first = ArraySpec::new("a", Dtype::Uint8, vec![SMALLEST_KEPT]).array(2, buffer);
        let second = first.clone();
        drop(first);
        let other = pool.take(2, SMALLEST_KEPT).unwrap();
        assert_ne!(other.as_slice().as_ptr(), address);
        drop(second);
        assert_eq!(pool.take(2, SMALLEST_KEPT).unwrap().as_slice().as_ptr(), address);
        drop(other);
    }

    #[test]
    fn a_pool_keeps_a_bounded_number_of_buffers() {
        let pool = Arc::new(BufferPool::default());
        let buffers: Vec<_> = (0..2 * MOST_KEPT).map(|_| pool.take(1, SMALLEST_KEPT).unwrap()).collect();
        drop(buffers);
        assert_eq!(lock(&pool.free).len(), MOST_KEPT);
    }

    #[test]
    fn an_array_beyond_the_limit_is_refused_before_it_is_allocated() {
        let pool = Arc::new(BufferPool::default());
        assert!(matches!(pool.take(usize::MAX, 2), Err(crate::Error::TooLarge { .. })));
    }

    #[test]
    fn overlapping_windows_share_slots() {
        let pool = Arc::new(BufferPool::default());
        let mut buffer = pool.take(1, 6).unwrap();
        buffer.as_mut_slice().copy_from_slice(&[1, 2, 3, 4, 5, 6]);
        let array = ArraySpec::new("a", Dtype::Uint8, vec![3]).array(2, Arc::new(buffer));
        let pairs = array.overlapping("pairs", 0, &[2, 2]);
        assert_eq!(pairs.shape, [2, 2, 2]);
        assert_eq!(pairs.to_bytes(), [1, 2, 2, 3, 4, 5, 5, 6]);
        let last = array.overlapping("last", 2, &[]);
        assert_eq!((last.shape.len(), last.to_bytes()), (1, vec![3, 6]));
    }
}

//! A batch of arrays. They lie in one buffer one after the other, so that one copy brings a batch to a device; `observation` and
//! `next_observation` may overlap.
//!
//! A large batch is evicted from the caches before it is used. An ordinary store reads each line before it overwrites it,
//! and evicts rows that the next item needs; a streamed store does neither. Streaming shortens the unpacking of 512 stacks
//! of frames by a fifth (`cargo bench -p replay_core --bench views decode`).

use std::sync::Arc;

use super::buffer::{Buffer, BufferPool};
use crate::chunk::RowLayout;
use crate::error::Result;
use crate::schema::{Column, Dtype};

/// A named array with NumPy's description: element type, shape, strides and an offset into its buffer. One whose items have different
/// lengths has their values, one after the other, and the offsets of each level.
#[derive(Clone)]
pub struct Array {
    pub name: String,
    pub dtype: Dtype,
    /// Elements along each dimension; the first is the batch, or the values of all items.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each dimension.
    pub strides: Vec<usize>,
    /// Byte offset of the first element in the buffer.
    pub offset: usize,
    /// The buffer, which other arrays may share.
    pub buffer: Arc<Buffer>,
    /// Whether other elements, of this array or of another one, may be the same bytes: true for observation stacks.
    pub shared: bool,
    /// Where items have different lengths: int64, the first element of each part and the end. The outermost level counts the parts of
    /// the next one, the last the values.
    pub offsets: Vec<Array>,
    /// In a slice of such an array every `step`-th outermost offset begins an item, and the next offset ends it.
    pub step: Option<usize>,
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
        if let Some(outer) = items.offsets.first_mut() {
            // The values stay: the offsets tell which are of these items.
            let own = self.step.unwrap_or(1);
            items.step = Some(own * step);
            *outer = match count.checked_sub(1) {
                Some(last) => outer.items(first * own, last * own * step + 2, 1),
                None => outer.items(0, 1, 1),
            };
            return items;
        }
        // Without items the offset stays in the buffer.
        items.offset += first * self.strides[0] * usize::from(count > 0);
        items.shape[0] = count;
        if count > 1 {
            items.strides[0] *= step;
        }
        items
    }

    /// The array itself, and its offsets.
    pub fn with_offsets(&self) -> impl Iterator<Item = &Array> {
        std::iter::once(self).chain(&self.offsets)
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
        let mut places = vec![self.offset];
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            places = places.iter().flat_map(|place| (0..n).map(move |index| place + index * stride)).collect();
        }
        let element = |&place| &self.buffer.as_slice()[place..place + self.dtype.bytes()];
        places.iter().flat_map(element).copied().collect()
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
    /// Items of every array. Fewer than were sampled where some are rejected.
    pub len: usize,
    pub arrays: Vec<Array>,
    /// Items whose data does not decode, to be reported.
    pub rejected: Vec<Rejected>,
}

impl Batch {
    pub fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.iter().find(|array| array.name == name)
    }
}

/// An array of a batch that is still to be filled: each item, or each of its rows, has the same number of its bytes.
pub(super) struct ArraySpec {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Its first dimension; `None` for the items of the batch.
    rows: Option<usize>,
    /// Offset in the buffer of the batch, see [`take_buffer`].
    offset: usize,
}

impl ArraySpec {
    pub(super) fn new(name: &str, dtype: Dtype, shape: Vec<usize>) -> Self {
        ArraySpec { name: name.to_owned(), dtype, shape, rows: None, offset: 0 }
    }

    /// An array of as many `rows`, whatever the number of items.
    pub(super) fn of_rows(name: &str, dtype: Dtype, shape: Vec<usize>, rows: usize) -> Self {
        ArraySpec { rows: Some(rows), ..ArraySpec::new(name, dtype, shape) }
    }

    /// The part of the buffer of another array, of no more bytes.
    pub(super) fn in_place_of(self, other: &ArraySpec) -> Self {
        ArraySpec { offset: other.offset, ..self }
    }

    /// An array of `steps` values of a column for each item; without that dimension where `steps` is `None`.
    pub(super) fn of_column(layout: &RowLayout, column: usize, steps: Option<usize>) -> Self {
        let Column { name, dtype, shape, .. } = &layout.columns[column].column;
        let shape = shape.iter().map(|&n| n as usize);
        ArraySpec::new(name, *dtype, steps.into_iter().chain(shape).collect())
    }

    pub(super) fn named(self, name: &str) -> Self {
        ArraySpec { name: name.to_owned(), ..self }
    }

    /// Bytes of one item; saturates, [`BufferPool::take`] bounds them.
    pub(super) fn item_bytes(&self) -> usize {
        self.shape.iter().fold(self.dtype.bytes(), |bytes, &n| bytes.saturating_mul(n))
    }

    /// Whether its first dimension is the items of the batch.
    pub(super) fn is_of_items(&self) -> bool {
        self.rows.is_none()
    }

    fn bytes(&self, items: usize) -> usize {
        self.rows.unwrap_or(items).saturating_mul(self.item_bytes())
    }

    /// The contiguous array of `items` in a filled buffer.
    pub(super) fn array(&self, items: usize, buffer: Arc<Buffer>) -> Array {
        let mut shape = vec![self.rows.unwrap_or(items)];
        shape.extend(&self.shape);
        let mut strides = vec![self.dtype.bytes(); shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        let (name, dtype, offset) = (self.name.clone(), self.dtype, self.offset);
        Array { name, dtype, shape, strides, offset, buffer, shared: false, offsets: Vec::new(), step: None }
    }
}

/// A buffer with any content for arrays of `items`, whose places it sets.
pub(super) fn take_buffer(pool: &Arc<BufferPool>, specs: &mut [ArraySpec], items: usize) -> Result<Buffer> {
    let mut len = 0_usize;
    for spec in specs {
        spec.offset = len.saturating_add(Buffer::ALIGNMENT - 1) & !(Buffer::ALIGNMENT - 1);
        len = spec.offset.saturating_add(spec.bytes(items));
    }
    pool.take(len)
}

/// The bytes of each array of `items` in the buffer of a batch.
pub(super) fn split<'b>(specs: &[ArraySpec], items: usize, buffer: &'b mut Buffer) -> Vec<&'b mut [u8]> {
    let (mut rest, mut at) = (buffer.as_mut_slice(), 0);
    let mut next = |spec: &ArraySpec| {
        let bytes = spec.bytes(items);
        let (taken, left) = std::mem::take(&mut rest).split_at_mut(spec.offset - at + bytes);
        let array = &mut taken[spec.offset - at..];
        (rest, at) = (left, spec.offset + bytes);
        array
    };
    specs.iter().map(&mut next).collect()
}

/// The arrays in the filled buffer of a batch.
pub(super) fn whole_arrays(specs: &[ArraySpec], items: usize, buffer: &Arc<Buffer>) -> Vec<Array> {
    specs.iter().map(|spec| spec.array(items, buffer.clone())).collect()
}

/// Writes values into the bytes of an array.
pub(super) fn put<const N: usize>(array: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    let slots = array.as_chunks_mut().0;
    slots.iter_mut().zip(values).for_each(|(slot, value)| *slot = value);
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
        // Numbers, without a call of memcpy.
        match (from.len(), to.len()) {
            (1, 1) => to[0] = from[0],
            (4, 4) => to.as_chunks_mut::<4>().0[0] = from.as_chunks::<4>().0[0],
            (8, 8) => to.as_chunks_mut::<8>().0[0] = from.as_chunks::<8>().0[0],
            _ => to.copy_from_slice(from),
        }
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
    fn arrays_beyond_the_limit_are_refused_before_they_are_allocated() {
        let pool = Arc::new(BufferPool::default());
        let mut specs = ["a", "b"].map(|name| ArraySpec::new(name, Dtype::Uint16, vec![]));
        assert!(matches!(take_buffer(&pool, &mut specs, usize::MAX), Err(crate::Error::TooLarge { .. })));
    }

    #[test]
    fn arrays_of_a_batch_lie_one_after_the_other_and_are_aligned() {
        let pool = Arc::new(BufferPool::default());
        let mut specs = [("a", 3), ("b", 100), ("c", 0), ("d", 1)]
            .map(|(name, bytes)| ArraySpec::new(name, Dtype::Uint8, vec![bytes]));
        let mut buffer = take_buffer(&pool, &mut specs, 2).unwrap();
        assert_eq!(specs.each_ref().map(|spec| spec.offset), [0, 64, 320, 320]);
        for (number, part) in (1..).zip(split(&specs, 2, &mut buffer)) {
            part.fill(number);
        }
        let arrays = whole_arrays(&specs, 2, &Arc::new(buffer));
        assert_eq!(arrays[1].to_bytes(), [2; 200]);
        assert_eq!((arrays[2].to_bytes(), arrays[3].to_bytes()), (vec![], vec![4; 2]));
    }

    #[test]
    fn overlapping_windows_share_slots() {
        let pool = Arc::new(BufferPool::default());
        let mut spec = [ArraySpec::new("a", Dtype::Uint8, vec![3])];
        let mut buffer = take_buffer(&pool, &mut spec, 2).unwrap();
        buffer.as_mut_slice().copy_from_slice(&[1, 2, 3, 4, 5, 6]);
        let array = spec[0].array(2, Arc::new(buffer));
        let pairs = array.overlapping("pairs", 0, &[2, 2]);
        assert_eq!(pairs.shape, [2, 2, 2]);
        assert_eq!(pairs.to_bytes(), [1, 2, 2, 3, 4, 5, 5, 6]);
        let last = array.overlapping("last", 2, &[]);
        assert_eq!((last.shape.len(), last.to_bytes()), (1, vec![3, 6]));
    }
}

//! Heap memory that Rust fills and then lends to another language, which may write to it.

use std::cell::UnsafeCell;

use crate::huge_pages;

/// Bytes on the heap. Rust writes them through an exclusive reference; once they are shared, only those who were
/// handed the pointer touch them.
#[derive(Default)]
pub(super) struct Storage(Box<[UnsafeCell<u8>]>);

// SAFETY: shared references only read, or give out a pointer whose users vouch for what they do.
unsafe impl Sync for Storage {}

impl Storage {
    /// `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let bytes = vec![0_u8; len].into_boxed_slice();
        huge_pages::advise(&bytes);
        let bytes = Box::into_raw(bytes);
        // SAFETY: UnsafeCell<u8> has the layout of u8, and the box was just taken apart.
        Storage(unsafe { Box::from_raw(bytes as *mut [UnsafeCell<u8>]) })
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Where the bytes are; they do not move while this value lives. To write there is sound for as long as
    /// nobody else uses the bytes.
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.0.as_ptr())
    }

    /// The bytes.
    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: the pointer and the length are the box's; who writes through the pointer vouches that no slice
        // is in use.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len()) }
    }

    /// The bytes, to be filled.
    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the pointer and the length are the box's, and the reference to it is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

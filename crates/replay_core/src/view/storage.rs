//! Heap memory that Rust fills and then lends to Python, which may write to it.

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

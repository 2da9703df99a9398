//! Hints to the processor and the system about memory. They change the duration of an access, never its result.

/// Least bytes for huge pages: less memory may contain no aligned one, or not fill it.
pub const HUGE_PAGES_FROM: usize = 4 << 20;

/// Fetches the cache lines of a value ahead of its use, so that the misses of several values overlap.
#[inline(always)]
pub fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(value)).step_by(64) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = std::ptr::from_ref(value).cast::<i8>();
        // SAFETY: a prefetch is a hint and reads nothing; SSE is part of every x86_64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(offset)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Asks the system for pages of 2 MB instead of 4 KB under memory that was just allocated and not touched yet.
/// Random accesses otherwise cost a page-table walk nearly every time. Linux grants the request where
/// `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` (the usual default) or `always`.
pub fn advise_huge_pages<T>(memory: &[T]) {
    let bytes = size_of_val(memory);
    if bytes < HUGE_PAGES_FROM {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4 << 10;
        let start = memory.as_ptr() as usize;
        let first = start.next_multiple_of(PAGE);
        let last = (start + bytes) / PAGE * PAGE;
        // SAFETY: the pages lie within the slice, and the advice does not change what is in them.
        unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
    }
}

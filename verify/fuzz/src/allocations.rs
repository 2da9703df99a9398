//! Bytes that a call allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocated bytes of this thread, and their maximum since it was last reset. A buffer that another thread frees stays counted.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

/// Runs `work`; the result is its value and the most bytes that it had allocated at once.
pub fn peak<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    PEAK.set(before);
    let value = work();
    (value, (PEAK.get() - before) as u64)
}

/// Runs `work`, which may allocate `limit` bytes at once.
///
/// # Panics
/// When it allocates more.
pub fn within<T>(limit: u64, what: &str, work: impl FnOnce() -> T) -> T {
    let (value, peak) = peak(work);
    assert!(peak <= limit, "{what} has allocated {peak} bytes, and may {limit}");
    value
}

/// The system's allocator, which counts.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: i64) {
    // An error means that the thread is ending.
    let live = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        live.get()
    });
    let _ = live.map(|live| PEAK.try_with(|peak| peak.set(peak.get().max(live))));
}

// SAFETY: each call is the system allocator's, with the caller's arguments; the counters neither allocate nor unwind. The trait's other
// methods are made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps to the conditions of `alloc`, which are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: `alloc` got the pointer from the system allocator, for the same layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

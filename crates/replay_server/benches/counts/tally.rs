//! Counters of each of the two sides, and the allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

// All of it runs on one thread, so nothing is ordered by these atomics: they are there because statics have to be.
static TALLIES: [Tally; 2] = [const { Tally::new() }; 2];
static SERVING: AtomicBool = AtomicBool::new(false);

/// Counters of one side.
pub struct Tally {
    allocations: AtomicU64,
    allocated_bytes: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Tally {
    const fn new() -> Self {
        Tally {
            allocations: AtomicU64::new(0),
            allocated_bytes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
        }
    }

    fn counts(&self) -> [(&'static str, u64); 5] {
        [
            ("allocations", self.allocations.load(Relaxed)),
            ("allocated bytes", self.allocated_bytes.load(Relaxed)),
            ("reads", self.reads.load(Relaxed)),
            ("writes", self.writes.load(Relaxed)),
            ("written bytes", self.written_bytes.load(Relaxed)),
        ]
    }
}

/// The side that runs now.
fn running() -> &'static Tally {
    &TALLIES[usize::from(SERVING.load(Relaxed))]
}

/// Counts the operations of `work` for the server.
pub fn as_server<T>(work: impl FnOnce() -> T) -> T {
    SERVING.store(true, Relaxed);
    let done = work();
    SERVING.store(false, Relaxed);
    done
}

/// A read from the transport: on the kernel's stack a system call.
pub fn count_read() {
    running().reads.fetch_add(1, Relaxed);
}

/// A write to the transport, of `bytes`: on the kernel's stack a system call.
pub fn count_write(bytes: usize) {
    running().writes.fetch_add(1, Relaxed);
    running().written_bytes.fetch_add(bytes as u64, Relaxed);
}

/// Averages of one operation, by name: `client allocations` and so on.
pub type Counts = BTreeMap<String, f64>;

/// Runs `operation` with the numbers up to `times`, both sides of it.
pub fn remote(times: usize, operation: &mut dyn FnMut(usize)) -> Counts {
    let [client, server] = counted(times, operation);
    let of = |side, counts: [_; 5]| counts.map(|(name, each)| (format!("{side} {name}"), each));
    of("client", client).into_iter().chain(of("server", server)).collect()
}

/// Runs `operation` with the numbers up to `times`, in one process: nothing goes over a transport.
pub fn in_process(times: usize, operation: &mut dyn FnMut(usize)) -> Counts {
    let [ours, _] = counted(times, operation);
    ours.into_iter().filter(|(name, _)| name.starts_with("alloc")).map(|(name, each)| (name.to_owned(), each)).collect()
}

fn counted(times: usize, operation: &mut dyn FnMut(usize)) -> [[(&'static str, f64); 5]; 2] {
    let totals = || TALLIES.each_ref().map(Tally::counts);
    let before = totals();
    (0..times).for_each(operation);
    let after = totals();
    std::array::from_fn(|side| {
        std::array::from_fn(|i| {
            let (name, total) = after[side][i];
            (name, (total - before[side][i].1) as f64 / times as f64)
        })
    })
}

/// The system's allocator, with a tally. A buffer that grows is another allocation, of its new size.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: every call is handed on as it came. The other methods are made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let tally = running();
        tally.allocations.fetch_add(1, Relaxed);
        tally.allocated_bytes.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller's promises are the system's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above, and all that was allocated came from the system.
        unsafe { System.dealloc(pointer, layout) }
    }
}

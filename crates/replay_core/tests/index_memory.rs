//! What a table allocates stays within what it has set aside of the memory's byte limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody};
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig, flags};
use replay_core::table::{Attempt, Table, Turn};

/// The system's allocator, which counts the bytes that are allocated.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on as it came. The other methods are made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A count, no data is published with it.
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above, and all that was allocated came from the system.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn allocated() -> u64 {
    ALLOCATED.load(Ordering::Relaxed) as u64
}

const FRAME: u32 = 16;

fn columns() -> Vec<Column> {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.into(),
        codec,
        finite: true,
        max_length: 0,
    };
    vec![column("number", Dtype::Uint64, &[], Codec::None), column("frame", Dtype::Uint8, &[FRAME], Codec::Lz4)]
}

/// One step, in a chunk of its own, that does not pack.
fn push(step: u64) -> Push {
    let mut payload = vec![if step == 0 { flags::FIRST } else { 0 }];
    payload.extend(step.to_le_bytes());
    payload.extend(FRAME.to_le_bytes());
    payload.extend([7; FRAME as usize]);
    let chunk = ChunkHead { stream: 0, rows: 1, first_step: step, bytes: payload.len() as u32, version: 0 };
    let item = NewItem { anchor: step, stream: 0, before: step.min(3) as u16, after: 0, priority: None };
    Push {
        writer: 1,
        epoch: 1,
        sequence: step + 1,
        body: PushBody { chunks: vec![chunk], items: vec![item], payload: Bytes::from(payload) },
    }
}

#[test]
fn a_full_table_takes_no_more_than_was_set_aside_for_it() {
    const STEPS: u64 = 1 << 14;
    for sampler in [Sampler::Prioritized, Sampler::Fifo, Sampler::MaxHeap, Sampler::RankBased] {
        let config = TableConfig { sampler, max_times_sampled: 1, ..TableConfig::new("t", columns(), STEPS) };
        let memory = Memory::new(MemoryLimits::default());
        let before = allocated();
        let table = memory.create_table(&config).unwrap();
        let made = allocated() - before;
        let index = Table::index_bytes(&config);
        assert!(made <= index, "{sampler:?}: {made} of {index}");
        assert!(index <= made + 16 * STEPS, "{sampler:?}: {made} of {index}");

        let open =
            OpenWriter { writer: 1, name: String::new(), server: None, streams: 1, window_before: 3, window_after: 0 };
        table.open_writer(&open).unwrap();
        for step in 0..2 * STEPS {
            let pushed = table.try_push(&push(step), &mut Turn::default());
            assert!(matches!(pushed, Ok(Attempt::Ready(_))));
        }
        assert_eq!(table.stats()["steps"], STEPS, "its bytes are enough for all");
        let taken = allocated() - before;
        let set_aside = memory.stats()["reserved_bytes"].as_u64().unwrap();
        assert!(taken <= set_aside, "{sampler:?}: {taken} of {set_aside}");
    }
}

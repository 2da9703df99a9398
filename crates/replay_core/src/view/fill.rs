//! Threads that fill the arrays of a batch together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::batch::{ArraySpec, Buffer};
use super::decode::{Decoded, SampledWindow, Unpacker};
use super::memory::Copies;
use crate::error::Result;
use crate::row_layout::RowLayout;
use base::allocation;
use base::error::OsError;
use base::sync::lock;

/// Items that a thread fills at a time: few, so that no thread waits long for the last one, and enough to wake another.
const PART_ITEMS: usize = 32;
/// Bytes of a batch for which one more thread is woken. Fewer are filled before it runs: with a second thread 64 steps of 100
/// bytes took 72 us instead of 41, and 512 took 253 instead of 213.
/// Tests, whose batches are small, use all threads.
const HELPER_BYTES: usize = if cfg!(debug_assertions) { 1 } else { 256 << 10 };
/// Spins (tens of microseconds) in which the calling thread waits for the last parts of the others before it sleeps. Sleeping
/// at once made a sample of 512 in process 3 % slower.
const LAST_PART_SPINS: usize = 4_000;

/// Fills one item's part of each array, or returns the reason why its window cannot be used.
pub(super) type Fill<'f, 'a> =
    &'f (dyn Fn(&mut Unpacker<'a>, &SampledWindow<'a>, &mut [&mut [u8]]) -> Decoded<()> + Sync);

/// The calling thread and a pool of others. They are not started anew for each batch: the scheduler tends to put a new thread
/// on its parent's core while another core is about to become idle, which made a remote sample of 512 take 6.2 ms instead of
/// 4.1 on two cores.
pub(super) struct Fillers {
    others: Option<ThreadPool>,
}

impl Fillers {
    /// Starts all of `threads` but the calling one.
    pub(super) fn new(threads: usize) -> Result<Self> {
        allocation::check_threads("a pool of unpacking threads", threads.saturating_sub(1))?;
        let start = |others| {
            ThreadPoolBuilder::new()
                .num_threads(others)
                .stack_size(allocation::STACK_BYTES)
                .thread_name(|number| format!("innet-unpack-{number}"))
                .build()
                .map_err(|error| {
                    let what = "cannot start the threads that unpack batches";
                    OsError::of(what)(std::io::Error::other(error))
                })
        };
        Ok(Fillers { others: (threads > 1).then(|| start(threads - 1)).transpose()? })
    }

    /// Fills the buffers of a batch, item by item. Returns the failed items and the reasons, in order.
    pub(super) fn fill_arrays<'a>(
        &self,
        layout: &'a RowLayout,
        windows: &[SampledWindow<'a>],
        specs: &[ArraySpec],
        buffers: &mut [Buffer],
        fill: Fill<'_, 'a>,
    ) -> Vec<(usize, String)> {
        let bytes = buffers.iter().map(Buffer::len).sum();
        let mut rest: Vec<&mut [u8]> = buffers.iter_mut().map(Buffer::as_mut_slice).collect();
        let parts = windows.chunks(PART_ITEMS).enumerate().map(|(part, windows)| {
            let taken: Vec<_> = rest
                .iter_mut()
                .zip(specs)
                .map(|(bytes, spec)| {
                    let (taken, left) = std::mem::take(bytes).split_at_mut(windows.len() * spec.item_bytes());
                    *bytes = left;
                    taken
                })
                .collect();
            (part * PART_ITEMS, windows, taken)
        });
        let parts = Mutex::new(parts);
        let failures = Mutex::new(Vec::new());
        let work = || {
            let mut out = Vec::with_capacity(specs.len());
            let mut unpacker = Unpacker::new(layout, Copies::to_batch(bytes));
            loop {
                let Some((first, windows, taken)) = lock(&parts).next() else {
                    return;
                };
                let mut items: Vec<_> =
                    taken.into_iter().zip(specs).map(|(part, spec)| part.chunks_exact_mut(spec.item_bytes())).collect();
                for (index, window) in windows.iter().enumerate() {
                    out.extend(items.iter_mut().map_while(Iterator::next));
                    if let Err(reason) = fill(&mut unpacker, window, &mut out) {
                        lock(&failures).push((first + index, reason));
                    }
                    out.clear();
                }
            }
        };
        let others_at_most = windows.len().div_ceil(PART_ITEMS).saturating_sub(1);
        let helpers = others_at_most.min(bytes / HELPER_BYTES);
        match &self.others {
            Some(others) if helpers > 0 => {
                let helpers = others.current_num_threads().min(helpers);
                let busy = AtomicUsize::new(helpers);
                others.in_place_scope(|scope| {
                    for _ in 0..helpers {
                        scope.spawn(|_| {
                            work();
                            // Relaxed: the end of the scope publishes what the threads wrote.
                            busy.fetch_sub(1, Ordering::Relaxed);
                        });
                    }
                    work();
                    for _ in 0..LAST_PART_SPINS {
                        if busy.load(Ordering::Relaxed) == 0 {
                            break;
                        }
                        std::hint::spin_loop();
                    }
                });
            }
            _ => work(),
        }
        let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        failures.sort_unstable_by_key(|(item, _)| *item);
        failures
    }
}

/// Closes the gaps that failed items left in an array.
pub(super) fn remove_items(bytes: &mut [u8], item_bytes: usize, failed: &[(usize, String)]) {
    let mut failed = failed.iter().map(|(item, _)| *item).peekable();
    let mut kept = 0;
    for item in 0..bytes.len() / item_bytes {
        if failed.next_if_eq(&item).is_some() {
            continue;
        }
        if kept < item {
            bytes.copy_within(item * item_bytes..(item + 1) * item_bytes, kept * item_bytes);
        }
        kept += 1;
    }
}

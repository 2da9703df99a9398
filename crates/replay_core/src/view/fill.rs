//! The arrays of a batch, filled item by item by several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::vec;

use rayon::{ThreadPool, ThreadPoolBuilder};

use base::allocation;
use base::system::OsError;
use base::wait::lock;

use super::batch::{self, Array, ArraySpec, Copies};
use super::buffer::Buffer;
use super::decode::{Decoded, SampledRow, SampledWindow, Steps, Unpacker};
use super::ragged::RaggedArray;
use crate::chunk::RowLayout;
use crate::error::Result;

/// Items that a thread fills at a time: few, so that no thread waits long for the last one, and enough to wake another.
const PART_ITEMS: usize = 32;
/// Bytes of a batch for which one more thread is woken. Fewer are filled before it runs: with a second thread 64 steps of 100
/// bytes took 72 µs instead of 41, and 512 took 253 instead of 213.
/// Tests, whose batches are small, use all threads.
const HELPER_BYTES: usize = if cfg!(debug_assertions) { 1 } else { 256 << 10 };
/// Spins (tens of microseconds) in which the calling thread waits for the last parts of the others before it sleeps. Sleeping
/// at once made a sample of 512 in process 3 % slower.
const LAST_PART_SPINS: usize = 4_000;

/// What a view makes of windows. `short` says that a window of the batch ends early, in a way that moves its arrays.
pub(super) trait ArraysOfView: Send + Sync {
    fn any_short(&self, _windows: &[SampledWindow<'_>]) -> bool {
        false
    }

    fn specs(&self, layout: &RowLayout, short: bool) -> Vec<ArraySpec>;

    /// The arrays whose items have different lengths. Rows of a window that `fill` refuses are not read.
    fn ragged<'a>(&self, _layout: &RowLayout, _windows: &[SampledWindow<'a>]) -> Vec<RaggedArray<'a>> {
        Vec::new()
    }

    /// Fills the arrays of some items.
    fn fill<'a>(&self, unpacker: &mut Unpacker<'a>, items: &mut Items<'_, 'a>, short: bool);

    fn arrays(&self, _short: bool, specs: &[ArraySpec], items: usize, buffer: &Arc<Buffer>) -> Vec<Array> {
        batch::whole_arrays(specs, items, buffer)
    }
}

/// Consecutive items of a batch, on their way into its arrays.
pub(super) struct Items<'b, 'a> {
    pub(super) windows: &'b [SampledWindow<'a>],
    /// Their bytes in each array that is not filled yet.
    arrays: vec::IntoIter<&'b mut [u8]>,
    /// Why an item cannot be used.
    failed: &'b mut [Option<String>],
}

impl<'a> Items<'_, 'a> {
    /// Results of `read`. `None` means that the window ends before its episode: the item fails, and gets the result of `none`.
    pub(super) fn read<T>(
        &mut self,
        read: impl Fn(&SampledWindow<'a>) -> Option<T>,
        none: impl Fn(&SampledWindow<'a>) -> T,
    ) -> Vec<T> {
        let of = |(window, failed): (_, &mut Option<String>)| {
            read(window).unwrap_or_else(|| {
                *failed = Some("the window ends before its episode does".into());
                none(window)
            })
        };
        self.windows.iter().zip(&mut *self.failed).map(of).collect()
    }

    /// The steps of each window, at most `most`; none of one that fails.
    pub(super) fn steps(&mut self, most: usize) -> Vec<Steps<'a>> {
        let none = |&window: &_| Steps { window, counted: 0, all: 0, terminated: false, observations: 0 };
        self.read(|window| window.steps(most), none)
    }

    /// Fills the next arrays: calls `fill` with the number of each item and its bytes in each of them, unless the item failed before.
    pub(super) fn fill_next<const N: usize>(&mut self, mut fill: impl FnMut(usize, [&mut [u8]; N]) -> Decoded<()>) {
        let arrays = [(); N].map(|()| self.arrays.next().unwrap_or_default());
        let mut parts = arrays.map(|array| array.chunks_exact_mut(array.len() / self.windows.len()));
        for (item, failed) in self.failed.iter_mut().enumerate() {
            let values = parts.each_mut().map(|part| part.next().unwrap_or_default());
            if failed.is_none() {
                *failed = fill(item, values).err();
            }
        }
    }

    /// Fills the next array with a column's values. `row` gives the row of an item's slot; a slot without a row has zeros.
    pub(super) fn fill_values(
        &mut self,
        unpacker: &mut Unpacker<'a>,
        column: usize,
        row: impl Fn(usize, usize) -> Option<SampledRow<'a>>,
    ) {
        let bytes = unpacker.bytes(column);
        self.fill_next(|item, [values]| {
            let mut slots = values.chunks_exact_mut(bytes).enumerate();
            slots.try_for_each(|(slot, value)| unpacker.unpack_or_zeros(row(item, slot), column, value))
        });
    }
}

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

    /// Fills the first arrays of a batch, item by item: those of `specs`, and after them the ragged ones. Returns the failed items and the
    /// reasons, in order; `failed` has those that are known.
    pub(super) fn fill_arrays<'a>(
        &self,
        layout: &'a RowLayout,
        windows: &[SampledWindow<'a>],
        (specs, ragged): (&[ArraySpec], &[RaggedArray<'a>]),
        buffer: &mut Buffer,
        (view, short): (&dyn ArraysOfView, bool),
        failed: Vec<(usize, String)>,
    ) -> Vec<(usize, String)> {
        let bytes = buffer.len();
        let fixed = specs.iter().take_while(|spec| spec.is_of_items()).count();
        let mut arrays = batch::split(specs, windows.len(), buffer).into_iter();
        let arrays_and_specs = arrays.by_ref().take(fixed).zip(specs);
        let mut rest: Vec<_> =
            arrays_and_specs.map(|(bytes, spec)| bytes.chunks_mut(PART_ITEMS * spec.item_bytes())).collect();
        // The values follow the offsets.
        let mut values: Vec<_> = ragged.iter().filter_map(|array| arrays.nth(array.depth())).collect();
        let parts = windows.chunks(PART_ITEMS).enumerate().map(|(part, windows)| {
            let first = part * PART_ITEMS;
            let mut arrays: Vec<_> = rest.iter_mut().map_while(Iterator::next).collect();
            arrays.extend(ragged.iter().zip(&mut values).map(|(array, values)| {
                values.split_off_mut(..array.bytes(first..first + windows.len())).unwrap_or_default()
            }));
            (first, windows, arrays)
        });
        let parts = Mutex::new(parts);
        let failures = Mutex::new(failed);
        let work = || {
            let mut unpacker = Unpacker::new(layout, Copies::to_batch(bytes));
            let mut reasons = vec![None; PART_ITEMS];
            loop {
                let Some((first, windows, mut arrays)) = lock(&parts).next() else {
                    return;
                };
                let reasons = &mut reasons[..windows.len()];
                let values = arrays.split_off(fixed);
                let arrays = arrays.into_iter();
                view.fill(&mut unpacker, &mut Items { windows, arrays, failed: &mut *reasons }, short);
                for (array, values) in ragged.iter().zip(values) {
                    array.fill(&mut unpacker, first..first + windows.len(), values, reasons);
                }
                let failed = reasons.iter_mut().enumerate();
                let failed = failed.filter_map(|(index, reason)| Some((first + index, reason.take()?)));
                lock(&failures).extend(failed);
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
        failures.sort_by_key(|(item, _)| *item);
        failures.dedup_by_key(|(item, _)| *item);
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

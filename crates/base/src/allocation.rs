//! Sizes that come from an argument, a setting or a peer: their limits, and allocations that fail with an error, where Rust's own
//! collections end the process.
//!
//! A system may grant memory that it does not have and kill the process that touches it. A large size is therefore also compared with
//! the memory that the process may have; [`measure_by`] sets the function that reads it.

use std::alloc::{GlobalAlloc, Layout, System, alloc_zeroed};
use std::fmt;
use std::hint::black_box;
use std::sync::OnceLock;

/// A size over a limit.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what} of {size} is over the limit of {limit}; {advice}")]
pub struct TooLarge {
    /// The sized thing, with its unit.
    pub what: &'static str,
    /// Its size.
    pub size: u64,
    /// The largest size allowed.
    pub limit: u64,
    /// How to get below the limit.
    pub advice: &'static str,
}

/// Checks a size (`what`, with its unit) against its limit; `advice` is how to get below it.
pub fn check_size(what: &'static str, size: u64, limit: u64, advice: &'static str) -> Result<(), TooLarge> {
    if size <= limit {
        return Ok(());
    }
    Err(TooLarge { what, size, limit, advice })
}

/// Smaller sizes are not tried beforehand by [`check`].
const LARGE: u64 = 4 << 20;

/// Smaller sizes are not compared with the process's limits: reading the files that have these takes 40 µs and more, one percent of
/// the time in which a batch of this size is filled.
const COMPARED: u64 = 32 << 20;

/// Address space of a thread's stack, as pools of threads set it.
pub const STACK_BYTES: usize = 2 << 20;

/// Memory that the process may still have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLeft {
    /// Bytes.
    pub bytes: u64,
    /// The limit, as it follows the number in messages: "of the machine".
    pub whose: &'static str,
}

static MEASURE: OnceLock<fn() -> Option<MemoryLeft>> = OnceLock::new();

/// Sets the function that measures the memory that this process may still have. The first one counts.
pub fn measure_by(measure: fn() -> Option<MemoryLeft>) {
    // An error says that another function was set before.
    let _ = MEASURE.set(measure);
}

/// A size for which the process has no memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} needs {bytes} bytes, {}", Shortage(*bytes, *room))]
pub struct OutOfMemory {
    /// What would have been allocated.
    pub what: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// Memory that the process may still have, if it is known.
    pub room: Option<MemoryLeft>,
}

struct Shortage(u64, Option<MemoryLeft>);

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shortage(wanted, Some(MemoryLeft { bytes, whose })) if wanted > bytes => {
                write!(f, "more than the {bytes} {whose}")
            }
            _ => f.write_str("which the operating system refuses this process"),
        }
    }
}

/// Checks that the process may have `bytes` more, and that the system's allocator can get them. For several allocations at a
/// time, or one of a library; another thread may be faster.
pub fn check(what: &'static str, bytes: u64) -> Result<(), OutOfMemory> {
    if bytes < LARGE {
        return Ok(());
    }
    compare(what, bytes)?;
    attempt(what, bytes)
}

/// Checks that the process has address space for the stacks of `threads` more, which take memory only as they are used. Started one by
/// one, the first would end the process when the stacks of the others had taken the rest of its addresses.
pub fn check_threads(what: &'static str, threads: usize) -> Result<(), OutOfMemory> {
    let bytes = STACK_BYTES as u64 * threads as u64;
    if bytes < LARGE { Ok(()) } else { attempt(what, bytes) }
}

/// Allocates at least [`LARGE`] bytes from the system and frees them.
fn attempt(what: &'static str, bytes: u64) -> Result<(), OutOfMemory> {
    let layout = usize::try_from(bytes).ok().and_then(|len| Layout::array::<u8>(len).ok());
    let layout = layout.ok_or_else(|| refused(what, bytes))?;
    // SAFETY: the layout has at least `LARGE` bytes.
    let trial = black_box(unsafe { System.alloc(layout) });
    if trial.is_null() {
        return Err(refused(what, bytes));
    }
    // SAFETY: the allocator has just returned the pointer, for this layout.
    unsafe { System.dealloc(trial, layout) };
    Ok(())
}

/// An empty vector with room for `len` elements.
pub fn with_capacity<T>(what: &'static str, len: usize) -> Result<Vec<T>, OutOfMemory> {
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    compare(what, bytes)?;
    let mut vector = Vec::new();
    match vector.try_reserve_exact(len) {
        Ok(()) => Ok(vector),
        Err(_) => Err(refused(what, bytes)),
    }
}

/// `len` zeros, as `vec![0; len]`: large ones take no memory until they are written.
pub fn zeros(what: &'static str, len: usize) -> Result<Box<[u8]>, OutOfMemory> {
    compare(what, len as u64)?;
    let layout = Layout::array::<u8>(len).map_err(|_| refused(what, len as u64))?;
    if len == 0 {
        return Ok(Box::default());
    }
    // SAFETY: the layout has a size, since `len` is above 0.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        return Err(refused(what, len as u64));
    }
    // SAFETY: the global allocator has just made it with the layout of a slice of `len` bytes, all of them zero.
    Ok(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) })
}

/// Compares a large size with the memory that the process may still have.
fn compare(what: &'static str, bytes: u64) -> Result<(), OutOfMemory> {
    if bytes < COMPARED {
        return Ok(());
    }
    match room() {
        Some(room) if bytes > room.bytes => Err(OutOfMemory { what, bytes, room: Some(room) }),
        _ => Ok(()),
    }
}

fn refused(what: &'static str, bytes: u64) -> OutOfMemory {
    OutOfMemory { what, bytes, room: room() }
}

fn room() -> Option<MemoryLeft> {
    MEASURE.get().and_then(|measure| measure())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_beyond_the_process_is_an_error_with_the_numbers() {
        measure_by(|| Some(MemoryLeft { bytes: 1 << 30, whose: "of this test" }));
        let told = |refused: OutOfMemory| refused.to_string();
        let wanted = "an array needs 1073741825 bytes, more than the 1073741824 of this test";
        assert_eq!(check("an array", (1 << 30) + 1).map_err(told), Err(wanted.to_owned()));
        assert_eq!(zeros("an array", (1 << 30) + 1).map(drop).map_err(told), Err(wanted.to_owned()));
        let words = with_capacity::<u64>("words", usize::MAX).map(drop).unwrap_err();
        assert_eq!((words.bytes, words.room.map(|room| room.bytes)), (u64::MAX, Some(1 << 30)));
        assert_eq!(check("an array", 1 << 25), Ok(()));
        assert_eq!(*zeros("an array", 5).unwrap(), [0; 5]);
        assert!(zeros("an array", 0).unwrap().is_empty());
        assert_eq!(with_capacity::<u64>("words", 7).unwrap().capacity(), 7);
    }

    #[test]
    fn a_refusal_of_the_system_says_so() {
        let refused =
            OutOfMemory { what: "an array", bytes: 5, room: Some(MemoryLeft { bytes: 9, whose: "of this test" }) };
        assert_eq!(refused.to_string(), "an array needs 5 bytes, which the operating system refuses this process");
    }
}

//! Calls of Python threads, and the interpreter's end.
//!
//! Once the interpreter finalizes, CPython up to 3.13 ends a thread that asks for the interpreter lock by `pthread_exit`, which
//! unwinds the thread's stack. Frames of this module cannot be unwound: the process crashes. So no thread may ask while it is in
//! a call of this module:
//!
//! - Threads with the lock are counted while they are in a call. An `atexit` handler waits until the others have left or have
//!   released the lock.
//! - From then on a thread that needs the lock for a call parks for ever, without the lock and with no lock of this module.
//!   Blocked calls end first, as by Ctrl-C. As before, a daemon thread does not outlive its interpreter.
//!
//! The thread that runs the handler is exempt, because it finalizes the interpreter.
//!
//! # Invariant
//!
//! CPython unwinds no call when it finalizes.

#![expect(clippy::disallowed_methods, reason = "other files call the functions here")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};

use crate::log;

/// Flag in [`STATE`]: the interpreter ends. The lower bits count threads that are in a call with the interpreter lock.
const ENDING: usize = 1 << (usize::BITS - 1);

/// Count and flag in one word: a thread that was counted before the flag is waited for, and every later one sees it.
///
/// Relaxed accesses: the word is a state on its own, and all accesses to it have one order. Python's objects are published by
/// the interpreter lock.
static STATE: AtomicUsize = AtomicUsize::new(0);

/// Longest wait of the handler: Python code that a call runs, such as a schedule or a log handler, may block.
const LONGEST: Duration = Duration::from_secs(5);

thread_local! {
    /// Nesting depth of this thread's calls with the interpreter lock.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// This thread runs the handler.
    static FINALIZES: Cell<bool> = const { Cell::new(false) };
}

/// Counts this thread, unless the interpreter ends.
fn enter() -> bool {
    let ending = STATE.fetch_add(1, Ordering::Relaxed) & ENDING != 0;
    if ending && !FINALIZES.get() {
        leave();
        return false;
    }
    true
}

fn leave() {
    STATE.fetch_sub(1, Ordering::Relaxed);
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// Whether the interpreter ends.
pub fn is_ending() -> bool {
    STATE.load(Ordering::Relaxed) & ENDING != 0
}

/// Whether the interpreter ends, and with it this thread's blocked call.
pub fn ends_calls() -> bool {
    is_ending() && !FINALIZES.get()
}

/// A call of this module by a thread with the interpreter lock, until dropped. Methods that run Python code begin with one;
/// nested ones count once.
pub struct Call {
    /// Not `Send`: the count belongs to this thread.
    _thread: PhantomData<*const ()>,
}

impl Call {
    /// Parks the thread, without the interpreter lock, if the interpreter ends.
    pub fn begin(py: Python<'_>) -> Self {
        Self::try_begin().unwrap_or_else(|| {
            py.detach(|| park());
            unreachable!("a parked thread does not return")
        })
    }

    /// `None` if the interpreter ends.
    fn try_begin() -> Option<Self> {
        let calls = CALLS.get();
        if calls == 0 && !enter() {
            return None;
        }
        CALLS.set(calls + 1);
        Some(Call { _thread: PhantomData })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let calls = CALLS.get() - 1;
        CALLS.set(calls);
        if calls == 0 {
            leave();
        }
    }
}

/// Part of a call without the interpreter lock, until dropped.
struct Detached {
    calls: usize,
}

impl Detached {
    fn begin() -> Self {
        leave();
        Detached { calls: CALLS.replace(0) }
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        if !enter() {
            park();
        }
        CALLS.set(self.calls);
    }
}

/// Runs `work` without the interpreter lock. If the interpreter ends meanwhile, the thread parks after `work`.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let _call = Call::begin(py);
    py.detach(|| {
        let _detached = Detached::begin();
        work()
    })
}

/// Whether this thread is attached to the interpreter, or was started by Python.
pub fn is_python_thread() -> bool {
    // SAFETY: the interpreter has loaded this module, so it is initialized; the function reads a variable of this thread.
    unsafe { !pyo3::ffi::PyGILState_GetThisThreadState().is_null() }
}

/// Runs `work` with the interpreter lock, in any thread; `None` if the interpreter ends.
pub fn try_attach<T>(work: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _call = Call::try_begin()?;
    Python::try_attach(work)
}

/// Registers the `atexit` handler, at import: handlers that the program registers later run earlier, and may still join threads.
///
/// # Errors
/// Exceptions of `atexit.register` and `os.register_at_fork`.
pub fn watch_end(py: Python<'_>) -> PyResult<()> {
    let end = PyCFunction::new_closure(py, None, None, |arguments, _| end(arguments.py()))?;
    py.import("atexit")?.call_method1("register", (end,))?;
    // A forked child has none of the other threads.
    let forked = PyCFunction::new_closure(py, None, None, |_, _| {
        STATE.store(CALLS.get().min(1), Ordering::Relaxed);
    })?;
    let after_in_child = PyDict::new(py);
    after_in_child.set_item("after_in_child", forked)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&after_in_child))?;
    Ok(())
}

/// The `atexit` handler.
fn end(py: Python<'_>) {
    detach(py, log::flush);
    FINALIZES.set(true);
    STATE.fetch_or(ENDING, Ordering::Relaxed);
    let until = Instant::now() + LONGEST;
    // Detached, so that this thread is not counted, even within a call.
    detach(py, || {
        while STATE.load(Ordering::Relaxed) != ENDING && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

//! Blocking calls without the interpreter lock, ended by their deadline, by Ctrl-C, or when the object is closed; and what objects with such
//! calls are made of: [`Exclusive`], which one thread uses at a time, and [`ProcessLocal`], which `close` drops and a forked child must not use.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use base::notation::Number;
use base::wait::{Advice, Wait, WaitNotice, lock};
use gradients_net::error::Error as WorkerError;
use replay_link::error::{Error, Result};

use crate::{error, interpreter};

/// Default timeout of a call, in seconds.
pub const TIMEOUT: Option<f64> = Some(60.0);

/// Longest duration of an argument in seconds: 31 years, which any clock can add to its time.
pub const MAX_SECONDS: f64 = 1e9;

/// Deadline of a call with `timeout` in seconds; `None` without a timeout, or for infinity.
///
/// # Errors
/// `ConfigError` for a timeout out of range.
pub fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    Ok(limit(py, "timeout", timeout)?.map(|limit| Instant::now() + limit))
}

/// Longest wait, from an argument in seconds; `None` without a limit, or for infinity.
///
/// # Errors
/// `ConfigError` that names the argument and its range.
pub fn limit(py: Python<'_>, argument: &str, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    let limited = timeout.filter(|&seconds| seconds != f64::INFINITY);
    limited.map(|seconds| within(py, argument, seconds, ", or None to wait without limit")).transpose()
}

/// A duration from an argument in seconds.
///
/// # Errors
/// `ConfigError` that names the argument and its range.
pub fn seconds(py: Python<'_>, argument: &str, seconds: f64) -> PyResult<Duration> {
    within(py, argument, seconds, "")
}

fn within(py: Python<'_>, argument: &str, seconds: f64, without: &str) -> PyResult<Duration> {
    match (0.0..=MAX_SECONDS).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => {
            let reason = format!("{argument} is in seconds, 0 to 1e9{without}; got {}", Number(seconds));
            Err(error::config(py, reason))
        }
    }
}

/// Runs signal handlers.
///
/// # Errors
/// Exception of a handler, now or earlier within Python code that the core called.
fn check_signals(py: Python<'_>) -> PyResult<()> {
    match error::take_raised() {
        Some(error) => Err(error),
        None => py.check_signals(),
    }
}

/// Runs `work` without the interpreter lock, and raises its error.
pub fn unlocked<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    interpreter::detach(py, work).map_err(|error| error::to_python(py, error))
}

/// Runs `work` without the interpreter lock, and raises its error, the exception of a signal handler, or `ClosedError` once
/// `closing` ends the call. A long wait is logged.
pub fn blocking<T: Send, E: Into<WorkerError> + Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    closing: Option<&Closing>,
    work: impl FnOnce(&Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    blocking_advised(py, deadline, closing, &|_| None, work)
}

/// [`blocking`] with advice that is appended to the reason of a wait for writers, in the log and in the deadline error.
pub fn blocking_advised<T: Send, E: Into<WorkerError> + Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    closing: Option<&Closing>,
    advice: &Advice<'_>,
    work: impl FnOnce(&Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let begun = closing.map(|closing| (closing, closing.begin()));
    let ended = || begun.and_then(|(closing, begun)| closing.ended(begun));
    let result = interpreter::detach(py, || {
        let interrupted = || {
            if ended().is_some() || interpreter::ends_calls() {
                return true;
            }
            match interpreter::try_attach(check_signals) {
                Some(Ok(())) => false,
                Some(Err(error)) => {
                    *lock(&raised) = Some(error);
                    true
                }
                // The interpreter ends.
                None => true,
            }
        };
        work(&Wait { deadline, interrupted: &interrupted, notice: Some(&WaitNotice::advised(advice)) })
    });
    if let Some(raised) = lock(&raised).take().or_else(error::take_raised) {
        return Err(raised);
    }
    result.map_err(|error| match (error.into(), ended()) {
        (WorkerError::Sum(failure), _) => error::of_sum(py, &failure),
        (WorkerError::Net(Error::Interrupted), Some(what)) => Closing::exception(py, what),
        (WorkerError::Net(error), _) => error::to_python(py, advised(error, advice)),
    })
}

/// The error, with the advice if its call waited for writers.
fn advised(error: Error, advice: &Advice<'_>) -> Error {
    let reason = error.waited_for().and_then(|reason| Some(reason.to_string() + &advice(reason.awaited_table()?)?));
    match reason {
        Some(reason) => Error::deadline(reason),
        None => error,
    }
}

/// A value that one thread uses at a time, perhaps for a blocking call: waiting for it respects the deadline and Ctrl-C of the waiting thread.
pub struct Exclusive<T> {
    value: parking_lot::Mutex<T>,
    what: &'static str,
}

impl<T> Exclusive<T> {
    /// A value that errors call `what`.
    pub fn new(what: &'static str, value: T) -> Self {
        Exclusive { value: parking_lot::Mutex::new(value), what }
    }

    /// Waits until no other thread has the value.
    ///
    /// # Errors
    /// [`Error::Deadline`] and [`Error::Interrupted`].
    pub fn take(&self, wait: &Wait<'_>) -> Result<parking_lot::MutexGuard<'_, T>> {
        let waited_for = || format!("another thread is using this {}", self.what);
        let mut slices = wait.slices(wait.deadline);
        let mut until = Instant::now();
        loop {
            if let Some(value) = self.value.try_lock_until(until) {
                return Ok(value);
            }
            let now = Instant::now();
            if wait.deadline.is_some_and(|deadline| now >= deadline) {
                return Err(Error::deadline(waited_for()));
            }
            wait.report(now, Wait::REPORT_AFTER, waited_for);
            until = slices.next_wake(now)?;
        }
    }
}

/// Signal by which `close` ends blocked calls. They check it as often as they check for Ctrl-C.
#[derive(Clone)]
pub struct Closing(Arc<ClosingState>);

struct ClosingState {
    what: &'static str,
    closed: AtomicBool,
    /// Number of times that blocked calls were ended. A writer's `close` ends them even if it fails.
    closes: AtomicU32,
    /// The replay of a writer, an iterator or a server.
    replay: Option<Closing>,
    /// Writers, iterators and servers of this replay, in any order.
    dependents: Mutex<Vec<Arc<dyn Dependent>>>,
}

/// An object that closing its replay ends, even if the program still holds it.
trait Dependent: Send + Sync {
    fn end(&self) -> Result<()>;
    fn is_open(&self) -> bool;
}

/// A value for the process that made it, until it is closed, and the function by which closing the replay ends it.
struct Open<T: Send> {
    value: Mutex<Option<T>>,
    end: fn(T) -> Result<()>,
    process: u32,
}

impl<T: Send> Dependent for Open<T> {
    fn end(&self) -> Result<()> {
        let value = lock(&self.value).take();
        value.map_or(Ok(()), self.end)
    }

    fn is_open(&self) -> bool {
        lock(&self.value).is_some()
    }
}

impl<T: Send> Open<T> {
    fn drop_value(&self) {
        let Some(value) = lock(&self.value).take() else {
            return;
        };
        if self.process != std::process::id() {
            std::mem::forget(value);
            return;
        }
        // Without the interpreter lock, because dropping may join threads and end connections. During the interpreter's
        // shutdown there are no other Python threads.
        #[expect(clippy::disallowed_methods, reason = "the interpreter that drops the object has the lock")]
        Python::try_attach(|py| interpreter::detach(py, || drop(value)));
    }
}

impl<T: Send> Drop for Open<T> {
    fn drop(&mut self) {
        self.drop_value();
    }
}

impl Closing {
    fn new(what: &'static str, replay: Option<Closing>) -> Self {
        Closing(Arc::new(ClosingState {
            what,
            closed: AtomicBool::new(false),
            closes: AtomicU32::new(0),
            replay,
            dependents: Mutex::default(),
        }))
    }

    /// Start of a call, for [`Closing::ended`].
    pub fn begin(&self) -> u32 {
        self.0.closes.load(Ordering::Relaxed)
    }

    /// Name of the object, or of its replay, if `close` ends a call that began at `begun`.
    ///
    /// Relaxed here and in `end_calls` and `close`: no other data is published with the values, and the next check is early
    /// enough.
    pub fn ended(&self, begun: u32) -> Option<&'static str> {
        let ended = self.0.closes.load(Ordering::Relaxed) != begun;
        if ended { Some(self.0.what) } else { self.closed() }
    }

    /// Name of the object or of its replay, if it is closed.
    fn closed(&self) -> Option<&'static str> {
        if self.0.closed.load(Ordering::Relaxed) {
            return Some(self.0.what);
        }
        self.replay().and_then(Closing::closed)
    }

    /// Signal of the replay, for the call that closes the object itself.
    pub fn replay(&self) -> Option<&Closing> {
        self.0.replay.as_ref()
    }

    /// Ends the calls that have begun.
    pub fn end_calls(&self) {
        self.0.closes.fetch_add(1, Ordering::Relaxed);
    }

    fn close(&self) {
        self.0.closed.store(true, Ordering::Relaxed);
    }

    fn add_dependent(&self, dependent: Arc<dyn Dependent>) {
        let mut dependents = lock(&self.0.dependents);
        dependents.retain(|dependent| dependent.is_open());
        dependents.push(dependent);
    }

    /// Ends the dependents of a closed replay. To be called without the interpreter lock.
    ///
    /// # Errors
    /// The first error; all dependents end.
    pub fn end_dependents(&self) -> Result<()> {
        let dependents = std::mem::take(&mut *lock(&self.0.dependents));
        let failed: Vec<_> = dependents.iter().filter_map(|dependent| dependent.end().err()).collect();
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    /// The exception for a closed object.
    pub fn exception(py: Python<'_>, what: &str) -> PyErr {
        error::raise(py, "ClosedError", format!("this {what} is closed"))
    }
}

/// A value for the process that made it, until it is closed.
///
/// A forked child has a copy of the memory but no threads, and shares the sockets: using or dropping the value there would
/// hang or corrupt a connection.
pub struct ProcessLocal<T: Send> {
    open: Arc<Open<T>>,
    closing: Closing,
    /// The value is not dropped with this object, but with its replay.
    kept: bool,
}

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if !self.kept {
            self.open.drop_value();
        }
    }
}

impl<T: Send> ProcessLocal<T> {
    /// `value`, which errors call `what`.
    pub fn new(what: &'static str, value: T) -> Self {
        // It has no replay that would end it.
        Self::with(None, what, value, |_| Ok(()))
    }

    /// [`ProcessLocal::new`] for an object of `replay`: closing the replay closes it too, by `end`.
    ///
    /// # Errors
    /// `ClosedError` if the replay has been closed meanwhile.
    pub fn within(
        py: Python<'_>,
        replay: Closing,
        what: &'static str,
        value: T,
        end: fn(T) -> Result<()>,
    ) -> PyResult<Self>
    where
        T: 'static,
    {
        let dependent = Self::with(Some(replay.clone()), what, value, end);
        replay.add_dependent(dependent.open.clone());
        // Relaxed in `closed`: if `end_dependents` ran before `add_dependent`, the lock of the dependents makes the flag visible here.
        if let Some(what) = replay.closed() {
            unlocked(py, || dependent.open.end())?;
            return Err(Closing::exception(py, what));
        }
        Ok(dependent)
    }

    fn with(replay: Option<Closing>, what: &'static str, value: T, end: fn(T) -> Result<()>) -> Self {
        ProcessLocal {
            open: Arc::new(Open { value: Mutex::new(Some(value)), end, process: std::process::id() }),
            closing: Closing::new(what, replay),
            kept: false,
        }
    }

    /// Lets the value live on without this object, until its replay is closed or gone.
    pub fn keep(mut self) -> Self {
        self.kept = true;
        self
    }

    /// The signal of `close`.
    pub fn closing(&self) -> &Closing {
        &self.closing
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        lock(&self.open.value)
    }

    /// `closed` if the value is closed, else the empty text, for `repr`.
    pub fn mark(&self, closed: &'static str) -> &'static str {
        if self.lock().is_none() { closed } else { "" }
    }

    /// # Errors
    /// `ForkError` in a forked child.
    pub fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.open.process == std::process::id() {
            return Ok(());
        }
        Err(error::raise(
            py,
            "ForkError",
            format!(
                "this {} was made before the process forked, and threads and connections do not survive a \
                 fork; make it in the child, or start processes with multiprocessing's \"spawn\" method",
                self.closing.0.what
            ),
        ))
    }

    /// Whether the value was closed, and not by its replay.
    ///
    /// # Errors
    /// `ForkError` in a forked child.
    pub fn is_closed(&self, py: Python<'_>) -> PyResult<bool> {
        self.check_process(py)?;
        Ok(self.closing.0.closed.load(Ordering::Relaxed))
    }

    /// A copy of the value.
    ///
    /// # Errors
    /// `ForkError` in a forked child, `ClosedError` after `close`.
    pub fn get(&self, py: Python<'_>) -> PyResult<T>
    where
        T: Clone,
    {
        self.check_process(py)?;
        if let Some(what) = self.closing.closed() {
            return Err(Closing::exception(py, what));
        }
        self.lock().clone().ok_or_else(|| Closing::exception(py, self.closing.0.what))
    }

    /// Runs a blocking call without the interpreter lock, at most until `deadline`; `close` ends it.
    ///
    /// # Errors
    /// Errors of [`ProcessLocal::get`] and `work`; `ClosedError` if `close` ended the call.
    pub fn call_until<R: Send, E: Into<WorkerError> + Send>(
        &self,
        py: Python<'_>,
        deadline: Option<Instant>,
        work: impl FnOnce(&T, &Wait<'_>) -> Result<R, E> + Send,
    ) -> PyResult<R>
    where
        T: Clone,
    {
        let value = self.get(py)?;
        blocking(py, deadline, Some(&self.closing), move |wait| {
            // Dropped here: it may be the last reference, whose drop joins threads that wait for the interpreter lock.
            let value = value;
            work(&value, wait)
        })
    }

    /// [`ProcessLocal::call_until`] for at most `timeout` seconds.
    ///
    /// # Errors
    /// Its errors; `ConfigError` for an invalid timeout.
    pub fn call<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl FnOnce(&T, &Wait<'_>) -> Result<R> + Send,
    ) -> PyResult<R>
    where
        T: Clone,
    {
        self.call_until(py, deadline(py, timeout)?, work)
    }

    /// Ends blocked calls and takes the value out; `None` if it was closed before.
    ///
    /// # Errors
    /// `ForkError` in a forked child.
    pub fn close(&self, py: Python<'_>) -> PyResult<Option<T>> {
        self.check_process(py)?;
        self.closing.close();
        Ok(self.lock().take())
    }
}

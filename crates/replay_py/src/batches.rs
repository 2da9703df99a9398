//! `Batches`: draws again and again, a background thread decoding ahead of the reader.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use pyo3::prelude::*;

use replay_core::error::{Error, ErrorCode, Result};
use replay_core::replay::{SampleChannel, Wait};

use crate::batch::PyBatch;
use crate::context::context_manager;
use crate::draw::{Draw, Drawn};
use crate::handle::Handle;
use crate::turns::Turns;
use crate::{error, wait};

/// Requests under way at a server at a time: one in the network while one is decoded.
const IN_FLIGHT: usize = 2;

/// What errors call it.
const WHAT: &str = "iterator of batches";

/// An iterator over batches that ends only with an error or `close`.
#[pyclass(name = "Batches", module = "innet_drl", frozen)]
pub struct PyBatches {
    source: Handle<Arc<Source>>,
    beta: Beta,
    timeout: Option<f64>,
    description: String,
}

/// The importance-sampling exponent: a number, or a schedule that is asked before every batch.
pub enum Beta {
    Number(f64),
    Schedule(Py<PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Beta {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if value.is_callable() {
            return Ok(Beta::Schedule(value.to_owned().unbind()));
        }
        value.extract().map(Beta::Number)
    }
}

impl Beta {
    fn now(&self, py: Python<'_>) -> PyResult<f64> {
        match self {
            Beta::Number(beta) => Ok(*beta),
            Beta::Schedule(schedule) => schedule.call0(py)?.extract(py),
        }
    }
}

/// Where the next batch comes from.
enum Source {
    /// Drawn and decoded when it is asked for.
    Direct(Turns<Direct>),
    /// Decoded ahead.
    Ahead(Turns<Ahead>),
}

struct Direct {
    draw: Draw,
    channel: Box<dyn SampleChannel>,
}

impl PyBatches {
    pub fn new(
        py: Python<'_>,
        draw: Draw,
        beta: Beta,
        prefetch: usize,
        timeout: Option<f64>,
        description: String,
    ) -> PyResult<Self> {
        wait::deadline(py, timeout)?;
        let first_beta = beta.now(py)?;
        let start = || -> Result<Source> {
            let in_flight = IN_FLIGHT.min(prefetch).max(1);
            let channel = draw.replay.sampler(draw.request.clone(), in_flight)?;
            if prefetch == 0 {
                let direct = Direct { draw, channel };
                return Ok(Source::Direct(Turns::new(WHAT, direct)));
            }
            let ahead = Ahead::start(draw, channel, prefetch, first_beta)?;
            Ok(Source::Ahead(Turns::new(WHAT, ahead)))
        };
        let source = py
            .detach(start)
            .map_err(|error| error::to_python(py, error))?;
        Ok(PyBatches {
            source: Handle::new(WHAT, Arc::new(source)),
            beta,
            timeout,
            description,
        })
    }
}

context_manager!(PyBatches, |batches, py, _failed| batches.close(py));

#[pymethods]
impl PyBatches {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyBatch>> {
        let source = self.source.get(py)?;
        let beta = self.beta.now(py)?;
        let deadline = wait::deadline(py, self.timeout)?;
        let drawn = wait::blocking(py, deadline, |wait| match &*source {
            Source::Direct(direct) => {
                let mut turn = direct.take(wait)?;
                let Direct { draw, channel } = &mut *turn;
                draw.next(wait, || beta, |wait| channel.next(wait))
            }
            Source::Ahead(ahead) => ahead.take(wait)?.next(beta, wait),
        })?;
        PyBatch::new(py, drawn.delivered()).map(Some)
    }

    /// Stops drawing ahead and waits for the background thread.
    ///
    /// In process, batches that were not handed out do not count for the rate limiter: dropped, a `Drawn` gives
    /// its credit back. A server has counted what it has sent, and has no way to hear that it was not wanted.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let source = self.source.close(py)?;
        py.detach(|| drop(source));
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = if self.source.is_closed() {
            ", closed"
        } else {
            ""
        };
        format!("<Batches of {}{closed}>", self.description)
    }
}

/// The reader's end of the background thread.
struct Ahead {
    batches: Option<Receiver<Result<Drawn>>>,
    shared: Arc<DecoderState>,
    thread: Option<JoinHandle<()>>,
}

/// What the reader tells the background thread, and what it hears of it.
struct DecoderState {
    stop: AtomicBool,
    /// The bits of the float64 that the next batch to be decoded is weighted with.
    beta: AtomicU64,
    /// Why there is no batch yet: what the last draw in vain waited for.
    waited_for: Mutex<String>,
}

impl Ahead {
    fn start(
        draw: Draw,
        channel: Box<dyn SampleChannel>,
        prefetch: usize,
        beta: f64,
    ) -> Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(prefetch.saturating_sub(1));
        let shared = Arc::new(DecoderState {
            stop: AtomicBool::new(false),
            beta: AtomicU64::new(beta.to_bits()),
            waited_for: Mutex::new("the first draw is under way".into()),
        });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("innet-batches".into())
            .spawn(move || decode_ahead(&draw, channel, &for_thread, &sender))
            .map_err(|source| Error::Io {
                what: "starting the thread that decodes batches".into(),
                source,
            })?;
        Ok(Ahead {
            batches: Some(receiver),
            shared,
            thread: Some(thread),
        })
    }

    fn next(&mut self, beta: f64, wait: &Wait<'_>) -> Result<Drawn> {
        // Relaxed: a number on its own; the thread may use it one batch later.
        self.shared.beta.store(beta.to_bits(), Ordering::Relaxed);
        let Some(batches) = &self.batches else {
            return Err(Error::Closed("this iterator of batches"));
        };
        let mut slices = wait.slices(wait.deadline);
        loop {
            let now = Instant::now();
            let slice = slices.next_wake(now)?.saturating_duration_since(now);
            match batches.recv_timeout(slice) {
                Ok(result) => return result,
                // The error that ended the thread was delivered before.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Closed("this iterator of batches, after an error,"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if wait.deadline.is_some_and(|end| Instant::now() >= end) {
                let waited_for = self.shared.waited_for();
                return Err(Error::Deadline { waited_for });
            }
        }
    }
}

impl DecoderState {
    fn waited_for(&self) -> String {
        self.waited_for
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Draws and decodes until the reader stops it or an error other than a deadline ends it.
fn decode_ahead(
    draw: &Draw,
    mut channel: Box<dyn SampleChannel>,
    shared: &DecoderState,
    batches: &SyncSender<Result<Drawn>>,
) {
    // Relaxed: the flag carries no data; `Drop` joins the thread.
    let stopped = || shared.stop.load(Ordering::Relaxed);
    while !stopped() {
        // The reader has the deadline that counts. Draws end in vain now and then so that it can say what
        // it waits for.
        let wait = Wait {
            deadline: Some(Instant::now() + 2 * Wait::CHECK_EVERY),
            interrupted: &stopped,
        };
        let beta = || f64::from_bits(shared.beta.load(Ordering::Relaxed));
        let result = draw.next(&wait, beta, |wait| channel.next(wait));
        match result {
            Err(error) if error.code() == ErrorCode::Deadline => {
                let reason = match error {
                    Error::Deadline { waited_for } => waited_for,
                    other => other.to_string(),
                };
                *shared
                    .waited_for
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = reason;
            }
            Err(Error::Interrupted) => return,
            result => {
                let failed = result.is_err();
                if batches.send(result).is_err() || failed {
                    return;
                }
            }
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes the thread where it waits for room.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was its last result; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

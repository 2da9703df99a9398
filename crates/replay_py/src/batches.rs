//! `Batches`: an iterator of samples, with a background thread that decodes ahead of the consumer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyStopIteration, PyTypeError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use base::system::OsError;
use base::wait::{Wait, lock};
use replay_core::error::WaitReason;
use replay_core::replay::{Replay, SampleChannel};
use replay_core::view;
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::batch::PyBatch;
use crate::class::context_manager;
use crate::decoded_sample::{DecodedSample, SampleSource};
use crate::error;
use crate::interpreter::{self, Call};
use crate::lease::PyLease;
use crate::open_writers::{AwaitedWriters, Awaiting, OpenWriters};
use crate::wait::{self, Closing, Exclusive, ProcessLocal};

/// Requests in flight to a server: one in the network while one is decoded.
const IN_FLIGHT: usize = 2;

/// Time after which the consumer looks again whether the background thread waits for steps.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Name of the iterator in errors.
const WHAT: &str = "iterator of batches";

#[doc = stub_doc!("Batches")]
#[pyclass(name = "Batches", module = "innet_drl", frozen)]
pub struct PyBatches {
    source: ProcessLocal<Arc<Exclusive<Source>>>,
    beta: Beta,
    timeout: Option<f64>,
    writers_timeout: Option<Duration>,
    /// Begin of the wait for the next batch, if an earlier call has not got it.
    waits_since: Mutex<Option<Instant>>,
    /// A batch whose lease an earlier call could not begin in time.
    arrived: Mutex<Option<DecodedSample>>,
    /// Whether an acknowledgement came after its lease.
    lost: Arc<AtomicBool>,
    /// Memory that is sampled. Weak: the source owns it.
    memory: Weak<dyn Replay<Error>>,
    description: String,
    tables: Vec<String>,
    writers: Arc<OpenWriters>,
}

/// The importance-sampling exponent: a number, or a schedule that is called before every batch.
pub enum Beta {
    Number(f64),
    Schedule(Py<PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Beta {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let _call = Call::begin(value.py());
        if value.is_callable() {
            return Ok(Beta::Schedule(value.to_owned().unbind()));
        }
        value.extract().map(Beta::Number).map_err(|_| {
            PyTypeError::new_err(format!("beta is a number, or a function that returns one, got {}", *value))
        })
    }
}

impl Beta {
    fn now(&self, py: Python<'_>) -> PyResult<f64> {
        let beta = match self {
            Beta::Number(beta) => *beta,
            Beta::Schedule(schedule) => {
                let returned = schedule.call0(py).map_err(|raised| {
                    // Raised by `next`, it would end a loop over the batches without a word.
                    if !raised.is_instance_of::<PyStopIteration>(py) {
                        return raised;
                    }
                    let advice = "beta is called before every batch, and raised StopIteration: return the last exponent from then on";
                    let ended = error::config(py, advice);
                    ended.set_cause(py, Some(raised));
                    ended
                })?;
                returned
                    .extract(py)
                    .map_err(|_| PyTypeError::new_err(format!("the function beta returns a number, got {returned}")))?
            }
        };
        view::check_beta(beta).map_err(|error| error::to_python(py, error))?;
        Ok(beta)
    }
}

/// Source of the batches.
enum Source {
    /// Samples and decodes in the call of the consumer.
    Direct(SampleSource, Channels),
    /// A background thread.
    Ahead(Ahead),
}

/// A channel for each share of the samples.
type Channels = Vec<Box<dyn SampleChannel<Error>>>;

impl PyBatches {
    pub fn new(
        py: Python<'_>,
        samples: SampleSource,
        beta: Beta,
        prefetch: usize,
        (timeout, writers_timeout): (Option<f64>, Option<Duration>),
        description: String,
        replay: Closing,
        writers: Arc<OpenWriters>,
    ) -> PyResult<Self> {
        wait::deadline(py, timeout)?;
        let first_beta = beta.now(py)?;
        let tables = samples.shares.iter().map(|share| share.table.clone()).collect();
        // A short batch ends with its deadline.
        let writers_timeout = writers_timeout.filter(|_| !samples.shares[0].request.allow_short);
        let memory = Arc::downgrade(&samples.replay);
        let start = || -> Result<Source> {
            let allow_short = samples.shares[0].request.allow_short;
            let in_flight = match allow_short {
                // Requests in flight would have the deadline of an earlier call.
                true => 0,
                false => IN_FLIGHT.min(prefetch),
            };
            let shares = samples.shares.iter();
            let channels = shares
                .map(|share| samples.replay.samples(&share.table, share.request, in_flight))
                .collect::<Result<Channels>>()?;
            if prefetch == 0 || allow_short {
                return Ok(Source::Direct(samples, channels));
            }
            Ahead::start(samples, channels, prefetch, first_beta).map(Source::Ahead)
        };
        let source = Exclusive::new(WHAT, wait::unlocked(py, start)?);
        Ok(PyBatches {
            source: ProcessLocal::within(py, replay, WHAT, Arc::new(source), |source| {
                drop(source);
                Ok(())
            })?,
            beta,
            timeout,
            writers_timeout,
            waits_since: Mutex::default(),
            arrived: Mutex::default(),
            lost: Arc::default(),
            memory,
            description,
            tables,
            writers,
        })
    }

    /// Begins the lease of a batch that the caller is about to get, if it has one with an end, or one that may be over.
    fn begin_lease(&self, sampled: &DecodedSample, wait: &Wait<'_>) -> Result<()> {
        match self.memory.upgrade() {
            Some(memory) if sampled.lease > 0 && (sampled.ends || self.lost.load(Ordering::Relaxed)) => {
                PyLease::change(&*memory, &self.tables[0], sampled.lease, true, wait)
            }
            _ => Ok(()),
        }
    }
}

context_manager!(PyBatches, |batches, py, _failed| batches.close(py));

#[pymethods]
impl PyBatches {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyBatch>> {
        let _call = Call::begin(py);
        let beta = self.beta.now(py)?;
        let (writers, tables) = (&self.writers, &self.tables);
        let next = |source: &Exclusive<Source>, wait: &Wait<'_>| match &mut *source.take(wait)? {
            Source::Direct(samples, channels) => samples.next(
                wait,
                || beta,
                |share, table, request, wait| {
                    writers.awaiting(table, request.allow_short, wait, |wait| channels[share].next(wait))
                },
            ),
            Source::Ahead(ahead) => {
                ahead.next(beta, wait, || tables.iter().map(|table| writers.send_open(table, wait)).collect())
            }
        };
        let source = self.source.get(py)?;
        let deadline = wait::deadline(py, self.timeout)?;
        let begun = *lock(&self.waits_since).get_or_insert_with(Instant::now);
        let awaited = AwaitedWriters::new(writers, self.memory.clone(), self.writers_timeout, begun, deadline);
        let closing = self.source.closing();
        let sampled = awaited.blocking(py, closing, move |wait| {
            // Dropped here, without the interpreter lock: it may be the last reference, whose drop joins a thread.
            let source = source;
            loop {
                let arrived = lock(&self.arrived).take();
                let sampled = arrived.map_or_else(|| next(&source, wait), Ok)?;
                match self.begin_lease(&sampled, wait) {
                    // Its connection has ended since it was sampled: its items come again.
                    Err(error) if error.code() == ErrorCode::Lease => {}
                    Err(error) => {
                        *lock(&self.arrived) = Some(sampled);
                        return Err(error);
                    }
                    Ok(()) => return Ok(sampled),
                }
            }
        })?;
        *lock(&self.waits_since) = None;
        let number = sampled.lease;
        let batch = sampled.delivered();
        if number == 0 {
            return Ok(Some(batch));
        }
        let (closing, table) = (self.source.closing().replay().cloned(), self.tables[0].clone());
        batch
            .leased(py, PyLease { memory: self.memory.clone(), closing, table, number, lost: self.lost.clone() })
            .map(Some)
    }

    #[doc = stub_doc!("Batches.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let source = self.source.close(py)?;
        interpreter::detach(py, || drop((source, lock(&self.arrived).take())));
        Ok(())
    }

    /// The schedule may refer to the owner of this iterator.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.beta {
            Beta::Schedule(schedule) => visit.call(schedule),
            Beta::Number(_) => Ok(()),
        }
    }

    fn __repr__(&self) -> String {
        let closed = self.source.mark(", closed");
        format!("<Batches of {}{closed}>", self.description)
    }
}

/// The consumer's end of the background thread.
struct Ahead {
    batches: Option<Receiver<Result<DecodedSample>>>,
    shared: Arc<DecoderState>,
    thread: Option<JoinHandle<()>>,
}

/// State that the consumer and the background thread share.
struct DecoderState {
    stop: AtomicBool,
    /// Bits of the float64 exponent for the next decoded batch.
    beta: AtomicU64,
    /// Reason why the last attempt to sample returned no batch.
    waited_for: Mutex<WaitReason>,
    /// The background thread waits for writers. Relaxed: the consumer looks again soon.
    blocked: AtomicBool,
}

impl Ahead {
    fn start(mut samples: SampleSource, channels: Channels, prefetch: usize, beta: f64) -> Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(prefetch.saturating_sub(1));
        let shared = Arc::new(DecoderState {
            stop: AtomicBool::new(false),
            beta: AtomicU64::new(beta.to_bits()),
            waited_for: Mutex::new("the first sample is under way".into()),
            blocked: AtomicBool::new(false),
        });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("innet-batches".into())
            .spawn(move || decode_ahead(&mut samples, channels, &for_thread, &sender))
            .map_err(OsError::of("starting the thread that decodes batches"))?;
        Ok(Ahead { batches: Some(receiver), shared, thread: Some(thread) })
    }

    /// The next batch. `send_open` sends the open chunks of this program's writers if the background thread waits for steps.
    fn next(
        &mut self,
        beta: f64,
        wait: &Wait<'_>,
        send_open: impl Fn() -> Result<Vec<Awaiting>>,
    ) -> Result<DecodedSample> {
        // Relaxed, as the load in `decode_ahead`: no other data is published with it, and one batch later is early enough.
        self.shared.beta.store(beta.to_bits(), Ordering::Relaxed);
        let Some(batches) = &self.batches else {
            return Err(Error::Closed("this iterator of batches"));
        };
        if let Ok(result) = batches.try_recv() {
            return result;
        }
        let mut slices = wait.slices(wait.deadline);
        let mut awaiting = None;
        loop {
            if awaiting.is_none() && self.shared.blocked.load(Ordering::Relaxed) {
                awaiting = Some(send_open()?);
            }
            let now = Instant::now();
            let slice = slices.next_wake(now)?.saturating_duration_since(now);
            let slice = match awaiting {
                None => slice.min(LOOK_EVERY),
                Some(_) => slice,
            };
            match batches.recv_timeout(slice) {
                Ok(result) => return result,
                // An earlier call has returned the error that ended the thread.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Closed("this iterator of batches, after an error,"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            for awaiting in awaiting.iter().flatten() {
                awaiting.send_rest(wait)?;
            }
            let waited_for = lock(&self.shared.waited_for).clone();
            let now = Instant::now();
            if wait.deadline.is_some_and(|end| now >= end) {
                return Err(Error::deadline(waited_for));
            }
            waited_for.report(wait, now, Wait::REPORT_AFTER);
        }
    }
}

/// Samples and decodes until the consumer stops it or an error occurs other than a deadline.
fn decode_ahead(
    samples: &mut SampleSource,
    mut channels: Channels,
    shared: &DecoderState,
    batches: &SyncSender<Result<DecodedSample>>,
) {
    // Relaxed, as the store in `Drop`, which joins the thread: no other data is published with the flag.
    let stopped = || shared.stop.load(Ordering::Relaxed);
    let mut tried = false;
    while !stopped() {
        // A short deadline keeps `waited_for` current for the consumer's error. The consumer's call has its own deadline. A memory in this
        // process is first tried without a wait, so that the consumer knows at once of a wait for writers.
        let longest = match samples.local && !tried {
            true => Duration::ZERO,
            false => 2 * Wait::CHECK_EVERY,
        };
        let wait = Wait { interrupted: &stopped, ..Wait::until(Some(Instant::now() + longest)) };
        let beta = || f64::from_bits(shared.beta.load(Ordering::Relaxed));
        let result = samples.next(&wait, beta, |share, _, _, wait| channels[share].next(wait));
        match result {
            Err(Error::Deadline { waited_for } | Error::RemoteDeadline { waited_for }) => {
                let blocked = waited_for.is_for_writers();
                *lock(&shared.waited_for) = *waited_for;
                shared.blocked.store(blocked, Ordering::Relaxed);
                tried = true;
            }
            Err(Error::Interrupted) => return,
            mut result => {
                shared.blocked.store(false, Ordering::Relaxed);
                tried = false;
                if let (Ok(sampled), Some(copy)) = (&mut result, &samples.copy) {
                    sampled.begin_copy(copy);
                }
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
        // Wakes the thread if it waits for space in the channel.
        self.batches = None;
        // Python's garbage collection may drop it in its own thread, in a copy that this begins.
        let current = std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != current) {
            // A panic is ignored: the panic hook has printed it.
            let _ = thread.join();
        }
    }
}

//! `Writer`: one `append` per step, one row per stream; and its state, which samples that wait for steps share.

mod rows;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use base::wait::{Wait, lock};
use replay_core::replay::WriterId;
use replay_core::schema::{Dtype, TableConfig};
use replay_core::view::ViewSpec;
use replay_core::writer::{FinalObservations, StepBatch, Writer, WriterCounters};
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::array;
use crate::class::{attributes, context_manager};
use crate::interpreter::{self, Call};
use crate::open_writers::OpenWriters;
use crate::structure::Structure;
use crate::wait::{self, Closing, Exclusive, ProcessLocal};
use crate::{arguments, error};
use rows::{by_column, values};

/// Longest flush at the end of a `with` block that raised an exception.
const FLUSH_AFTER_FAILURE: Duration = Duration::from_secs(5);

/// Limit for sending a step at the end of a writer's call, for a sample that waits.
pub const SEND_WITHIN: Duration = Duration::from_millis(200);
/// Limit for sending the open chunks of a writer whose connection broke.
const RECONNECT_WITHIN: Duration = Duration::from_millis(200);

#[doc = stub_doc!("Writer")]
#[pyclass(name = "Writer", module = "innet_drl", frozen)]
pub struct PyWriter {
    writer: ProcessLocal<Arc<WriterState>>,
    config: Arc<TableConfig>,
    /// Id of the writer in its memory.
    pub id: WriterId,
    name: String,
    num_envs: usize,
    structure: Structure,
    /// Version of the table's parameters in the last `get_parameters` with this writer. Relaxed: it publishes nothing else.
    version: AtomicU64,
    /// Argument name of the final observation: `final_` and the view's observation.
    final_observation: Option<String>,
}

impl PyWriter {
    /// A writer that `replay` closes, added to the open ones of its replay.
    ///
    /// # Errors
    /// `ClosedError` if the replay has been closed meanwhile.
    pub fn new(
        py: Python<'_>,
        config: Arc<TableConfig>,
        writer: Writer<Error>,
        name: String,
        num_envs: u32,
        view: &ViewSpec,
        replay: Closing,
        open: &OpenWriters,
    ) -> PyResult<Self> {
        let id = writer.id().clone();
        let shared = Arc::new(WriterState {
            writer: Exclusive::new("writer", writer),
            counters: Mutex::default(),
            awaited: open.awaited(&config.name),
            thread: Mutex::new(std::thread::current().id()),
            late: AtomicBool::new(false),
        });
        open.add(&config.name, &shared);
        Ok(PyWriter {
            writer: ProcessLocal::within(py, replay, "writer", shared, |writer| {
                drop(writer);
                Ok(())
            })?,
            structure: Structure::of(config.columns.iter().map(|column| column.name.as_str())),
            version: AtomicU64::new(0),
            config,
            id,
            name,
            num_envs: num_envs as usize,
            final_observation: view.observation().map(|column| format!("final_{column}")),
        })
    }

    /// Notes the version of parameters that the next steps are made with.
    pub fn has_parameters(&self, name: &str, version: u64) {
        if version > 0 && self.config.parameters.as_deref() == Some(name) {
            self.version.store(version, Ordering::Relaxed);
        }
    }

    /// Appends one step, or a block of `steps`.
    fn append_rows(
        &self,
        py: Python<'_>,
        rows: &Rows<'_, '_>,
        steps: Option<usize>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let terminated = self.flags(steps, "terminated", Some(rows.terminated))?;
        let truncated = self.flags(steps, "truncated", Some(rows.truncated))?;
        let first = self.flags(steps, "first", rows.first)?;
        let finals = self.flags(steps, "final", rows.r#final)?;
        let priority = |value| self.elements(steps, "priority", value, array::PRIORITIES, "numbers")?.to_f64(py);
        let priority = rows.priority.map(priority).transpose()?;
        let q = |name, value| self.read(steps, name, value, Dtype::Float32, &[]);
        let final_q = rows.final_q.map(|value| q("final_q", value)).transpose()?;
        let q = rows.q.map(|value| q("q", value)).transpose()?;
        let (mut inputs, mut last) = (Vec::new(), Vec::new());
        for (name, value) in rows.columns.into_iter().flatten() {
            let name: String = name.extract()?;
            if self.is_final_observation(&name) {
                self.columns(steps, &name, &name["final_".len()..], &value, &mut last)?;
            } else {
                self.columns(steps, &name, &name, &value, &mut inputs)?;
            }
        }
        let version = match rows.version {
            None => self.version.load(Ordering::Relaxed),
            // A table that names no parameters may have such a column.
            Some(value) if self.structure.get("version").is_some() => {
                self.columns(steps, "version", "version", value, &mut inputs)?;
                0
            }
            Some(version) => arguments::version(version)?,
        };
        if final_q.is_some() && last.is_empty() {
            return Err(error::schema(
                py,
                &self.config.name,
                "final_q belongs to final observations, and there are none",
            ));
        }
        let (columns, last) = (by_column(&inputs), by_column(&last));
        let same_step = (!last.is_empty()).then(|| FinalObservations {
            columns: &last,
            ended: finals.as_deref(),
            q: final_q.as_ref().map(values),
        });
        let step = StepBatch {
            columns: &columns,
            terminated: terminated.as_deref(),
            truncated: truncated.as_deref(),
            first: first.as_deref(),
            final_rows: finals.as_deref().filter(|_| same_step.is_none()),
            final_observations: same_step,
            q: q.as_ref().map(values),
            priority: priority.as_deref(),
            version,
        };
        self.writer.call(py, timeout, |writer, wait| {
            writer.call(wait, |writer| match steps {
                None => writer.append(&step, wait),
                Some(steps) => {
                    writer.extend(&step, steps, wait)?;
                    // Without a wait, which could fail after the block is appended: the next call sends the rest.
                    let _ = writer.send(&Wait::until(Some(Instant::now())));
                    Ok(())
                }
            })
        })
    }

    fn counters(&self, py: Python<'_>) -> PyResult<WriterCounters> {
        self.writer.call(py, None, |writer, _| Ok(*lock(&writer.counters)))
    }

    /// Whether the last call ended at its deadline or by a signal.
    fn is_late(&self, py: Python<'_>) -> bool {
        let late = self.writer.call(py, None, |writer, _| Ok(writer.late.load(Ordering::Relaxed)));
        late.unwrap_or(false)
    }

    /// Whether `name` is the argument of the final observation, and not a column of the table.
    fn is_final_observation(&self, name: &str) -> bool {
        self.final_observation.as_deref() == Some(name) && self.structure.get(name).is_none()
    }
}

/// Arguments of `append` and `extend`.
struct Rows<'a, 'py> {
    terminated: &'a Bound<'py, PyAny>,
    truncated: &'a Bound<'py, PyAny>,
    first: Option<&'a Bound<'py, PyAny>>,
    r#final: Option<&'a Bound<'py, PyAny>>,
    q: Option<&'a Bound<'py, PyAny>>,
    priority: Option<&'a Bound<'py, PyAny>>,
    final_q: Option<&'a Bound<'py, PyAny>>,
    version: Option<&'a Bound<'py, PyAny>>,
    columns: Option<&'a Bound<'py, PyDict>>,
}

attributes! { PyWriter as "Writer", |writer, py|
    num_envs: usize = writer.num_envs;
    steps: PyResult<u64> = Ok(writer.counters(py)?.steps);
    items: PyResult<u64> = Ok(writer.counters(py)?.items);
    dropped_windows: PyResult<u64> = Ok(writer.counters(py)?.dropped.by_mistake());
}

context_manager!(PyWriter, |writer, py, failed| match failed {
    true => {
        // No flush after a deadline or Ctrl-C: the caller has waited long enough. Errors are ignored: they would hide the block's
        // exception.
        if !writer.is_late(py) {
            let _ = writer.close(py, Some(FLUSH_AFTER_FAILURE.as_secs_f64()));
        }
        // Closes the connection, so that a waiting push is not stored later.
        let state = writer.writer.close(py).ok();
        interpreter::detach(py, || drop(state));
        Ok(())
    }
    // No deadline: the block's steps are complete, and backpressure of the table must not discard them.
    false => writer.close(py, None),
});

#[pymethods]
impl PyWriter {
    #[doc = stub_doc!("Writer.append")]
    #[pyo3(signature = (
        *, terminated, truncated, first = None, r#final = None, q = None, priority = None, final_q = None, version = None,
        timeout = 60.0, **columns
    ))]
    fn append(
        &self,
        py: Python<'_>,
        terminated: &Bound<'_, PyAny>,
        truncated: &Bound<'_, PyAny>,
        first: Option<&Bound<'_, PyAny>>,
        r#final: Option<&Bound<'_, PyAny>>,
        q: Option<&Bound<'_, PyAny>>,
        priority: Option<&Bound<'_, PyAny>>,
        final_q: Option<&Bound<'_, PyAny>>,
        version: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        columns: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let _call = Call::begin(py);
        let rows = Rows { terminated, truncated, first, r#final, q, priority, final_q, version, columns };
        self.append_rows(py, &rows, None, timeout)
    }

    #[doc = stub_doc!("Writer.extend")]
    #[pyo3(signature = (
        *, terminated, truncated, first = None, r#final = None, q = None, priority = None, final_q = None, version = None,
        timeout = 60.0, **columns
    ))]
    fn extend(
        &self,
        py: Python<'_>,
        terminated: &Bound<'_, PyAny>,
        truncated: &Bound<'_, PyAny>,
        first: Option<&Bound<'_, PyAny>>,
        r#final: Option<&Bound<'_, PyAny>>,
        q: Option<&Bound<'_, PyAny>>,
        priority: Option<&Bound<'_, PyAny>>,
        final_q: Option<&Bound<'_, PyAny>>,
        version: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        columns: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let _call = Call::begin(py);
        let rows = Rows { terminated, truncated, first, r#final, q, priority, final_q, version, columns };
        // Only the steps: `flags` checks the rest.
        let block = array::read(terminated, None, |reason| {
            error::schema(py, &self.config.name, format!("\"terminated\": {reason}"))
        })?;
        let steps = match block.shape.as_slice() {
            [steps, _, ..] => *steps,
            _ => {
                let (shape, envs) = (&block.shape, self.num_envs);
                let reason = format!(
                    "\"terminated\" of a block has to be bool[T, {envs}] (steps, environments), got {}{shape:?}: give one step with \
                     `append`, and steps of one environment as values[:, None]",
                    block.dtype.name()
                );
                return Err(error::schema(py, &self.config.name, reason));
            }
        };
        self.append_rows(py, &rows, Some(steps), timeout)
    }

    /// For the recorder: the parts of each column as dictionaries, `None` for one array, and the dtype of a ragged column.
    #[getter]
    fn _parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.structure.to_dict(py, "", &|name| {
            let column = self.config.column_index(name).map(|index| &self.config.columns[index]);
            match column.filter(|column| column.is_ragged()) {
                Some(column) => Ok(array::to_numpy(py, column.dtype).into_any()),
                None => Ok(py.None().into_bound(py)),
            }
        })
    }

    /// For the recorder: the argument of `append` for last observations, `None` for a view without observations.
    #[getter]
    fn _final_observation(&self) -> Option<&str> {
        self.final_observation.as_deref()
    }

    #[doc = stub_doc!("Writer.flush")]
    #[pyo3(signature = (timeout = 60.0))]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.writer.call(py, timeout, |writer, wait| writer.call(wait, |writer| writer.flush(wait)))
    }

    #[doc = stub_doc!("Writer.close")]
    #[pyo3(signature = (timeout = 60.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let deadline = wait::deadline(py, timeout)?;
        // By the end of a `with` block that raised an exception.
        if self.writer.is_closed(py)? {
            return Ok(());
        }
        let writer = self.writer.get(py)?;
        let closing = self.writer.closing();
        // Ends a blocked append or flush of another thread, which holds the writer.
        closing.end_calls();
        wait::blocking(py, deadline, closing.replay(), move |wait| {
            let writer = writer;
            writer.call(wait, |writer| writer.close(wait))
        })
    }

    fn __repr__(&self) -> String {
        format!("<Writer {:?} of table {:?}, {} environments>", self.name, self.config.name, self.num_envs)
    }
}

/// The writer, and its counters after the last call, readable while the next one blocks.
pub struct WriterState {
    pub writer: Exclusive<Writer<Error>>,
    pub counters: Mutex<WriterCounters>,
    /// Samples that wait for steps of the table. Relaxed, because the writer's lock orders it: a sample is counted before
    /// [`OpenWriters::send_open`] takes the lock, and [`WriterState::call`] reads the number under it. So either of them sends a step.
    pub awaited: Arc<AtomicUsize>,
    /// Thread of the last call.
    pub thread: Mutex<ThreadId>,
    /// The last call ended at its deadline or by a signal. Relaxed: the flag publishes nothing else.
    pub late: AtomicBool,
}

impl WriterState {
    /// Runs `work` on the writer.
    pub fn call(&self, wait: &Wait<'_>, work: impl FnOnce(&mut Writer<Error>) -> Result<()>) -> Result<()> {
        let mut writer = self.writer.take(wait)?;
        *lock(&self.thread) = thread::current().id();
        let done = work(&mut writer);
        if done.is_ok() && self.awaited.load(Ordering::Relaxed) > 0 {
            // The steps are appended, so an error, or a signal, is left to the next call. Only a flush drives the connection until the
            // push has arrived.
            let _ = writer.flush_complete(&Wait::until(Some(Instant::now() + SEND_WITHIN)));
        }
        let counters = writer.counters();
        *lock(&self.counters) = counters;
        let code = done.as_ref().err().map(Error::code);
        let late = matches!(code, Some(ErrorCode::Deadline | ErrorCode::Interrupted));
        self.late.store(late, Ordering::Relaxed);
        done.map_err(|error| match (error.code(), counters.unsent_rows) {
            // Its channel has counted the steps that it had sent.
            (code @ ErrorCode::Expired, unsent @ 1..) => Error::Remote {
                code,
                message: format!("{error}; {unsent} appended steps that were not sent yet are lost, too"),
            },
            _ => error,
        })
    }

    /// Sends the open chunks for a sample that waits for them. Returns whether a later try may send them, since the push has to wait, or
    /// another thread is using the writer. The writer's next call raises other errors.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn send_open(&self, wait: &Wait<'_>) -> Result<bool> {
        let code = |flushed: &Result<()>| flushed.as_ref().err().map(Error::code);
        let mut flushed = self.flush_until(Instant::now(), wait);
        if let Some(ErrorCode::Connect | ErrorCode::Disconnected) = code(&flushed) {
            // A try without time does not reconnect.
            flushed = self.flush_until(Instant::now() + RECONNECT_WITHIN, wait);
        }
        match code(&flushed) {
            Some(ErrorCode::Interrupted) => Err(Error::Interrupted),
            code => Ok(code == Some(ErrorCode::Deadline)),
        }
    }

    pub fn flush_until(&self, deadline: Instant, wait: &Wait<'_>) -> Result<()> {
        let wait = Wait { deadline: Some(deadline), notice: None, ..*wait };
        let mut writer = self.writer.take(&wait)?;
        // A sample of the writer's own thread keeps it from appending a last observation.
        let flushed = match *lock(&self.thread) == thread::current().id() {
            true => writer.flush(&wait),
            false => writer.flush_complete(&wait),
        };
        *lock(&self.counters) = writer.counters();
        flushed
    }
}

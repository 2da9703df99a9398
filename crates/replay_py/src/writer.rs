//! `Writer`: one `append` per step, one row per stream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use base::sync::lock;
use base::wait::Wait;
use replay_core::replay::WriterId;
use replay_core::schema::{Dtype, TableConfig};
use replay_core::view::ViewSpec;
use replay_core::writer::{FinalObservations, StepBatch, Values, Writer, WriterCounters};
use replay_net::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::array::{self, Expected, Input};
use crate::class::{attributes, context_manager};
use crate::exclusive::Exclusive;
use crate::interpreter::Call;
use crate::process_local::{Closing, ProcessLocal};
use crate::{error, interpreter, wait};

/// Longest flush at the end of a `with` block that raised an exception.
const FLUSH_AFTER_FAILURE: Duration = Duration::from_secs(5);

#[doc = stub_doc!("Writer")]
#[pyclass(name = "Writer", module = "innet_drl", frozen)]
pub struct PyWriter {
    writer: ProcessLocal<Arc<WriterState>>,
    config: Arc<TableConfig>,
    id: WriterId,
    name: String,
    num_envs: usize,
    /// Argument name of the final observation: `final_` and the view's observation.
    final_observation: Option<String>,
}

/// The writer, and its counters after the last call, readable while the next one blocks.
struct WriterState {
    writer: Exclusive<Writer<Error>>,
    counters: Arc<Mutex<WriterCounters>>,
    /// The last call ended at its deadline or by a signal. Relaxed: the flag publishes nothing else.
    late: AtomicBool,
}

impl WriterState {
    fn call(
        &self,
        wait: &Wait<'_>,
        work: impl FnOnce(&mut Writer<Error>) -> Result<()>,
    ) -> Result<()> {
        let mut writer = self.writer.take(wait)?;
        let done = work(&mut writer);
        *lock(&self.counters) = writer.counters();
        let code = done.as_ref().err().map(Error::code);
        let late = matches!(code, Some(ErrorCode::Deadline | ErrorCode::Interrupted));
        self.late.store(late, Ordering::Relaxed);
        done
    }
}

/// Writers that a replay has opened, by the name of their table.
#[derive(Default)]
pub struct OpenWriters(Mutex<Vec<(String, Weak<Mutex<WriterCounters>>)>>);

impl OpenWriters {
    fn add(&self, table: &str, counters: &Arc<Mutex<WriterCounters>>) {
        let mut writers = lock(&self.0);
        writers.retain(|(_, counters)| counters.strong_count() > 0);
        writers.push((table.to_owned(), Arc::downgrade(counters)));
    }

    /// Advice for a wait for steps of a table: unsent steps of these writers, and windows that they dropped.
    pub fn advice(&self, table: &str) -> Option<String> {
        let writers = lock(&self.0);
        let of_table = writers.iter().filter(|(of, _)| of == table);
        let open = of_table.filter_map(|(_, counters)| counters.upgrade());
        let counters: Vec<_> = open.map(|counters| *lock(&counters)).collect();
        let unsent: u64 = counters.iter().map(|writer| writer.unsent_rows).sum();
        let dropped: u64 = counters.iter().map(WriterCounters::dropped).sum();
        let mut advice = String::new();
        if unsent > 0 {
            advice +=
                &format!(" (an open writer holds {unsent} unsent steps: flush, or chunk_steps=1)");
        }
        if dropped > 0 {
            advice += &format!(
                " ({dropped} windows were dropped: a row with first=True follows no end of an episode, or a truncated row \
                 no final one)"
            );
        }
        (!advice.is_empty()).then_some(advice)
    }
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
        let shared = WriterState {
            writer: Exclusive::new("writer", writer),
            counters: Arc::default(),
            late: AtomicBool::new(false),
        };
        open.add(&config.name, &shared.counters);
        Ok(PyWriter {
            writer: ProcessLocal::within(py, replay, "writer", Arc::new(shared), |writer| {
                drop(writer);
                Ok(())
            })?,
            config,
            id,
            name,
            num_envs: num_envs as usize,
            final_observation: view.observation().map(|column| format!("final_{column}")),
        })
    }

    /// Id of the writer in its memory.
    pub fn id(&self) -> &WriterId {
        &self.id
    }

    /// Reads one argument of `append`; `row` is the shape of one row.
    fn read<'py>(
        &self,
        name: &str,
        value: &Bound<'py, PyAny>,
        dtype: Dtype,
        row: &[u32],
    ) -> PyResult<Input<'py>> {
        let shape: Vec<usize> = std::iter::once(self.num_envs)
            .chain(row.iter().map(|&n| n as usize))
            .collect();
        let expected = Expected {
            dtype,
            shape: &shape,
        };
        array::read(value, Some(expected), |reason| {
            let reason = format!("{name:?} has to be {}{shape:?}: {reason}", dtype.name());
            error::schema(value.py(), &self.config.name, reason)
        })
    }

    fn refuse(&self, py: Python<'_>, name: &str, expected: &str, got: &Input<'_>) -> PyErr {
        error::schema(
            py,
            &self.config.name,
            format!(
                "{name:?} has to be {expected}[{}] (environments), got {}{:?}",
                self.num_envs,
                got.dtype.name(),
                got.shape
            ),
        )
    }

    fn flags(&self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let input = self.read(name, value, Dtype::Bool, &[])?;
        if input.dtype != Dtype::Bool || input.shape != [self.num_envs] {
            return Err(self.refuse(value.py(), name, "bool", &input));
        }
        // Converted, because a byte of a NumPy bool may be greater than 1.
        Ok(input.bytes().iter().map(|&byte| byte != 0).collect())
    }

    fn priorities(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
        let input = self.read("priority", value, Dtype::Float64, &[])?;
        if !array::PRIORITIES.contains(&input.dtype) || input.shape != [self.num_envs] {
            return Err(self.refuse(value.py(), "priority", "numbers", &input));
        }
        Ok(array::Numbers(input).to_f64())
    }

    fn column<'py>(
        &self,
        name: &str,
        column: &str,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<Input<'py>> {
        let found = self
            .config
            .columns
            .iter()
            .find(|known| known.name == column);
        match found {
            Some(column) => self.read(name, value, column.dtype, &column.shape),
            // The core's error lists the columns.
            None => self.read(name, value, Dtype::Float32, &[]),
        }
    }

    fn counters(&self, py: Python<'_>) -> PyResult<WriterCounters> {
        self.writer
            .call(py, None, |writer, _| Ok(*lock(&writer.counters)))
    }

    /// Whether the last call ended at its deadline or by a signal.
    fn is_late(&self, py: Python<'_>) -> bool {
        let late = self.writer.call(py, None, |writer, _| {
            Ok(writer.late.load(Ordering::Relaxed))
        });
        late.unwrap_or(false)
    }

    /// Whether `name` is the argument of the final observation, and not a column of the table.
    fn is_final_observation(&self, name: &str) -> bool {
        self.final_observation.as_deref() == Some(name)
            && self.config.columns.iter().all(|column| column.name != name)
    }
}

fn values<'a>(input: &'a Input<'_>) -> Values<'a> {
    Values::new(input.dtype, &input.shape, input.bytes())
}

attributes! { PyWriter as "Writer", |writer, py|
    num_envs: usize = writer.num_envs;
    steps: PyResult<u64> = Ok(writer.counters(py)?.steps);
    items: PyResult<u64> = Ok(writer.counters(py)?.items);
    dropped_windows: PyResult<u64> = Ok(writer.counters(py)?.dropped());
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
    #[pyo3(
        signature = (
            *, terminated, truncated, first = None, r#final = None, q = None, priority = None, final_q =
            None, timeout = wait::TIMEOUT, **columns
        ),
        text_signature = "($self, *, terminated, truncated, first=None, final=None, q=None, priority=None, \
                          final_q=None, timeout=60.0, **columns)"
    )]
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
        timeout: Option<f64>,
        columns: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let _call = Call::begin(py);
        let terminated = self.flags("terminated", terminated)?;
        let truncated = self.flags("truncated", truncated)?;
        let first = first.map(|value| self.flags("first", value)).transpose()?;
        let finals = r#final
            .map(|value| self.flags("final", value))
            .transpose()?;
        let priority = priority.map(|value| self.priorities(value)).transpose()?;
        let read_q = |name, value| self.read(name, value, Dtype::Float32, &[]);
        let q = q.map(|value| read_q("q", value)).transpose()?;
        let final_q = final_q.map(|value| read_q("final_q", value)).transpose()?;
        let mut inputs: Vec<(String, Input<'_>)> = Vec::new();
        let mut final_observation = None;
        for (name, value) in columns.into_iter().flatten() {
            let name: String = name.extract()?;
            if self.is_final_observation(&name) {
                let column = &name["final_".len()..];
                final_observation = Some(self.column(&name, column, &value)?);
            } else {
                let input = self.column(&name, &name, &value)?;
                inputs.push((name, input));
            }
        }
        if final_q.is_some() && final_observation.is_none() {
            return Err(error::schema(
                py,
                &self.config.name,
                "final_q belongs to final observations, and there are none",
            ));
        }
        let columns: Vec<(&str, Values<'_>)> = inputs
            .iter()
            .map(|(name, input)| (name.as_str(), values(input)))
            .collect();
        let same_step = final_observation
            .as_ref()
            .map(|observation| FinalObservations {
                observation: values(observation),
                ended: finals.as_deref(),
                q: final_q.as_ref().map(values),
            });
        let step = StepBatch {
            columns: &columns,
            terminated: Some(&terminated),
            truncated: Some(&truncated),
            first: first.as_deref(),
            final_rows: finals.as_deref().filter(|_| same_step.is_none()),
            final_observations: same_step,
            q: q.as_ref().map(values),
            priority: priority.as_deref(),
        };
        self.writer.call(py, timeout, |writer, wait| {
            writer.call(wait, |writer| writer.append(&step, wait))
        })
    }

    #[doc = stub_doc!("Writer.flush")]
    #[pyo3(signature = (timeout = wait::TIMEOUT), text_signature = "($self, timeout=60.0)")]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.writer.call(py, timeout, |writer, wait| {
            writer.call(wait, |writer| writer.flush(wait))
        })
    }

    #[doc = stub_doc!("Writer.close")]
    #[pyo3(signature = (timeout = wait::TIMEOUT), text_signature = "($self, timeout=60.0)")]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let deadline = wait::deadline(py, timeout)?;
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
        format!(
            "<Writer {:?} of table {:?}, {} environments>",
            self.name, self.config.name, self.num_envs
        )
    }
}

//! `GradientUpdates`: membership in an asynchronous gradient job, over a connection of its own.

use std::sync::Arc;
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use gradients::JoinJob;
use gradients_net::GradientUpdates;
use gradients_net::error::Error;
use replay_client::{Client, Namespace};

use crate::class::{attributes, context_manager};
use crate::gradients::inside;
use crate::interpreter::Call;
use crate::process_local::ProcessLocal;
use crate::{array, integer, interpreter, wait};

#[doc = stub_doc!("GradientUpdates")]
#[pyclass(name = "GradientUpdates", module = "innet_drl.gradients", frozen)]
pub struct PyGradientUpdates {
    updates: ProcessLocal<Arc<GradientUpdates>>,
    description: String,
}

impl PyGradientUpdates {
    pub fn join(
        py: Python<'_>,
        client: &Client,
        namespace: Option<&Namespace>,
        request: &JoinJob,
        last: Option<u64>,
    ) -> PyResult<Self> {
        let last = last.unwrap_or(u64::MAX);
        let updates = wait::blocking(py, None, None, |wait| {
            let joined = GradientUpdates::join(client, request, last, wait);
            joined.map_err(|error| inside(namespace, error))
        })?;
        Ok(PyGradientUpdates {
            updates: ProcessLocal::new("asynchronous gradient worker", Arc::new(updates)),
            description: format!("{} of {} in {:?}", request.worker, request.workers, request.job),
        })
    }
}

attributes! { PyGradientUpdates as "GradientUpdates", |updates, py|
    index: PyResult<u64> = updates.updates.call(py, None, |updates, _| Ok(updates.worker.session().index()));
}

context_manager!(PyGradientUpdates, |updates, py, _failed| updates.leave(py));

#[pymethods]
impl PyGradientUpdates {
    #[doc = stub_doc!("GradientUpdates.offer")]
    fn offer(
        &self,
        py: Python<'_>,
        gradient: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = integer::index)] index: u64,
    ) -> PyResult<bool> {
        let _call = Call::begin(py);
        let mut gradient = array::floats_to_change(gradient)?;
        let gradient = gradient.as_slice_mut()?;
        self.updates.call_until(py, None, |updates, _| updates.worker.offer(gradient, index).map_err(Error::from))
    }

    #[doc = stub_doc!("GradientUpdates.take")]
    fn take(&self, py: Python<'_>, mean: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let _call = Call::begin(py);
        let mut mean = array::floats_to_change(mean)?;
        let mean = mean.as_slice_mut()?;
        self.updates.call_until(py, None, |updates, _| updates.worker.session().take(mean).map_err(Error::from))
    }

    #[doc = stub_doc!("GradientUpdates.wait")]
    #[pyo3(signature = (deadline = None, *, for_gradient = false))]
    fn wait(&self, py: Python<'_>, deadline: Option<f64>, for_gradient: bool) -> PyResult<bool> {
        let deadline = deadline.map(|seconds| wait::seconds(py, "deadline", seconds));
        let until = deadline.transpose()?.map(|longest| Instant::now() + longest);
        self.updates.call_until(py, until, |updates, wait| updates.wait(for_gradient, wait))
    }

    #[doc = stub_doc!("GradientUpdates.restart")]
    fn restart(&self, py: Python<'_>, #[pyo3(from_py_with = integer::index)] index: u64) -> PyResult<()> {
        self.updates.call(py, None, |updates, _| {
            updates.worker.session().restart(index, Instant::now());
            Ok(())
        })
    }

    #[doc = stub_doc!("GradientUpdates.contributions")]
    fn contributions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let _call = Call::begin(py);
        let counted = self.updates.call(py, None, |updates, _| Ok(updates.worker.session().contributions()))?;
        let counts = [
            ("offered", counted.offered),
            ("counted", counted.counted),
            ("dropped", counted.dropped),
            ("late_segments", counted.late_segments),
            ("dropped_segments", counted.dropped_segments),
            ("restarts", counted.restarts),
        ];
        counts.into_py_dict(py)
    }

    #[doc = stub_doc!("GradientUpdates.leave")]
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let updates = self.updates.close(py)?;
        interpreter::detach(py, || drop(updates));
        Ok(())
    }

    fn __repr__(&self) -> String {
        let left = self.updates.mark(", left");
        format!("<GradientUpdates {}{left}>", self.description)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GradientUpdates cannot be pickled: join in the other process"))
    }
}

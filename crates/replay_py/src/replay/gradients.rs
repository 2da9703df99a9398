//! `Replay`'s gradient jobs, on a server that sums gradients.

use std::sync::Arc;

use gradients::{Arithmetic, Asynchronous, JoinJob};
use pyo3::prelude::*;
use replay_client::{Client, Namespace};

use super::PyReplay;
use crate::gradient_updates::PyGradientUpdates;
use crate::gradients::{PyGradientWorker, worker_name};
use crate::interpreter::Call;
use crate::station::PyStation;
use crate::{error, integer, wait};

impl PyReplay {
    /// The client of the server that sums gradients, and the namespace of the job.
    fn gradient_client(&self, py: Python<'_>) -> PyResult<(Arc<Client>, Option<Namespace>)> {
        let backend = self.backend.get(py)?;
        let client = backend.client.ok_or_else(|| {
            error::config(py, "gradient jobs need a server that sums gradients: innet_drl.connect(...)")
        })?;
        Ok((client, backend.namespace))
    }
}

/// Name of a job at the server.
fn full_name(namespace: Option<&Namespace>, job: String) -> String {
    namespace.map_or_else(|| job.clone(), |namespace| namespace.full(&job))
}

#[pymethods]
impl PyReplay {
    #[doc = stub_doc!("Replay.join_gradients")]
    #[pyo3(signature = (
        job, worker, workers, *, world = None, name = "", arithmetic = "float32", segment_values = 360, deadline = 30.0,
        via = None, station = None
    ))]
    fn join_gradients(
        &self,
        py: Python<'_>,
        job: String,
        #[pyo3(from_py_with = integer::worker)] worker: u16,
        #[pyo3(from_py_with = integer::workers)] workers: u16,
        #[pyo3(from_py_with = integer::world)] world: Option<u32>,
        name: &str,
        arithmetic: &str,
        #[pyo3(from_py_with = integer::segment_values)] segment_values: u16,
        deadline: f64,
        via: Option<&str>,
        station: Option<PyRef<'_, PyStation>>,
    ) -> PyResult<PyGradientWorker> {
        let _call = Call::begin(py);
        let (client, namespace) = self.gradient_client(py)?;
        let choices = [("float32", Arithmetic::Float), ("fixed", Arithmetic::Fixed)];
        let request = JoinJob {
            job: full_name(namespace.as_ref(), job),
            worker,
            workers,
            world: world.unwrap_or(workers.into()),
            name: worker_name(py, name)?,
            arithmetic: error::choice(py, "arithmetic", arithmetic, choices)?,
            segment_values,
            deadline: wait::seconds(py, "deadline", deadline)?,
            asynchronous: None,
            below: None,
        };
        PyGradientWorker::join(py, &client, namespace.as_ref(), &request, via, station.as_deref())
    }

    #[doc = stub_doc!("Replay.follow_gradients")]
    #[pyo3(signature = (
        job, worker, workers, *, values, threshold, staleness = 3, updates = None, name = "", segment_values = 360,
        deadline = 30.0
    ))]
    fn follow_gradients(
        &self,
        py: Python<'_>,
        job: String,
        #[pyo3(from_py_with = integer::worker)] worker: u16,
        #[pyo3(from_py_with = integer::workers)] workers: u16,
        #[pyo3(from_py_with = integer::values)] values: u32,
        #[pyo3(from_py_with = integer::threshold)] threshold: u16,
        #[pyo3(from_py_with = integer::staleness)] staleness: u16,
        #[pyo3(from_py_with = integer::updates)] updates: Option<u64>,
        name: &str,
        #[pyo3(from_py_with = integer::segment_values)] segment_values: u16,
        deadline: f64,
    ) -> PyResult<PyGradientUpdates> {
        let _call = Call::begin(py);
        let (client, namespace) = self.gradient_client(py)?;
        let request = JoinJob {
            job: full_name(namespace.as_ref(), job),
            worker,
            workers,
            world: workers.into(),
            name: worker_name(py, name)?,
            arithmetic: Arithmetic::Float,
            segment_values,
            deadline: wait::seconds(py, "deadline", deadline)?,
            asynchronous: Some(Asynchronous { values, threshold, staleness }),
            below: None,
        };
        PyGradientUpdates::join(py, &client, namespace.as_ref(), &request, updates)
    }
}

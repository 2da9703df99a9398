//! `GradientWorker`: membership in a gradient job, over a connection of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use base::wait::Wait;
use gradients::{Control, JoinJob, packet};
use gradients_net::GradientWorker;
use gradients_net::error::Error as WorkerError;
use replay_client::{Client, Namespace};
use replay_link::error::Error;

use crate::class::{attributes, context_manager};
use crate::exclusive::Exclusive;
use crate::interpreter::Call;
use crate::process_local::ProcessLocal;
use crate::station::PyStation;
use crate::{array, error, integer, interpreter, wait};

/// Form of addresses for gradients, in errors.
pub const UDP_ADDRESS: &str = "an IP address and a port, such as 127.0.0.1:7711";

/// Longest name of a worker, in bytes.
const MAX_NAME: usize = 64;

#[doc = stub_doc!("GradientWorker")]
#[pyclass(name = "GradientWorker", module = "innet_drl.gradients", frozen)]
pub struct PyGradientWorker {
    worker: ProcessLocal<Arc<SharedWorker>>,
    /// Longest time of a call in seconds, including the wait for other threads.
    deadline: f64,
    description: String,
}

struct SharedWorker {
    /// `None` after leaving.
    worker: Exclusive<Option<GradientWorker>>,
    /// Number of the next round, readable during a sum. Relaxed: no other data is published with it.
    round: AtomicU64,
}

impl SharedWorker {
    fn with<T>(
        &self,
        wait: &Wait<'_>,
        work: impl FnOnce(&mut GradientWorker) -> Result<T, WorkerError>,
    ) -> Result<T, WorkerError> {
        let mut worker = self.worker.take(wait)?;
        let worker = worker.as_mut().ok_or(Error::Closed("this gradient worker"))?;
        let done = work(worker);
        self.round.store(worker.next_round(), Ordering::Relaxed);
        done
    }
}

/// The error of a join, with names as seen from a namespace.
pub fn inside(namespace: Option<&Namespace>, error: WorkerError) -> WorkerError {
    match error {
        WorkerError::Net(error) => Namespace::short_names(namespace, error).into(),
        failure => failure,
    }
}

/// Display name of a worker: `name` unless it is empty.
pub fn worker_name(py: Python<'_>, name: &str) -> PyResult<String> {
    if !name.is_empty() {
        return Ok(name.to_owned());
    }
    let host: String = py.import("socket")?.call_method0("gethostname")?.extract()?;
    let process = format!(", process {}", std::process::id());
    let host = packet::cut(&host, MAX_NAME - process.len());
    Ok(format!("{host}{process}"))
}

impl PyGradientWorker {
    pub fn join(
        py: Python<'_>,
        client: &Client,
        namespace: Option<&Namespace>,
        request: &JoinJob,
        via: Option<&str>,
        station: Option<&PyStation>,
    ) -> PyResult<Self> {
        let via: Option<SocketAddr> = via.map(|via| error::parse(py, "via", via, UDP_ADDRESS)).transpose()?;
        let station = station.map(|station| &station.config);
        if let (Some(via), Some(_)) = (via, station) {
            let advice = "a station sends to the server's own address: leave one of them out";
            return Err(error::config(py, format!("both via ({via}) and station: {advice}")));
        }
        let worker = wait::blocking(py, None, None, |wait| {
            let joined = GradientWorker::join(client, request, via, station, wait);
            joined.map_err(|error| inside(namespace, error))
        })?;
        let round = AtomicU64::new(worker.next_round());
        let shared = SharedWorker { worker: Exclusive::new("gradient worker", Some(worker)), round };
        Ok(PyGradientWorker {
            worker: ProcessLocal::new("gradient worker", Arc::new(shared)),
            deadline: request.deadline.as_secs_f64(),
            description: format!("{} of {} in {:?}", request.worker, request.workers, request.job),
        })
    }

    /// The end of a call that may take `deadline` seconds.
    fn until(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<Option<Instant>> {
        let longest = wait::seconds(py, "deadline", deadline.unwrap_or(self.deadline))?;
        Ok(Some(Instant::now() + longest))
    }

    fn call(&self, py: Python<'_>, command: Control, deadline: Option<f64>) -> PyResult<()> {
        let until = self.until(py, deadline)?;
        self.worker.call_until(py, until, |shared, wait| shared.with(wait, |worker| worker.call(command, wait)))
    }
}

attributes! { PyGradientWorker as "GradientWorker", |worker, py|
    round: PyResult<u64> = worker.worker.call(py, None, |shared, _| Ok(shared.round.load(Ordering::Relaxed)));
}

context_manager!(PyGradientWorker, |worker, py, failed| match failed {
    // No `leave`, which may wait and hide the block's exception: dropping the worker closes its connection.
    true => {
        let shared = worker.worker.close(py)?;
        interpreter::detach(py, || drop(shared));
        Ok(())
    }
    false => worker.leave(py, None),
});

#[pymethods]
impl PyGradientWorker {
    #[doc = stub_doc!("GradientWorker.sum")]
    #[pyo3(signature = (values, *, mean = false, deadline = None))]
    fn sum(&self, py: Python<'_>, values: &Bound<'_, PyAny>, mean: bool, deadline: Option<f64>) -> PyResult<u32> {
        let _call = Call::begin(py);
        let mut values = array::floats_to_change(values)?;
        let values = values.as_slice_mut()?;
        let until = self.until(py, deadline)?;
        let sum = self
            .worker
            .call_until(py, until, |shared, wait| shared.with(wait, |worker| worker.sum(values, mean, wait)))?;
        Ok(sum.workers)
    }

    #[doc = stub_doc!("GradientWorker.set_threshold")]
    #[pyo3(signature = (threshold, *, deadline = None))]
    fn set_threshold(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = integer::threshold)] threshold: u16,
        deadline: Option<f64>,
    ) -> PyResult<()> {
        self.call(py, Control::SetThreshold(threshold), deadline)
    }

    #[doc = stub_doc!("GradientWorker.reset")]
    #[pyo3(signature = (*, deadline = None))]
    fn reset(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<()> {
        self.call(py, Control::Reset, deadline)
    }

    #[doc = stub_doc!("GradientWorker.force")]
    #[pyo3(signature = (*, deadline = None))]
    fn force(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<()> {
        self.call(py, Control::Force, deadline)
    }

    #[doc = stub_doc!("GradientWorker.halt")]
    #[pyo3(signature = (reason, *, deadline = None))]
    fn halt(&self, py: Python<'_>, reason: String, deadline: Option<f64>) -> PyResult<()> {
        self.call(py, Control::Halt(reason), deadline)
    }

    #[doc = stub_doc!("GradientWorker.leave")]
    #[pyo3(signature = (*, deadline = None))]
    fn leave(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<()> {
        let deadline = self.until(py, deadline)?;
        let Some(shared) = self.worker.close(py)? else {
            return Ok(());
        };
        wait::blocking(py, deadline, None, move |wait| {
            let worker = shared.worker.take(wait)?.take();
            worker.map_or(Ok(()), |worker| worker.leave(wait))
        })
    }

    fn __repr__(&self) -> String {
        let left = self.worker.mark(", left");
        format!("<GradientWorker {}{left}>", self.description)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GradientWorker cannot be pickled: join in the other process"))
    }
}

//! Gradient jobs of a server that sums gradients: `GradientWorker` and, for asynchronous jobs, `GradientUpdates` are memberships, each over a
//! connection of its own; `Station` is the DPDK device of a worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use base::wait::Wait;
use gradients::{Arithmetic, Asynchronous, Control, DpdkConfig, JoinJob, packet};
use gradients_net::error::Error as WorkerError;
use gradients_net::{GradientUpdates, GradientWorker};
use replay_client::{Client, Namespace};
use replay_link::error::Error;

use crate::class::{attributes, context_manager};
use crate::interpreter::{self, Call};
use crate::replay::PyReplay;
use crate::wait::{self, Exclusive, ProcessLocal};
use crate::{arguments, array, error};

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

/// Display name of a worker: `name` unless it is empty.
fn worker_name(py: Python<'_>, name: &str) -> PyResult<String> {
    if !name.is_empty() {
        return Ok(name.to_owned());
    }
    let host: String = py.import("socket")?.call_method0("gethostname")?.extract()?;
    let process = format!(", process {}", std::process::id());
    let host = packet::cut(&host, MAX_NAME - process.len());
    Ok(format!("{host}{process}"))
}

impl PyGradientWorker {
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
        #[pyo3(from_py_with = arguments::threshold)] threshold: u16,
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

#[doc = stub_doc!("Station")]
#[pyclass(name = "Station", module = "innet_drl.gradients", frozen)]
pub struct PyStation {
    pub config: DpdkConfig,
}

#[pymethods]
impl PyStation {
    #[new]
    #[pyo3(signature = (device, address, *, eal = "", prefix = 24, gateway = None, idle_sleep_us = 0))]
    fn new(
        py: Python<'_>,
        device: String,
        address: &str,
        eal: &str,
        #[pyo3(from_py_with = arguments::prefix)] prefix: u8,
        gateway: Option<&str>,
        #[pyo3(from_py_with = arguments::idle_sleep_us)] idle_sleep_us: u64,
    ) -> PyResult<Self> {
        let wanted = "a free IPv4 address of the device's network and a port, such as 10.0.0.3:7711";
        let address = arguments::parse(py, "address", address, wanted)?;
        let gateway = gateway.map(|text| arguments::parse(py, "gateway", text, "an IPv4 address"));
        Ok(PyStation {
            config: DpdkConfig {
                eal: eal.split_whitespace().map(str::to_owned).collect(),
                devices: vec![device],
                address,
                prefix,
                gateway: gateway.transpose()?,
                threads: 1,
                cores: Vec::new(),
                idle_sleep: Duration::from_micros(idle_sleep_us),
            },
        })
    }

    fn __repr__(&self) -> String {
        let DpdkConfig { devices, address, prefix, .. } = &self.config;
        format!("<Station {address}/{prefix} on {}>", devices.join(", "))
    }
}

#[doc = stub_doc!("GradientUpdates")]
#[pyclass(name = "GradientUpdates", module = "innet_drl.gradients", frozen)]
pub struct PyGradientUpdates {
    updates: ProcessLocal<Arc<GradientUpdates>>,
    description: String,
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
        #[pyo3(from_py_with = arguments::index)] index: u64,
    ) -> PyResult<bool> {
        let _call = Call::begin(py);
        let mut gradient = array::floats_to_change(gradient)?;
        let gradient = gradient.as_slice_mut()?;
        self.updates.call_until(py, None, |updates, _| updates.worker.offer(gradient, index).map_err(WorkerError::from))
    }

    #[doc = stub_doc!("GradientUpdates.take")]
    fn take(&self, py: Python<'_>, mean: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let _call = Call::begin(py);
        let mut mean = array::floats_to_change(mean)?;
        let mean = mean.as_slice_mut()?;
        self.updates.call_until(py, None, |updates, _| updates.worker.session().take(mean).map_err(WorkerError::from))
    }

    #[doc = stub_doc!("GradientUpdates.wait")]
    #[pyo3(signature = (deadline = None, *, for_gradient = false))]
    fn wait(&self, py: Python<'_>, deadline: Option<f64>, for_gradient: bool) -> PyResult<bool> {
        let deadline = deadline.map(|seconds| wait::seconds(py, "deadline", seconds));
        let until = deadline.transpose()?.map(|longest| Instant::now() + longest);
        self.updates.call_until(py, until, |updates, wait| updates.wait(for_gradient, wait))
    }

    #[doc = stub_doc!("GradientUpdates.restart")]
    fn restart(&self, py: Python<'_>, #[pyo3(from_py_with = arguments::index)] index: u64) -> PyResult<()> {
        self.updates.call(py, None, |updates, _| {
            updates.worker.session().restart(index, Instant::now());
            Ok(())
        })
    }

    #[doc = stub_doc!("GradientUpdates.contributions")]
    fn contributions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let _call = Call::begin(py);
        let counted = self.updates.call(py, None, |updates, _| Ok(updates.worker.session().contributions()))?;
        counted.named().into_py_dict(py)
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

impl PyReplay {
    /// Joins a job of the server that sums gradients, under its name in the namespace. Returns the membership and its description.
    fn join_job<W: Send>(
        &self,
        py: Python<'_>,
        mut request: JoinJob,
        join: impl FnOnce(&Client, &JoinJob, &Wait<'_>) -> Result<W, WorkerError> + Send,
    ) -> PyResult<(W, String)> {
        let (client, namespace) = self.gradient_client(py)?;
        if let Some(namespace) = &namespace {
            request.job = namespace.full(&request.job);
        }
        let joined = wait::blocking(py, None, None, |wait| {
            join(&client, &request, wait).map_err(|error| match error {
                WorkerError::Net(error) => Namespace::short_names(namespace.as_ref(), error).into(),
                failure => failure,
            })
        })?;
        Ok((joined, format!("{} of {} in {:?}", request.worker, request.workers, request.job)))
    }
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
        #[pyo3(from_py_with = arguments::worker)] worker: u16,
        #[pyo3(from_py_with = arguments::workers)] workers: u16,
        #[pyo3(from_py_with = arguments::world)] world: Option<u32>,
        name: &str,
        arithmetic: &str,
        #[pyo3(from_py_with = arguments::segment_values)] segment_values: u16,
        deadline: f64,
        via: Option<&str>,
        station: Option<PyRef<'_, PyStation>>,
    ) -> PyResult<PyGradientWorker> {
        let _call = Call::begin(py);
        let choices = [("float32", Arithmetic::Float), ("fixed", Arithmetic::Fixed)];
        let request = JoinJob {
            job,
            worker,
            workers,
            world: world.unwrap_or(workers.into()),
            name: worker_name(py, name)?,
            arithmetic: arguments::choice(py, "arithmetic", arithmetic, choices)?,
            segment_values,
            deadline: wait::seconds(py, "deadline", deadline)?,
            asynchronous: None,
            below: None,
        };
        let via: Option<SocketAddr> = via.map(|via| arguments::parse(py, "via", via, UDP_ADDRESS)).transpose()?;
        let station = station.as_deref().map(|station| &station.config);
        if let (Some(via), Some(_)) = (via, station) {
            let advice = "a station sends to the server's own address: leave one of them out";
            return Err(error::config(py, format!("both via ({via}) and station: {advice}")));
        }
        let deadline = request.deadline.as_secs_f64();
        let (worker, description) = self
            .join_job(py, request, |client, request, wait| GradientWorker::join(client, request, via, station, wait))?;
        let round = AtomicU64::new(worker.next_round());
        let shared = SharedWorker { worker: Exclusive::new("gradient worker", Some(worker)), round };
        Ok(PyGradientWorker { worker: ProcessLocal::new("gradient worker", Arc::new(shared)), deadline, description })
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
        #[pyo3(from_py_with = arguments::worker)] worker: u16,
        #[pyo3(from_py_with = arguments::workers)] workers: u16,
        #[pyo3(from_py_with = arguments::values)] values: u32,
        #[pyo3(from_py_with = arguments::threshold)] threshold: u16,
        #[pyo3(from_py_with = arguments::staleness)] staleness: u16,
        #[pyo3(from_py_with = arguments::updates)] updates: Option<u64>,
        name: &str,
        #[pyo3(from_py_with = arguments::segment_values)] segment_values: u16,
        deadline: f64,
    ) -> PyResult<PyGradientUpdates> {
        let _call = Call::begin(py);
        let request = JoinJob {
            job,
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
        let last = updates.unwrap_or(u64::MAX);
        let (updates, description) =
            self.join_job(py, request, |client, request, wait| GradientUpdates::join(client, request, last, wait))?;
        let updates = ProcessLocal::new("asynchronous gradient worker", Arc::new(updates));
        Ok(PyGradientUpdates { updates, description })
    }
}

//! `Relay`: the emulated link of the benchmarks and tests.

use std::sync::Mutex;

use pyo3::prelude::*;

use base::error::OsError;
use base::sync::lock;
use replay_net::bench::link::LinkConfig;
use replay_net::bench::relay::Relay;

use crate::class::context_manager;
use crate::gradients::socket_address;
use crate::process_local::Closing;
use crate::{error, integer, wait};

#[doc = stub_doc!("Relay")]
#[pyclass(name = "Relay", module = "innet_drl", frozen)]
pub struct PyRelay {
    address: String,
    relay: Mutex<Option<Relay>>,
}

impl PyRelay {
    fn with<T>(&self, py: Python<'_>, work: impl FnOnce(&Relay) -> T) -> PyResult<T> {
        let relay = lock(&self.relay);
        let relay = relay
            .as_ref()
            .ok_or_else(|| Closing::exception(py, "relay"))?;
        Ok(work(relay))
    }
}

context_manager!(PyRelay, |relay, _py, _failed| {
    relay.close();
    Ok(())
});

#[pymethods]
impl PyRelay {
    #[new]
    #[pyo3(
        signature = (to, *, delay = 0.0, jitter = 0.0, rate = None, loss = 0.0, datagrams = false, seed = 0)
    )]
    fn new(
        py: Python<'_>,
        to: &str,
        delay: f64,
        jitter: f64,
        rate: Option<f64>,
        loss: f64,
        datagrams: bool,
        #[pyo3(from_py_with = integer::seed)] seed: u64,
    ) -> PyResult<Self> {
        let config = LinkConfig {
            delay: wait::seconds(py, "delay", delay)?,
            jitter: wait::seconds(py, "jitter", jitter)?,
            rate,
            loss,
        };
        config.check().map_err(|reason| error::config(py, reason))?;
        let to = socket_address(py, to)?;
        let relay = match datagrams {
            true => Relay::datagrams(to, config, seed),
            false => Relay::streams(to, config, seed),
        };
        let failed = |source| error::to_python(py, OsError::of("the relay failed")(source));
        let relay = relay.map_err(failed)?;
        Ok(PyRelay {
            address: relay.address().to_string(),
            relay: Mutex::new(Some(relay)),
        })
    }

    #[doc = stub_doc!("Relay.address")]
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    #[doc = stub_doc!("Relay.bytes")]
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let [to_server, back] = self.with(py, Relay::bytes)?;
        Ok((to_server, back))
    }

    #[doc = stub_doc!("Relay.cut")]
    fn cut(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Relay::cut)
    }

    #[doc = stub_doc!("Relay.close")]
    fn close(&self) {
        *lock(&self.relay) = None;
    }
}

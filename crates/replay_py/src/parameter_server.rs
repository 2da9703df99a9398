//! `ParameterServer` and `ParameterWorker`: the baseline of `innet-drl bench gradients`.

use std::io;
use std::net::IpAddr;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

use base::error::OsError;
use replay_net::bench::parameter_server::{ParameterServer, ParameterWorker};

use crate::gradients::socket_address;
use crate::{error, integer, interpreter, wait};

fn failed(py: Python<'_>, source: io::Error) -> PyErr {
    let error = OsError::of("the benchmark's server failed")(source);
    error::to_python(py, error)
}

#[doc = stub_doc!("ParameterServer")]
#[pyclass(name = "ParameterServer", module = "innet_drl", frozen)]
pub struct PyParameterServer(ParameterServer);

#[pymethods]
impl PyParameterServer {
    #[new]
    #[pyo3(signature = (workers, max_bytes, host = "127.0.0.1"))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = integer::workers)] workers: u16,
        #[pyo3(from_py_with = integer::max_bytes)] max_bytes: usize,
        host: &str,
    ) -> PyResult<Self> {
        let wanted = || error::config(py, format!("host is an IP address, got {host:?}"));
        let host: IpAddr = host.parse().map_err(|_| wanted())?;
        ParameterServer::start(host, workers.into(), max_bytes)
            .map(Self)
            .map_err(|source| failed(py, source))
    }

    #[doc = stub_doc!("ParameterServer.address")]
    #[getter]
    fn address(&self) -> String {
        self.0.address().to_string()
    }
}

#[doc = stub_doc!("ParameterWorker")]
#[pyclass(name = "ParameterWorker", module = "innet_drl")]
pub struct PyParameterWorker(ParameterWorker);

#[pymethods]
impl PyParameterWorker {
    #[new]
    #[pyo3(signature = (address, *, deadline = 60.0))]
    fn new(py: Python<'_>, address: &str, deadline: f64) -> PyResult<Self> {
        let address = socket_address(py, address)?;
        let deadline = wait::seconds(py, "deadline", deadline)?;
        interpreter::detach(py, || ParameterWorker::connect(address, deadline))
            .map(Self)
            .map_err(|source| failed(py, source))
    }

    #[doc = stub_doc!("ParameterWorker.sum")]
    fn sum(&mut self, py: Python<'_>, values: &Bound<'_, PyArray1<f32>>) -> PyResult<()> {
        let mut values = values.try_readwrite()?;
        let values = values.as_slice_mut()?;
        interpreter::detach(py, || self.0.sum(values)).map_err(|source| failed(py, source))
    }
}

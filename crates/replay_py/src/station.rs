//! `Station`: DPDK device and IPv4 interface of a worker of a gradient job.

use std::time::Duration;

use pyo3::prelude::*;

use gradients::DpdkConfig;

use crate::{error, integer};

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
        #[pyo3(from_py_with = integer::prefix)] prefix: u8,
        gateway: Option<&str>,
        #[pyo3(from_py_with = integer::idle_sleep_us)] idle_sleep_us: u64,
    ) -> PyResult<Self> {
        let wanted = "a free IPv4 address of the device's network and a port, such as 10.0.0.3:7711";
        let address = error::parse(py, "address", address, wanted)?;
        let gateway = gateway.map(|text| error::parse(py, "gateway", text, "an IPv4 address"));
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

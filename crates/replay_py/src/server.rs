//! `Server`: network access to a memory in this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use replay_core::memory::Memory;
use replay_net::config::{Secret, ServerConfig};
use replay_net::server::{RunningServer, Server};
use replay_net::stack::Address;

use crate::context::context_manager;
use crate::error;
use crate::handle::Handle;

/// A server in front of a `Replay` of this process.
#[pyclass(name = "Server", module = "innet_drl", frozen)]
pub struct PyServer {
    server: Handle<RunningServer>,
    addresses: Vec<String>,
    gradients: Option<String>,
}

/// One address or several.
pub struct Addresses(Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Addresses {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(one) = value.extract::<String>() {
            return Ok(Addresses(vec![one]));
        }
        value.extract().map(Addresses)
    }
}

/// An address of a server.
pub fn parse(py: Python<'_>, address: &str) -> PyResult<Address> {
    address.parse().map_err(|error| error::to_python(py, error))
}

/// An IP address with a port.
pub fn udp(py: Python<'_>, address: &str) -> PyResult<SocketAddr> {
    address.parse().map_err(|_| {
        let wanted = "an IP address and a port, such as 127.0.0.1:7711";
        error::config(py, format!("gradients is {wanted}, got {address:?}"))
    })
}

/// Arguments of `Replay.serve` besides the addresses.
pub struct ServeOptions {
    pub token: Option<String>,
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    pub trusted_network: bool,
    pub io_threads: usize,
    pub spin: bool,
    pub gradients: Option<SocketAddr>,
}

pub fn start(
    py: Python<'_>,
    memory: Arc<Memory>,
    addresses: Addresses,
    options: ServeOptions,
) -> PyResult<PyServer> {
    let listen = addresses
        .0
        .iter()
        .map(|address| parse(py, address))
        .collect::<PyResult<Vec<_>>>()?;
    let config = ServerConfig {
        listen,
        token: options.token.map(Secret),
        tls_cert: options.tls_cert,
        tls_key: options.tls_key,
        trusted_network: options.trusted_network,
        io_threads: options.io_threads,
        spin: options.spin,
        gradients: options.gradients,
        ..ServerConfig::default()
    };
    let server = py
        .detach(|| Server::start(&config, memory))
        .map_err(|error| error::to_python(py, error))?;
    let addresses = server.addresses().iter().map(Address::to_string).collect();
    let gradients = server.gradients().map(|address| address.to_string());
    Ok(PyServer {
        server: Handle::new("server", server),
        addresses,
        gradients,
    })
}

context_manager!(PyServer, |server, py, _failed| server.close(py));

#[pymethods]
impl PyServer {
    /// Where it listens, ports filled in: what `connect` takes.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }

    /// Where it sums gradients, `"ip:port"` of UDP, or `None` where it does not.
    #[getter]
    fn gradients(&self) -> Option<&str> {
        self.gradients.as_deref()
    }

    /// Stops listening, lets requests under way finish, and ends the connections.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(server) = self.server.close(py)? {
            py.detach(|| {
                server.shut_down();
                server.wait()
            })
            .map_err(|error| error::to_python(py, error))?;
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = if self.server.is_closed() {
            ", closed"
        } else {
            ""
        };
        format!("<Server at {}{closed}>", self.addresses.join(", "))
    }
}

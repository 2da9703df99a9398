//! `Server`, which puts a memory of this process on the network, and `connect`, which reaches one.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;

use replay_core::memory::Memory;
use replay_net::client::{Client, ConnectOptions};
use replay_net::config::{Secret, ServerConfig};
use replay_net::server::{RunningServer, Server};
use replay_net::stack::Address;
use replay_wire::auth;

use crate::handle::Handle;
use crate::replay::PyReplay;
use crate::table::PyTable;
use crate::{error, log, wait};

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

fn parse(py: Python<'_>, address: &str) -> PyResult<Address> {
    address.parse().map_err(|error| error::to_python(py, error))
}

/// An IP address with a port.
pub fn udp(py: Python<'_>, address: &str) -> PyResult<SocketAddr> {
    address.parse().map_err(|_| {
        let wanted = "an IP address and a port, such as 127.0.0.1:7711";
        error::config(py, format!("gradients is {wanted}, got {address:?}"))
    })
}

/// What `Replay.serve` takes beside the addresses.
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

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _exception_type: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
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

/// Stands for no timeout: longer than any network stack tries.
const LONGEST_CONNECT: Duration = Duration::from_secs(24 * 60 * 60);

/// Connects to a server.
#[pyfunction]
#[pyo3(
    signature = (
        url, *, token = None, tables = Vec::new(), timeout = 10.0, tls_ca = None, spin = false, config = None, grace = 5.0
    ),
    text_signature = "(url, *, token=None, tables=(), timeout=10.0, tls_ca=None, spin=False, config=None, grace=5.0)"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the Python function"
)]
pub fn connect(
    py: Python<'_>,
    url: &str,
    token: Option<String>,
    tables: Vec<PyRef<'_, PyTable>>,
    timeout: Option<f64>,
    tls_ca: Option<PathBuf>,
    spin: bool,
    config: Option<PathBuf>,
    grace: f64,
) -> PyResult<PyReplay> {
    log::start(py)?;
    let grace = Duration::try_from_secs_f64(grace)
        .map_err(|_| error::config(py, format!("grace is in seconds, got {grace}")))?;
    let address = parse(py, url)?;
    let deadline = wait::deadline(py, timeout)?;
    // An empty token is none, also where the environment has one.
    let token = match token {
        Some(token) => Some(token.trim().to_owned()).filter(|token| !token.is_empty()),
        None => auth::environment_token(),
    };
    let options = ConnectOptions {
        token,
        tls_ca,
        spin,
        stack_config: config,
        connect_timeout: timeout
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .unwrap_or(LONGEST_CONNECT),
        grace,
        ..ConnectOptions::default()
    };
    let client = wait::blocking(py, deadline, |wait| {
        Client::connect(&address, options, wait)
    })?;
    let replay = PyReplay::remote(Arc::new(client), address.to_string());
    replay.make_tables(py, tables, timeout)?;
    Ok(replay)
}

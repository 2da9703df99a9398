//! `Server`: network access to a memory in this process.

use std::sync::Arc;

use pyo3::prelude::*;

use gradients_net::GradientsConfig;
use replay_core::memory::Memory;
use replay_link::error::Result;
use replay_link::stack::Address;
use replay_server::config::{HttpAddress, ServerConfig};
use replay_server::plugin::ExtensionSettings;
use replay_server::server::{RunningServer, Server};

use crate::class::{attributes, context_manager};
use crate::gradients::UDP_ADDRESS;
use crate::interpreter::Call;
use crate::process_local::{Closing, ProcessLocal};
use crate::{error, wait};

#[doc = stub_doc!("Server")]
#[pyclass(name = "Server", module = "innet_drl", frozen)]
pub struct PyServer {
    server: ProcessLocal<RunningServer>,
    addresses: Vec<String>,
    gradients: Option<String>,
    http: Option<String>,
}

/// Reads one address or several.
pub fn addresses(value: &Bound<'_, PyAny>) -> PyResult<Vec<Address>> {
    let _call = Call::begin(value.py());
    let texts = match value.extract() {
        Ok(one) => vec![one],
        Err(_) => value.extract::<Vec<String>>()?,
    };
    let addresses = texts.iter().map(|text| text.parse().map_err(|error| error::to_python(value.py(), error)));
    addresses.collect()
}

/// Settings of the server's extensions: gradient sums at a UDP address.
pub fn extensions(py: Python<'_>, gradients: Option<&str>) -> PyResult<ExtensionSettings> {
    let gradients = gradients.map(|at| error::parse(py, "gradients", at, UDP_ADDRESS)).transpose()?;
    let config = GradientsConfig { gradients, ..GradientsConfig::default() };
    config.settings().map_err(|error| error::to_python(py, error))
}

impl PyServer {
    /// A server of the memory of `replay`. It serves without the returned object, until the replay is closed or gone.
    pub fn start(py: Python<'_>, memory: Arc<Memory>, replay: Closing, config: &ServerConfig) -> PyResult<Self> {
        let server = wait::unlocked(py, || Server::start(config, memory))?;
        let addresses = server.addresses().iter().map(Address::to_string).collect();
        let extensions = server.server().service().extensions.iter();
        let mut gradients = extensions.filter(|one| one.name() == gradients_net::NAME);
        let gradients = gradients.next().and_then(|one| one.address());
        let http = server.http().map(HttpAddress::to_string);
        let server = ProcessLocal::within(py, replay, "server", server, end)?.keep();
        Ok(PyServer { server, addresses, gradients, http })
    }
}

/// Closes a server, and waits until it has ended.
fn end(server: RunningServer) -> Result<()> {
    server.close();
    server.wait()
}

attributes! { PyServer as "Server", |server, py|
    addresses: Vec<String> = server.addresses.clone();
    gradients: Option<&str> = server.gradients.as_deref();
    http: Option<&str> = server.http.as_deref();
}

context_manager!(PyServer, |server, py, _failed| server.close(py));

#[pymethods]
impl PyServer {
    #[doc = stub_doc!("Server.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(server) = self.server.close(py)? {
            wait::unlocked(py, || end(server))?;
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        let closed = self.server.mark(", closed");
        format!("<Server at {}{closed}>", self.addresses.join(", "))
    }
}

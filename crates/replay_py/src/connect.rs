//! `connect`: a `Replay` on a server, or on several.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use replay_client::shards::{ShardedClient, parse_addresses};
use replay_client::{Client, ConnectOptions, Namespace};
use replay_core::schema::TableConfig;
use replay_wire::auth::{self, Secret};

use crate::interpreter::Call;
use crate::replay::PyReplay;
use crate::{definition, error, log, wait};

/// Connect timeout for `timeout=None`, longer than any network stack tries.
const LONGEST_CONNECT: Duration = Duration::from_secs(24 * 60 * 60);

#[doc = stub_doc!("connect")]
#[pyfunction]
#[pyo3(
    signature = (
        url, *, token = None, tables = Vec::new(), timeout = 10.0, tls_ca = None, spin = false, config = None, grace = 5.0,
        reconnect_for = 60.0, namespace = None
    ),
    text_signature = "(url, *, token=None, tables=(), timeout=10.0, tls_ca=None, spin=False, config=None, grace=5.0, \
                      reconnect_for=60.0, namespace=None)"
)]
pub fn connect(
    py: Python<'_>,
    url: &str,
    token: Option<String>,
    #[pyo3(from_py_with = definition::tables)] tables: Vec<TableConfig>,
    timeout: Option<f64>,
    tls_ca: Option<PathBuf>,
    spin: bool,
    config: Option<PathBuf>,
    grace: f64,
    reconnect_for: f64,
    namespace: Option<&str>,
) -> PyResult<PyReplay> {
    let _call = Call::begin(py);
    log::start();
    let grace = wait::seconds(py, "grace", grace)?;
    let reconnect_for = wait::seconds(py, "reconnect_for", reconnect_for)?;
    let namespace = namespace.map(str::parse::<Namespace>).transpose();
    let namespace = namespace.map_err(|error| error::to_python(py, error))?;
    let addresses = parse_addresses(url).map_err(|error| error::to_python(py, error))?;
    let deadline = wait::deadline(py, timeout)?;
    // An empty argument means no token, even if the environment has one.
    let token = match token {
        Some(token) => Some(token.trim().to_owned()).filter(|token| !token.is_empty()),
        None => auth::environment_token(),
    };
    let longest = deadline.map_or(LONGEST_CONNECT, |deadline| deadline.saturating_duration_since(Instant::now()));
    let options = ConnectOptions {
        token: token.map(Secret),
        tls_ca,
        spin,
        stack_config: config,
        connect_timeout: longest,
        await_server: longest,
        reconnect_for,
        grace,
        namespace: namespace.clone(),
        ..ConnectOptions::default()
    };
    let replay = if let [address] = &addresses[..] {
        let client = Arc::new(wait::blocking(py, deadline, None, |wait| Client::connect(address, options, wait))?);
        PyReplay::served(client.clone(), client, &address.to_string(), namespace)
    } else {
        let client = wait::blocking(py, deadline, None, |wait| ShardedClient::connect(&addresses, &options, wait))?;
        let (first, names) = (client.first().clone(), client.names());
        PyReplay::served(Arc::new(client), first, &names, namespace)
    };
    replay.make_tables(py, &tables, timeout)?;
    Ok(replay)
}

//! Interface for services of other crates. A program registers them before it parses settings. A server starts those that its settings
//! enable. Clients address them by name, over dedicated connections.

mod settings;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use event_listener::{Event, EventListener};
pub use prometheus_client::metrics::MetricType;
use serde_json::Value;

use crate::cli::doctor::{Finding, MachineFiles};
use crate::config::ServerConfig;
use crate::error::Result;
use base::sync::lock;
use replay_core::table::Attempt;
pub use settings::{ExtensionSettings, SettingsType};
pub(crate) use settings::{add_flags, check_types, given_flags, names_of_settings};

/// Longest message in either direction, in bytes: messages do not count in the limits of memory for requests and replies.
pub const MAX_MESSAGE: u64 = 16 << 10;

/// A registered service.
pub trait PluggedExtension: Sync {
    /// Name in requests and statistics, where no other may have it, and key of its settings in [`ServerConfig::extensions`].
    fn name(&self) -> &'static str;
    /// Type of its settings, if it has any.
    fn settings(&self) -> Option<SettingsType> {
        None
    }
    /// Error message for requests to a server that does not run it.
    fn absent(&self) -> String {
        format!("this server does not have the service {:?}", self.name())
    }
    /// Crates that log at the configured level. All other crates log warnings and errors only.
    fn log_targets(&self) -> &'static [&'static str] {
        &[]
    }
    /// Checks the configuration of a server before the start.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) with advice.
    fn check(&self, _config: &ServerConfig) -> Result<()> {
        Ok(())
    }
    /// Reads the files that a start of the service reads.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) with the file.
    fn check_files(&self, _config: &ServerConfig) -> Result<()> {
        Ok(())
    }
    /// Starts the service; `None` if the settings do not enable it.
    ///
    /// # Errors
    /// Any error ends the start of the server.
    fn start(&self, config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>>;
    /// Consequence of `trusted_network` for this service, for the log; `None` if the setting does not matter to it.
    fn trust(&self, _config: &ServerConfig) -> Option<&'static str> {
        None
    }
    /// Checks of the machine, for `innet-replay doctor`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) for settings that cannot be read.
    fn findings(&self, _config: &ServerConfig, _machine: &MachineFiles) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
}

/// A service of a running server.
pub trait Extension: Send + Sync {
    /// [`PluggedExtension::name`].
    fn name(&self) -> &'static str;
    /// Starts a session for a new connection.
    fn session(self: Arc<Self>) -> Box<dyn Session>;
    /// Own address, for the server's ready line.
    fn address(&self) -> Option<String> {
        None
    }
    /// Reason for which requests to the memory are refused; `None` if the server has a memory.
    fn instead_of_memory(&self) -> Option<&'static str> {
        None
    }
    /// Statistics, as a JSON object: a member of the server's, under the name.
    fn stats(&self) -> Value;
    /// Statistics exported to Prometheus. `innet-replay top` and the live page also show groups with a label.
    fn metrics(&self) -> &'static [MetricGroup] {
        &[]
    }
}

/// Requests of one connection. Dropped when the connection ends.
pub trait Session {
    /// One attempt at a request of at most [`MAX_MESSAGE`] bytes; a blocked one is tried again after [`Session::changed`].
    ///
    /// # Errors
    /// The error to answer the request with.
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>>;
    /// Listens for the next change that may unblock a request. A blocked attempt must not notify, or it would wake itself forever. The
    /// default is for services that never block.
    fn changed(&self) -> EventListener {
        Event::new().listen()
    }
    /// Called when the connection ends while the server keeps running.
    fn end(&mut self) {}
}

/// A group of metrics: the members of one JSON object or, with a label, of each object in it.
#[derive(Debug)]
pub struct MetricGroup {
    /// Prefix of the metrics' names.
    pub prefix: &'static str,
    /// JSON pointer to the object within the service's statistics; empty for all of them.
    pub pointer: &'static str,
    /// Name of the label; its values are the names of the objects.
    pub label: Option<&'static str>,
    /// Type of each metric, name of its statistic, and help.
    pub metrics: &'static [Metric],
}

/// Type of a metric, name of its statistic, and help.
pub type Metric = (MetricType, &'static str, &'static str);

static PLUGGED_IN: Mutex<Vec<&'static dyn PluggedExtension>> = Mutex::new(Vec::new());

/// Plugs a service in, once for each name. No two settings may have the same name, the server's own included.
pub fn plug_in(extension: &'static dyn PluggedExtension) {
    let mut extensions = lock(&PLUGGED_IN);
    if extensions.iter().all(|known| known.name() != extension.name()) {
        extensions.push(extension);
    }
}

/// All registered services.
pub fn plugged_in() -> Vec<&'static dyn PluggedExtension> {
    lock(&PLUGGED_IN).clone()
}

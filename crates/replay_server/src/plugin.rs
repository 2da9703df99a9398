//! Interface for other crates: network stacks, and services beside the memory. A program plugs them in before it parses addresses and
//! settings. A server starts the services that its settings enable; clients address them by name, over connections of their own.

mod settings;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use event_listener::{Event, EventListener};
pub use prometheus_client::metrics::MetricType;
use serde_json::Value;

use crate::config::ServerConfig;
use crate::findings::{Finding, MachineFiles};
use crate::server::{JoinTask, ServeTask};
use base::sync::lock;
use replay_core::table::Attempt;
use replay_link::error::{Error, Result};
use replay_link::stack::plugged;
use replay_link::stack::{PluggedStack, StackName};
pub use settings::{ExtensionSettings, SettingsType};

/// Longest message in either direction, in bytes: messages do not count in the limits of memory for requests and replies.
pub const MAX_MESSAGE: u64 = 16 << 10;

/// What another crate adds to a server: a network stack, or a service beside the memory.
pub trait Plugin: Sync {
    /// Name: of a stack in `--stack`, of a service in requests and statistics, where no other may have it, and key of its settings in
    /// [`ServerConfig::extensions`].
    fn name(&self) -> &'static str;
    /// Crates that log at the configured level. All other crates log warnings and errors only.
    fn log_targets(&self) -> &'static [&'static str] {
        &[]
    }
    /// The stack, of a plug-in that is one. The calls with a configuration are then for servers that have this stack.
    fn stack(&self) -> Option<&'static dyn PluggedStack> {
        None
    }
    /// Type of the settings, if there are any.
    fn settings(&self) -> Option<SettingsType> {
        None
    }
    /// Checks the configuration of a server before the start.
    ///
    /// # Errors
    /// [`Error::Config`] with advice.
    fn check(&self, _config: &ServerConfig) -> Result<()> {
        Ok(())
    }
    /// Checks what this program was built with, and reads the files that a start reads.
    ///
    /// # Errors
    /// [`Error::Config`] with the file, or what to build.
    fn check_files(&self, _config: &ServerConfig) -> Result<()> {
        Ok(())
    }
    /// Checks of the machine, for `innet-replay doctor`.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that cannot be read.
    fn findings(&self, _config: &ServerConfig, _machine: &MachineFiles) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
    /// Runs a server's `task` on the stack's thread; starts the thread if it is not running.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Io`] for a stack that cannot be started.
    fn serve(&self, _config: &ServerConfig, _task: ServeTask) -> Result<JoinTask> {
        Err(Error::Internal(format!("{} is no network stack", self.name())))
    }
    /// Starts the service; `None` if the settings do not enable it.
    ///
    /// # Errors
    /// Any error ends the start of the server.
    fn start(&self, _config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>> {
        Ok(None)
    }
    /// Error message for requests to a server that does not run the service.
    fn absent(&self) -> String {
        format!("this server does not have the service {:?}", self.name())
    }
    /// Consequence of `trusted_network` for the service, for the log; `None` if the setting does not matter to it.
    fn trust(&self, _config: &ServerConfig) -> Option<&'static str> {
        None
    }
}

/// A service of a running server.
pub trait Extension: Send + Sync {
    /// [`Plugin::name`].
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

static PLUGGED_IN: Mutex<Vec<&'static dyn Plugin>> = Mutex::new(Vec::new());

/// Plugs in, once for each name. No two settings may have the same name, the server's own included.
pub fn plug_in(plugin: &'static dyn Plugin) {
    plugin.stack().into_iter().for_each(plugged::register);
    let mut plugins = lock(&PLUGGED_IN);
    if plugins.iter().all(|known| known.name() != plugin.name()) {
        plugins.push(plugin);
    }
}

/// All plug-ins.
pub fn plugged_in() -> Vec<&'static dyn Plugin> {
    lock(&PLUGGED_IN).clone()
}

/// The plug-ins of a server with this stack: its own, and all that are no stacks.
pub fn of_server(stack: StackName) -> impl Iterator<Item = &'static dyn Plugin> {
    let concerns = move |plugin: &&dyn Plugin| plugin.stack().is_none() || plugin.name() == stack.name();
    plugged_in().into_iter().filter(concerns)
}

/// The plug-in of a stack other than the kernel's.
///
/// # Errors
/// [`Error::Internal`] for a stack that is not plugged in.
pub fn of_stack(stack: &dyn PluggedStack) -> Result<&'static dyn Plugin> {
    let found = plugged_in().into_iter().find(|plugin| plugin.name() == stack.name());
    found.ok_or_else(|| Error::Internal(format!("the stack {} has no plug-in", stack.name())))
}

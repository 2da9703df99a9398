//! Plug-ins, what another crate adds to a server: a network stack, or an extension, which is a part beside the memory. A program plugs them in
//! before it parses addresses and settings. A server starts the extensions that its settings enable; clients address them by name, over
//! connections of their own. For `innet-replay doctor`, plug-ins check the machine: what they found, and what to do about it.

mod extension;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::Serialize;

use base::wait::lock;
use replay_link::error::{Error, Result};
use replay_link::stack::{PluggedStack, StackName, plugged};

use crate::config::ServerConfig;
use crate::server::{JoinTask, ServeTask};

pub use extension::{
    Extension, ExtensionConnection, MAX_MESSAGE, Metric, MetricGroup, MetricType, PluginSettings, SettingsType,
};

/// What another crate adds to a server: a network stack, or an extension.
pub trait Plugin: Sync {
    /// Name: of a stack in `--stack`, of an extension in requests and statistics, where no other may have it, and key of its settings in
    /// [`ServerConfig::plugins`].
    fn name(&self) -> &'static str;
    /// Crates that log at the configured level. All other crates log warnings and errors only.
    fn log_targets(&self) -> &'static [&'static str] {
        &[]
    }
    /// The network stack; `None` for an extension. A stack's methods with a configuration are called only for servers with this stack.
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
    /// Starts the extension; `None` if the settings do not enable it.
    ///
    /// # Errors
    /// Any error ends the start of the server.
    fn start(&self, _config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>> {
        Ok(None)
    }
    /// Error message for requests to a server that does not run the extension.
    fn absent(&self) -> String {
        format!("this server does not have the extension {:?}", self.name())
    }
    /// Consequence of `trusted_network` for the extension, for the log; `None` if the setting does not matter to it.
    fn trust(&self, _config: &ServerConfig) -> Option<&'static str> {
        None
    }
}

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

/// The plug-ins of a server with this stack: that of the stack, and all extensions.
pub fn of_server(stack: StackName) -> impl Iterator<Item = &'static dyn Plugin> {
    let concerns = move |plugin: &&dyn Plugin| plugin.stack().is_none() || plugin.name() == stack.name();
    plugged_in().into_iter().filter(concerns)
}

/// The plug-in of a stack that is not the kernel.
///
/// # Errors
/// [`Error::Internal`] for a stack that is not plugged in.
pub fn of_stack(stack: &dyn PluggedStack) -> Result<&'static dyn Plugin> {
    let found = plugged_in().into_iter().find(|plugin| plugin.name() == stack.name());
    found.ok_or_else(|| Error::Internal(format!("the stack {} has no plug-in", stack.name())))
}

/// Result of the check of one component.
#[derive(Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the component.
    pub check: &'static str,
    /// Whether the check passed.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// Advice if the check failed, else empty.
    pub to_do: String,
}

impl Finding {
    /// The result of a check.
    pub fn new(check: &'static str, checked: CheckResult) -> Self {
        let ok = checked.is_ok();
        let (found, to_do) = checked.map_or_else(|missing| missing, |found| (found, String::new()));
        Finding { check, ok, found, to_do }
    }
}

/// Description of a component; of a missing one, with advice.
pub type CheckResult = std::result::Result<String, (String, String)>;

/// # Errors
/// What was found, and what to do, always.
pub fn missing(found: impl Into<String>, to_do: impl Into<String>) -> CheckResult {
    Err((found.into(), to_do.into()))
}

/// Files of the machine to check; tests provide their own.
pub struct MachineFiles {
    /// Root folder, `/` outside of tests.
    pub root: PathBuf,
}

impl MachineFiles {
    /// The files of this machine.
    pub fn this() -> Self {
        MachineFiles { root: PathBuf::from("/") }
    }

    /// Path of a file below the root.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// A small file's text without surrounding white space; empty if it cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> String {
        let text = fs::read_to_string(self.at(path)).unwrap_or_default();
        text.trim().to_owned()
    }
}

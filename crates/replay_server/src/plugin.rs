//! Plug-ins, what another crate adds to a server: a network stack, or an extension, which is a part beside the memory. A program plugs them in
//! before it parses addresses and settings. A server starts the extensions that its settings enable; clients address them by name, over
//! connections of their own.

mod extension;

use std::sync::{Arc, Mutex};

use crate::config::ServerConfig;
use crate::findings::{Finding, MachineFiles};
use crate::server::{JoinTask, ServeTask};
use base::sync::lock;
pub use extension::{
    Extension, ExtensionSettings, MAX_MESSAGE, Metric, MetricGroup, MetricType, Session, SettingsType,
};
use replay_link::error::{Error, Result};
use replay_link::stack::plugged;
use replay_link::stack::{PluggedStack, StackName};

/// What another crate adds to a server: a network stack, or an extension.
pub trait Plugin: Sync {
    /// Name: of a stack in `--stack`, of an extension in requests and statistics, where no other may have it, and key of its settings in
    /// [`ServerConfig::extensions`].
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

//! Network stacks of other crates. A program registers them by name before it parses addresses: `--stack NAME` for a server,
//! `innet+NAME://` for a client.

use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};

use super::{Address, ByteStream};
use crate::cli::doctor::Finding;
use crate::client::ConnectOptions;
use crate::client::pipeline::ServerWait;
use crate::config::ServerConfig;
use crate::error::{Error, Result};
use crate::server::{JoinTask, ServeTask};
use base::sync::lock;
use base::wait::Wait;

/// A network stack of another crate.
pub trait PluggedStack: Sync {
    /// Name of the stack in `--stack` and in addresses.
    fn name(&self) -> &'static str;
    /// Display name.
    fn title(&self) -> &'static str;
    /// Help text of the value in `--stack`.
    fn help(&self) -> &'static str;
    /// Crate that logs at the configured level.
    fn log_target(&self) -> &'static str;
    /// # Errors
    /// [`Error::Config`] if this program was built without the stack.
    fn check_built_in(&self) -> Result<()>;
    /// Checks the configuration of a server on this stack before the start.
    ///
    /// # Errors
    /// [`Error::Config`] with advice.
    fn check_server(&self, config: &ServerConfig) -> Result<()>;
    /// Reads the files that a start of the stack reads.
    ///
    /// # Errors
    /// [`Error::Config`] with the file.
    fn check_files(&self, _config: &ServerConfig) -> Result<()> {
        Ok(())
    }
    /// Runs `task` on the stack's thread; starts the thread if it is not running.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Io`] for a stack that cannot be started.
    fn serve(&self, config: &ServerConfig, task: ServeTask) -> Result<JoinTask>;
    /// Creates a client for `address`.
    ///
    /// # Errors
    /// [`Error::Config`] if the options do not fit the address, or if the stack cannot be started.
    fn client(&self, address: &Address, options: &ConnectOptions) -> Result<Arc<dyn StackClient>>;
    /// Checks of the machine for `innet-replay doctor`, with the stack's configuration file if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] for a file that cannot be read.
    fn findings(&self, file: Option<&Path>) -> Result<Vec<Finding>>;
}

/// A future that is run on a stack's thread.
pub type StackFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Connects to one server over a stack with its own thread.
pub trait StackClient: Send + Sync {
    /// Opens a stream to the server. Polled by [`run`](Self::run).
    fn connect(&self) -> StackFuture<'_, io::Result<Box<dyn ByteStream>>>;
    /// Runs `work` on the stack's thread and blocks this one until it is done, `until` passes or the call is interrupted. `work`
    /// is polled at least once, and dropped on that thread before this returns. A long wait for `server` is logged.
    ///
    /// # Errors
    /// [`Error::Interrupted`], and [`Error::Closed`] when the stack has ended.
    fn run(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        server: &ServerWait,
        work: StackFuture<'_, ()>,
    ) -> Result<()>;
}

static PLUGGED_IN: Mutex<Vec<&'static dyn PluggedStack>> = Mutex::new(Vec::new());

/// Registers a stack. Later stacks of the same name are ignored.
pub fn plug_in(stack: &'static dyn PluggedStack) {
    let mut stacks = lock(&PLUGGED_IN);
    if stacks.iter().all(|known| known.name() != stack.name()) {
        stacks.push(stack);
    }
}

/// All registered stacks.
pub fn plugged_in() -> Vec<&'static dyn PluggedStack> {
    lock(&PLUGGED_IN).clone()
}

/// `text` of each registered stack, joined by "or"; `None` without any.
pub(crate) fn alternatives(text: impl Fn(&dyn PluggedStack) -> String) -> Option<String> {
    let texts: Vec<_> = plugged_in().into_iter().map(text).collect();
    (!texts.is_empty()).then(|| texts.join(" or "))
}

/// A network stack, by its name.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum StackName {
    /// The kernel's: TCP and Unix sockets.
    #[default]
    Kernel,
    /// Another crate's.
    Plugged(&'static dyn PluggedStack),
}

impl StackName {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            StackName::Kernel => "kernel",
            StackName::Plugged(stack) => stack.name(),
        }
    }

    /// Parser of a flag, with the names of all stacks in its help.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Self> {
        let plugged = plugged_in().into_iter();
        let plugged = plugged.map(|stack| PossibleValue::new(stack.name()).help(stack.help()));
        let kernel = PossibleValue::new("kernel").help("The kernel's: TCP and Unix sockets");
        PossibleValuesParser::new([kernel].into_iter().chain(plugged)).try_map(|name| name.parse::<Self>())
    }
}

impl FromStr for StackName {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] with the names of all stacks.
    fn from_str(text: &str) -> Result<Self> {
        if text == "kernel" {
            return Ok(StackName::Kernel);
        }
        let stack = plugged_in().into_iter().find(|known| known.name() == text);
        stack.map(StackName::Plugged).ok_or_else(|| {
            let others = alternatives(|stack| stack.name().to_owned());
            let others = others.map_or(String::new(), |names| format!(" or {names}"));
            Error::Config(format!("there is no network stack {text:?}, only kernel{others}"))
        })
    }
}

impl TryFrom<String> for StackName {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<StackName> for String {
    fn from(stack: StackName) -> Self {
        stack.name().to_owned()
    }
}

impl PartialEq for StackName {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for StackName {}

impl Hash for StackName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for StackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

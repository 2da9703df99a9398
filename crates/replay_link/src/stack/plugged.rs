//! Network stacks of other crates. A program plugs them in before it parses addresses: `--stack NAME` for a server, `innet+NAME://`
//! for a client.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::{Deserialize, Deserializer, Serialize};

use super::{Address, ByteStream, ServerWait};
use crate::error::{Error, Result};
use base::wait::{Wait, lock};

/// A network stack of another crate, as addresses and clients see it.
pub trait PluggedStack: Sync {
    /// Name of the stack in `--stack` and in addresses.
    fn name(&self) -> &'static str;
    /// Display name.
    fn title(&self) -> &'static str;
    /// Help text of the value in `--stack`.
    fn help(&self) -> &'static str;
    /// Creates a client for `address`, with the stack's configuration file if there is one. A client that is to `spin` polls without
    /// sleeping.
    ///
    /// # Errors
    /// [`Error::Config`] if the options do not fit the address, or if the stack cannot be started.
    fn client(&self, address: &Address, file: Option<&Path>, spin: bool) -> Result<Arc<dyn StackClient>>;
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

static STACKS: Mutex<Vec<&'static dyn PluggedStack>> = Mutex::new(Vec::new());

/// Makes a stack known by its name. Later stacks of the same name are ignored.
pub fn register(stack: &'static dyn PluggedStack) {
    let mut stacks = lock(&STACKS);
    if stacks.iter().all(|known| known.name() != stack.name()) {
        stacks.push(stack);
    }
}

/// All stacks that are plugged in.
pub fn plugged_in() -> Vec<&'static dyn PluggedStack> {
    lock(&STACKS).clone()
}

/// `text` of each registered stack, joined by "or"; `None` without any.
pub fn alternatives(text: impl Fn(&dyn PluggedStack) -> String) -> Option<String> {
    let texts: Vec<_> = plugged_in().into_iter().map(text).collect();
    (!texts.is_empty()).then(|| texts.join(" or "))
}

/// A network stack, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct StackName(&'static str);

impl StackName {
    /// The kernel: TCP and Unix sockets.
    pub const KERNEL: Self = StackName("kernel");

    /// The name.
    pub fn name(self) -> &'static str {
        self.0
    }

    /// The stack of another crate; `None` for the kernel.
    pub fn plugged(self) -> Option<&'static dyn PluggedStack> {
        plugged_in().into_iter().find(|stack| stack.name() == self.0)
    }
}

impl FromStr for StackName {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] with the names of all stacks.
    fn from_str(text: &str) -> Result<Self> {
        let plugged = plugged_in().into_iter().map(|stack| stack.name());
        let mut known = std::iter::once(Self::KERNEL.0).chain(plugged);
        known.find(|name| *name == text).map(StackName).ok_or_else(|| {
            let others = alternatives(|stack| stack.name().to_owned());
            let others = others.map_or(String::new(), |names| format!(" or {names}"));
            Error::Config(format!("there is no network stack {text:?}, only kernel{others}"))
        })
    }
}

impl<'de> Deserialize<'de> for StackName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

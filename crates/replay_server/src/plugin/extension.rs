//! An extension of a running server: requests over connections of its own, statistics. Settings of plug-ins: each is a flag of
//! `innet-replay serve` beside the server's own, and a key of the same name in its file.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use clap::builder::Resettable;
use clap::{ArgMatches, Args, Command};
use event_listener::{Event, EventListener};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use toml::Table;
use toml::de::{Deserializer, Error as TomlError};

use replay_core::table::Attempt;
use replay_link::error::{Error, Result};

pub use prometheus_client::metrics::MetricType;

/// Longest message in either direction, in bytes: messages do not count in the limits of memory for requests and replies.
pub const MAX_MESSAGE: u64 = 16 << 10;

/// An extension of a running server.
pub trait Extension: Send + Sync {
    /// Name of its plug-in.
    fn name(&self) -> &'static str;
    /// Takes a new connection.
    fn connect(self: Arc<Self>) -> Box<dyn ExtensionConnection>;
    /// Own address, for the server's ready line.
    fn address(&self) -> Option<String> {
        None
    }
    /// Reason for which requests to the memory are refused; `None` if the server has a memory.
    fn instead_of_memory(&self) -> Option<&'static str> {
        None
    }
    /// Statistics: a JSON object, which the server's statistics have under the name of the extension.
    fn stats(&self) -> Value;
    /// Statistics exported to Prometheus. The live page also shows groups with a label.
    fn metrics(&self) -> &'static [MetricGroup] {
        &[]
    }
}

/// Requests of one connection. Dropped when the connection ends.
pub trait ExtensionConnection {
    /// One attempt at a request of at most [`MAX_MESSAGE`] bytes; a blocked one is tried again after [`ExtensionConnection::changed`].
    ///
    /// # Errors
    /// The error to answer the request with.
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>>;
    /// Listens for the next change that may unblock a request. A blocked attempt must not notify, or it would wake itself forever. The
    /// default is for extensions that never block.
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
    /// JSON pointer to the object within the extension's statistics; empty for all of them.
    pub pointer: &'static str,
    /// Name of the label; its values are the names of the objects.
    pub label: Option<&'static str>,
    /// Type of each metric, name of its statistic, and help.
    pub metrics: &'static [Metric],
}

/// Type of a metric, name of its statistic, and help.
pub type Metric = (MetricType, &'static str, &'static str);

/// How the settings of one plug-in are read.
#[derive(Clone, Copy)]
pub struct SettingsType {
    pub(crate) flags: fn(Command) -> Command,
    pub(crate) of_flags: fn(&ArgMatches) -> Result<Table>,
    pub(crate) check: fn(Deserializer<'_>) -> Result<(), TomlError>,
}

impl SettingsType {
    /// The settings of a struct.
    pub fn of<T: Args + Serialize + DeserializeOwned>() -> Self {
        SettingsType {
            flags: |command| {
                // The documentation of the struct would replace that of the command.
                let (about, long) = (command.get_about().cloned(), command.get_long_about().cloned());
                T::augment_args(command).about(Resettable::from(about)).long_about(Resettable::from(long))
            },
            of_flags: |matches| {
                let settings =
                    T::from_arg_matches(matches).map_err(|error| Error::Config(format!("command line: {error}")))?;
                table_of(&settings)
            },
            check: |settings| T::deserialize(settings).map(drop),
        }
    }

    pub(crate) fn names(self) -> Vec<String> {
        let command = (self.flags)(Command::new(""));
        let flags = command.get_arguments();
        flags.map(|flag| flag.get_id().to_string()).collect()
    }
}

fn table_of(settings: &impl Serialize) -> Result<Table> {
    Table::try_from(settings).map_err(|error| Error::Config(error.to_string()))
}

/// Settings that were given to a server's plug-ins, by the plug-in's name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PluginSettings(pub(crate) BTreeMap<&'static str, Table>);

impl PluginSettings {
    /// Settings of one plug-in.
    ///
    /// # Errors
    /// [`Error::Config`] for values that TOML does not have.
    pub fn of(name: &'static str, settings: &impl Serialize) -> Result<Self> {
        Ok(PluginSettings([(name, table_of(settings)?)].into()))
    }

    /// The settings of a plug-in; those that were not given have their defaults.
    ///
    /// # Errors
    /// [`Error::Config`] names the setting.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let given = self.0.get(name).cloned().unwrap_or_default();
        let read = given.try_into();
        read.map_err(|error: TomlError| Error::Config(error.to_string()))
    }
}

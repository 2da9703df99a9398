//! Services of other crates beside the memory. A program plugs them in before it reads settings; a server starts those that its settings
//! ask for, and its clients reach them by name, over connections of their own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};
use event_listener::EventListener;
pub use prometheus_client::metrics::MetricType;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use toml::Table;
use toml::de::{DeTable, Deserializer, Error as TomlError};

use crate::cli::doctor::{Finding, MachineFiles};
use crate::config::ServerConfig;
use crate::error::{Error, Result};
use base::sync::lock;
use replay_core::table::Attempt;

/// A service, as a program knows it.
pub trait PluggedExtension: Sync {
    /// Its name: in requests, in statistics, and of its settings in [`ServerConfig::extensions`].
    fn name(&self) -> &'static str;
    /// Its settings.
    fn settings(&self) -> SettingsType;
    /// The error of a request to a server without it.
    fn absent(&self) -> &'static str;
    /// Crates whose events belong to this program, for filters of logs.
    fn log_targets(&self) -> &'static [&'static str];
    /// Checks the configuration of a server before the start.
    ///
    /// # Errors
    /// [`Error::Config`] with advice.
    fn check(&self, config: &ServerConfig) -> Result<()>;
    /// The service of a server; `None` if the settings do not ask for it.
    ///
    /// # Errors
    /// Any: the server does not start.
    fn start(&self, config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>>;
    /// What `trusted_network` trusts the network with, beside the memory; `None` for nothing.
    fn trust(&self, _config: &ServerConfig) -> Option<&'static str> {
        None
    }
    /// Parts of a machine that it needs, for `innet-replay doctor`.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that cannot be read.
    fn findings(&self, _config: &ServerConfig, _machine: &MachineFiles) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
}

/// A service of a running server.
pub trait Extension: Send + Sync {
    /// [`PluggedExtension::name`].
    fn name(&self) -> &'static str;
    /// A new connection's session.
    fn session(self: Arc<Self>) -> Box<dyn Session>;
    /// An address of its own, for the line that says that the server is ready.
    fn address(&self) -> Option<String> {
        None
    }
    /// Why requests to the memory are refused; `None` if the server has one.
    fn instead_of_memory(&self) -> Option<&'static str> {
        None
    }
    /// Its statistics, an object.
    fn stats(&self) -> Value;
    /// Which of its statistics Prometheus gets. Groups with a label are also shown by `innet-replay top` and the live page.
    fn metrics(&self) -> &'static [MetricGroup] {
        &[]
    }
}

/// Requests of one connection. Dropped when the connection ends.
pub trait Session {
    /// One attempt at a request; a blocked one is tried again after [`Session::changed`].
    ///
    /// # Errors
    /// The error to answer the request with.
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>>;
    /// Listens for the next change that may unblock a request. An attempt that is blocked is no change: it would wake itself for ever.
    fn changed(&self) -> EventListener;
    /// The connection ends while the server goes on.
    fn end(&mut self) {}
}

/// Statistics of the same names: the members of one object, or those of all members of an object that are told apart by a label.
#[derive(Debug)]
pub struct MetricGroup {
    /// Begin of the metrics' names.
    pub prefix: &'static str,
    /// JSON pointer to the object within the service's statistics; empty for all of them.
    pub pointer: &'static str,
    /// Label of the members' names.
    pub label: Option<&'static str>,
    /// Type of each metric, name of its statistic, and help.
    pub metrics: &'static [Metric],
}

/// Type of a metric, name of its statistic, and help.
pub type Metric = (MetricType, &'static str, &'static str);

/// How the settings of a service are read: each is a flag of `innet-replay serve`, and a key of the same name in its file.
#[derive(Clone, Copy)]
pub struct SettingsType {
    flags: fn(Command) -> Command,
    of_flags: fn(&ArgMatches) -> Result<Table>,
    check: fn(Deserializer<'_>) -> Result<(), TomlError>,
}

impl SettingsType {
    /// The settings of a struct.
    pub fn of<T: Args + Serialize + DeserializeOwned>() -> Self {
        SettingsType {
            flags: |command| T::augment_args(command),
            of_flags: |matches| {
                let settings = T::from_arg_matches(matches)
                    .map_err(|error| Error::Config(format!("command line: {error}")))?;
                table_of(&settings)
            },
            check: |settings| T::deserialize(settings).map(drop),
        }
    }

    fn names(self) -> Vec<String> {
        let command = (self.flags)(Command::new(""));
        let flags = command.get_arguments();
        flags.map(|flag| flag.get_id().to_string()).collect()
    }
}

fn table_of(settings: &impl Serialize) -> Result<Table> {
    Table::try_from(settings).map_err(|error| Error::Config(error.to_string()))
}

/// Settings that were given to a server's extensions, by the extension's name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExtensionSettings(BTreeMap<&'static str, Table>);

impl ExtensionSettings {
    /// Settings of one extension.
    ///
    /// # Errors
    /// [`Error::Config`] for values that TOML does not have.
    pub fn of(name: &'static str, settings: &impl Serialize) -> Result<Self> {
        Ok(ExtensionSettings([(name, table_of(settings)?)].into()))
    }

    /// The settings of an extension; those that were not given have their defaults.
    ///
    /// # Errors
    /// [`Error::Config`] names the setting.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let given = self.0.get(name).cloned().unwrap_or_default();
        let read = given.try_into();
        read.map_err(|error: TomlError| Error::Config(error.to_string()))
    }

    /// Takes the settings of all extensions out of a configuration.
    pub(crate) fn take(config: &mut Table) -> Self {
        let mut taken = BTreeMap::new();
        for extension in plugged_in() {
            let names = extension.settings().names().into_iter();
            let given = names.filter_map(|name| config.remove_entry(&name));
            taken.insert(extension.name(), given.collect());
        }
        ExtensionSettings(taken)
    }
}

/// Checks the types of all extensions' settings in a file, and takes them out.
///
/// # Errors
/// The first wrong value, with its place.
pub(crate) fn check_types(
    file: &mut toml::Spanned<DeTable<'_>>,
) -> std::result::Result<(), TomlError> {
    for extension in plugged_in() {
        let settings = extension.settings();
        let names = settings.names().into_iter();
        let own = names.filter_map(|name| file.get_mut().remove_entry(name.as_str()));
        let own: DeTable<'_> = own.collect();
        (settings.check)(Deserializer::from(toml::Spanned::new(file.span(), own)))?;
    }
    Ok(())
}

/// `command` with the flags of all extensions.
pub(crate) fn add_flags(command: Command) -> Command {
    let extensions = plugged_in().into_iter();
    extensions.fold(command, |command, extension| {
        (extension.settings().flags)(command)
    })
}

/// The settings of extensions that the command line gives.
///
/// # Errors
/// [`Error::Config`] for values that TOML does not have.
pub(crate) fn given_flags(matches: &ArgMatches) -> Result<Table> {
    let mut given = Table::new();
    for extension in plugged_in() {
        let settings = extension.settings();
        let mut flags = (settings.of_flags)(matches)?;
        flags.retain(|name, _| matches.value_source(name) == Some(ValueSource::CommandLine));
        given.extend(flags);
    }
    Ok(given)
}

static PLUGGED_IN: Mutex<Vec<&'static dyn PluggedExtension>> = Mutex::new(Vec::new());

/// Plugs a service in, once for each name.
pub fn plug_in(extension: &'static dyn PluggedExtension) {
    let mut extensions = lock(&PLUGGED_IN);
    if extensions
        .iter()
        .all(|known| known.name() != extension.name())
    {
        extensions.push(extension);
    }
}

/// The services that this program knows.
pub fn plugged_in() -> Vec<&'static dyn PluggedExtension> {
    lock(&PLUGGED_IN).clone()
}

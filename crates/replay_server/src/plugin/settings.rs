//! Settings of plug-ins: each is a flag of `innet-replay serve` beside the server's own, and a key of the same name in its file.

use std::collections::BTreeMap;

use clap::builder::Resettable;
use clap::{ArgMatches, Args, Command};
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Table;
use toml::de::{Deserializer, Error as TomlError};

use replay_link::error::{Error, Result};

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
pub struct ExtensionSettings(pub(crate) BTreeMap<&'static str, Table>);

impl ExtensionSettings {
    /// Settings of one plug-in.
    ///
    /// # Errors
    /// [`Error::Config`] for values that TOML does not have.
    pub fn of(name: &'static str, settings: &impl Serialize) -> Result<Self> {
        Ok(ExtensionSettings([(name, table_of(settings)?)].into()))
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

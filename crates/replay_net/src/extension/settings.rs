//! Settings of extensions: each is a flag of `innet-replay serve` beside the server's own, and a key of the same name in its file.

use std::collections::BTreeMap;

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Table;
use toml::de::{DeTable, Deserializer, Error as TomlError};

use super::plugged_in;
use crate::error::{Error, Result};

/// How the settings of one extension are read.
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
        for (extension, settings) in plugged_settings() {
            let names = settings.names().into_iter();
            let given = names.filter_map(|name| config.remove_entry(&name));
            taken.insert(extension, given.collect());
        }
        ExtensionSettings(taken)
    }
}

/// Checks the types of all extensions' settings in a file, and takes them out.
///
/// # Errors
/// The first wrong value, with its place.
pub(crate) fn check_types(file: &mut toml::Spanned<DeTable<'_>>) -> std::result::Result<(), TomlError> {
    for (_, settings) in plugged_settings() {
        let names = settings.names().into_iter();
        let own = names.filter_map(|name| file.get_mut().remove_entry(name.as_str()));
        let own: DeTable<'_> = own.collect();
        (settings.check)(Deserializer::from(toml::Spanned::new(file.span(), own)))?;
    }
    Ok(())
}

/// `command` with the flags of all extensions.
pub(crate) fn add_flags(command: Command) -> Command {
    plugged_settings().into_iter().fold(command, |command, (_, settings)| (settings.flags)(command))
}

/// The settings of extensions that the command line gives.
///
/// # Errors
/// [`Error::Config`] for values that TOML does not have.
pub(crate) fn given_flags(matches: &ArgMatches) -> Result<Table> {
    let mut given = Table::new();
    for (_, settings) in plugged_settings() {
        let mut flags = (settings.of_flags)(matches)?;
        flags.retain(|name, _| matches.value_source(name) == Some(ValueSource::CommandLine));
        given.extend(flags);
    }
    Ok(given)
}

/// The names of all extensions' settings.
pub(crate) fn names_of_settings() -> Vec<String> {
    let settings = plugged_settings().into_iter();
    settings.flat_map(|(_, settings)| settings.names()).collect()
}

/// Their names and settings, of those that have any.
fn plugged_settings() -> Vec<(&'static str, SettingsType)> {
    let extensions = plugged_in().into_iter();
    let settings = extensions.map(|extension| Some((extension.name(), extension.settings()?)));
    settings.flatten().collect()
}

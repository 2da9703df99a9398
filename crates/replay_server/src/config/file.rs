//! Reading a configuration: a TOML file and flags, with the settings of plug-ins among the server's own.

use std::collections::BTreeMap;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, Id};
use serde::Deserialize;
use toml::de::{DeTable, Deserializer, Error as TomlError};
use toml::{Spanned, Table};

use super::ServerConfig;
use crate::plugin::{PluginSettings, SettingsType, plugged_in};
use replay_link::error::{Error, Result};

/// Similarity above which a name is proposed in place of another, as by clap for flags.
const LIKE: f64 = 0.7;

impl ServerConfig {
    /// Reads the text of a TOML file. Errors name the file by `origin`; `overrides` replaces keys of the same name.
    ///
    /// # Errors
    /// [`Error::Config`] with line and key, also for unknown keys.
    pub fn from_toml(text: &str, origin: &str, mut overrides: Table) -> Result<Self> {
        let refuse = |mut error: TomlError| {
            error.set_input(Some(text));
            let message = error.message().to_owned();
            // The given name, and those that it could be.
            let mut names = message.split('`').skip(1).step_by(2);
            let (given, mut known) = (names.next().unwrap_or_default(), names.collect::<Vec<_>>());
            let settings = plugged_settings().into_iter();
            let others: Vec<String> = match message.starts_with("unknown field") && known.contains(&"listen") {
                true => settings.flat_map(|(_, settings)| settings.names()).collect(),
                false => Vec::new(),
            };
            known.extend(others.iter().map(String::as_str));
            let others = match others.is_empty() {
                true => String::new(),
                false => format!("or, of plug-ins, `{}`\n", others.join("`, `")),
            };
            let like = known.into_iter().map(|name| (strsim::jaro(given, name), name));
            let nearest = like.filter(|(like, _)| *like > LIKE).max_by(|(one, _), (other, _)| one.total_cmp(other));
            let nearest = nearest.map_or(String::new(), |(_, name)| format!("did you mean `{name}`?\n"));
            Error::Config(format!("{origin}: {error}{others}{nearest}"))
        };
        let mut file = DeTable::parse(text).map_err(refuse)?;
        let mut plugins = BTreeMap::new();
        for (plugin, settings) in plugged_settings() {
            let (names, span) = (settings.names(), file.span());
            let own = names.iter().filter_map(|name| file.get_mut().remove_entry(name.as_str()));
            let own = Spanned::new(span, own.collect::<DeTable<'_>>());
            // Checked without the overrides, so that an error names its line in the file.
            (settings.check)(Deserializer::from(own.clone())).map_err(refuse)?;
            let mut given = Table::deserialize(Deserializer::from(own)).map_err(refuse)?;
            given.extend(names.iter().filter_map(|name| overrides.remove_entry(name)));
            plugins.insert(plugin, given);
        }
        ServerConfig::deserialize(Deserializer::from(file.clone())).map_err(refuse)?;
        let mut table = Table::deserialize(Deserializer::from(file)).map_err(refuse)?;
        table.extend(overrides);
        let config: ServerConfig = table.try_into().map_err(refuse)?;
        Ok(ServerConfig { plugins: PluginSettings(plugins), ..config })
    }
}

/// `command` with the flags of all plug-ins.
pub fn add_flags(command: Command) -> Command {
    plugged_settings().into_iter().fold(command, |command, (_, settings)| (settings.flags)(command))
}

/// Settings that the command line gives: of the server (`own`), and of its plug-ins.
///
/// # Errors
/// [`Error::Config`] for values that TOML does not have.
pub fn given_flags(own: &ServerConfig, matches: &ArgMatches) -> Result<Table> {
    let mut flags = Table::try_from(own).map_err(|error| Error::Config(format!("command line: {error}")))?;
    for (_, settings) in plugged_settings() {
        flags.extend((settings.of_flags)(matches)?);
    }
    let given = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let given: Vec<&str> = matches.ids().map(Id::as_str).filter(given).collect();
    flags.retain(|name, _| given.contains(&name));
    Ok(flags)
}

/// Names and settings of the plug-ins that have any.
fn plugged_settings() -> Vec<(&'static str, SettingsType)> {
    let plugins = plugged_in().into_iter();
    let settings = plugins.map(|plugin| Some((plugin.name(), plugin.settings()?)));
    settings.flatten().collect()
}

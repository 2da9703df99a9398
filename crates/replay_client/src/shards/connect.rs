//! Connecting to several servers: parses their addresses, and checks that they form one memory.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::dialer::Dialer;
use super::super::memories::Memories;
use super::super::pipeline::{is_absent, is_busy};
use super::super::{Address, Client, ConnectOptions};
use super::ShardedClient;
use super::group::{self, Group, ask_promptly, at, is_lost};
use base::sync::lock;
use base::system;
use base::wait::Wait;
use replay_core::replay::Replay;
use replay_core::schema::TableConfig;
use replay_link::error::refuse;
use replay_link::error::{Error, Result};
use serde_json::Value;

/// Time limit for a call's reconnects: one immediate retry, none after a pause.
const RECONNECT_FOR: Duration = Duration::from_millis(10);

/// Parses a list `innet://a:7710,b:7710`; addresses after the first may omit its scheme.
///
/// # Errors
/// [`Error::Config`] if an address is invalid or repeated.
pub fn parse_addresses(text: &str) -> Result<Vec<Address>> {
    let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
    let mut addresses: Vec<Address> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let address: Address = match part.contains("://") || scheme.is_empty() {
            true => part.parse()?,
            false => format!("{scheme}://{part}").parse()?,
        };
        if addresses.contains(&address) {
            return refuse(format!("{text} names {address} twice: name each server once"));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

impl ShardedClient {
    /// Connects to servers that form one memory. A server that does not answer in time is left out until it answers.
    ///
    /// # Errors
    /// [`Error::Connect`] if no server answers; [`Error::Config`] if releases or tables differ, or one memory is a copy of another; [`replay_core::Error::TableDiffers`] if the
    /// definitions of a table differ; errors of [`Client::connect`], with the address.
    pub fn connect(addresses: &[Address], options: &ConnectOptions, wait: &Wait<'_>) -> Result<Self> {
        let begun = system::now();
        // The first round is short, so that a server that does not answer leaves time for the others.
        let soon = ConnectOptions {
            await_server: Duration::ZERO,
            connect_timeout: options.connect_timeout / (addresses.len() as u32 + 1),
            ..options.clone()
        };
        let mut clients = Vec::new();
        for address in addresses {
            clients.push(Self::one(address, soon.clone(), wait)?);
        }
        let mut missing = clients.iter().filter(|client| client.is_err()).count() as u32;
        for (address, client) in addresses.iter().zip(&mut clients) {
            if client.is_ok() {
                continue;
            }
            // Divides the remaining time equally among the missing servers.
            let left = options.await_server.saturating_sub(system::elapsed(begun)) / missing;
            missing -= 1;
            if !left.is_zero() {
                let patient = ConnectOptions {
                    await_server: left,
                    connect_timeout: options.connect_timeout.min(left),
                    ..options.clone()
                };
                *client = Self::one(address, patient, wait)?;
            }
        }
        if clients.iter().all(std::result::Result::is_err) {
            let missing = clients.into_iter().find_map(std::result::Result::err);
            return Err(missing.unwrap_or(Error::Closed("the connection")));
        }
        let memories = Arc::new(Memories::default());
        let mut members = Vec::new();
        let mut absent = Vec::new();
        for (shard, (address, client)) in addresses.iter().zip(clients).enumerate() {
            let mut client = client.or_else(|error| {
                absent.push((shard, error));
                Ok::<_, Error>(Client::unconnected(Dialer::new(address.clone(), options.clone())?))
            })?;
            if let Some(dialer) = Arc::get_mut(&mut client.dialer) {
                // Later connections get the full timeouts.
                dialer.options = options.clone();
                dialer.memories = Some(memories.clone());
            }
            client.reconnect_for = RECONNECT_FOR;
            members.push(client);
        }
        let group = Arc::new(Group::new(members, options.reconnect_for));
        for (shard, error) in absent {
            group.leave(shard, &error);
        }
        let client = ShardedClient {
            group,
            idle: Mutex::default(),
            idle_updates: Mutex::default(),
            incarnations: Mutex::default(),
        };
        client.check_alike(&memories, wait)?;
        Ok(client)
    }

    /// Connects to one server. The inner result is an error if the server does not answer.
    fn one(address: &Address, options: ConnectOptions, wait: &Wait<'_>) -> Result<Result<Client>> {
        match Client::connect(address, options, wait) {
            Err(error) if is_absent(&error) || is_busy(&error) || is_lost(&error) => Ok(Err(error)),
            Err(Error::Wire(replay_wire::Error::Authentication(reason))) => {
                Err(Error::authentication(format!("{address}: {reason}; servers of one list have the same token")))
            }
            Err(error) => Err(at(&address.to_string(), error)),
            connected => Ok(connected),
        }
    }

    /// Checks that the servers have the same release, memories of their own and the same tables. Creates the tables at servers without any.
    fn check_alike(&self, memories: &Memories, wait: &Wait<'_>) -> Result<()> {
        let group = &self.group;
        let stats = group.each(|client| ask_promptly(client, wait, |wait| client.stats(wait)))?;
        let release = |stats: &Value| stats["server"]["release"].as_str().unwrap_or("").to_owned();
        let releases = stats.iter().map(|(shard, stats)| (group.shards[*shard].name(), release(stats)));
        check_releases(&releases.collect::<Vec<_>>())?;
        for (shard, stats) in &stats {
            let noted = memories.note(group.shards[*shard].name(), stats);
            noted.map_err(|error| Error::Config(error.to_string()))?;
        }
        let listings = group.each(|client| ask_promptly(client, wait, |wait| client.list(wait)))?;
        let with_tables = listings.iter().find(|(_, listing)| !listing.tables.is_empty());
        let Some((model, tables)) = with_tables.map(|(shard, listing)| (*shard, &listing.tables)) else {
            return Ok(());
        };
        let name = |shard: usize| group.shards[shard].name();
        for (shard, listing) in &listings {
            if listing.tables.is_empty() {
                continue;
            }
            for table in tables.iter().chain(&listing.tables) {
                let find = |known: &[TableConfig]| known.iter().find(|known| known.name == table.name).cloned();
                let difference = match (find(tables), find(&listing.tables)) {
                    (Some(there), Some(here)) => here.difference(&there),
                    (there, _) => {
                        let (has, lacks) = if there.is_some() { (model, *shard) } else { (*shard, model) };
                        return refuse(format!(
                            "table {:?} is at {} and not at {}: name the servers of one memory alone, or drop the table there \
                             (connect to that one server, and Replay.drop_table)",
                            table.name,
                            name(has),
                            name(lacks),
                        ));
                    }
                };
                if let Some(difference) = difference {
                    return Err(replay_core::Error::TableDiffers {
                        table: table.name.clone(),
                        difference: format!(
                            "at {} {difference} by {}: drop it at one of them (connect to that one server, and \
                             Replay.drop_table), or leave that server out",
                            name(*shard),
                            name(model),
                        ),
                    }
                    .into());
                }
            }
        }
        for (shard, _) in listings.iter().filter(|(_, one)| one.tables.is_empty()) {
            let client = &group.shards[*shard].client;
            group.answered(*shard, group::complete(client, &[], tables, wait))?;
        }
        let mut versions = lock(&group.versions);
        for listed in listings.iter().flat_map(|(_, listing)| &listing.parameters) {
            let newest = versions.entry(listed.name.clone()).or_default();
            *newest = listed.version.max(*newest);
        }
        Ok(())
    }
}

/// Checks the releases of servers, each with its address.
fn check_releases(servers: &[(String, String)]) -> Result<()> {
    let differs = |pair: &&[(String, String)]| pair[0].1 != pair[1].1;
    match servers.windows(2).find(differs) {
        None => Ok(()),
        Some(pair) => refuse(format!(
            "{} is of release {} and {} of release {}: install the same release on all servers",
            pair[0].0, pair[0].1, pair[1].0, pair[1].1
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_different_releases_are_refused_by_name() {
        let servers = |releases: &[&str]| {
            let named = releases.iter().enumerate();
            let named = named.map(|(at, release)| (format!("innet://h{at}:1"), release.to_string()));
            check_releases(&named.collect::<Vec<_>>())
        };
        assert!(servers(&["0.2.0"]).is_ok());
        assert!(servers(&["0.2.0", "0.2.0", "0.2.0"]).is_ok());
        let refused = servers(&["0.2.0", "0.2.0", "0.1.0"]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "innet://h1:1 is of release 0.2.0 and innet://h2:1 of release 0.1.0: install the same release on all servers"
        );
    }
}

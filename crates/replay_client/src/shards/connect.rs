//! Connecting to several servers: parses their addresses, and checks that they form one memory.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::dialer::Dialer;
use super::super::outage::MemoryIdentities;
use super::super::pipeline::{is_absent, is_busy};
use super::super::{Address, Client, ConnectOptions};
use super::ShardedClient;
use super::group::{self, Group, ask_promptly, at, is_lost};
use base::system;
use base::wait::{Wait, lock};
use replay_core::replay::Replay;
use replay_core::schema::TableConfig;
use replay_link::error::{Error, Result, refuse};
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
    /// [`Error::Connect`] if no server answers; [`Error::Config`] if releases or tables differ, or one memory is a copy of another;
    /// [`replay_core::Error::TableDiffers`] if the definitions of a table differ; errors of [`Client::connect`], with the address.
    pub fn connect(addresses: &[Address], options: &ConnectOptions, wait: &Wait<'_>) -> Result<Self> {
        let begun = system::now();
        let identities = Arc::new(MemoryIdentities::default());
        let mut members = Vec::new();
        for address in addresses {
            let dialer = Dialer::new(address.clone(), options.clone());
            let mut dialer = dialer.map_err(|error| at(&address.to_string(), error))?;
            dialer.identities = Some(identities.clone());
            dialer.reconnect_calls_for = RECONNECT_FOR;
            members.push(Client::unconnected(dialer));
        }
        // The first round is short, so that a server that does not answer leaves time for the others.
        let soon = ConnectOptions {
            await_server: Duration::ZERO,
            connect_timeout: options.connect_timeout / (addresses.len() as u32 + 1),
            ..options.clone()
        };
        let absent = members.iter().map(|client| reach(client, &soon, wait));
        let mut absent = absent.collect::<Result<Vec<_>>>()?;
        for shard in 0..members.len() {
            // Divides the remaining time equally among the missing servers.
            let missing = absent[shard..].iter().flatten().count().max(1) as u32;
            let left = options.await_server.saturating_sub(system::elapsed(begun)) / missing;
            if absent[shard].is_some() && !left.is_zero() {
                let connect_timeout = options.connect_timeout.min(left);
                let patient = ConnectOptions { await_server: left, connect_timeout, ..options.clone() };
                absent[shard] = reach(&members[shard], &patient, wait)?;
            }
        }
        if absent.iter().all(Option::is_some)
            && let Some(error) = absent.swap_remove(0)
        {
            return Err(error);
        }
        let group = Arc::new(Group::new(members, options.reconnect_for));
        for (shard, error) in absent.iter().enumerate() {
            if let Some(error) = error {
                group.leave(shard, error);
            }
        }
        let client = ShardedClient {
            group,
            idle: Mutex::default(),
            idle_updates: Mutex::default(),
            incarnations: Mutex::default(),
        };
        client.check_alike(wait)?;
        Ok(client)
    }

    /// Checks that the servers have the same release and the same tables. Creates the tables at servers without any.
    fn check_alike(&self, wait: &Wait<'_>) -> Result<()> {
        let group = &self.group;
        let stats = group.each(|client| ask_promptly(client, wait, |wait| client.stats(wait)))?;
        let release = |stats: &Value| stats["server"]["release"].as_str().unwrap_or("").to_owned();
        let releases = stats.iter().map(|(shard, stats)| (group.shards[*shard].name(), release(stats)));
        check_releases(&releases.collect::<Vec<_>>())?;
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

/// Connects to one server; the result is an error if the server does not answer.
fn reach(client: &Client, options: &ConnectOptions, wait: &Wait<'_>) -> Result<Option<Error>> {
    let address = client.address();
    match client.open(options, wait) {
        Err(error @ Error::CopiedMemory { .. }) => refuse(error.to_string()),
        Err(error) if is_absent(&error) || is_busy(&error) || is_lost(&error) => Ok(Some(error)),
        Err(Error::Wire(replay_wire::Error::Authentication(reason))) => {
            Err(Error::authentication(format!("{address}: {reason}; servers of one list have the same token")))
        }
        opened => opened.map(|()| None).map_err(|error| at(&address.to_string(), error)),
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

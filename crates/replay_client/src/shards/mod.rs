//! One memory over several servers (shards). Each item, with its chunks, is on one server.
//!
//! | module | subject |
//! | --- | --- |
//! | `connect` | parses addresses; checks that the servers form one memory |
//! | `group` | which servers answer; return of absent servers |
//! | `samples` | batches from all servers, and what may be asked for now (`samples/admission`) |
//! | `shard_link` | requests to one server, and its last answer |
//! | `partial` | one batch in progress, and its division |
//! | `updates` | updates of priorities, routed by id |
//! | `merge` | merged definitions and statistics |
//!
//! - **Sampling.** Each server contributes items in proportion to its sum of priorities, as of its last answer. An item's probability is
//!   its server's expected share of the batch times the probability at the server.
//! - **Replay ratio.** Each rate limiter compares its server's inserts with the samples taken from it. A batch's samples are taken in
//!   proportion to what the limiters admit, wherever its items come from. So no limiter blocks a batch or a writer while another could
//!   continue, and the servers together keep to `samples_per_insert` within the sum of the slacks. A batch begins only when the limiters
//!   admit all of it, so an abandoned call has taken nothing. While writers wait, which might never let that much accumulate, a client
//!   takes what there is and keeps it for its next batch.
//! - **Writers** stay on one server.
//! - **An absent server** is left out by each client that notices, and used again when it answers.
//!
//! # Invariant
//!
//! A batch has items of each server in proportion to its sum of priorities, with the probabilities by which they
//! were sampled. It is delivered once the rate limiters have given its samples; a short batch may be delivered earlier, and
//! later ones make up for it.

mod connect;
mod group;
mod merge;
mod partial;
mod samples;
mod shard_link;
mod updates;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::Client;
use super::push::Pushes;
use base::system::random_number;
use base::wait::{Wait, lock};
pub use connect::parse_addresses;
use group::{Group, ask_promptly};
use replay_core::replay::{
    ChangeLease, Listing, OpenWriter, Parameters, PushChannel, ReadPosition, ReadSteps, Replay, SampleChannel,
    SampleRequest, Sampled, StepsRead, UpdateChannel, UpdateReceipt, WriterId,
};
use replay_core::schema::TableConfig;
use replay_core::table::ids::IdSpace;
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_wire::{ErrorCode, RequestBody};
use samples::ShardedSamples;
use updates::ShardedUpdates;

/// Limit of idle channels of each kind.
const MAX_IDLE: usize = 4;

/// One memory over several servers.
pub struct ShardedClient {
    group: Arc<Group>,
    /// Channels for single batches.
    idle: Mutex<Vec<ShardedSamples>>,
    /// Channels for synchronous updates.
    idle_updates: Mutex<Vec<ShardedUpdates>>,
    /// Incarnations of the servers, from the last statistics.
    incarnations: Mutex<BTreeMap<usize, String>>,
}

impl ShardedClient {
    /// All addresses, for messages.
    pub fn names(&self) -> String {
        self.group.names()
    }

    /// Client of the first server, whose extensions the program uses.
    pub fn first(&self) -> &Arc<Client> {
        &self.group.shards[0].client
    }

    /// Sends a request to every server; an absent server is an error.
    fn all(&self, request: &str, ask: impl Fn(&Client) -> Result<()>) -> Result<()> {
        let done = self.group.each(ask)?;
        match (0..self.group.shards.len()).find(|shard| !done.iter().any(|(of, ())| of == shard)) {
            None => Ok(()),
            Some(away) => Err(Error::Disconnected {
                address: self.group.shards[away].name(),
                reason: format!("{request} is for every server, and this one is away: call again when it answers"),
            }),
        }
    }

    /// A channel for a single batch: one with samples or an unfinished batch for this request, else an empty one.
    fn idle_samples(&self, table: &str, request: &SampleRequest) -> ShardedSamples {
        let mut idle = lock(&self.idle);
        let suits = idle.iter().position(|channel| channel.suits(table, request));
        let found = suits.or_else(|| idle.iter().position(|channel| !channel.is_unfinished()));
        let channel = found.map(|index| idle.remove(index));
        channel.unwrap_or_else(|| ShardedSamples::new(self.group.clone(), table, *request, 0))
    }

    /// Server of a writer that names one: if it is absent, its successor.
    fn wanted_shard(&self, number: u32) -> Result<usize> {
        let count = self.group.shards.len();
        let wanted = number as usize % count;
        let order = (0..count).map(|offset| (wanted + offset) % count);
        let mut present = order.filter(|&shard| !self.group.is_away(shard));
        present.next().ok_or_else(|| self.group.none_answers())
    }

    /// The present servers, each with the count of its connected writers of a table.
    fn connected_writers(&self, table: &str, wait: &Wait<'_>) -> Result<Vec<(usize, u64)>> {
        let stats = self.group.each(|client| ask_promptly(client, wait, |wait| client.stats(wait)))?;
        let connected = |stats: serde_json::Value| stats["tables"][table]["connected_writers"].as_u64().unwrap_or(0);
        Ok(stats.into_iter().map(|(shard, stats)| (shard, connected(stats))).collect())
    }

    /// Opens a writer at the server with the fewest writers of the table. Writers that start at once may choose the same server: its answer has
    /// their count, and those beyond an equal share of all writers open at another one.
    fn open_where_fewest(&self, table: &str, open: &OpenWriter, wait: &Wait<'_>) -> Result<(usize, Pushes)> {
        let count = self.group.shards.len();
        // Breaks ties by the writer's number.
        let after = |shard: usize| (shard as u64).wrapping_sub(open.writer) % count as u64;
        let mut moves = count;
        loop {
            let connected = self.connected_writers(table, wait)?;
            let fewest = connected.into_iter().min_by_key(|&(shard, writers)| (writers, after(shard)));
            let (shard, before) = fewest.ok_or_else(|| self.group.none_answers())?;
            let opened = self.group.shards[shard].client.pushes(table, open.clone(), wait);
            let Some(mut pushes) = self.group.answered(shard, opened)? else { continue };
            if pushes.connected > before + 1 && moves > 0 {
                let now = self.connected_writers(table, wait)?;
                // More moves would crowd the other servers.
                let writers: u64 = now.iter().map(|&(_, writers)| writers).sum();
                if pushes.connected > writers.div_ceil(now.len() as u64) {
                    self.group.answered(shard, pushes.close(wait))?;
                    moves -= 1;
                    continue;
                }
            }
            return Ok((shard, pushes));
        }
    }
}

/// Keeps a channel for a later call. One that is not `unfinished` gives way to it, or else the oldest one.
fn keep<T>(idle: &Mutex<Vec<T>>, channel: T, unfinished: impl Fn(&T) -> bool) {
    let mut idle = lock(idle);
    if idle.len() == MAX_IDLE {
        let given_up = idle.iter().position(|channel| !unfinished(channel));
        idle.remove(given_up.unwrap_or(0));
    }
    idle.push(channel);
}

impl Commands for ShardedClient {
    fn command(&self, command: RequestBody, wait: &Wait<'_>) -> Result<()> {
        if let RequestBody::EmptyTable(_) = command {
            // Unfinished batches may have items of the table.
            lock(&self.idle).clear();
        }
        self.all(command.name(), |client| client.command(command.clone(), wait))
    }
}

impl Replay<Error> for ShardedClient {
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<()> {
        if config.queue_size > 0 {
            return Err(Error::Config(format!(
                "table {:?} is a queue, whose order several servers do not share: connect to one server",
                config.name
            )));
        }
        let part = merge::of_server(config, self.group.shards.len() as u64);
        let made = self.group.each(|client| client.create_table(&part, wait));
        made.map(drop)
    }

    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        let describe = |client: &Client| match ask_promptly(client, wait, |wait| client.table_config(table, wait)) {
            Err(error) if error.code() == ErrorCode::UnknownTable => Ok(Err(error)),
            described => described.map(Ok),
        };
        let (mut part, mut lacking) = (None, Vec::new());
        for (shard, described) in self.group.each(describe)? {
            match described {
                Ok(table) => part = Some(table),
                Err(error) => lacking.push((shard, error)),
            }
        }
        let Some(part) = part else {
            return Err(lacking
                .pop()
                .map_or_else(|| self.group.none_answers(), |(at, e)| self.group.shards[at].named(e)));
        };
        // Servers that were restarted without the table get it as they return.
        for (shard, error) in lacking {
            self.group.leave(shard, &error);
        }
        Ok(Arc::new(merge::of_all(&part, self.group.shards.len() as u64)))
    }

    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        // Unfinished batches may have items of the table, and a table that is made again under its name is another one.
        lock(&self.idle).clear();
        self.all("drop_table", |client| {
            match client.drop_table(table, wait) {
                // An earlier call dropped the table here, but not on every server.
                Err(error) if error.code() == ErrorCode::UnknownTable => {
                    let others = self
                        .group
                        .each(|other| Ok(other.list(wait)?.tables.iter().any(|known| known.name == table)))?;
                    match others.iter().any(|&(_, known)| known) {
                        true => Ok(()),
                        false => Err(error),
                    }
                }
                dropped => dropped,
            }
        })
    }

    fn open_writer(&self, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<Box<dyn PushChannel<Error>>> {
        let (shard, mut pushes) = match open.server {
            None => self.open_where_fewest(table, &open, wait)?,
            Some(number) => loop {
                let shard = self.wanted_shard(number)?;
                let opened = self.group.shards[shard].client.pushes(table, open.clone(), wait);
                if let Some(pushes) = self.group.answered(shard, opened)? {
                    break (shard, pushes);
                }
            },
        };
        pushes.server = shard;
        Ok(Box::new(pushes))
    }

    fn sample(&self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        let mut channel = self.idle_samples(table, request);
        let sampled = channel.once(table, request, wait);
        keep(&self.idle, channel, ShardedSamples::is_unfinished);
        sampled
    }

    fn samples(&self, table: &str, request: SampleRequest, in_flight: usize) -> Result<Box<dyn SampleChannel<Error>>> {
        self.group.check_process()?;
        let channel = ShardedSamples::new(self.group.clone(), table, request, in_flight);
        Ok(Box::new(channel))
    }

    /// Ids of absent servers count as stale.
    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        let idle = lock(&self.idle_updates).pop();
        let mut channel = idle.unwrap_or_else(|| ShardedUpdates::new(self.group.clone()));
        let updated = channel.once(table, ids, priorities, wait);
        // After an error its counts belong to no call.
        if updated.is_ok() {
            keep(&self.idle_updates, channel, |_| false);
        }
        updated
    }

    fn change_lease(&self, table: &str, _change: ChangeLease, _wait: &Wait<'_>) -> Result<()> {
        Err(replay_core::Error::Lease { table: table.to_owned() }.into())
    }

    fn updates(&self) -> Result<Option<Box<dyn UpdateChannel<Error>>>> {
        self.group.check_process()?;
        Ok(Some(Box::new(ShardedUpdates::new(self.group.clone()))))
    }

    /// An absent server is an error, because its steps would be missing.
    fn read_positions(&self, table: &str, wait: &Wait<'_>) -> Result<Vec<ReadPosition>> {
        let servers = 0..self.group.shards.len() as u32;
        let first = |server| ReadPosition { server, ..ReadPosition::default() };
        let asked = servers.map(|server| self.read_steps(table, &ReadSteps { from: first(server), bytes: 0 }, wait));
        let positions = asked.map(|read| Ok(read?.next));
        positions.filter_map(Result::transpose).collect()
    }

    /// An absent server is an error.
    fn read_steps(&self, table: &str, request: &ReadSteps, wait: &Wait<'_>) -> Result<StepsRead> {
        self.group.check_process()?;
        let server = request.from.server;
        let shards = &self.group.shards;
        let shard = shards
            .get(server as usize)
            .ok_or_else(|| Error::Config(format!("there is no server {server}, only {}", shards.len())))?;
        let read = shard.client.read_steps(table, request, wait)?;
        Ok(StepsRead { next: read.next.map(|next| ReadPosition { server, ..next }), ..read })
    }

    fn report_corrupt(&self, table: &str, id: u64, reason: &str, wait: &Wait<'_>) -> Result<Option<String>> {
        for shard in self.group.of_number(IdSpace::number_of(id)) {
            let client = &self.group.shards[shard].client;
            let reported = client.report_corrupt(table, id, reason, wait);
            if let Some(Some(writer)) = self.group.answered(shard, reported)? {
                return Ok(Some(writer));
            }
        }
        Ok(None)
    }

    /// Stores parameters on all servers under one version.
    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        let known = lock(&self.group.versions).get(name).copied().unwrap_or(0);
        let put =
            self.group.each(|client| client.put_version(name, random_number(), known + 1, bytes.clone(), wait))?;
        // Concurrent puts of several clients may leave servers with different versions until the next put.
        let version = put.iter().map(|&(_, version)| version).max().unwrap_or(0);
        let mut versions = lock(&self.group.versions);
        let newest = versions.entry(name.to_owned()).or_default();
        *newest = version.max(*newest);
        Ok(version)
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        wait: &Wait<'_>,
    ) -> Result<Option<Parameters>> {
        self.group.check_process()?;
        // The writer's server has to learn the version that the writer got, or `max_version_lag` blocks the writer.
        let first = writer.map_or(self.group.own, |writer| writer.server);
        self.group.any(first, |client| client.get_parameters(name, newer_than, writer, wait))
    }

    fn list(&self, wait: &Wait<'_>) -> Result<Listing> {
        let listings = self.group.each(|client| ask_promptly(client, wait, |wait| client.list(wait)))?;
        let count = self.group.shards.len() as u64;
        Ok(merge::listing(listings.into_iter().map(|(_, one)| one), count))
    }

    fn stats(&self, wait: &Wait<'_>) -> Result<serde_json::Value> {
        let answers = self.group.each(|client| ask_promptly(client, wait, |wait| client.stats(wait)))?;
        let mut incarnations = lock(&self.incarnations);
        for (shard, stats) in &answers {
            let incarnation = stats["incarnation"].as_str().unwrap_or("").to_owned();
            incarnations.insert(*shard, incarnation);
        }
        let known: Vec<_> = incarnations.values().map(String::as_str).collect();
        let incarnation = known.join("+");
        let names = self.group.shards.iter().map(group::Shard::name);
        let mut servers: Vec<_> = names.map(|name| (name, None)).collect();
        for (shard, stats) in answers {
            servers[shard].1 = Some(stats);
        }
        Ok(merge::stats(incarnation, servers))
    }
}

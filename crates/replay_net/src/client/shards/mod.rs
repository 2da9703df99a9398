//! One memory over several servers (shards). Each item, with its chunks, is on one server.
//!
//! | module | subject |
//! | --- | --- |
//! | `connect` | their addresses; checks that they are one memory |
//! | `group` | which servers answer; how one that was away is taken up again |
//! | `samples` | batches from all servers |
//! | `lane` | requests to one server, and its last answer |
//! | `partial` | one batch under way |
//! | `shares` | how items and samples of the rate limiters are divided |
//! | `merge` | definitions and statistics of all servers as those of one |
//!
//! - **Sampling.** A batch has items of each server in proportion to its sum of priorities, as of the server's last answer. An
//!   item's probability is its server's expected part of the batch times its probability there.
//! - **Replay ratio.** Each server's rate limiter compares its own inserts with the samples that it counts. The samples of a batch
//!   are divided over the limiters by what these admit, and not by the items of the batch: so no limiter holds up a batch or a
//!   writer while another could go on, and over all servers the samples keep to `samples_per_insert` within the sum of the slacks.
//! - **Writers** keep to one server.
//! - **A server that is away** is left out by each client that misses it, and taken up again when it answers.

mod connect;
mod group;
mod lane;
mod merge;
mod partial;
mod samples;
mod shares;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::Client;
use super::pipeline::expect_reply;
pub use connect::parse_addresses;
use group::{Group, is_lost, lock};
use replay_core::error::{Error, ErrorCode, Result, check_priorities};
use replay_core::replay::{
    BatchPart, Listing, OpenWriter, Parameters, PushChannel, Replay, SampleChannel, SampleRequest,
    Sampled, UpdateReceipt, Wait, WriterId,
};
use replay_core::schema::TableConfig;
use replay_core::table::ids::IdSpace;
use replay_wire::{ReplyBody, RequestBody};
use samples::ShardedSamples;

/// Idle channels for samples that are kept.
const MAX_IDLE: usize = 4;

/// One memory over several servers.
pub struct ShardedClient {
    group: Arc<Group>,
    /// Channels for single samples.
    idle: Mutex<Vec<ShardedSamples>>,
    /// Incarnations of the servers, as of the last statistics.
    incarnations: Mutex<BTreeMap<usize, String>>,
}

impl ShardedClient {
    /// The addresses, for messages.
    pub fn names(&self) -> String {
        self.group.names()
    }

    /// The client of the first server, which sums gradients.
    pub fn first(&self) -> &Arc<Client> {
        &self.group.shards[0].client
    }

    /// Sends a request to every server, also where a call would go on without those that are away.
    fn all(&self, what: &str, ask: impl Fn(&Client) -> Result<()>) -> Result<()> {
        let done = self.group.each(ask)?;
        match (0..self.group.shards.len()).find(|shard| !done.iter().any(|(of, ())| of == shard)) {
            None => Ok(()),
            Some(away) => Err(Error::Disconnected {
                address: self.group.shards[away].name(),
                reason: format!(
                    "{what} on every server, and this one is away: call again when it answers"
                ),
            }),
        }
    }

    /// The server of a new writer: by the number at the end of its name, or the one with the fewest writers of the table.
    fn shard_of_writer(&self, open: &OpenWriter, wait: &Wait<'_>) -> Result<usize> {
        let count = self.group.shards.len();
        let digits = open
            .name
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .len();
        if let Ok(number) = open.name[digits..].parse::<u64>() {
            let wanted = (number % count as u64) as usize;
            // The next one while that is away.
            let order = (0..count).map(|step| (wanted + step) % count);
            let mut present = order.filter(|&shard| !self.group.is_away(shard));
            return present.next().ok_or_else(|| self.group.none_answers());
        }
        let stats = self.group.each(|client| client.stats(wait))?;
        let writers = |stats: &serde_json::Value| {
            let writers = &stats["tables"][&open.table]["writers"];
            writers.as_u64().unwrap_or(0)
        };
        // Of those with as few, any: writers of one moment do not all take the first.
        let after = |shard: usize| (shard as u64).wrapping_sub(open.writer) % count as u64;
        let fewest = stats
            .iter()
            .min_by_key(|(shard, stats)| (writers(stats), after(*shard)));
        fewest
            .map(|&(shard, _)| shard)
            .ok_or_else(|| self.group.none_answers())
    }

    /// Asks all servers for the number in the ids of their table.
    fn ask_numbers(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let request = SampleRequest {
            table: table.to_owned(),
            count: 0,
            before: 0,
            after: 0,
            allow_short: false,
            min_probability: false,
            part: Some(BatchPart { limiter_samples: 0 }),
        };
        for (shard, sampled) in self.group.each(|client| client.sample(&request, wait))? {
            if let Some(state) = sampled.shard {
                self.group.note_number(state.number, shard);
            }
        }
        Ok(())
    }

    /// The servers that may have an id.
    fn route(&self, table: &str, ids: &[u64], wait: &Wait<'_>) -> Result<Vec<Vec<usize>>> {
        let mut asked = false;
        let mut routes: Vec<(u16, Vec<usize>)> = Vec::new();
        let mut by_shard = vec![Vec::new(); self.group.shards.len()];
        for (index, &id) in ids.iter().enumerate() {
            let number = IdSpace::number_of(id);
            let known = routes.iter().position(|(of, _)| *of == number);
            let known = match known {
                Some(known) => known,
                None => {
                    let mut shards = self.group.of_number(number);
                    if shards.is_empty() && !std::mem::replace(&mut asked, true) {
                        self.ask_numbers(table, wait)?;
                        shards = self.group.of_number(number);
                    }
                    routes.push((number, shards));
                    routes.len() - 1
                }
            };
            for &shard in &routes[known].1 {
                by_shard[shard].push(index);
            }
        }
        Ok(by_shard)
    }
}

impl Replay for ShardedClient {
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<()> {
        let part = merge::part(config, self.group.shards.len() as u64);
        let made = self.group.each(|client| client.create_table(&part, wait));
        made.map(drop)
    }

    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        let tables = self.group.each(|client| client.table_config(table, wait))?;
        let whole = merge::whole(&tables[0].1, self.group.shards.len() as u64);
        Ok(Arc::new(whole))
    }

    fn empty_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let what = format!("table {table:?} is emptied");
        self.all(&what, |client| client.empty_table(table, wait))
    }

    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let what = format!("table {table:?} is dropped");
        self.all(&what, |client| match client.drop_table(table, wait) {
            // An earlier call dropped it here, and not at another server.
            Err(error) if error.code() == ErrorCode::UnknownTable => {
                let others = self.group.each(|other| {
                    Ok(other
                        .list(wait)?
                        .tables
                        .iter()
                        .any(|known| known.name == table))
                })?;
                match others.iter().any(|&(_, known)| known) {
                    true => Ok(()),
                    false => Err(error),
                }
            }
            dropped => dropped,
        })
    }

    fn open_writer(&self, open: OpenWriter, wait: &Wait<'_>) -> Result<Box<dyn PushChannel>> {
        loop {
            let shard = self.shard_of_writer(&open, wait)?;
            let opened = self.group.shards[shard]
                .client
                .open_writer(open.clone(), wait);
            // Relaxed: a hint for `get_parameters`.
            self.group.own.store(shard, Ordering::Relaxed);
            if let Some(channel) = self.group.answered(shard, opened)? {
                return Ok(channel);
            }
        }
    }

    fn sample(&self, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        let idle = lock(&self.idle).pop();
        let mut channel =
            idle.unwrap_or_else(|| ShardedSamples::new(self.group.clone(), request.clone(), 1));
        let sampled = channel.once(request, wait);
        let mut idle = lock(&self.idle);
        if idle.len() < MAX_IDLE {
            idle.push(channel);
        }
        sampled
    }

    fn sampler(&self, request: SampleRequest, in_flight: usize) -> Result<Box<dyn SampleChannel>> {
        self.group.check_process()?;
        let channel = ShardedSamples::new(self.group.clone(), request, in_flight);
        Ok(Box::new(channel))
    }

    /// Ids of servers that are away are stale.
    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        if ids.len() != priorities.len() {
            return Err(Error::Schema {
                table: table.into(),
                reason: format!("{} ids and {} priorities", ids.len(), priorities.len()),
            });
        }
        self.group.check_process()?;
        // Before any server sets one: an update is applied as a whole or not at all.
        check_priorities(priorities)?;
        let mut applied = 0;
        let mut begun = Vec::new();
        for (shard, indexes) in self.route(table, ids, wait)?.into_iter().enumerate() {
            if indexes.is_empty() || self.group.is_away(shard) {
                continue;
            }
            let ids: Vec<u64> = indexes.iter().map(|&index| ids[index]).collect();
            let priorities: Vec<f64> = indexes.iter().map(|&index| priorities[index]).collect();
            let body = RequestBody::UpdatePriorities {
                table: table.into(),
                ids: ids.clone(),
                priorities: priorities.clone(),
            };
            let request = self.group.shards[shard].client.begin(wait, body);
            begun.push((shard, request, ids, priorities));
        }
        for (shard, request, ids, priorities) in begun {
            let client = &self.group.shards[shard].client;
            let reply = request.and_then(|request| client.finish(wait, request));
            let receipt = match reply {
                // On a new connection: the server may have been started again since the last call.
                Err(error) if is_lost(&error) => {
                    client.update_priorities(table, &ids, &priorities, wait)
                }
                reply => reply
                    .and_then(|reply| expect_reply!(reply, ReplyBody::Updated(receipt) => receipt)),
            };
            if let Some(receipt) = self.group.answered(shard, receipt)? {
                applied += receipt.applied;
            }
        }
        // Not the sum of the servers': an id whose number two tables share was sent to both.
        let stale = (ids.len() as u32).saturating_sub(applied);
        Ok(UpdateReceipt { applied, stale })
    }

    fn report_corrupt(
        &self,
        table: &str,
        id: u64,
        reason: &str,
        wait: &Wait<'_>,
    ) -> Result<Option<String>> {
        for shard in self.group.of_number(IdSpace::number_of(id)) {
            let client = &self.group.shards[shard].client;
            let reported = client.report_corrupt(table, id, reason, wait);
            if let Some(Some(writer)) = self.group.answered(shard, reported)? {
                return Ok(Some(writer));
            }
        }
        Ok(None)
    }

    /// Puts them on all servers, as one version.
    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        let known = lock(&self.group.versions).get(name).copied().unwrap_or(0);
        let put = self
            .group
            .each(|client| client.put_version(name, known + 1, bytes.clone(), wait))?;
        // Servers differ after puts of several clients at a time; the next put makes them agree again.
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
        let count = self.group.shards.len();
        // Relaxed: a hint, as in `open_writer`.
        let own = self.group.own.load(Ordering::Relaxed);
        for shard in (0..count).map(|step| (own + step) % count) {
            if self.group.is_away(shard) {
                continue;
            }
            let client = &self.group.shards[shard].client;
            let found = client.get_parameters(name, newer_than, writer, wait);
            if let Some(found) = self.group.answered(shard, found)? {
                return Ok(found);
            }
        }
        Err(self.group.none_answers())
    }

    fn list(&self, wait: &Wait<'_>) -> Result<Listing> {
        let listings = self.group.each(|client| client.list(wait))?;
        let count = self.group.shards.len() as u64;
        Ok(merge::listing(
            listings.into_iter().map(|(_, one)| one),
            count,
        ))
    }

    fn stats(&self, wait: &Wait<'_>) -> Result<serde_json::Value> {
        let answers = self.group.each(|client| client.stats(wait))?;
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

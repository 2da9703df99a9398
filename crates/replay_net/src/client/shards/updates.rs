//! Updates of priorities: each goes to the server of its id.

use std::sync::Arc;

use super::super::pipeline::expect_reply;
use super::super::updates::{Updates, check_lengths};
use super::group::{Group, is_lost};
use replay_core::error::{Result, check_priorities};
use replay_core::replay::{BatchPart, Replay, SampleRequest, UpdateChannel, UpdateReceipt, Wait};
use replay_core::table::ids::IdSpace;
use replay_wire::{ReplyBody, RequestBody};

impl Group {
    /// Asks all servers for the number in the ids of their table.
    fn ask_numbers(self: &Arc<Self>, table: &str, wait: &Wait<'_>) -> Result<()> {
        let request = SampleRequest {
            table: table.to_owned(),
            count: 0,
            before: 0,
            after: 0,
            allow_short: false,
            min_probability: false,
            part: Some(BatchPart { limiter_samples: 0 }),
        };
        for (shard, sampled) in self.each(|client| client.sample(&request, wait))? {
            if let Some(state) = sampled.shard {
                self.note_number(state.number, shard);
            }
        }
        Ok(())
    }

    /// The servers that may have an id.
    fn route(
        self: &Arc<Self>,
        table: &str,
        ids: &[u64],
        wait: &Wait<'_>,
    ) -> Result<Vec<Vec<usize>>> {
        let mut asked = false;
        let mut routes: Vec<(u16, Vec<usize>)> = Vec::new();
        let mut by_shard = vec![Vec::new(); self.shards.len()];
        for (index, &id) in ids.iter().enumerate() {
            let number = IdSpace::number_of(id);
            let known = routes.iter().position(|(of, _)| *of == number);
            let known = match known {
                Some(known) => known,
                None => {
                    let mut shards = self.of_number(number);
                    if shards.is_empty() && !std::mem::replace(&mut asked, true) {
                        self.ask_numbers(table, wait)?;
                        shards = self.of_number(number);
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

    /// Updates priorities, and waits for the answers. Ids of servers that are away are stale.
    ///
    /// # Errors
    /// Errors of [`Replay::update_priorities`].
    pub fn update_priorities(
        self: &Arc<Self>,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        check_lengths(table, ids, priorities)?;
        // Before any server sets one: an update is applied as a whole or not at all.
        check_priorities(priorities)?;
        let mut applied = 0;
        let mut begun = Vec::new();
        for (shard, indexes) in self.route(table, ids, wait)?.into_iter().enumerate() {
            if indexes.is_empty() || self.is_away(shard) {
                continue;
            }
            let ids: Vec<u64> = indexes.iter().map(|&index| ids[index]).collect();
            let priorities: Vec<f64> = indexes.iter().map(|&index| priorities[index]).collect();
            let body = RequestBody::UpdatePriorities {
                table: table.into(),
                ids: ids.clone(),
                priorities: priorities.clone(),
            };
            let request = self.shards[shard].client.begin(wait, body);
            begun.push((shard, request, ids, priorities));
        }
        for (shard, request, ids, priorities) in begun {
            let client = &self.shards[shard].client;
            let reply = request.and_then(|request| client.finish(wait, request));
            let receipt = match reply {
                // On a new connection: the server may have been started again since the last call.
                Err(error) if is_lost(&error) => {
                    client.update_priorities(table, &ids, &priorities, wait)
                }
                reply => reply
                    .and_then(|reply| expect_reply!(reply, ReplyBody::Updated(receipt) => receipt)),
            };
            if let Some(receipt) = self.answered(shard, receipt)? {
                applied += receipt.applied;
            }
        }
        // Not the sum of the servers': an id whose number two tables share was sent to both.
        let stale = (ids.len() as u32).saturating_sub(applied);
        Ok(UpdateReceipt { applied, stale })
    }
}

/// Updates that are not waited for, over a channel to each server.
pub struct ShardedUpdates {
    group: Arc<Group>,
    channels: Vec<Option<Updates>>,
    answered: UpdateReceipt,
    /// Ids that more than one server got, each counted for every server but one: stale at least there.
    surplus: u32,
}

impl ShardedUpdates {
    /// Channels that connect on their first update.
    pub fn new(group: Arc<Group>) -> Self {
        ShardedUpdates {
            channels: group.shards.iter().map(|_| None).collect(),
            group,
            answered: UpdateReceipt::default(),
            surplus: 0,
        }
    }

    /// Counts the answers of a server. If it does not answer it is left out, and its unanswered updates are stale.
    fn settle(&mut self, shard: usize, receipt: Result<UpdateReceipt>, ids: u32) -> Result<()> {
        let receipt = match receipt {
            Err(error) if is_lost(&error) => {
                self.group.leave(shard, &error);
                let channel = self.channels[shard].take();
                let stale = ids + channel.map_or(0, Updates::abandon);
                UpdateReceipt { applied: 0, stale }
            }
            Err(error) => return Err(self.group.shards[shard].named(error)),
            Ok(receipt) => receipt,
        };
        self.answered.applied += receipt.applied;
        let extra = self.surplus.min(receipt.stale);
        self.surplus -= extra;
        self.answered.stale += receipt.stale - extra;
        Ok(())
    }
}

impl UpdateChannel for ShardedUpdates {
    fn send(
        &mut self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        self.group.check_process()?;
        check_lengths(table, ids, priorities)?;
        // Before any server gets one: an update is applied as a whole or not at all.
        check_priorities(priorities)?;
        let routes = self.group.route(table, ids, wait)?;
        let copies: usize = routes.iter().map(Vec::len).sum();
        match copies.checked_sub(ids.len()) {
            Some(surplus) => self.surplus += surplus as u32,
            // Ids of no server.
            None => self.answered.stale += (ids.len() - copies) as u32,
        }
        for (shard, indexes) in routes.into_iter().enumerate() {
            if indexes.is_empty() {
                continue;
            }
            let count = indexes.len() as u32;
            if self.group.is_away(shard) {
                let stale = UpdateReceipt {
                    applied: 0,
                    stale: count,
                };
                self.settle(shard, Ok(stale), 0)?;
                continue;
            }
            let ids: Vec<u64> = indexes.iter().map(|&index| ids[index]).collect();
            let priorities: Vec<f64> = indexes.iter().map(|&index| priorities[index]).collect();
            let client = &self.group.shards[shard].client;
            let channel = self.channels[shard].get_or_insert_with(|| client.updates_channel());
            let sent = channel.send(table, &ids, &priorities, wait);
            self.settle(shard, sent, count)?;
        }
        Ok(std::mem::take(&mut self.answered))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        for shard in 0..self.channels.len() {
            if let Some(channel) = &mut self.channels[shard] {
                let flushed = channel.flush(wait);
                self.settle(shard, flushed, 0)?;
            }
        }
        Ok(std::mem::take(&mut self.answered))
    }
}

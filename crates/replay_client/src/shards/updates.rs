//! Updates of priorities, routed to the servers by id.

use std::sync::Arc;

use super::super::updates::Updates;
use super::group::{Group, Shard, is_lost, silent, within_grace};
use base::wait::Wait;
use replay_core::replay::check_update;
use replay_core::replay::{UpdateChannel, UpdateReceipt};
use replay_core::table::ids::IdSpace;
use replay_link::error::{Error, Result};

impl Group {
    /// Positions of the ids that each server may hold. Ids of a table that this client has not sampled go to all servers.
    fn route(&self, ids: &[u64]) -> Vec<Vec<usize>> {
        let present: Vec<usize> = self.present().collect();
        let mut by_shard = vec![Vec::new(); self.shards.len()];
        let mut last = None;
        let mut shards = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let number = IdSpace::number_of(id);
            if last.replace(number) != Some(number) {
                shards = self.of_number(number);
            }
            let of: &[usize] = if shards.is_empty() { &present } else { &shards };
            of.iter().for_each(|&shard| by_shard[shard].push(index));
        }
        by_shard
    }
}

/// Calls a server's channel. A server never delays an update: one without any answer for the grace is lost.
fn answering<T>(
    channel: &mut Updates,
    shard: &Shard,
    wait: &Wait<'_>,
    call: impl Fn(&mut Updates, &Wait<'_>) -> Result<T>,
) -> Result<T> {
    loop {
        let unanswered = channel.unanswered();
        if let Some(done) = within_grace(&shard.client.dialer, wait, |wait| call(channel, wait))? {
            return Ok(done);
        }
        if channel.unanswered() == unanswered {
            return Err(silent(&shard.client.dialer));
        }
    }
}

/// Updates over a channel to each server.
pub struct ShardedUpdates {
    group: Arc<Group>,
    channels: Vec<Updates>,
    answered: UpdateReceipt,
    /// Count of extra copies of ids that went to several servers; each copy will be stale on some server.
    surplus: u32,
}

impl ShardedUpdates {
    /// Channels that connect on their first update.
    pub fn new(group: Arc<Group>) -> Self {
        ShardedUpdates {
            channels: group.shards.iter().map(|shard| Updates::new(shard.client.dialer.clone())).collect(),
            group,
            answered: UpdateReceipt::default(),
            surplus: 0,
        }
    }

    /// Updates priorities and waits for the answers. Ids of absent servers count as stale.
    pub fn once(&mut self, table: &str, ids: &[u64], priorities: &[f64], wait: &Wait<'_>) -> Result<UpdateReceipt> {
        let updated = self.send(table, ids, priorities, wait).and_then(|sent| {
            // The grace covers the network, as in other calls.
            let grace = self.group.shards[0].client.dialer.options.grace;
            let deadline = wait.deadline.map(|deadline| deadline + grace);
            let rest = self.flush(&Wait { deadline, ..*wait })?;
            Ok(UpdateReceipt { applied: sent.applied + rest.applied, stale: sent.stale + rest.stale })
        });
        if updated.is_err() {
            for shard in 0..self.channels.len() {
                self.abandon(shard);
            }
        }
        updated
    }

    /// Drops the updates that a server has not answered: their ids count as stale.
    fn abandon(&mut self, shard: usize) -> UpdateReceipt {
        let another = Updates::new(self.group.shards[shard].client.dialer.clone());
        std::mem::replace(&mut self.channels[shard], another).abandon()
    }

    /// Waits for a server's answers.
    fn answers(&mut self, shard: usize, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        if self.group.is_away(shard) {
            return Ok(self.abandon(shard));
        }
        let (channel, shard) = (&mut self.channels[shard], &self.group.shards[shard]);
        answering(channel, shard, wait, |channel, wait| channel.flush(wait))
    }

    /// Adds a server's counts. Leaves a server out that does not answer; its unanswered updates count as stale.
    fn settle(&mut self, shard: usize, receipt: Result<UpdateReceipt>, ids: u32) -> Result<()> {
        let receipt = match receipt {
            Err(error) if is_lost(&error) => {
                self.group.leave(shard, &error);
                let mut receipt = self.abandon(shard);
                receipt.stale += ids;
                receipt
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

impl UpdateChannel<Error> for ShardedUpdates {
    fn send(&mut self, table: &str, ids: &[u64], priorities: &[f64], wait: &Wait<'_>) -> Result<UpdateReceipt> {
        self.group.check_process()?;
        // Checked before any server gets a part: an update applies as a whole or not at all.
        check_update(table, ids, priorities)?;
        let routes = self.group.route(ids);
        let copies: usize = routes.iter().map(Vec::len).sum();
        match copies.checked_sub(ids.len()) {
            Some(surplus) => self.surplus += surplus as u32,
            // Ids without a server.
            None => self.answered.stale += (ids.len() - copies) as u32,
        }
        for (shard, indexes) in routes.into_iter().enumerate() {
            if indexes.is_empty() {
                continue;
            }
            let count = indexes.len() as u32;
            if self.group.is_away(shard) {
                let stale = UpdateReceipt { applied: 0, stale: count };
                self.settle(shard, Ok(stale), 0)?;
                continue;
            }
            let ids: Vec<u64> = indexes.iter().map(|&index| ids[index]).collect();
            let priorities: Vec<f64> = indexes.iter().map(|&index| priorities[index]).collect();
            let sent = answering(&mut self.channels[shard], &self.group.shards[shard], wait, |channel, wait| {
                channel.send(table, &ids, &priorities, wait)
            });
            self.settle(shard, sent, count)?;
        }
        Ok(std::mem::take(&mut self.answered))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        let mut failed = None;
        for shard in 0..self.channels.len() {
            let answers = self.answers(shard, wait);
            match self.settle(shard, answers, 0) {
                Ok(()) => {}
                Err(error @ Error::Interrupted) => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut self.answered)),
        }
    }
}

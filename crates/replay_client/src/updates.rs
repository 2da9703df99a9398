//! Asynchronous updates of priorities over a dedicated connection. Several are in flight at a time, and each is kept until it is answered.
//! After a broken connection, unanswered updates are resent in order. Applying an update twice is harmless, because later updates are
//! applied again after it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::dialer::Dialer;
use super::link::{self, Channel, Link};
use super::pipeline::{answer, unexpected};
use base::wait::Wait;
use replay_core::replay::check_update;
use replay_core::replay::{UpdateChannel, UpdateReceipt};
use replay_link::error::{Error, Result};
use replay_wire::{ErrorCode, Reply, ReplyBody, RequestBody, UpdatePriorities};

/// Most updates in flight: a server reads as many requests of one connection.
const MAX_IN_FLIGHT: usize = 64;

/// The updates of one client.
pub struct Updates {
    link: Link<TableUpdate>,
    /// Counts that no call has returned yet.
    answered: UpdateReceipt,
    /// Tables that were there when an update was answered.
    known: HashSet<String>,
}

/// An update, and its table.
pub struct TableUpdate {
    table: String,
    update: UpdatePriorities,
}

impl TableUpdate {
    /// Count of its ids.
    fn len(&self) -> u32 {
        self.update.ids.len() as u32
    }
}

impl Updates {
    /// A channel that connects on its first update.
    pub fn new(dialer: Arc<Dialer>) -> Self {
        let mut link = Link::new(dialer);
        link.reconnect_for = link.dialer.reconnect_calls_for;
        Updates { link, answered: UpdateReceipt::default(), known: HashSet::new() }
    }

    /// Drops unanswered updates and counts their ids as stale.
    pub fn abandon(mut self) -> UpdateReceipt {
        let ids: u32 = self.link.requests().map(TableUpdate::len).sum();
        self.link.clear();
        UpdateReceipt { applied: self.answered.applied, stale: self.answered.stale + ids }
    }

    /// Updates without an answer.
    pub fn unanswered(&self) -> usize {
        self.link.len()
    }
}

impl Channel for Updates {
    type Request = TableUpdate;

    fn link(&mut self) -> &mut Link<TableUpdate> {
        &mut self.link
    }

    /// Updates never wait at a server, so they have no deadline.
    fn send(&mut self, _deadline: Option<Instant>) -> Result<()> {
        self.link.send(usize::MAX, None, |_, of| (&of.table, RequestBody::UpdatePriorities(of.update.clone())))
    }

    /// Handles the answer to the first pending update: a server answers updates in order.
    fn settle(&mut self, reply: Reply) -> Result<()> {
        let id = reply.id;
        let answer = answer(reply.body);
        if answer.as_ref().is_err_and(|error| self.ends_connection(error)) {
            return answer.map(drop);
        }
        if self.link.answered(id) != Some(0) {
            return Err(Error::protocol(format!("the server answered request {id}, which is not the first in flight")));
        }
        let Some(of) = self.link.remove(0) else { return Ok(()) };
        match answer {
            Ok(ReplyBody::Updated(receipt)) => {
                self.answered.applied += receipt.applied;
                self.answered.stale += receipt.stale;
                self.known.insert(of.table);
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            Err(error) if error.code() == ErrorCode::UnknownTable => {
                // Another table may have the name, and get a number from a new connection.
                self.link.disconnect();
                // A table that was dropped has no items.
                if !self.known.contains(&of.table) {
                    return Err(error);
                }
                self.answered.stale += of.len();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn late(&self) -> Error {
        let (server, count) = (&self.link.dialer.address, self.link.len());
        Error::deadline(format!("{server} has not answered {count} updates of priorities"))
    }
}

impl UpdateChannel<Error> for Updates {
    /// Blocks only while as many updates as allowed are in flight, and during a reconnect.
    fn send(&mut self, table: &str, ids: &[u64], priorities: &[f64], wait: &Wait<'_>) -> Result<UpdateReceipt> {
        self.link.dialer.check_process()?;
        // Checked before sending: the call with the bad priority gets the error, with its position in the list.
        check_update(table, ids, priorities)?;
        let bytes = size_of_val(ids) + size_of_val(priorities);
        link::work(self, &mut None, wait, |updates| updates.link.has_room(MAX_IN_FLIGHT, bytes))?;
        let update = UpdatePriorities { ids: ids.to_vec(), priorities: priorities.to_vec() };
        self.link.queue(TableUpdate { table: table.to_owned(), update }, bytes);
        match Channel::send(self, None) {
            Ok(()) => self.link.connection()?.try_flush(),
            // The connection numbers no more tables: the next call sends the update over another one.
            Err(error) if self.ends_connection(&error) => self.link.disconnect(),
            Err(error) => {
                self.link.take_back();
                return Err(error);
            }
        }
        Ok(std::mem::take(&mut self.answered))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        if !self.link.is_empty() {
            link::work(self, &mut None, wait, |updates| updates.link.is_empty())?;
        }
        Ok(std::mem::take(&mut self.answered))
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        if !self.link.is_empty() {
            tracing::warn!(
                updates = self.link.len(),
                "dropped before its last updates of priorities were answered: close the replay to wait for them"
            );
        }
    }
}

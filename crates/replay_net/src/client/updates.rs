//! Asynchronous updates of priorities over a dedicated connection. Several are in flight at a time, and each is kept until it is answered.
//! After a broken connection, unanswered updates are resent in order. Applying an update twice is harmless, because later updates are
//! applied again after it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{Connection, Dialer};
use super::pipeline::{answer, is_broken, is_closed, unexpected};
use super::pool::{retry_for, while_broken};
use crate::error::{Error, Result};
use base::wait::Wait;
use replay_core::error::check_priorities;
use replay_core::replay::{UpdateChannel, UpdateReceipt};
use replay_wire::{ErrorCode, Reply, ReplyBody, UpdatePriorities};

/// Limit of unanswered updates: a server reads as many requests of one connection.
const WINDOW: usize = 64;

/// The updates of one client.
pub struct Updates {
    dialer: Arc<Dialer>,
    /// Longest time for which a call reconnects.
    reconnect_for: Duration,
    connection: Option<Connection>,
    /// Unanswered updates, in order.
    pending: VecDeque<PendingUpdate>,
    pending_bytes: usize,
    /// Counts that no call has returned yet.
    answered: UpdateReceipt,
}

struct PendingUpdate {
    table: String,
    update: UpdatePriorities,
    bytes: usize,
    /// Its request on the current connection.
    sent: Option<u64>,
}

impl PendingUpdate {
    /// Number of its ids.
    fn len(&self) -> u32 {
        self.update.ids.len() as u32
    }
}

/// Checks an update before it is sent, so that the call that passed it gets the error, with the position in its list.
///
/// # Errors
/// [`replay_core::Error::Schema`] for unequal numbers of ids and priorities; [`replay_core::Error::Priority`].
pub fn check(table: &str, ids: &[u64], priorities: &[f64]) -> Result<()> {
    if ids.len() == priorities.len() {
        return Ok(check_priorities(priorities)?);
    }
    Err(replay_core::Error::Schema {
        table: table.into(),
        reason: format!("{} ids and {} priorities", ids.len(), priorities.len()),
    }
    .into())
}

impl Updates {
    /// A channel that connects on its first update.
    pub fn new(dialer: Arc<Dialer>, reconnect_for: Duration) -> Self {
        Updates {
            dialer,
            reconnect_for,
            connection: None,
            pending: VecDeque::new(),
            pending_bytes: 0,
            answered: UpdateReceipt::default(),
        }
    }

    /// Drops unanswered updates and counts their ids as stale.
    pub fn abandon(mut self) -> UpdateReceipt {
        let pending = std::mem::take(&mut self.pending);
        let ids: u32 = pending.iter().map(PendingUpdate::len).sum();
        UpdateReceipt { applied: self.answered.applied, stale: self.answered.stale + ids }
    }

    /// Updates without an answer.
    pub fn unanswered(&self) -> usize {
        self.pending.len()
    }

    /// Sends updates and receives answers until `done`, and reconnects after a broken connection.
    fn work(&mut self, wait: &Wait<'_>, done: impl Fn(&Self) -> bool) -> Result<()> {
        let dialer = self.dialer.clone();
        let longest = while_broken(self.reconnect_for);
        retry_for(longest, &mut None, &dialer, wait, || {
            let worked = self.work_on_this_connection(wait, &done);
            if worked.as_ref().is_err_and(|e| is_broken(e) || is_closed(e)) {
                self.connection = None;
            }
            worked
        })
    }

    fn work_on_this_connection(&mut self, wait: &Wait<'_>, done: &impl Fn(&Self) -> bool) -> Result<()> {
        if self.connection.is_none() {
            self.connection = Some(self.dialer.dial(wait)?);
            for update in &mut self.pending {
                update.sent = None;
            }
        }
        while let Some(reply) = self.connection()?.arrived(wait)? {
            self.settle(reply)?;
        }
        loop {
            self.send_pending()?;
            if done(self) {
                return Ok(());
            }
            let waited_for =
                format!("{} has not answered {} updates of priorities", self.dialer.address, self.pending.len());
            let late = || Error::deadline(waited_for);
            let reply = self.connection()?.reply(wait, wait.deadline, late)?;
            self.settle(reply)?;
        }
    }

    fn send_pending(&mut self) -> Result<()> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        for update in &mut self.pending {
            if update.sent.is_none() {
                update.sent = Some(connection.send(u32::MAX, Some(&update.table), update.update.clone().into())?);
            }
        }
        Ok(())
    }

    /// Handles the answer to the first pending update: a server answers updates in order.
    fn settle(&mut self, reply: Reply) -> Result<()> {
        let error = match answer(reply.body) {
            Ok(ReplyBody::Updated(receipt)) => {
                self.answered.applied += receipt.applied;
                self.answered.stale += receipt.stale;
                None
            }
            Ok(other) => return Err(unexpected(&other)),
            Err(error) if error.code() == ErrorCode::UnknownTable && self.is_of_dropped_table(reply.id)? => None,
            Err(error) => Some(error),
        };
        if error.as_ref().is_some_and(|e| is_broken(e) || is_closed(e)) {
            return error.map_or(Ok(()), Err);
        }
        match self.pending.pop_front() {
            Some(update) if update.sent == Some(reply.id) => {
                self.pending_bytes -= update.bytes;
                error.map_or(Ok(()), Err)
            }
            _ => {
                let id = reply.id;
                Err(Error::protocol(format!("the server answered request {id}, which is not the first in flight")))
            }
        }
    }

    /// Whether the first pending update is for a table that was dropped since it was named: its ids are stale.
    fn is_of_dropped_table(&mut self, request: u64) -> Result<bool> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        let Some(update) = self.pending.front() else { return Ok(false) };
        let dropped = connection.forget_table(&update.table, Some(request))?;
        if dropped {
            self.answered.stale += update.len();
        }
        Ok(dropped)
    }

    fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().ok_or(Error::Closed("the connection"))
    }
}

impl UpdateChannel<Error> for Updates {
    /// Blocks only while `WINDOW` updates, or [`ConnectOptions::push_window_bytes`](super::ConnectOptions) of them, are unanswered, and
    /// during a reconnect.
    fn send(&mut self, table: &str, ids: &[u64], priorities: &[f64], wait: &Wait<'_>) -> Result<UpdateReceipt> {
        self.dialer.check_process()?;
        check(table, ids, priorities)?;
        let bytes = size_of_val(ids) + size_of_val(priorities);
        let most = self.dialer.options.push_window_bytes;
        self.work(wait, |updates| {
            updates.pending.is_empty() || (updates.pending.len() < WINDOW && updates.pending_bytes + bytes <= most)
        })?;
        let update = UpdatePriorities { ids: ids.to_vec(), priorities: priorities.to_vec() };
        let sent = Some(self.connection()?.send(u32::MAX, Some(table), update.clone().into())?);
        self.pending_bytes += bytes;
        self.pending.push_back(PendingUpdate { table: table.to_owned(), update, bytes, sent });
        self.connection()?.try_flush();
        Ok(std::mem::take(&mut self.answered))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        if !self.pending.is_empty() {
            self.work(wait, |updates| updates.pending.is_empty())?;
        }
        Ok(std::mem::take(&mut self.answered))
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        if !self.pending.is_empty() {
            tracing::warn!(
                updates = self.pending.len(),
                "dropped before its last updates of priorities were answered: close the replay to wait for them"
            );
        }
    }
}

//! Batches from several servers. Each server samples its share, all at the same time. The shares become one batch; blobs stay in the received
//! frames.
//!
//! No server delays its share: it answers with what it has, and a client that lacks something asks again. Samples that were taken from the
//! rate limiters and not delivered stay with the client for its next batches (`paid`).

mod admission;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::sample::Pipelining;
use super::group::{Group, is_lost};
use super::partial::{PartialBatch, Seen};
use super::shard_link::ShardLink;
use base::system::{self, random_number};
use base::wait::Wait;
use replay_core::error::WaitReason;
use replay_core::replay::{BatchShare, Replay, SampleChannel, SampleRequest, Sampled};
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

/// Time limit of the question whether a server has lost its table.
const LOST_TABLE: Duration = Duration::from_millis(250);
/// Pause before servers that had nothing to give are asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(5);
/// In place of a batch's index, for requests without items.
const NO_BATCH: u64 = 0;

/// Batches of one sample request, from several servers.
pub struct ShardedSamples {
    group: Arc<Group>,
    table: String,
    request: SampleRequest,
    /// Minimum of batches in flight. With 0, each call requests its own.
    in_flight: usize,
    links: Vec<ShardLink>,
    /// Batches in progress, the oldest first.
    batches: VecDeque<PartialBatch>,
    last_batch: u64,
    /// Samples taken from the rate limiters for batches that are not delivered; below 0 after a short batch that they did not pay in
    /// full, which the next batches make up for.
    paid: i64,
    /// A server's reason why it could not answer at once.
    delayed: Option<WaitReason>,
    /// By the round trip to the slowest server.
    pipelining: Pipelining,
    /// Start of a time in which no server answers.
    dark_since: Option<Instant>,
    /// Error of the servers, once the table was dropped. A later table of that name is a different one.
    dropped: Option<String>,
}

impl ShardedSamples {
    /// A channel that connects on its first batch.
    pub fn new(group: Arc<Group>, table: &str, request: SampleRequest, in_flight: usize) -> Self {
        let links = group.shards.iter().map(|shard| ShardLink::new(shard.client.dialer.clone())).collect();
        ShardedSamples {
            group,
            table: table.to_owned(),
            request,
            in_flight,
            links,
            batches: VecDeque::new(),
            last_batch: NO_BATCH,
            paid: 0,
            delayed: None,
            pipelining: Pipelining::default(),
            dark_since: None,
            dropped: None,
        }
    }

    /// One batch, by the servers' present sums of priorities. If an earlier call for this request met its deadline, continues its batch.
    pub fn once(&mut self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        if !self.suits(table, request) {
            self.batches.clear();
            self.paid = 0;
            // Discards late replies to an earlier request.
            self.links.iter_mut().filter(|link| !link.is_idle()).for_each(|link| drop(link.reset()));
        }
        (self.table, self.request) = (table.to_owned(), *request);
        let named = self.links.iter().any(|link| link.has_answered);
        match self.batch(wait) {
            // Connections of earlier calls have the number of a table that was dropped. The new ones name it again.
            Err(error) if named && error.code() == ErrorCode::UnknownTable => self.batch(wait),
            sampled => sampled,
        }
    }

    /// Whether it has samples, or shares of a batch, for later calls.
    pub fn is_unfinished(&self) -> bool {
        self.paid != 0 || !self.batches.is_empty()
    }

    /// Whether its samples, and its batch in progress, are for this request.
    pub fn suits(&self, table: &str, request: &SampleRequest) -> bool {
        self.table == table && (self.batches.is_empty() || self.request == *request)
    }

    /// The next batch; after an error that is no deadline, over new connections.
    fn batch(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        if self.in_flight == 0 && !base::planted!(OldTotal) {
            // Asks for the present sums of priorities, not for those after the last batch.
            self.links.iter_mut().for_each(|link| link.stale = true);
        }
        let next = self.next_batch(wait);
        if let Err(error) = &next
            && !matches!(error, Error::Deadline { .. } | Error::Interrupted)
        {
            // Replies in flight are useless without their batches: reconnects.
            self.batches.clear();
            self.links.iter_mut().for_each(|link| drop(link.reset()));
            if error.code() == ErrorCode::UnknownTable {
                self.paid = 0;
            }
        }
        next
    }

    fn next_batch(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        loop {
            self.look_around(wait)?;
            let blocked = self.top_up(wait)?;
            let oldest = self.batches.front().map_or(NO_BATCH, |batch| batch.number);
            if self.receive_one(oldest, wait)? {
                continue;
            }
            if self.batches.front().is_some_and(|batch| batch.is_complete() && self.pays_for(batch.items())) {
                return self.deliver(wait);
            }
            if !self.may_go_on() {
                let blocked = blocked.or_else(|| self.delayed.take());
                let blocked = blocked.map_or_else(|| self.lacks(self.batches.len()), |reason| Ok(Some(reason)))?;
                let reason = blocked.unwrap_or_else(|| self.on_servers("has too few samples left".to_owned()));
                if wait.deadline.is_some_and(|end| system::now() >= end) {
                    return self.short(reason, wait);
                }
                pause(&reason, wait)?;
            }
            self.ask_states(|_| true, wait)?;
            for index in 0..self.batches.len() {
                self.request_shares(index, wait)?;
            }
        }
    }

    /// Leaves out absent servers, and asks the others for unknown states.
    fn look_around(&mut self, wait: &Wait<'_>) -> Result<()> {
        for shard in 0..self.links.len() {
            if self.group.is_away(shard) {
                self.drop_link(shard);
            }
        }
        self.ask_states(|link| link.stale || link.seen.is_none(), wait)?;
        if self.links.iter().any(|link| link.seen.is_some()) {
            self.dark_since = None;
        } else {
            let since = *self.dark_since.get_or_insert_with(system::now);
            if system::elapsed(since) >= self.group.reconnect_for {
                return Err(self.group.none_answers());
            }
        }
        Ok(())
    }

    /// Asks present servers for their table's state and for samples that are missing, all at the same time once they are connected.
    fn ask_states(&mut self, asked: impl Fn(&ShardLink) -> bool, wait: &Wait<'_>) -> Result<()> {
        let asked: Vec<usize> = self.group.present().filter(|&shard| asked(&self.links[shard])).collect();
        let takes = self.takes(self.paying());
        for &shard in &asked {
            let sent = self.send(shard, NO_BATCH, (0, takes[shard]), wait);
            self.settle(shard, sent, wait)?;
        }
        self.links.iter_mut().for_each(ShardLink::try_flush);
        // An interrupted call may have left a request, whose reply comes first.
        while self.receive_one(NO_BATCH, wait)? {}
        for shard in asked {
            self.links[shard].stale = false;
        }
        Ok(())
    }

    /// Handles the result of a call to one server. Leaves the server out if it does not answer, or has lost its table.
    fn settle(&mut self, shard: usize, result: Result<()>, wait: &Wait<'_>) -> Result<()> {
        let Err(error) = result else { return Ok(()) };
        if is_lost(&error) {
            // A broken connection may mean a restart: the next connection shows it.
            if !self.links[shard].has_answered {
                self.group.leave(shard, &error);
            }
            self.drop_link(shard);
            return Ok(());
        }
        if error.code() == ErrorCode::UnknownTable {
            let wait = Wait { deadline: Some(system::now() + LOST_TABLE), ..*wait };
            let shards = &self.group.shards;
            let known = |shard: usize| shards[shard].client.table_config(&self.table, &wait).is_ok();
            // A table created again there would be a different one.
            let mut others = self.group.present().filter(|&other| other != shard);
            let has_lost_it = !known(shard) && others.any(known);
            drop(others);
            if has_lost_it {
                self.group.leave(shard, &error);
                self.drop_link(shard);
                return Ok(());
            }
        }
        Err(self.group.shards[shard].named(error))
    }

    /// Returns the requested shares of an absent server, to be divided among the others. Received items stay in their batch.
    fn drop_link(&mut self, shard: usize) {
        let lost = self.links[shard].reset();
        // The remaining servers may be nearer, which batches in a long queue would not show.
        let slowest = self.links.iter().map(|link| link.round_trip).max();
        let round_trip = &mut self.pipelining.round_trip;
        *round_trip = slowest.unwrap_or_default().min(*round_trip);
        for share in lost {
            if let Some(batch) = find(&mut self.batches, share.batch) {
                batch.owe(shard, share.count());
            }
        }
    }

    fn seen(&self) -> Vec<Option<Seen>> {
        self.links.iter().map(|link| link.seen).collect()
    }

    /// Begins as many batches as are to be in flight. Returns the reason if the servers do not admit one.
    fn top_up(&mut self, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        let mut blocked = None;
        while blocked.is_none() && self.batches.len() < self.pipelining.wanted(self.in_flight) {
            blocked = self.lacks(self.batches.len() + 1)?;
            if blocked.is_none() {
                self.begin(self.request.count, wait)?;
            }
        }
        self.links.iter_mut().for_each(ShardLink::try_flush);
        Ok(blocked)
    }

    /// Begins a batch of so many items.
    fn begin(&mut self, count: u32, wait: &Wait<'_>) -> Result<()> {
        self.last_batch += 1;
        let received = self.pipelining.received;
        self.batches.push_back(PartialBatch::new(self.last_batch, count, &self.seen(), uniform(), received));
        self.request_shares(self.batches.len() - 1, wait)
    }

    /// Requests a batch's outstanding items. The first requests also take its samples, and go to every server: later batches need all
    /// states.
    fn request_shares(&mut self, index: usize, wait: &Wait<'_>) -> Result<()> {
        let seen = self.seen();
        let batch = &mut self.batches[index];
        let (number, begins) = (batch.number, batch.begins());
        let counts = batch.take_owed(&seen, uniform());
        let takes = if begins { self.takes(index + 1) } else { vec![0; counts.len()] };
        let mut settled = Ok(());
        for (shard, (count, take)) in counts.into_iter().zip(takes).enumerate() {
            if seen[shard].is_none() || (count == 0 && !begins) {
                continue;
            }
            if settled.is_err() {
                // The next call requests it.
                self.batches[index].owe(shard, count);
                continue;
            }
            let sent = self.send(shard, number, (count, take), wait);
            if sent.is_err() {
                self.batches[index].owe(shard, count);
            }
            settled = self.settle(shard, sent, wait);
        }
        settled
    }

    fn send(&mut self, shard: usize, batch: u64, (count, take): (u32, u32), wait: &Wait<'_>) -> Result<()> {
        let request = SampleRequest { count, share: Some(BatchShare { take }), ..self.request };
        if let Some(round_trip) = self.links[shard].send(&self.table, batch, request, wait)? {
            self.pipelining.round_trip = self.pipelining.round_trip.max(round_trip);
        }
        Ok(())
    }

    /// Waits for one reply to a request for a share of this batch; `false` if none is in flight.
    fn receive_one(&mut self, batch: u64, wait: &Wait<'_>) -> Result<bool> {
        let Some(shard) = self.links.iter().position(|link| link.awaits(batch)) else {
            return Ok(false);
        };
        match self.receive(shard, wait) {
            Err(error @ (Error::Deadline { .. } | Error::Interrupted)) => Err(error),
            received => self.settle(shard, received, wait).map(|()| true),
        }
    }

    /// Waits for a server's next reply. What it lacks is requested again.
    fn receive(&mut self, shard: usize, wait: &Wait<'_>) -> Result<()> {
        let (share, sampled) = self.links[shard].receive(wait)?;
        let found = sampled.as_ref().map_or(0, |sampled| sampled.items.len() as u32);
        if let Some(batch) = find(&mut self.batches, share.batch) {
            batch.owe(shard, share.count() - found);
        }
        let sampled = match sampled {
            // No room for the reply: the client asks again, as if the server had nothing.
            Err(error @ Error::RemoteDeadline { .. }) => {
                let error = self.group.shards[shard].named(error);
                self.delayed = error.waited_for().cloned();
                return Ok(());
            }
            sampled => sampled?,
        };
        if let Some(state) = sampled.state {
            self.group.note_numbers(shard, state, &sampled.items);
            self.paid += i64::from(state.taken);
        }
        if let Some(batch) = find(&mut self.batches, share.batch) {
            batch.add(shard, sampled);
        }
        Ok(())
    }

    /// Short batch at the call's deadline: the received items, or else as many as the servers return at once.
    ///
    /// # Errors
    /// [`Error::Deadline`] with the reason, unless the request allows a short batch and there are items.
    fn short(&mut self, reason: WaitReason, wait: &Wait<'_>) -> Result<Sampled> {
        if !self.request.allow_short {
            return Err(Error::deadline(reason));
        }
        if self.batches.is_empty() {
            if let Some(waited_for) = self.stocked()? {
                return Err(Error::deadline(waited_for));
            }
            let count = self.short_of(self.request.count);
            if count == 0 {
                return Err(Error::deadline(reason));
            }
            self.begin(count, wait)?;
            while self.receive_one(self.last_batch, wait)? {}
        }
        // Other clients may have taken the samples that this one has seen. A batch with one sample at least is delivered before it is paid.
        match self.batches.front().is_some_and(|batch| batch.items() > 0 && self.pays_for(1)) {
            true => self.deliver(wait),
            false => Err(Error::deadline(reason)),
        }
    }

    /// Returns the oldest batch, after requesting the next ones, so that servers sample while the caller decodes.
    fn deliver(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        let batch = self.batches.pop_front().ok_or(Error::Closed("the batch"))?;
        self.paid -= batch.items() as i64;
        let (sent, before) = batch.asked;
        self.pipelining.note(sent, before, system::now(), batch.bytes());
        if self.in_flight > 1 {
            // The next call meets the same error.
            let _ = self.top_up(&Wait { deadline: None, ..*wait });
        }
        Ok(batch.into_sampled()?)
    }
}

impl SampleChannel<Error> for ShardedSamples {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        self.group.check_process()?;
        if let Some(message) = &self.dropped {
            return Err(Error::Remote { code: ErrorCode::UnknownTable, message: message.clone() });
        }
        self.batch(wait).inspect_err(|error| {
            if error.code() == ErrorCode::UnknownTable {
                self.dropped = Some(error.to_string());
            }
        })
    }
}

/// Pauses before the servers are asked again.
fn pause(reason: &WaitReason, wait: &Wait<'_>) -> Result<()> {
    let now = system::now();
    wait.check()?;
    reason.report(wait, now, Wait::REPORT_AFTER);
    let left = wait.deadline.map(|end| end.saturating_duration_since(now));
    system::sleep(left.map_or(ASK_AGAIN_AFTER, |left| left.min(ASK_AGAIN_AFTER)));
    Ok(())
}

/// A random number from 0 to 1.
fn uniform() -> f64 {
    (random_number() >> 11) as f64 / (1_u64 << 53) as f64
}

fn find(batches: &mut VecDeque<PartialBatch>, number: u64) -> Option<&mut PartialBatch> {
    batches.iter_mut().find(|batch| batch.number == number)
}

//! Batches from several servers. Each server samples a part, all at the same time. The parts become one batch, whose blobs stay in the
//! received frames.

mod admission;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::Client;
use super::super::sample::Pipelining;
use super::group::{Group, ask_promptly, is_lost};
use super::lane::Lane;
use super::partial::{PartialBatch, Seen};
use super::shares::limiter_samples;
use base::host;
use base::random::random_number;
use base::wait::Wait;
use replay_core::cause::WaitReason;
use replay_core::replay::{BatchPart, Replay, SampleChannel, SampleRequest, Sampled};
use replay_core::schema::TableConfig;
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

/// Longest time for which a server delays a part. After that the rest of the batch is divided again, by the servers' new state.
const HELD_FOR: Duration = Duration::from_millis(250);
/// Pause before servers without items to sample are asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(5);
/// Batch number of requests that only ask for a table's state.
const NO_BATCH: u64 = 0;

/// Batches of one sample request, from several servers.
pub struct ShardedSamples {
    group: Arc<Group>,
    table: String,
    request: SampleRequest,
    in_flight: usize,
    /// Definition of the table at the servers, once one has answered.
    definition: Option<Arc<TableConfig>>,
    lanes: Vec<Lane>,
    /// Batches in progress, the oldest first.
    batches: VecDeque<PartialBatch>,
    last_batch: u64,
    /// Follows the slowest server's round trip.
    pipelining: Pipelining,
    /// Start of a time in which no server answers.
    dark_since: Option<Instant>,
    /// The servers' error, once the iterator's table was dropped. A later table of that name is a different one.
    dropped: Option<String>,
}

impl ShardedSamples {
    /// A channel that connects on its first batch.
    pub fn new(group: Arc<Group>, table: &str, request: SampleRequest, in_flight: usize) -> Self {
        let lanes = group.shards.iter().map(|shard| Lane::new(shard.client.dialer.clone())).collect();
        ShardedSamples {
            group,
            table: table.to_owned(),
            request,
            in_flight,
            definition: None,
            lanes,
            batches: VecDeque::new(),
            last_batch: NO_BATCH,
            pipelining: Pipelining::default(),
            dark_since: None,
            dropped: None,
        }
    }

    /// One batch, by the servers' present sums of priorities. If an earlier call for this request met its deadline, returns its batch,
    /// which servers have charged already.
    ///
    /// # Errors
    /// Errors of [`Replay::sample`].
    pub fn once(&mut self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        let continues = self.has_begun(table, request);
        if !continues {
            (self.table, self.request) = (table.to_owned(), *request);
            // Another client may have created the table anew.
            self.definition = None;
            self.batches.clear();
        }
        let named = self.lanes.iter().any(Lane::has_answered);
        for lane in &mut self.lanes {
            if !continues && !lane.is_idle() {
                // Discards late replies to an earlier request.
                lane.reset();
            }
            lane.seen = None;
        }
        match self.batch(wait) {
            // Connections of earlier calls have the number of a table that was dropped. The new ones name it again.
            Err(error) if named && error.code() == ErrorCode::UnknownTable => self.batch(wait),
            sampled => sampled,
        }
    }

    /// The next batch; after an error that is no deadline, over new connections.
    fn batch(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        if self.in_flight == 0 && self.batches.is_empty() && !base::planted!(OldTotal) {
            // Asks for the present sums of priorities, not for those after the last batch.
            self.lanes.iter_mut().for_each(|lane| lane.seen = None);
        }
        let next = self.next_batch(wait);
        if let Err(error) = &next
            && !matches!(error, Error::Deadline { .. } | Error::Interrupted)
        {
            // Replies in flight are useless without their batches: reconnects.
            self.batches.clear();
            for lane in &mut self.lanes {
                lane.reset();
            }
            self.definition = None;
        }
        next
    }

    /// Whether a batch was requested from servers and not delivered.
    pub fn is_unfinished(&self) -> bool {
        self.batches.front().is_some_and(|batch| batch.begun)
    }

    /// Whether an unfinished batch of this request was requested from servers.
    pub fn has_begun(&self, table: &str, request: &SampleRequest) -> bool {
        self.table == table && self.request == *request && self.is_unfinished()
    }

    fn next_batch(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        loop {
            self.look_around(wait)?;
            let blocked = self.top_up(wait)?;
            let front = self.batches.front();
            let (number, complete) = front.map_or((NO_BATCH, false), |batch| (batch.number, batch.is_complete()));
            if !self.lanes.iter().any(|lane| lane.awaits(number)) {
                if complete {
                    return self.deliver(wait);
                }
                let reason = match blocked {
                    Some(reason) => Some(reason),
                    None => self.stocked(wait)?,
                };
                let reason = reason.unwrap_or_else(|| self.none_answers());
                let late = wait.deadline.is_some_and(|end| host::now() >= end);
                if late && self.request.allow_short {
                    return self.short(reason, wait);
                }
                self.pause(wait, reason)?;
                continue;
            }
            if let Some(reason) = self.receive_for(number, wait)? {
                let late = wait.deadline.is_some_and(|end| host::now() >= end);
                if late && self.request.allow_short {
                    return self.short(reason, wait);
                }
                if late {
                    return Err(Error::deadline(reason));
                }
                wait.check()?;
                reason.report(wait, host::now(), Wait::REPORT_AFTER);
                // Divides the rest of the batch again, by the present state.
                self.renew_states(wait)?;
            }
        }
    }

    /// Leaves out absent servers, and asks the others for unknown states.
    fn look_around(&mut self, wait: &Wait<'_>) -> Result<()> {
        for shard in 0..self.lanes.len() {
            if self.group.is_away(shard) {
                self.drop_lane(shard);
            }
        }
        self.ask_states(|group, shard, lane| !group.is_away(shard) && lane.seen.is_none(), wait)?;
        if self.lanes.iter().any(|lane| lane.seen.is_some()) {
            self.dark_since = None;
        } else {
            let since = *self.dark_since.get_or_insert_with(host::now);
            if host::elapsed(since) >= self.group.reconnect_for {
                return Err(self.group.none_answers());
            }
        }
        Ok(())
    }

    /// Asks the present servers for their state again.
    fn renew_states(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.ask_states(|_, _, lane| lane.seen.is_some(), wait)
    }

    /// Asks some servers only for their table's state, all at the same time once they are connected.
    fn ask_states(&mut self, asked: impl Fn(&Group, usize, &Lane) -> bool, wait: &Wait<'_>) -> Result<()> {
        let lanes = self.lanes.iter().enumerate();
        let asked: Vec<usize> =
            lanes.filter(|(shard, lane)| asked(&self.group, *shard, lane)).map(|(shard, _)| shard).collect();
        for &shard in &asked {
            let sent = self.send(shard, NO_BATCH, (0, 0), host::now(), wait);
            self.settle(shard, sent, wait)?;
        }
        for &shard in &asked {
            self.lanes[shard].try_flush();
        }
        for shard in asked {
            // An interrupted call may have left a request, whose reply comes first.
            while self.lanes[shard].awaits(NO_BATCH) {
                let received = self.receive(shard, wait).map(drop);
                self.settle(shard, received, wait)?;
            }
        }
        Ok(())
    }

    /// Handles the result of a call to one server. Leaves the server out if it does not answer, or has lost its table.
    fn settle(&mut self, shard: usize, result: Result<()>, wait: &Wait<'_>) -> Result<()> {
        let Err(error) = result else { return Ok(()) };
        if is_lost(&error) {
            // A broken connection may mean a restart: the next connection shows it.
            if !self.lanes[shard].has_answered() {
                self.group.leave(shard, &error);
            }
            self.drop_lane(shard);
            return Ok(());
        }
        if error.code() == ErrorCode::UnknownTable {
            let wait = Wait { deadline: Some(host::now() + HELD_FOR), ..*wait };
            let shards = &self.group.shards;
            let known = |shard: usize| shards[shard].client.table_config(&self.table, &wait).is_ok();
            // A table created again there would be a different one.
            let mut others = self.group.present().filter(|&other| other != shard);
            let has_lost_it = !known(shard) && others.any(known);
            drop(others);
            if has_lost_it {
                self.group.leave(shard, &error);
                self.drop_lane(shard);
                return Ok(());
            }
        }
        Err(self.group.shards[shard].named(error))
    }

    /// Returns an absent server's requested parts, to be divided among the others. Received items stay in their batch.
    fn drop_lane(&mut self, shard: usize) {
        let lost = self.lanes[shard].reset();
        // The remaining servers may be nearer, which batches in a long queue would not show.
        let slowest = self.lanes.iter().map(|lane| lane.round_trip).max();
        let round_trip = &mut self.pipelining.round_trip;
        *round_trip = slowest.unwrap_or_default().min(*round_trip);
        for part in lost {
            if let Some(batch) = find(&mut self.batches, part.batch) {
                batch.owe(shard, part.count(), part.limiter_samples());
            }
        }
    }

    fn seen(&self) -> Vec<Option<Seen>> {
        self.lanes.iter().map(|lane| lane.seen).collect()
    }

    fn definition(&mut self, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        if let Some(definition) = &self.definition {
            return Ok(definition.clone());
        }
        let describe = |client: &Client| ask_promptly(client, wait, |wait| client.table_config(&self.table, wait));
        let definition = self.group.any(0, describe)?;
        Ok(self.definition.insert(definition).clone())
    }

    /// Requests the missing parts of batches in progress, and begins others up to `in_flight`.
    fn top_up(&mut self, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        let mut blocked = None;
        for index in 0..self.pipelining.wanted(self.in_flight) {
            if index == self.batches.len() {
                blocked = self.ready(wait)?;
                if blocked.is_some() {
                    break;
                }
                self.last_batch += 1;
                let at = uniform()?;
                let batch =
                    PartialBatch::new(self.last_batch, self.request.count, &self.seen(), at, self.pipelining.received);
                self.batches.push_back(batch);
            }
            self.send_parts(index, wait)?;
            // Later batches would only take its rate limiter samples.
            let owed = self.batches[index].owed_samples();
            if owed > 0 && self.most_of_one().is_finite() {
                blocked = Some(self.limited(f64::from(owed), wait)?);
                break;
            }
        }
        for lane in &mut self.lanes {
            lane.try_flush();
        }
        Ok(blocked)
    }

    /// Requests a batch's outstanding items and rate limiter samples.
    fn send_parts(&mut self, index: usize, wait: &Wait<'_>) -> Result<()> {
        if self.batches[index].is_complete() {
            return Ok(());
        }
        let seen = self.seen();
        let batch = &mut self.batches[index];
        let begins = !std::mem::replace(&mut batch.begun, true);
        let (counts, samples) = batch.take_owed(&seen, uniform()?);
        let number = batch.number;
        let present: Vec<usize> = (0..seen.len()).filter(|&at| seen[at].is_some()).collect();
        let limits = present.iter().any(|&at| self.lanes[at].allowance().is_finite());
        let charges = if limits {
            let most = self.most_of_one();
            let allowances = present.iter().map(|&at| self.lanes[at].allowance());
            let allowances: Vec<f64> = allowances.map(|allowed| allowed.min(most)).collect();
            let charges = limiter_samples(samples, &allowances);
            // The rest is charged later: a limiter admits it only after inserts, whose writers may wait for this batch.
            let charged: u32 = charges.iter().sum();
            self.batches[index].owe(0, 0, samples - charged);
            charges
        } else {
            present.iter().map(|&at| counts[at]).collect()
        };
        let now = host::now();
        let held = now + HELD_FOR;
        let due = match wait.deadline {
            // Only the oldest batch has the call's deadline.
            Some(deadline) if index == 0 => deadline.clamp(now, held),
            _ => held,
        };
        let mut settled = Ok(());
        for (shard, charge) in present.into_iter().zip(charges) {
            // The first request goes to every server, even without items: later batches need all states.
            if begins || counts[shard] > 0 || charge > 0 {
                let part = (counts[shard], charge);
                if settled.is_err() {
                    // The next call after an interrupt requests it.
                    self.batches[index].owe(shard, part.0, part.1);
                    continue;
                }
                let sent = self.send(shard, number, part, due, wait);
                if sent.is_err() {
                    self.batches[index].owe(shard, part.0, part.1);
                }
                settled = self.settle(shard, sent, wait);
            }
        }
        settled
    }

    fn send(
        &mut self,
        shard: usize,
        batch: u64,
        (count, limiter_samples): (u32, u32),
        due: Instant,
        wait: &Wait<'_>,
    ) -> Result<()> {
        let request = SampleRequest {
            count,
            // A short batch is allowed at the call's deadline, not at a server's.
            allow_short: self.request.allow_short && wait.deadline.is_some_and(|end| host::now() >= end),
            part: Some(BatchPart { limiter_samples }),
            ..self.request
        };
        if let Some(round_trip) = self.lanes[shard].send(&self.table, batch, request, due, wait)? {
            self.pipelining.round_trip = self.pipelining.round_trip.max(round_trip);
        }
        Ok(())
    }

    /// Waits for one reply of a batch. Returns the reason if the server could not sample its part.
    fn receive_for(&mut self, batch: u64, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        let Some(shard) = self.lanes.iter().position(|lane| lane.awaits(batch)) else {
            return Ok(None);
        };
        match self.receive(shard, wait) {
            Ok(reason) => Ok(reason),
            Err(error @ (Error::Deadline { .. } | Error::Interrupted)) => Err(error),
            Err(error) => self.settle(shard, Err(error), wait).map(|()| None),
        }
    }

    /// Waits for a server's next reply. Returns the reason if the server could not sample its part, which is then requested again.
    fn receive(&mut self, shard: usize, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        let member = &self.group.shards[shard];
        let (part, sampled) = self.lanes[shard].receive(wait)?;
        let batch = find(&mut self.batches, part.batch);
        let error = match sampled {
            Ok(sampled) => {
                if let Some(state) = sampled.shard {
                    self.group.note_numbers(shard, state, &sampled.items);
                }
                if let Some(batch) = batch {
                    // With `max_times_sampled`, a server may have fewer samples left than requested.
                    batch.owe(shard, part.count() - sampled.items.len() as u32, 0);
                    batch.add(shard, sampled);
                }
                return Ok(None);
            }
            Err(error) => error,
        };
        if let Some(batch) = batch {
            batch.owe(shard, part.count(), part.limiter_samples());
        }
        let reason = match error {
            Error::RemoteDeadline { waited_for } => waited_for,
            error if error.code() == ErrorCode::NoMass => Box::new(error.to_string().into()),
            error => return Err(error),
        };
        Ok(Some(WaitReason::AtServer(member.name(), reason)))
    }

    /// Pauses before the servers are asked again.
    fn pause(&mut self, wait: &Wait<'_>, reason: WaitReason) -> Result<()> {
        let now = host::now();
        if wait.deadline.is_some_and(|end| now >= end) {
            return Err(Error::deadline(reason));
        }
        wait.check()?;
        reason.report(wait, now, Wait::REPORT_AFTER);
        let left = wait.deadline.map(|end| end.saturating_duration_since(now));
        host::sleep(left.map_or(ASK_AGAIN_AFTER, |left| left.min(ASK_AGAIN_AFTER)));
        for lane in &mut self.lanes {
            lane.seen = None;
        }
        Ok(())
    }

    /// Short batch at the call's deadline: the received items, or else as many as the servers return at once.
    fn short(&mut self, reason: WaitReason, wait: &Wait<'_>) -> Result<Sampled> {
        self.receive_rest(wait)?;
        if self.batches.front().is_none_or(|batch| batch.items() == 0) {
            self.renew_states(wait)?;
            if let Some(waited_for) = self.stocked(wait)? {
                return Err(Error::deadline(waited_for));
            }
            let count = self.admitted().min(f64::from(self.request.count)) as u32;
            if count == 0 {
                return Err(Error::deadline(reason));
            }
            let seen = self.seen();
            self.last_batch += 1;
            let batch = PartialBatch::new(self.last_batch, count, &seen, uniform()?, self.pipelining.received);
            self.batches = [batch].into();
            self.send_parts(0, wait)?;
        }
        self.receive_rest(wait)?;
        match self.batches.pop_front() {
            Some(batch) if batch.items() > 0 => Ok(batch.into_sampled()?),
            _ => Err(Error::deadline(reason)),
        }
    }

    /// Waits for all replies of the oldest batch.
    fn receive_rest(&mut self, wait: &Wait<'_>) -> Result<()> {
        while let Some(batch) = self.batches.front()
            && let number = batch.number
            && self.lanes.iter().any(|lane| lane.awaits(number))
        {
            self.receive_for(number, wait)?;
        }
        Ok(())
    }

    /// Returns the oldest batch, after requesting the next ones, so that servers sample while the caller decodes.
    fn deliver(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        let batch = self.batches.pop_front();
        if let Some(batch) = &batch {
            let (sent, before) = batch.asked;
            self.pipelining.note(sent, before, host::now(), batch.bytes());
        }
        if self.in_flight > 1 {
            // The next call meets the same error.
            let _ = self.top_up(&Wait { deadline: None, ..*wait });
        }
        let batch = batch.ok_or(Error::Closed("the batch"))?;
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

/// A random number from 0 to 1.
fn uniform() -> Result<f64> {
    Ok((random_number()? >> 11) as f64 / (1_u64 << 53) as f64)
}

fn find(batches: &mut VecDeque<PartialBatch>, number: u64) -> Option<&mut PartialBatch> {
    batches.iter_mut().find(|batch| batch.number == number)
}

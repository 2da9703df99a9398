//! The writers that a sample waits for. A registry has the writers of a replay: a sample that waits for steps, `episodes` and `save` make
//! them send their open chunks. The state of all writers, from statistics, is the reason of a wait, or its end when they are gone.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use base::wait::{Wait, lock};
use replay_client::writers_seen::WritersSeen;
use replay_core::error::WaitReason;
use replay_core::replay::Replay;
use replay_core::writer::WriterCounters;
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::wait::{self, Closing};
use crate::writer::{SEND_WITHIN, WriterState};

/// Time for which a waiting sample tries writers again, at each look for an interrupt: it may have its items meanwhile.
const RETRY_FOR: Duration = Duration::from_millis(10);

/// Writers that a replay has opened, and the numbers of its samples that wait for their steps, by table.
#[derive(Default)]
pub struct OpenWriters {
    writers: Mutex<Vec<(String, Weak<WriterState>)>>,
    awaited: Mutex<HashMap<String, Arc<AtomicUsize>>>,
}

/// A sample that waits for steps of a table, until dropped. The table's writers then send each step at once.
pub struct Awaiting {
    samples: Arc<AtomicUsize>,
    /// Writers whose open chunks are not sent.
    unsent: Mutex<VecDeque<Arc<WriterState>>>,
}

impl Awaiting {
    /// Sends the open chunks of writers that could not send them: of those that can, without waiting for the others.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn send_rest(&self, wait: &Wait<'_>) -> Result<()> {
        let mut unsent = lock(&self.unsent);
        let begun = Instant::now();
        for _ in 0..unsent.len() {
            let Some(writer) = unsent.pop_front() else { break };
            if writer.send_open(wait)? {
                unsent.push_back(writer);
            }
            if begun.elapsed() > RETRY_FOR {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Awaiting {
    fn drop(&mut self) {
        self.samples.fetch_sub(1, Ordering::Relaxed);
    }
}

impl OpenWriters {
    /// Adds a writer of the table.
    pub fn add(&self, table: &str, writer: &Arc<WriterState>) {
        let mut writers = lock(&self.writers);
        writers.retain(|(_, writer)| writer.strong_count() > 0);
        writers.push((table.to_owned(), Arc::downgrade(writer)));
    }

    fn of_table(&self, table: &str) -> Vec<Arc<WriterState>> {
        let writers = lock(&self.writers);
        let of_table = writers.iter().filter(|(of, _)| of == table);
        of_table.filter_map(|(_, writer)| writer.upgrade()).collect()
    }

    /// Number of samples that wait for steps of the table.
    pub fn awaited(&self, table: &str) -> Arc<AtomicUsize> {
        lock(&self.awaited).entry(table.to_owned()).or_default().clone()
    }

    /// Advice for a wait for steps of a table: why these writers dropped windows, or made no item.
    pub fn advice(&self, table: &str) -> Option<String> {
        let writers = self.of_table(table);
        let counters: Vec<_> = writers.iter().map(|writer| *lock(&writer.counters)).collect();
        let sum = |of: fn(&WriterCounters) -> u64| counters.iter().map(of).sum::<u64>();
        let dropped = sum(|counters| counters.dropped.by_mistake());
        let within_burn_in = sum(|counters| counters.dropped.within_burn_in);
        if dropped > 0 {
            return Some(format!(
                " ({dropped} windows were dropped: a row with first=True follows no end of an episode, or a truncated row no final \
                 one)"
            ));
        }
        (within_burn_in > 0 && sum(|counters| counters.items) == 0).then(|| {
            format!(
                " (all {within_burn_in} windows ended within their burn_in: an item needs a longer episode, or a shorter burn_in)"
            )
        })
    }

    /// Sends the open chunks of a table's writers for a sample that waits for them. It calls [`Awaiting::send_rest`] while it waits.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn send_open(&self, table: &str, wait: &Wait<'_>) -> Result<Awaiting> {
        let samples = self.awaited(table);
        samples.fetch_add(1, Ordering::Relaxed);
        let awaiting = Awaiting { samples, unsent: Mutex::default() };
        for writer in self.of_table(table) {
            if writer.send_open(wait)? {
                lock(&awaiting.unsent).push_back(writer);
            }
        }
        Ok(awaiting)
    }

    /// Has the open chunks of a table's writers, or of all, stored before a call reads them. Pushes that the rate limiter holds are left out.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn flush(&self, table: Option<&str>, wait: &Wait<'_>) -> Result<()> {
        let writers = lock(&self.writers).clone().into_iter().filter(|(of, _)| table.is_none_or(|table| table == of));
        let writers: Vec<_> = writers.filter_map(|(_, writer)| writer.upgrade()).collect();
        // All are sent before the first is waited for.
        for writer in &writers {
            writer.send_open(wait)?;
        }
        let deadline = Instant::now() + SEND_WITHIN;
        let interrupted = |writer: &Arc<WriterState>| match writer.flush_until(deadline, wait) {
            Err(Error::Interrupted) => Err(Error::Interrupted),
            _ => Ok(()),
        };
        writers.iter().try_for_each(interrupted)
    }

    /// Calls `attempt`, which samples the table. If it would wait for steps, the writers first send their open chunks; otherwise chunks
    /// fill. Before a sample that may be short (`allow_short`) they always send.
    ///
    /// # Errors
    /// Errors of `attempt`, and [`Error::Interrupted`].
    pub fn awaiting<T>(
        &self,
        table: &str,
        allow_short: bool,
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&Wait<'_>) -> Result<T>,
    ) -> Result<T> {
        if !(allow_short || self.of_table(table).is_empty()) {
            let at_once = Wait { deadline: Some(Instant::now()), ..*wait };
            match attempt(&at_once) {
                Err(error) if error.waited_for().is_some_and(WaitReason::is_for_writers) => {}
                // Also where the connection broke: a try without time does not reconnect.
                Err(error) if is_for_lack_of_time(&error) => return attempt(wait),
                done => return done,
            }
        }
        let awaiting = self.send_open(table, wait)?;
        let interrupted = || awaiting.send_rest(wait).is_err() || (wait.interrupted)();
        attempt(&Wait { interrupted: &interrupted, ..*wait })
    }
}

/// Whether a call that had more time might succeed.
fn is_for_lack_of_time(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::Deadline | ErrorCode::Connect | ErrorCode::Disconnected)
}

/// Time without an answer after which a call asks for the state of the writers, and the pause until it asks again.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Limit of asking.
const ASK_WITHIN: Duration = Duration::from_millis(500);

/// The writers that one call may wait for.
pub struct AwaitedWriters<'a> {
    /// Writers of this replay, which know why they made no items.
    own: &'a OpenWriters,
    replay: Weak<dyn Replay<Error>>,
    /// `writers_timeout`.
    longest: Option<Duration>,
    /// Begin of the wait.
    begun: Instant,
    /// End of the call.
    deadline: Option<Instant>,
    next_look: Mutex<Instant>,
    /// What ended the call.
    absent: Mutex<Option<String>>,
}

impl<'a> AwaitedWriters<'a> {
    /// A call until `deadline` that has waited since `begun`, or an earlier one that it continues.
    pub fn new(
        own: &'a OpenWriters,
        replay: Weak<dyn Replay<Error>>,
        longest: Option<Duration>,
        begun: Instant,
        deadline: Option<Instant>,
    ) -> Self {
        AwaitedWriters { own, replay, longest, begun, deadline, next_look: Mutex::new(begun), absent: Mutex::new(None) }
    }

    /// End of the reason of a wait for writers of a table: why writers of this replay made no items, and the state of all writers.
    fn advice(&self, table: &str) -> Option<String> {
        let own = self.own.advice(table);
        // A short call ends in time.
        let all = (self.begun.elapsed() >= ASK_EVERY).then(|| self.look(table)).flatten();
        let all = all.map(|seen| format!("; {}", seen.sentence));
        (own.is_some() || all.is_some()).then(|| own.unwrap_or_default() + &all.unwrap_or_default())
    }

    /// Whether no writer of the awaited table has been connected for `writers_timeout`, and the call has waited as long.
    fn are_gone(&self, wait: &Wait<'_>) -> bool {
        let now = Instant::now();
        if self.longest.is_none_or(|longest| now - self.begun < longest) || now < *lock(&self.next_look) {
            return false;
        }
        *lock(&self.next_look) = now + ASK_EVERY;
        wait.awaited().is_some_and(|table| self.find_gone(&table))
    }

    fn find_gone(&self, table: &str) -> bool {
        let long = |absence: Duration| self.longest.is_some_and(|longest| absence >= longest);
        let gone = self.look(table).filter(|seen| seen.absence.is_some_and(long));
        let found = gone.is_some();
        *lock(&self.absent) = gone.map(|seen| seen.sentence);
        found
    }

    /// [`wait::blocking`] for a call that may wait for writers. Their state is appended to the reason of the wait, in the log and in the
    /// deadline error. If they are gone, the call ends with [`Error::NoWriters`].
    pub fn blocking<T: Send>(
        &self,
        py: Python<'_>,
        closing: &Closing,
        work: impl FnOnce(&Wait<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        wait::blocking_advised(py, self.deadline, Some(closing), &|table| self.advice(table), |wait| {
            let interrupted = || (wait.interrupted)() || self.are_gone(wait);
            work(&Wait { interrupted: &interrupted, ..*wait }).map_err(|error| self.explain(error))
        })
    }

    /// The error of the call, or that of writers that are gone.
    fn explain(&self, error: Error) -> Error {
        let long = self.longest.is_some_and(|longest| self.begun.elapsed() >= longest);
        if long && let Some(table) = error.waited_for().and_then(WaitReason::awaited_table) {
            self.find_gone(table);
        }
        match lock(&self.absent).take() {
            Some(absent) if error.waited_for().is_some() || matches!(error, Error::Interrupted) => {
                Error::NoWriters(absent)
            }
            _ => error,
        }
    }

    /// State of a table's writers; `None` if the memory does not answer. Takes no longer than the call may, with its grace.
    fn look(&self, table: &str) -> Option<WritersSeen> {
        let soon = Instant::now() + ASK_WITHIN;
        let until = self.deadline.map_or(soon, |deadline| deadline.min(soon));
        let stats = self.replay.upgrade()?.stats(&Wait::until(Some(until))).ok()?;
        WritersSeen::of(&stats, table)
    }
}

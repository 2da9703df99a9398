//! The writers that a sample waits for: their state, for the reason of its wait, and the end of a wait for writers that are gone.

use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use base::sync::lock;
use base::wait::Wait;
use replay_client::writers_seen::WritersSeen;
use replay_core::error::WaitReason;
use replay_core::replay::Replay;
use replay_link::error::Error;

use crate::open_writers::OpenWriters;

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
    pub fn advice(&self, table: &str) -> Option<String> {
        let own = self.own.advice(table);
        // A short call ends in time.
        let all = (self.begun.elapsed() >= ASK_EVERY).then(|| self.look(table)).flatten();
        let all = all.map(|seen| format!("; {}", seen.sentence));
        (own.is_some() || all.is_some()).then(|| own.unwrap_or_default() + &all.unwrap_or_default())
    }

    /// Whether no writer of the awaited table has been connected for `writers_timeout`, and the call has waited as long.
    pub fn are_gone(&self, wait: &Wait<'_>) -> bool {
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

    /// The error of the call, or that of writers that are gone.
    pub fn explain(&self, error: Error) -> Error {
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

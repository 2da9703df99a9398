//! The writers that a sample waits for: how they are, for the reason of its wait, and the end of a wait for writers that are gone.

use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use base::sync::lock;
use base::wait::Wait;
use replay_core::replay::Replay;
use replay_net::client::writers_seen::WritersSeen;
use replay_net::error::Error;

use crate::open_writers::OpenWriters;

/// Time without an answer after which a call asks how the writers are, and the pause until it asks again.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Limit of asking.
const ASK_WITHIN: Duration = Duration::from_millis(500);

/// The writers of one call's tables.
pub struct AwaitedWriters<'a> {
    tables: Vec<&'a str>,
    /// Writers of this replay, which know why they made no items.
    own: &'a OpenWriters,
    replay: Weak<dyn Replay<Error>>,
    /// `writers_timeout`.
    longest: Option<Duration>,
    /// Begin of the wait.
    begun: Instant,
    next_look: Mutex<Instant>,
    /// What ended the call.
    absent: Mutex<Option<String>>,
}

impl<'a> AwaitedWriters<'a> {
    /// A call that has waited since `begun`, or an earlier one that it continues.
    pub fn new(
        tables: impl Iterator<Item = &'a str>,
        own: &'a OpenWriters,
        replay: Weak<dyn Replay<Error>>,
        longest: Option<Duration>,
        begun: Instant,
    ) -> Self {
        AwaitedWriters {
            tables: tables.collect(),
            own,
            replay,
            longest,
            begun,
            next_look: Mutex::new(begun),
            absent: Mutex::new(None),
        }
    }

    /// What the reason of a wait for writers ends with: why this replay's writers made no items, and how all writers are.
    pub fn advice(&self) -> Option<String> {
        let own = self.tables.iter().find_map(|table| self.own.advice(table));
        // A short call ends in time.
        let all = (self.begun.elapsed() >= ASK_EVERY).then(|| self.look()).flatten();
        let all = all.map(|seen| format!("; {}", seen.sentence));
        (own.is_some() || all.is_some()).then(|| own.unwrap_or_default() + &all.unwrap_or_default())
    }

    /// Whether no writer has been connected for `writers_timeout`, and the wait is as long.
    pub fn are_gone(&self) -> bool {
        let Some(longest) = self.longest.filter(|&longest| self.begun.elapsed() >= longest) else {
            return false;
        };
        let now = Instant::now();
        if std::mem::replace(&mut *lock(&self.next_look), now + ASK_EVERY) > now {
            return lock(&self.absent).is_some();
        }
        let gone = self.look().filter(|seen| seen.absence.is_some_and(|absence| absence >= longest));
        *lock(&self.absent) = gone.map(|seen| seen.sentence);
        lock(&self.absent).is_some()
    }

    /// The error of the call, or that of writers that are gone.
    pub fn explain(&self, error: Error) -> Error {
        let waited = error.waited_for().is_some_and(|reason| reason.is_for_writers()) && {
            *lock(&self.next_look) = self.begun;
            self.are_gone()
        };
        match lock(&self.absent).take() {
            Some(absent) if waited || matches!(error, Error::Interrupted) => Error::NoWriters(absent),
            _ => error,
        }
    }

    /// The first table without a connected writer, or else the first table; `None` if the memory does not answer.
    fn look(&self) -> Option<WritersSeen> {
        let wait = Wait::until(Some(Instant::now() + ASK_WITHIN));
        let stats = self.replay.upgrade()?.stats(&wait).ok()?;
        let seen: Vec<_> = self.tables.iter().filter_map(|table| WritersSeen::of(&stats, table)).collect();
        let absent = seen.iter().position(|seen| seen.absence.is_some());
        seen.into_iter().nth(absent.unwrap_or(0))
    }
}

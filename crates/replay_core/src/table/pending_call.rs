//! The states of one waiting call, without clock and I/O: when to attempt it, when to listen for changes, and how it ends. Between
//! steps an in-process call sleeps on its thread, a server's request in its coroutine.

use std::time::Instant;

use crate::error::{Error, Result};
use crate::wait_reason::WaitReason;
use base::wait::Wait;

use super::Turn;

/// Result of one attempt at a call that may have to wait.
#[derive(Debug)]
pub enum Attempt<T, B = WaitReason> {
    Ready(T),
    /// Nothing was done. [`PendingCall`] says when to try again.
    Blocked(B),
}

impl<T> Attempt<T> {
    pub fn map<U>(self, result: impl FnOnce(T) -> U) -> Attempt<U> {
        match self {
            Attempt::Ready(done) => Attempt::Ready(result(done)),
            Attempt::Blocked(reason) => Attempt::Blocked(reason),
        }
    }
}

/// One call from its first attempt to its end.
pub struct PendingCall<E = Error> {
    turn: Turn,
    /// End of the wait; `None` waits forever.
    until: Option<Instant>,
    /// Makes the error at the end of the wait.
    ended: fn(WaitReason) -> E,
    tried: bool,
}

impl<E> PendingCall<E> {
    /// A call that waits until `until`, then fails with `ended`.
    pub fn new(turn: Turn, until: Option<Instant>, ended: fn(WaitReason) -> E) -> Self {
        PendingCall { turn, until, ended, tried: false }
    }

    pub fn turn(&self) -> &Turn {
        &self.turn
    }

    /// Makes one attempt. Its argument is `true` in the last one before the deadline's error.
    pub fn attempt<T>(
        &mut self,
        clock: impl Fn() -> Instant,
        attempt: impl FnOnce(bool, &mut Turn) -> Result<Attempt<T>, E>,
    ) -> Result<Attempt<T>, E> {
        let over = self.until.is_some_and(|until| clock() >= until);
        self.tried = true;
        match attempt(over, &mut self.turn)? {
            Attempt::Blocked(reason) if over => Err((self.ended)(reason)),
            attempt => Ok(attempt),
        }
    }

    /// Attempts the call until it has ended, or is blocked with a listener that covers the whole attempt: then the caller sleeps until a
    /// change, or until [`Self::again`], and calls `step` again. `listen` makes a listener for the changes that may unblock the call at
    /// its current queue position.
    pub fn step<T, L>(
        &mut self,
        clock: impl Fn() -> Instant,
        listen: impl Fn(&Turn) -> Result<L, E>,
        mut attempt: impl FnMut(bool, &mut Turn) -> Result<Attempt<T>, E>,
    ) -> Result<Attempt<T, (WaitReason, L)>, E> {
        loop {
            let positions = self.turn.positions();
            // Before the attempt, so that no change after it is missed. The first attempt precedes the call's queue position.
            let changed = self.tried.then(|| listen(&self.turn)).transpose()?;
            match (self.attempt(&clock, &mut attempt)?, changed) {
                (Attempt::Ready(done), _) => return Ok(Attempt::Ready(done)),
                // After a change of its queue position the call needs another listener.
                (Attempt::Blocked(reason), Some(changed)) if positions == self.turn.positions() => {
                    return Ok(Attempt::Blocked((reason, changed)));
                }
                (Attempt::Blocked(_), _) => {}
            }
        }
    }

    /// Time at which a call that was blocked at `now` is tried again without a change. The first call of a queue retries soon: a slot
    /// may become free just after the wake-up. Calls behind it, and calls that are certain to be `woken`, sleep until their end.
    pub fn again(&self, now: Instant, woken: bool) -> Option<Instant> {
        match woken || self.turn.is_behind() {
            true => self.until,
            false => {
                let soon = now + Wait::CHECK_EVERY;
                Some(self.until.map_or(soon, |until| until.min(soon)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::waiting::WaitingLine;
    use super::*;

    /// A call of a line that is blocked until the clock is at `ready`, in seconds.
    struct Call<'a> {
        pending: PendingCall,
        line: &'a Arc<WaitingLine>,
        clock: &'a Clock,
        ready: u64,
        /// Whether each attempt was the last before an error.
        attempts: Vec<bool>,
    }

    struct Clock {
        begun: Instant,
        seconds: Cell<u64>,
    }

    impl Clock {
        fn at(&self, seconds: u64) -> Instant {
            self.begun + Duration::from_secs(seconds)
        }
    }

    impl<'a> Call<'a> {
        fn new(line: &'a Arc<WaitingLine>, clock: &'a Clock, until: Option<u64>) -> Self {
            let until = until.map(|seconds| clock.at(seconds));
            Call {
                pending: PendingCall::new(Turn::default(), until, Error::deadline),
                line,
                clock,
                ready: 7,
                attempts: Vec::new(),
            }
        }

        fn step(&mut self) -> Result<Attempt<u64, (WaitReason, event_listener::EventListener)>> {
            let now = self.clock.seconds.get();
            let (line, ready, attempts) = (self.line, self.ready, &mut self.attempts);
            self.pending.step(
                || self.clock.at(now),
                Turn::changed,
                |last, turn| {
                    attempts.push(last);
                    turn.attempt(line, false, || {
                        Ok(match now >= ready {
                            true => Attempt::Ready(now),
                            false => Attempt::Blocked("it rains".into()),
                        })
                    })
                },
            )
        }
    }

    fn clock() -> Clock {
        Clock { begun: Instant::now(), seconds: Cell::new(0) }
    }

    #[test]
    fn a_blocked_call_looks_again_once_it_listens_and_ends_when_it_is_let_through() {
        let (line, clock) = (Arc::default(), clock());
        let mut call = Call::new(&line, &clock, None);
        assert!(matches!(call.step().unwrap(), Attempt::Blocked(_)));
        assert_eq!(call.attempts, [false, false], "the second with a listener");
        let soon = clock.at(3) + Wait::CHECK_EVERY;
        assert_eq!(call.pending.again(clock.at(3), false), Some(soon));
        assert_eq!(call.pending.again(clock.at(3), true), None);
        clock.seconds.set(7);
        assert!(matches!(call.step().unwrap(), Attempt::Ready(7)));
        assert_eq!(call.attempts.len(), 3);
    }

    #[test]
    fn a_call_behind_another_sleeps_until_its_end() {
        let (line, clock) = (Arc::default(), clock());
        let mut first = Call::new(&line, &clock, None);
        let mut second = Call::new(&line, &clock, Some(60));
        for call in [&mut first, &mut second] {
            assert!(matches!(call.step().unwrap(), Attempt::Blocked(_)));
        }
        assert_eq!(second.pending.again(clock.at(0), false), Some(clock.at(60)));
        drop(first);
        let soon = clock.at(0) + Wait::CHECK_EVERY;
        assert_eq!(second.pending.again(clock.at(0), false), Some(soon));
    }

    #[test]
    fn at_its_end_a_blocked_call_fails() {
        let (line, clock) = (Arc::default(), clock());
        let mut call = Call::new(&line, &clock, Some(5));
        assert!(matches!(call.step().unwrap(), Attempt::Blocked(_)));
        clock.seconds.set(5);
        let Err(Error::Deadline { waited_for }) = call.step() else {
            panic!("its wait is over");
        };
        assert_eq!(*waited_for, "it rains".into());
        assert_eq!(call.attempts, [false, false, true]);
    }
}

//! Queues of waiting calls: a table has one for its pushes and one for its samples, each writer one for its pushes that wait for newer
//! parameters. Only the first call of a queue is tried, so that no later call overtakes it and a change wakes two calls, not all.
//!
//! [`PendingCall`] has the states of one call, without clock and I/O: when to attempt it, when to listen for changes, and how it ends.
//! Between polls an in-process call sleeps on its thread, a server's request in its coroutine.
//!
//! # Invariant
//!
//! Waiting pushes and samples are served in order. A push without items skips the queue. A push that waits for newer parameters
//! (`max_version_lag`) is in its writer's own queue.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, WaitReason};
use crate::sync::{AtomicU64, AtomicUsize, Event, EventListener, Mutex, Ordering, fence, lock};
use base::system;
use base::wait::Wait;

/// Queue of waiting calls of one kind.
#[derive(Default)]
pub struct WaitingLine {
    waiting: Mutex<Waiting>,
    /// Length of the queue, readable without the lock.
    length: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    /// By position, the events that are notified when a call is to be tried again.
    calls: BTreeMap<u64, Arc<Event>>,
    /// Position of the next call.
    next: u64,
    /// The reason of the first call's wait; `None` before its first attempt.
    reason: Option<WaitReason>,
}

impl WaitingLine {
    /// Wakes the first call of each queue, after a change that may unblock it.
    pub fn wake_first(lines: &[&Self]) {
        // SeqCst: pairs with the fence in `Turn::enter`. Either the loads below see the new call, or the attempt that
        // follows its entry sees the change.
        fence(Ordering::SeqCst);
        for line in lines {
            if line.length.load(Ordering::Relaxed) > 0 {
                lock(&line.waiting).wake_first();
            }
        }
    }

    /// Number of calls that wait, and the reason of the first one's wait.
    pub fn waits(&self) -> (usize, Option<String>) {
        let waiting = lock(&self.waiting);
        let reason = waiting.reason.as_ref().filter(|_| !waiting.calls.is_empty());
        (waiting.calls.len(), reason.map(WaitReason::to_string))
    }

    pub fn is_waited(&self) -> bool {
        // Relaxed: a hint, as a call may come or go meanwhile.
        self.length.load(Ordering::Relaxed) > 0
    }

    /// Wakes every call: the table is gone.
    pub fn wake_all(&self) {
        for woken in lock(&self.waiting).calls.values() {
            woken.notify(usize::MAX);
        }
    }
}

/// Queue membership of one call: from the first blocked attempt until the turn is dropped, which lets the next call try.
#[derive(Default)]
pub struct Turn {
    position: Option<Position>,
    positions: u32,
    /// Time of the first blocked attempt.
    since: Option<Instant>,
    /// Whether statistics have its wait. A call that continues an earlier one takes this over.
    pub(crate) counted: bool,
}

/// Membership of a queue, until it is dropped.
struct Position {
    line: Arc<WaitingLine>,
    position: u64,
    woken: Arc<Event>,
}

impl Position {
    fn enter(line: &Arc<WaitingLine>) -> Self {
        let woken = Arc::new(Event::new());
        let mut waiting = lock(&line.waiting);
        let position = waiting.next;
        waiting.next += 1;
        waiting.calls.insert(position, woken.clone());
        line.length.store(waiting.calls.len(), Ordering::Relaxed);
        drop(waiting);
        // SeqCst: pairs with the fence in `WaitingLine::wake_first`.
        fence(Ordering::SeqCst);
        Position { line: line.clone(), position, woken }
    }

    /// The reason of its wait behind others; `None` for the first call.
    fn behind(&self) -> Option<WaitReason> {
        let waiting = lock(&self.line.waiting);
        match (waiting.calls.range(..self.position).count(), &waiting.reason) {
            (0, _) => None,
            (ahead, Some(first)) => Some(first.behind(ahead)),
            (ahead, None) => Some(format!("{ahead} earlier calls wait").into()),
        }
    }
}

impl Drop for Position {
    /// Leaves the queue, and lets the next call try.
    fn drop(&mut self) {
        base::planted!(KeptPlace => return);
        let mut waiting = lock(&self.line.waiting);
        let first = waiting.is_first(self.position);
        waiting.calls.remove(&self.position);
        self.line.length.store(waiting.calls.len(), Ordering::Relaxed);
        if first {
            waiting.wake_first();
        }
    }
}

impl Turn {
    /// Whether the call waits behind another one.
    pub fn is_behind(&self) -> bool {
        self.position.as_ref().is_some_and(|here| !lock(&here.line.waiting).is_first(here.position))
    }

    /// Reason of the wait of a call behind others.
    pub fn behind(&self) -> Option<WaitReason> {
        self.position.as_ref()?.behind()
    }

    /// Listener for the next attempt. [`PendingCall`](super::PendingCall) decides when to make it.
    pub fn changed(&self) -> Result<EventListener> {
        match &self.position {
            Some(here) => Ok(here.woken.listen()),
            None => Err(Error::Internal("a call that never blocks waits".into())),
        }
    }

    /// Number of queue positions that the call has had. If it changes during an attempt, the call needs a new listener.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    pub fn waits(&self) -> bool {
        self.position.is_some()
    }

    /// Counts the wait, at the second blocked attempt: the first is the only one of a call without time to wait.
    pub(super) fn count_once(&mut self, waits: &AtomicU64) {
        if !std::mem::replace(&mut self.counted, true) {
            waits.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Time since the first blocked attempt; `None` before it.
    pub fn waited(&self) -> Option<Duration> {
        self.since.map(system::elapsed)
    }

    /// Attempts the call if it is first in the queue or `passes` the others, and enqueues it if it is blocked.
    pub(super) fn attempt<T>(
        &mut self,
        line: &Arc<WaitingLine>,
        passes: bool,
        attempt: impl FnOnce() -> Result<Attempt<T>>,
    ) -> Result<Attempt<T>> {
        // A hint: calls that arrive concurrently may go in any order.
        if !passes
            && line.length.load(Ordering::Relaxed) > 0
            && let Some(reason) = self.enter(line).behind()
        {
            return Ok(Attempt::Blocked(reason));
        }
        let attempt = attempt()?;
        if let Attempt::Blocked(reason) = &attempt {
            let position = self.enter(line).position;
            let mut waiting = lock(&line.waiting);
            if waiting.is_first(position) {
                waiting.reason = Some(reason.clone());
            }
        }
        Ok(attempt)
    }

    /// Position of the call in this queue: joins it at the end if needed, and leaves any other.
    fn enter(&mut self, line: &Arc<WaitingLine>) -> &Position {
        if self.position.as_ref().is_some_and(|here| !Arc::ptr_eq(&here.line, line)) {
            self.position = None;
        }
        self.position.get_or_insert_with(|| {
            self.positions += 1;
            self.since.get_or_insert_with(system::now);
            Position::enter(line)
        })
    }
}

impl Waiting {
    fn is_first(&self, position: u64) -> bool {
        self.calls.first_key_value().is_some_and(|(first, _)| *first == position)
    }

    fn wake_first(&self) {
        if let Some((_, woken)) = self.calls.first_key_value() {
            woken.notify(usize::MAX);
        }
    }
}

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
    pub fn poll<T, L>(
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
    use super::super::waiting::WaitingLine;
    use super::*;
    use event_listener::Listener;
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::Duration;

    const RAIN: &str = "it rains";

    fn blocked(turn: &mut Turn, line: &Arc<WaitingLine>, passes: bool) -> Option<String> {
        let attempt = || {
            Ok(match passes {
                true => Attempt::Ready(()),
                false => Attempt::Blocked(RAIN.into()),
            })
        };
        match turn.attempt(line, false, attempt).unwrap() {
            Attempt::Ready(()) => None,
            Attempt::Blocked(waits) => Some(waits.to_string()),
        }
    }

    #[test]
    fn calls_are_tried_in_the_order_of_their_arrival() {
        let line = Arc::default();
        let [mut first, mut second, mut third] = [(); 3].map(|()| Turn::default());
        assert_eq!(blocked(&mut first, &line, false).unwrap(), RAIN);
        let behind = blocked(&mut second, &line, true).unwrap();
        assert_eq!(behind, format!("1 earlier calls wait: {RAIN}"));
        assert!(blocked(&mut third, &line, true).unwrap().starts_with("2 "));
        assert!(!first.is_behind() && second.is_behind());
        assert_eq!(line.waits(), (3, Some(RAIN.to_owned())));
        drop(second);
        assert!(blocked(&mut third, &line, true).unwrap().starts_with("1 "));
        assert_eq!(blocked(&mut first, &line, true), None);
        let woken = third.changed().unwrap();
        drop(first);
        assert!(woken.wait_timeout(Duration::ZERO).is_some());
        assert_eq!(blocked(&mut third, &line, true), None);
        drop(third);
        assert_eq!(blocked(&mut Turn::default(), &line, true), None);
        assert_eq!(line.waits(), (0, None));
    }

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

        fn poll(&mut self) -> Result<Attempt<u64, (WaitReason, event_listener::EventListener)>> {
            let now = self.clock.seconds.get();
            let (line, ready, attempts) = (self.line, self.ready, &mut self.attempts);
            self.pending.poll(
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
        assert!(matches!(call.poll().unwrap(), Attempt::Blocked(_)));
        assert_eq!(call.attempts, [false, false], "the second with a listener");
        let soon = clock.at(3) + Wait::CHECK_EVERY;
        assert_eq!(call.pending.again(clock.at(3), false), Some(soon));
        assert_eq!(call.pending.again(clock.at(3), true), None);
        clock.seconds.set(7);
        assert!(matches!(call.poll().unwrap(), Attempt::Ready(7)));
        assert_eq!(call.attempts.len(), 3);
    }

    #[test]
    fn a_call_behind_another_sleeps_until_its_end() {
        let (line, clock) = (Arc::default(), clock());
        let mut first = Call::new(&line, &clock, None);
        let mut second = Call::new(&line, &clock, Some(60));
        for call in [&mut first, &mut second] {
            assert!(matches!(call.poll().unwrap(), Attempt::Blocked(_)));
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
        assert!(matches!(call.poll().unwrap(), Attempt::Blocked(_)));
        clock.seconds.set(5);
        let Err(Error::Deadline { waited_for }) = call.poll() else {
            panic!("its wait is over");
        };
        assert_eq!(*waited_for, "it rains".into());
        assert_eq!(call.attempts, [false, false, true]);
    }
}

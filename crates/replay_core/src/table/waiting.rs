//! Queues of waiting calls: a table has one for its pushes and one for its samples, each writer one for its pushes that wait for newer
//! parameters. Only the first call of a queue is tried, so that no later call overtakes it and a change wakes two calls, not all.
//!
//! # Invariant
//!
//! Waiting pushes and samples are served in order. A push without items skips the queue. A push that waits for newer parameters
//! (`max_version_lag`) is in its writer's own queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, AtomicUsize, Event, EventListener, Mutex, Ordering, fence, lock};
use crate::wait_reason::WaitReason;
use base::host;

use super::pending_call::Attempt;

/// Queue of waiting calls of one kind.
#[derive(Default)]
pub struct WaitingLine {
    waiting: Mutex<Waiting>,
    /// Length of the queue, readable without the lock.
    length: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    /// In ascending order of their numbers.
    places: VecDeque<Arc<Place>>,
    /// Number of the next place.
    next: u64,
    /// The reason of the first call's wait; `None` before its first attempt.
    reason: Option<WaitReason>,
}

struct Place {
    number: u64,
    /// Notified when the call is to be tried again.
    woken: Event,
}

impl WaitingLine {
    /// Wakes the first call of each queue, after a change that may unblock it.
    pub fn wake_first(lines: &[&Self]) {
        // SeqCst: pairs with the fence in `Turn::enter`. Either the loads below see the new place, or the attempt that
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
        let reason = waiting.reason.as_ref().filter(|_| !waiting.places.is_empty());
        (waiting.places.len(), reason.map(WaitReason::to_string))
    }

    /// Whether a call waits.
    pub fn is_waited(&self) -> bool {
        // Relaxed: a hint, as a call may come or go meanwhile.
        self.length.load(Ordering::Relaxed) > 0
    }

    /// Wakes every call: the table is gone.
    pub fn wake_all(&self) {
        for place in &lock(&self.waiting).places {
            place.woken.notify(usize::MAX);
        }
    }
}

/// Queue membership of one call: from the first blocked attempt until the turn is dropped, which lets the next call try.
#[derive(Default)]
pub struct Turn {
    place: Option<(Arc<WaitingLine>, Arc<Place>)>,
    places: u32,
    /// Time of the first blocked attempt.
    since: Option<Instant>,
    /// Whether statistics have its wait. A call that continues an earlier one takes this over.
    pub(crate) counted: bool,
}

impl Turn {
    /// Whether the call waits behind another one.
    pub fn is_behind(&self) -> bool {
        self.place.as_ref().is_some_and(|(line, place)| !lock(&line.waiting).is_first(place))
    }

    /// Reason of the wait of a call behind others.
    pub fn behind(&self) -> Option<WaitReason> {
        let (line, place) = self.place.as_ref()?;
        lock(&line.waiting).ahead_of(place)
    }

    /// Listener for the next attempt. [`PendingCall`](super::PendingCall) decides when to make it.
    ///
    /// # Errors
    /// [`Error::Internal`] for a call that was not blocked.
    pub fn changed(&self) -> Result<EventListener> {
        match &self.place {
            Some((_, place)) => Ok(place.woken.listen()),
            None => Err(Error::Internal("a call that never blocks waits".into())),
        }
    }

    /// Number of queue positions that the call has had. If it changes during an attempt, the call needs a new listener.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Whether the call is in a queue.
    pub fn waits(&self) -> bool {
        self.place.is_some()
    }

    /// Counts the wait, at the second blocked attempt: the first is the only one of a call without time to wait.
    pub(super) fn count_once(&mut self, waits: &AtomicU64) {
        if !std::mem::replace(&mut self.counted, true) {
            waits.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Time since the first blocked attempt; `None` before it.
    pub fn waited(&self) -> Option<Duration> {
        self.since.map(host::elapsed)
    }

    /// Attempts the call if it is first in the queue or `passes` the others, and enqueues it if it is blocked.
    ///
    /// # Errors
    /// The error of `attempt`, which ends the call.
    pub(super) fn attempt<T>(
        &mut self,
        line: &Arc<WaitingLine>,
        passes: bool,
        attempt: impl FnOnce() -> Result<Attempt<T>>,
    ) -> Result<Attempt<T>> {
        // A hint: calls that arrive concurrently may go in any order.
        if !passes && line.length.load(Ordering::Relaxed) > 0 {
            let place = self.enter(line);
            if let Some(waits) = lock(&line.waiting).ahead_of(place) {
                return Ok(Attempt::Blocked(waits));
            }
        }
        let attempt = attempt()?;
        if let Attempt::Blocked(waits) = &attempt {
            let place = self.enter(line);
            let mut waiting = lock(&line.waiting);
            if waiting.is_first(place) {
                waiting.reason = Some(waits.clone());
            }
        }
        Ok(attempt)
    }

    /// Position of the call in this queue: joins it at the end if needed, and leaves any other.
    fn enter(&mut self, line: &Arc<WaitingLine>) -> &Arc<Place> {
        let here = |(of, _): &(Arc<WaitingLine>, _)| Arc::ptr_eq(of, line);
        if !self.place.as_ref().is_some_and(here) {
            self.leave();
            self.places += 1;
            self.since.get_or_insert_with(host::now);
        }
        let (_, place) = self.place.get_or_insert_with(|| {
            let mut waiting = lock(&line.waiting);
            let place = Arc::new(Place { number: waiting.next, woken: Event::new() });
            waiting.next += 1;
            waiting.places.push_back(place.clone());
            line.length.store(waiting.places.len(), Ordering::Relaxed);
            drop(waiting);
            // SeqCst: pairs with the fence in `WaitingLine::wake_first`.
            fence(Ordering::SeqCst);
            (line.clone(), place)
        });
        place
    }
}

impl Waiting {
    /// Reason of the wait of a call behind others.
    fn ahead_of(&self, place: &Arc<Place>) -> Option<WaitReason> {
        let ahead = self.position(place).filter(|&ahead| ahead > 0)?;
        Some(match &self.reason {
            Some(first) => first.behind(ahead),
            None => format!("{ahead} earlier calls wait").into(),
        })
    }

    fn position(&self, place: &Place) -> Option<usize> {
        let number = |one: &Arc<Place>| one.number;
        self.places.binary_search_by_key(&place.number, number).ok()
    }

    fn is_first(&self, place: &Arc<Place>) -> bool {
        self.places.front().is_some_and(|one| Arc::ptr_eq(one, place))
    }

    fn wake_first(&self) {
        if let Some(first) = self.places.front() {
            first.woken.notify(usize::MAX);
        }
    }
}

impl Turn {
    /// Leaves the queue, and lets the next call try.
    fn leave(&mut self) {
        let Some((line, place)) = self.place.take() else {
            return;
        };
        let mut waiting = lock(&line.waiting);
        let first = waiting.is_first(&place);
        if let Some(at) = waiting.position(&place) {
            waiting.places.remove(at);
        }
        line.length.store(waiting.places.len(), Ordering::Relaxed);
        if first {
            waiting.wake_first();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        base::planted!(KeptPlace => return);
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use event_listener::Listener;

    use super::*;

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
}

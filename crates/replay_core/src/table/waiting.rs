//! The order of calls that wait: a table has a line for its pushes and one for its samples, each writer a line for its pushes
//! that wait for newer parameters, and only the first call of a line is tried. So a call is passed by no later one, however fast that is, and a change wakes two calls, not all.
//!
//! # Invariant
//!
//! Waiting pushes and samples are served in order. A push without items skips the line. A push that waits for newer
//! parameters (`max_version_lag`) is in its writer's own line.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_listener::{Event, EventListener};

use crate::cause::WaitReason;
use crate::error::{Error, Result};
use base::sync::lock;

use super::Attempt;
use super::activity;

/// Calls of one kind that wait for a table.
#[derive(Default)]
pub struct WaitingLine {
    waiting: Mutex<Waiting>,
    /// Number of places, for calls that only ask whether there are any.
    length: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    /// By their numbers, which rise.
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
    /// Wakes the first calls of these lines, after a change that may let them through.
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
        let reason = waiting
            .reason
            .as_ref()
            .filter(|_| !waiting.places.is_empty());
        (waiting.places.len(), reason.map(WaitReason::to_string))
    }

    /// Wakes every call: the table is gone.
    pub fn wake_all(&self) {
        for place in &lock(&self.waiting).places {
            place.woken.notify(usize::MAX);
        }
    }
}

/// The turn of one call. Its place in a line begins with the first blocked attempt, and ends with the call: dropping the turn
/// lets the next one try.
#[derive(Default)]
pub struct Turn {
    /// Number of the table in its ids; `None` before the first attempt.
    table: Option<u16>,
    place: Option<(Arc<WaitingLine>, Arc<Place>)>,
    places: u32,
    /// Time of the first blocked attempt.
    since: Option<Instant>,
    /// For a push: keeps its writer from expiring.
    pub(super) push: Option<activity::Waiting>,
}

impl Turn {
    /// A call on the table of this number alone; with `None` on the one of the first attempt. Another table of the same name,
    /// made after that was dropped, refuses it.
    pub fn of_table(number: Option<u16>) -> Self {
        let mut turn = Turn::default();
        turn.table = number;
        turn
    }

    /// Leaves the line. The call stays on its table.
    pub fn give_up_place(&mut self) {
        *self = Turn::of_table(self.table);
    }

    /// Whether the call is on a certain table already.
    pub fn has_table(&self) -> bool {
        self.table.is_some()
    }

    /// Whether the call is on the table of this number, as it is from its first attempt on.
    pub(super) fn is_on(&mut self, number: u16) -> bool {
        *self.table.get_or_insert(number) == number
    }

    /// Whether the call waits, and another one is to be tried before it.
    pub fn is_behind(&self) -> bool {
        self.place
            .as_ref()
            .is_some_and(|(line, place)| !lock(&line.waiting).is_first(place))
    }

    /// The reason of the call's wait while another one is to be tried before it.
    pub fn behind(&self) -> Option<WaitReason> {
        let (line, place) = self.place.as_ref()?;
        lock(&line.waiting).ahead_of(place)
    }

    /// A listener for the moment to try the call again. [`PendingCall`](super::PendingCall) says when to make it.
    ///
    /// # Errors
    /// [`Error::Internal`] for a call that was not blocked.
    pub fn changed(&self) -> Result<EventListener> {
        match &self.place {
            Some((_, place)) => Ok(place.woken.listen()),
            None => Err(Error::Internal("a call that never blocks waits".into())),
        }
    }

    /// Number of places that the call has had. Another one than before an attempt means that the attempt gave it a new place,
    /// with a listener of its own.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Whether an attempt was blocked.
    pub fn waits(&self) -> bool {
        self.place.is_some()
    }

    /// Time since the first blocked attempt; `None` before it.
    pub fn waited(&self) -> Option<Duration> {
        self.since.map(|since| since.elapsed())
    }

    /// Makes an attempt if it is this call's turn, or if the call `passes` the others, and takes a place in the line if it
    /// has to wait.
    ///
    /// # Errors
    /// The error of `attempt`, which ends the call.
    pub(super) fn attempt<T>(
        &mut self,
        line: &Arc<WaitingLine>,
        passes: bool,
        attempt: impl FnOnce() -> Result<Attempt<T>>,
    ) -> Result<Attempt<T>> {
        // A hint: of calls that arrive at the same time, any may be first.
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

    /// The call's place in this line, the last one if it has none yet. It has no other.
    fn enter(&mut self, line: &Arc<WaitingLine>) -> &Arc<Place> {
        let here = |(of, _): &(Arc<WaitingLine>, _)| Arc::ptr_eq(of, line);
        if !self.place.as_ref().is_some_and(here) {
            self.leave();
            self.places += 1;
            self.since.get_or_insert_with(Instant::now);
        }
        let (_, place) = self.place.get_or_insert_with(|| {
            let mut waiting = lock(&line.waiting);
            let place = Arc::new(Place {
                number: waiting.next,
                woken: Event::new(),
            });
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
    /// The reason of a call's wait while others are ahead of it.
    fn ahead_of(&self, place: &Arc<Place>) -> Option<WaitReason> {
        let ahead = self.position(place).filter(|&ahead| ahead > 0)?;
        Some(match &self.reason {
            Some(first) => first.behind(ahead as u64),
            None => WaitReason::Ahead(ahead as u64),
        })
    }

    fn position(&self, place: &Place) -> Option<usize> {
        let number = |one: &Arc<Place>| one.number;
        self.places.binary_search_by_key(&place.number, number).ok()
    }

    fn is_first(&self, place: &Arc<Place>) -> bool {
        self.places
            .front()
            .is_some_and(|one| Arc::ptr_eq(one, place))
    }

    fn wake_first(&self) {
        if let Some(first) = self.places.front() {
            first.woken.notify(usize::MAX);
        }
    }
}

impl Turn {
    /// Gives the place up, so that the next call of its line is tried.
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
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use event_listener::Listener;

    use super::*;
    use crate::cause::Cause;

    const RAIN: &str = "table \"t\" is being emptied";

    fn blocked(turn: &mut Turn, line: &Arc<WaitingLine>, passes: bool) -> Option<String> {
        let attempt = || {
            Ok(match passes {
                true => Attempt::Ready(()),
                false => Attempt::Blocked(WaitReason::at("t", Cause::Emptied)),
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

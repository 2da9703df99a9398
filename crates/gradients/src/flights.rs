//! Contributions in flight: sent, and without a sum. Sums open the congestion window, losses close it, and what is overdue is queried.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Reordering threshold: a sum counts as lost once a sum more than this many segments later has arrived. One path hardly reorders more.
const REORDERING: u32 = 8;
/// Most segments queried at a time, the oldest first.
pub const MAX_QUERIES: usize = 16;

struct Flight {
    segment: u32,
    /// `None` if its sum measures no round trip: it was sent again, or waits for other workers.
    sent: Option<Instant>,
    next_query: Instant,
    queries: u32,
    /// A later sum has caused a query.
    overtaken: bool,
    /// The aggregator has it, and waits for other workers.
    acknowledged: bool,
}

/// Contributions in flight, the oldest first.
pub struct Flights {
    window: CongestionWindow,
    flights: VecDeque<Flight>,
    acknowledged: usize,
}

impl Flights {
    /// No contributions yet; up to `limit` may be in flight.
    pub fn new(limit: u32) -> Self {
        Flights { window: CongestionWindow::new(limit), flights: VecDeque::new(), acknowledged: 0 }
    }

    /// Begins a vector, whose segments are numbered from 0 again.
    pub fn begin(&mut self) {
        self.flights.clear();
        self.acknowledged = 0;
        self.window.recovery_point = 0;
    }

    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    pub fn contains(&self, segment: u32) -> bool {
        self.position(segment).is_some()
    }

    /// Sums arrive roughly in the order of their contributions, so the search is short.
    fn position(&self, segment: u32) -> Option<usize> {
        self.flights.iter().position(|flight| flight.segment == segment)
    }

    /// Whether another contribution may leave.
    pub fn may_launch(&self) -> bool {
        self.flights.len() - self.acknowledged < self.window.size()
    }

    /// Whether the oldest contribution and segment `next`, the newest, are in different entries of the aggregator's window.
    pub fn are_within_limit(&self, next: u32) -> bool {
        self.flights.front().is_none_or(|oldest| next - oldest.segment < self.window.limit as u32)
    }

    /// Time to wait for a sum.
    pub fn timeout(&self) -> Duration {
        self.window.timeout(0)
    }

    /// Adds a contribution that was sent now.
    pub fn launch(&mut self, now: Instant, segment: u32) {
        let next_query = now + self.window.timeout(0);
        let flight = Flight { segment, sent: Some(now), next_query, queries: 0, overtaken: false, acknowledged: false };
        self.flights.push_back(flight);
    }

    /// Removes a contribution whose sum has arrived; `false` if it was not in flight.
    pub fn land(&mut self, now: Instant, segment: u32) -> bool {
        let Some(flight) = self.position(segment).and_then(|at| self.flights.remove(at)) else {
            return false;
        };
        self.acknowledged -= usize::from(flight.acknowledged);
        // Also of a queried one: an estimate below half of the round trip has all queried, and has to rise.
        self.window.on_sum(flight.sent.map(|sent| now.saturating_duration_since(sent)));
        true
    }

    /// Counts the loss of a contribution, which is sent again; `false` if it is not in flight. `next` is the first segment that was not sent.
    pub fn lose(&mut self, now: Instant, segment: u32, next: u32) -> bool {
        let Some(at) = self.position(segment) else {
            return false;
        };
        let flight = &mut self.flights[at];
        (flight.sent, flight.queries) = (None, flight.queries.max(1));
        flight.next_query = now + self.window.timeout(1);
        self.acknowledged -= usize::from(std::mem::take(&mut flight.acknowledged));
        self.window.on_loss(segment, next);
        true
    }

    /// Notes that a segment waits for other workers.
    pub fn note_waiting(&mut self, segment: u32) {
        if let Some(at) = self.position(segment) {
            self.flights[at].sent = None;
        }
    }

    /// Notes that the aggregator has a contribution, and waits for other workers.
    pub fn acknowledge(&mut self, segment: u32) {
        self.note_waiting(segment);
        if let Some(at) = self.position(segment) {
            let before = std::mem::replace(&mut self.flights[at].acknowledged, true);
            self.acknowledged += usize::from(!before);
        }
    }

    /// Whether the aggregator has all of them.
    pub fn are_acknowledged(&self) -> bool {
        self.acknowledged == self.flights.len()
    }

    /// Segments in flight.
    pub fn segments(&self) -> Vec<u32> {
        self.flights.iter().map(|flight| flight.segment).collect()
    }

    /// Segments to query because the sum of `segment`, which should have come after theirs, has arrived. `next` is the first segment that
    /// was not sent.
    pub fn overtaken(&mut self, now: Instant, segment: u32, next: u32) -> Vec<u32> {
        let earlier = self.flights.iter().take_while(|flight| flight.segment + REORDERING < segment);
        let mut queried = Vec::new();
        for at in 0..earlier.count() {
            if !std::mem::replace(&mut self.flights[at].overtaken, true) {
                self.window.on_loss(self.flights[at].segment, next);
                queried.push(self.query(now, at));
            }
        }
        queried
    }

    /// Segments to query because their sums are overdue.
    pub fn overdue(&mut self, now: Instant) -> Vec<u32> {
        let due: Vec<usize> = self.oldest().filter(|&at| self.flights[at].next_query <= now).collect();
        due.into_iter().map(|at| self.query(now, at)).collect()
    }

    /// Time of the next query.
    pub fn next_query(&self) -> Option<Instant> {
        self.oldest().map(|at| self.flights[at].next_query).min()
    }

    /// The contributions that may be queried: first those that the aggregator may not have.
    fn oldest(&self) -> impl Iterator<Item = usize> {
        let of = |acknowledged| {
            let flights = self.flights.iter().enumerate();
            flights.filter(move |(_, flight)| flight.acknowledged == acknowledged).map(|(at, _)| at)
        };
        of(false).chain(of(true)).take(MAX_QUERIES)
    }

    fn query(&mut self, now: Instant, at: usize) -> u32 {
        let flight = &mut self.flights[at];
        flight.queries += 1;
        flight.next_query = now + self.window.timeout(flight.queries);
        flight.segment
    }
}

const INITIAL: f32 = 32.0;
/// Smallest window after losses.
const SMALLEST: f32 = 8.0;
/// Timeout before the first round trip is measured, and limits afterwards.
const INITIAL_TIMEOUT: Duration = Duration::from_millis(20);
const MIN_TIMEOUT: Duration = Duration::from_millis(5);
const MAX_TIMEOUT: Duration = Duration::from_millis(200);
/// Longest timeout after a retry, unless the first one was longer: under heavy loss a deadline has to have time for many queries.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_millis(50);

/// Congestion window of one worker. A sum acknowledges a contribution, so contributions leave at the aggregator's pace. The window grows by slow
/// start, then additively. A loss halves it, at most once for the segments that were in flight together.
#[derive(Debug, Clone)]
pub struct CongestionWindow {
    limit: f32,
    size: f32,
    /// Size from which growth is additive.
    slow_start_threshold: f32,
    /// First segment that was not in flight at the last loss.
    recovery_point: u32,
    round_trip: Option<Duration>,
}

impl CongestionWindow {
    pub fn new(limit: u32) -> Self {
        let limit = limit.max(1) as f32;
        CongestionWindow {
            limit,
            size: INITIAL.min(limit),
            slow_start_threshold: limit,
            recovery_point: 0,
            round_trip: None,
        }
    }

    /// Segments that may be in flight.
    pub fn size(&self) -> usize {
        self.size as usize
    }

    /// Counts a sum; `round_trip` is the time since its contribution, if that was sent once.
    pub fn on_sum(&mut self, round_trip: Option<Duration>) {
        let growth = match self.size < self.slow_start_threshold {
            true => 1.0,
            false => self.size.recip(),
        };
        self.size = (self.size + growth).min(self.limit);
        if let Some(measured) = round_trip {
            self.round_trip = Some(match self.round_trip {
                None => measured,
                Some(average) => (average * 7 + measured) / 8,
            });
        }
    }

    /// Counts the loss of `segment`; `next` is the first segment that has not been sent.
    pub fn on_loss(&mut self, segment: u32, next: u32) {
        if segment >= self.recovery_point {
            self.size = (self.size / 2.0).max(SMALLEST.min(self.limit));
            self.slow_start_threshold = self.size;
            self.recovery_point = next;
        }
    }

    /// Time to wait for a sum, after `tries` queries for it.
    pub fn timeout(&self, tries: u32) -> Duration {
        let first = self.round_trip.map_or(INITIAL_TIMEOUT, |took| 2 * took);
        let first = first.clamp(MIN_TIMEOUT, MAX_TIMEOUT);
        (first * (1 << tries.min(6))).min(first.max(MAX_RETRY_TIMEOUT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_that_grows_beyond_the_timeout_ends_needless_queries() {
        let (mut flights, mut now, mut queries) = (Flights::new(8), Instant::now(), 0);
        let ms = Duration::from_millis;
        for segment in 0..200 {
            // A queue of 40 ms fills up.
            let round_trip = if segment < 100 { ms(4) } else { ms(44) };
            flights.launch(now, segment);
            let queried = flights.overdue(now + round_trip - ms(1));
            queries += if segment < 150 { 0 } else { queried.len() };
            now += round_trip;
            assert!(flights.land(now, segment));
        }
        assert_eq!(queries, 0, "of the last 50");
    }

    #[test]
    fn a_resent_contribution_and_one_that_waits_measure_no_round_trip() {
        let (mut flights, now) = (Flights::new(8), Instant::now());
        flights.launch(now, 0);
        assert!(flights.lose(now, 0, 1));
        flights.launch(now, 1);
        flights.note_waiting(1);
        (0..2).for_each(|segment| assert!(flights.land(now + Duration::from_secs(1), segment)));
        assert_eq!(flights.timeout(), INITIAL_TIMEOUT);
    }

    #[test]
    fn it_grows_with_sums_and_halves_once_for_one_flight() {
        let mut window = CongestionWindow::new(100);
        assert_eq!(window.size(), 32);
        (0..200).for_each(|_| window.on_sum(None));
        assert_eq!(window.size(), 100);
        window.on_loss(10, 100);
        window.on_loss(50, 101);
        assert_eq!(window.size(), 50);
        window.on_loss(100, 150);
        assert_eq!(window.size(), 25);
        (0..25).for_each(|_| window.on_sum(None));
        assert!(window.size() <= 26);
        (0..100).for_each(|i| window.on_loss(1000 + 10 * i, 1001 + 10 * i));
        assert_eq!(window.size(), 8);
    }

    #[test]
    fn timeouts_follow_the_round_trip_within_limits() {
        let mut window = CongestionWindow::new(8);
        assert_eq!(window.timeout(0), INITIAL_TIMEOUT);
        window.on_sum(Some(Duration::from_micros(50)));
        assert_eq!(window.timeout(0), MIN_TIMEOUT);
        assert_eq!(window.timeout(1), 2 * MIN_TIMEOUT);
        assert_eq!(window.timeout(60), MAX_RETRY_TIMEOUT);
        (0..99).for_each(|_| window.on_sum(Some(Duration::from_secs(9))));
        assert_eq!(window.timeout(0), MAX_TIMEOUT);
        assert_eq!(window.timeout(60), MAX_TIMEOUT);
    }
}

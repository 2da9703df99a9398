//! Contributions in flight: sent, and without a sum. Sums open the congestion window, losses close it, and what is overdue is queried.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::congestion_window::CongestionWindow;

/// Reordering threshold: a sum counts as lost once a sum more than this many segments later has arrived. One path hardly reorders more.
const REORDERING: u32 = 8;
/// Most segments queried at a time, the oldest first.
pub const MAX_QUERIES: usize = 16;

struct Flight {
    segment: u32,
    sent: Instant,
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
        self.window.begin_round();
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
        self.flights.front().is_none_or(|oldest| next - oldest.segment < self.window.limit())
    }

    /// Time to wait for a sum.
    pub fn timeout(&self) -> Duration {
        self.window.timeout(0)
    }

    /// Adds a contribution that was sent now.
    pub fn launch(&mut self, now: Instant, segment: u32) {
        let next_query = now + self.window.timeout(0);
        let flight = Flight { segment, sent: now, next_query, queries: 0, overtaken: false, acknowledged: false };
        self.flights.push_back(flight);
    }

    /// Removes a contribution whose sum has arrived; `false` if it was not in flight.
    pub fn land(&mut self, now: Instant, segment: u32) -> bool {
        let Some(flight) = self.position(segment).and_then(|at| self.flights.remove(at)) else {
            return false;
        };
        self.acknowledged -= usize::from(flight.acknowledged);
        let round_trip = (flight.queries == 0).then(|| now.saturating_duration_since(flight.sent));
        self.window.on_sum(round_trip);
        true
    }

    /// Counts the loss of a contribution, which is sent again; `false` if it is not in flight. `next` is the first segment that was not sent.
    pub fn lose(&mut self, now: Instant, segment: u32, next: u32) -> bool {
        let Some(at) = self.position(segment) else {
            return false;
        };
        let flight = &mut self.flights[at];
        flight.queries = flight.queries.max(1);
        flight.next_query = now + self.window.timeout(1);
        self.acknowledged -= usize::from(std::mem::take(&mut flight.acknowledged));
        self.window.on_loss(segment, next);
        true
    }

    /// Notes that the aggregator has a contribution.
    pub fn acknowledge(&mut self, segment: u32) {
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

//! A worker's congestion window and retransmission timeout.
//!
//! A sum acknowledges a contribution, so contributions leave at the aggregator's pace. The window grows by slow start, then additively. A
//! loss halves it, at most once for the segments that were in flight together.

use std::time::Duration;

const INITIAL: f32 = 32.0;
/// Smallest window after losses.
const SMALLEST: f32 = 8.0;
/// Timeout before the first round trip is measured, and limits afterwards.
const INITIAL_TIMEOUT: Duration = Duration::from_millis(20);
const MIN_TIMEOUT: Duration = Duration::from_millis(5);
const MAX_TIMEOUT: Duration = Duration::from_millis(200);
/// Longest timeout after a retry, unless the first one was longer: a query has ten bytes, and under heavy loss many are needed within a
/// deadline.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_millis(50);

/// Congestion window of one worker.
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

    pub fn limit(&self) -> u32 {
        self.limit as u32
    }

    /// Begins a round, whose segments are numbered from 0 again.
    pub fn begin_round(&mut self) {
        self.recovery_point = 0;
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

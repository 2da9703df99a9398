//! How many segments a worker has under way, and how long it waits before it asks for one. Each sum lets the next contribution go, so the
//! aggregator's pace is the worker's; the window grows while nothing is lost, and is halved when something is, at most once for what was
//! under way together.

use std::time::Duration;

/// Segments under way at first.
const INITIAL: f32 = 32.0;
/// Losses do not make it smaller.
const SMALLEST: f32 = 8.0;
const FIRST_PATIENCE: Duration = Duration::from_millis(20);
const LEAST_PATIENCE: Duration = Duration::from_millis(5);
const MOST_PATIENCE: Duration = Duration::from_millis(200);
/// Questions are ten bytes: asking often costs little, and where much is lost many are needed within a deadline.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// The window of one worker.
#[derive(Debug, Clone)]
pub struct Window {
    limit: f32,
    allowed: f32,
    /// Growth is slower from here on.
    careful_from: f32,
    /// Losses before this segment belong to one that has been answered.
    recover: u32,
    round_trip: Option<Duration>,
}

impl Window {
    /// At most `limit` segments.
    pub fn new(limit: u32) -> Self {
        let limit = limit.max(1) as f32;
        Window {
            limit,
            allowed: INITIAL.min(limit),
            careful_from: limit,
            recover: 0,
            round_trip: None,
        }
    }

    /// Segments that may be under way.
    pub fn allowed(&self) -> usize {
        self.allowed as usize
    }

    /// Most that may ever be.
    pub fn limit(&self) -> u32 {
        self.limit as u32
    }

    /// Segments are numbered from 0 again.
    pub fn begin(&mut self) {
        self.recover = 0;
    }

    /// A sum came, the given time after its contribution left, where that was sent once.
    pub fn sum(&mut self, took: Option<Duration>) {
        let step = match self.allowed < self.careful_from {
            true => 1.0,
            false => self.allowed.recip(),
        };
        self.allowed = (self.allowed + step).min(self.limit);
        if let Some(took) = took {
            self.round_trip = Some(match self.round_trip {
                None => took,
                Some(before) => (before * 7 + took) / 8,
            });
        }
    }

    /// `segment` was lost; `next` is the first that has not been sent.
    pub fn loss(&mut self, segment: u32, next: u32) {
        if segment >= self.recover {
            self.allowed = (self.allowed / 2.0).max(SMALLEST.min(self.limit));
            self.careful_from = self.allowed;
            self.recover = next;
        }
    }

    /// How long to wait for a sum before the try of this number, from 0.
    pub fn patience(&self, tries: u32) -> Duration {
        let first = self.round_trip.map_or(FIRST_PATIENCE, |took| 2 * took);
        let first = first.clamp(LEAST_PATIENCE, MOST_PATIENCE);
        (first * (1 << tries.min(6))).min(first.max(ASK_EVERY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_sums_and_halves_once_for_one_flight() {
        let mut window = Window::new(100);
        assert_eq!(window.allowed(), 32);
        (0..200).for_each(|_| window.sum(None));
        assert_eq!(window.allowed(), 100);
        window.loss(10, 100);
        window.loss(50, 101);
        assert_eq!(window.allowed(), 50);
        window.loss(100, 150);
        assert_eq!(window.allowed(), 25);
        (0..25).for_each(|_| window.sum(None));
        assert!(window.allowed() <= 26);
        (0..100).for_each(|i| window.loss(1000 + 10 * i, 1001 + 10 * i));
        assert_eq!(window.allowed(), 8);
    }

    #[test]
    fn patience_follows_the_round_trip_within_limits() {
        let mut window = Window::new(8);
        assert_eq!(window.patience(0), FIRST_PATIENCE);
        window.sum(Some(Duration::from_micros(50)));
        assert_eq!(window.patience(0), LEAST_PATIENCE);
        assert_eq!(window.patience(1), 2 * LEAST_PATIENCE);
        assert_eq!(window.patience(60), ASK_EVERY);
        (0..99).for_each(|_| window.sum(Some(Duration::from_secs(9))));
        assert_eq!(window.patience(0), MOST_PATIENCE);
        assert_eq!(window.patience(60), MOST_PATIENCE);
    }
}

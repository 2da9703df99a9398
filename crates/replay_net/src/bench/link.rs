//! A model of one direction of a link, without I/O and without a clock: the arrival time of each piece of data. Times are since
//! any fixed instant.
//!
//! A piece first waits until the earlier ones have been transmitted, then takes `bytes / rate`, then `delay` and a part of
//! `jitter`. Pieces of one stream arrive in order; datagrams do not have to.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use base::words::Number;

/// Payload of a TCP segment on Ethernet, for the loss of longer pieces.
const SEGMENT: usize = 1448;

/// Transmission time that may wait before the link: a sender of a stream then has to wait, and a datagram is lost.
pub const QUEUE: Duration = Duration::from_millis(20);

/// Shortest time until a lost segment of a stream is sent again.
const MIN_RETRANSMISSION: Duration = Duration::from_millis(1);

/// Largest loss: with a higher one a segment would be sent again for ever.
const MAX_LOSS: f64 = 0.9;

/// Properties of one direction of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkConfig {
    /// Delay of every piece.
    pub delay: Duration,
    /// Longest further delay of a piece; its delays are uniformly distributed.
    pub jitter: Duration,
    /// Bytes a second; `None` for no limit.
    pub rate: Option<f64>,
    /// Probability that a packet is lost. A lost datagram does not arrive; a lost segment of a stream arrives a round trip later,
    /// and so does everything behind it.
    pub loss: f64,
}

impl Default for LinkConfig {
    /// A link that changes nothing.
    fn default() -> Self {
        LinkConfig {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            loss: 0.0,
        }
    }
}

impl LinkConfig {
    /// # Errors
    /// A value out of range, in words.
    pub fn check(&self) -> Result<(), String> {
        if !(0.0..=MAX_LOSS).contains(&self.loss) {
            let got = Number(self.loss);
            return Err(format!("loss is a probability, 0 to {MAX_LOSS}, got {got}"));
        }
        match self.rate {
            Some(rate) if !(1.0..=1e15).contains(&rate) => Err(format!(
                "rate is in bytes per second, 1 to 1e15, got {}",
                Number(rate)
            )),
            _ => Ok(()),
        }
    }
}

/// The last arrival of one stream, behind which its next piece arrives.
#[derive(Debug, Default, Clone, Copy)]
pub struct StreamOrder(Duration);

/// One direction of a link, which several streams may share.
pub struct Link {
    config: LinkConfig,
    random: StdRng,
    /// End of the transmission of all earlier pieces.
    free: Duration,
}

impl Link {
    /// A link whose random numbers are seeded with `seed`.
    pub fn new(config: LinkConfig, seed: u64) -> Self {
        Link {
            config,
            random: StdRng::seed_from_u64(seed),
            free: Duration::ZERO,
        }
    }

    /// Time from which a sender of a stream may send its next piece.
    pub fn ready(&self) -> Duration {
        self.free.saturating_sub(QUEUE)
    }

    /// Arrival of a piece of a stream that is sent at `now`.
    pub fn stream(&mut self, now: Duration, bytes: usize, order: &mut StreamOrder) -> Duration {
        let segments = bytes.div_ceil(SEGMENT).max(1) as f64;
        let mut arrival = self.transmit(now, bytes);
        // Any lost segment holds the piece back; a segment that is sent again can be lost again.
        let mut lost = 1.0 - (1.0 - self.config.loss).powf(segments);
        while self.config.loss > 0.0 && self.random.random_bool(lost) {
            arrival += (2 * self.config.delay + self.config.jitter).max(MIN_RETRANSMISSION);
            lost = self.config.loss;
        }
        order.0 = order.0.max(arrival);
        order.0
    }

    /// Arrival of a datagram that is sent at `now`; `None` if it is lost.
    pub fn datagram(&mut self, now: Duration, bytes: usize) -> Option<Duration> {
        if self.config.loss > 0.0 && self.random.random_bool(self.config.loss) {
            return None;
        }
        (self.ready() <= now).then(|| self.transmit(now, bytes))
    }

    fn transmit(&mut self, now: Duration, bytes: usize) -> Duration {
        let taken = self.config.rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(bytes as f64 / rate)
        });
        self.free = self.free.max(now) + taken;
        let jitter = match self.config.jitter {
            Duration::ZERO => Duration::ZERO,
            jitter => self.random.random_range(Duration::ZERO..=jitter),
        };
        self.free + self.config.delay + jitter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn delayed() -> LinkConfig {
        LinkConfig {
            delay: 5 * MS,
            ..LinkConfig::default()
        }
    }

    /// Arrivals of `count` pieces of `bytes`, one sent each millisecond.
    fn stream(config: LinkConfig, seed: u64, count: u32, bytes: usize) -> Vec<Duration> {
        let (mut link, mut order) = (Link::new(config, seed), StreamOrder::default());
        let sent = (0..count).map(|n| link.stream(n * MS, bytes, &mut order));
        sent.collect()
    }

    fn datagrams(config: LinkConfig, seed: u64, count: u32) -> Vec<Option<Duration>> {
        let mut link = Link::new(config, seed);
        (0..count).map(|n| link.datagram(n * MS, 1000)).collect()
    }

    #[test]
    fn a_link_without_properties_delivers_at_once() {
        let arrivals = stream(LinkConfig::default(), 0, 10, 1 << 20);
        assert_eq!(arrivals, (0..10).map(|n| n * MS).collect::<Vec<_>>());
    }

    #[test]
    fn every_piece_takes_the_delay() {
        for (n, arrival) in (0..).zip(stream(delayed(), 0, 10, 1 << 20)) {
            assert_eq!(arrival, n * MS + 5 * MS);
        }
        for (n, arrival) in (0..).zip(datagrams(delayed(), 0, 10)) {
            assert_eq!(arrival, Some(n * MS + 5 * MS));
        }
    }

    #[test]
    fn the_rate_spaces_pieces_of_all_streams_and_then_stops_their_senders() {
        let config = LinkConfig {
            rate: Some(1e6),
            ..delayed()
        };
        let mut link = Link::new(config, 0);
        let (mut one, mut other) = (StreamOrder::default(), StreamOrder::default());
        // 10 kB take 10 ms each.
        assert_eq!(link.stream(Duration::ZERO, 10_000, &mut one), 15 * MS);
        assert_eq!(link.ready(), Duration::ZERO);
        assert_eq!(link.stream(Duration::ZERO, 10_000, &mut other), 25 * MS);
        assert_eq!(link.stream(Duration::ZERO, 10_000, &mut one), 35 * MS);
        assert_eq!(link.ready(), 30 * MS - QUEUE);
        // A link that was idle does not catch up.
        assert_eq!(link.stream(100 * MS, 10_000, &mut one), 115 * MS);
    }

    #[test]
    fn datagrams_beyond_the_queue_are_lost() {
        let config = LinkConfig {
            rate: Some(1e6),
            ..delayed()
        };
        let mut link = Link::new(config, 0);
        let sent: Vec<_> = (0..6)
            .map(|_| link.datagram(Duration::ZERO, 10_000))
            .collect();
        let arrivals = [
            Some(15 * MS),
            Some(25 * MS),
            Some(35 * MS),
            None,
            None,
            None,
        ];
        assert_eq!(sent, arrivals);
        assert_eq!(link.datagram(30 * MS, 10_000), Some(45 * MS));
    }

    #[test]
    fn jitter_is_bounded_reorders_datagrams_and_keeps_the_order_of_streams() {
        let config = LinkConfig {
            jitter: 10 * MS,
            ..delayed()
        };
        let arrivals = stream(config, 1, 1000, 100);
        assert!(arrivals.is_sorted());
        let datagrams: Vec<_> = datagrams(config, 1, 1000).into_iter().flatten().collect();
        assert_eq!(datagrams.len(), 1000);
        assert!(!datagrams.is_sorted());
        for (n, arrival) in (0..).zip(&datagrams) {
            let taken = *arrival - n * MS;
            assert!((5 * MS..=15 * MS).contains(&taken), "{taken:?}");
        }
        let mean = datagrams.iter().sum::<Duration>() / 1000;
        let sent = 499 * MS + MS / 2;
        assert!((9 * MS..11 * MS).contains(&(mean - sent)), "{mean:?}");
    }

    #[test]
    fn loss_drops_datagrams_and_delays_streams_by_a_round_trip() {
        let config = LinkConfig {
            loss: 0.1,
            ..delayed()
        };
        let lost = datagrams(config, 2, 10_000);
        let lost = lost.iter().filter(|arrival| arrival.is_none()).count();
        assert!((900..1100).contains(&lost), "{lost}");
        let (mut link, mut late) = (Link::new(config, 2), 0);
        for n in 0..10_000_u32 {
            // Streams of their own, so that none is behind another one's loss.
            let taken = link.stream(n * MS, 100, &mut StreamOrder::default()) - n * MS;
            assert_eq!((taken - 5 * MS).as_nanos() % (10 * MS).as_nanos(), 0);
            late += usize::from(taken > 5 * MS);
        }
        assert!((900..1100).contains(&late), "{late}");
        // A piece of ten segments is late if any of them was lost: 1 - 0.9^10.
        let of_ten = (0..1000).map(|seed| stream(config, seed, 1, 10 * SEGMENT)[0]);
        let late = of_ten.filter(|&arrival| arrival > 5 * MS).count();
        assert!((600..700).contains(&late), "{late}");
        let arrivals = stream(config, 3, 1000, 100);
        assert!(arrivals.is_sorted());
        assert!(arrivals.windows(2).any(|pair| pair[0] == pair[1]));
    }

    #[test]
    fn a_seed_repeats_every_arrival() {
        let config = LinkConfig {
            jitter: 3 * MS,
            loss: 0.2,
            ..delayed()
        };
        assert_eq!(stream(config, 7, 100, 5000), stream(config, 7, 100, 5000));
        assert_eq!(datagrams(config, 7, 100), datagrams(config, 7, 100));
        assert_ne!(datagrams(config, 7, 100), datagrams(config, 8, 100));
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (loss, rate, part) in [
            (1.0, None, "loss"),
            (-0.1, None, "loss"),
            (f64::NAN, None, "loss"),
            (0.0, Some(0.0), "rate"),
            (0.0, Some(f64::INFINITY), "rate"),
        ] {
            let config = LinkConfig {
                loss,
                rate,
                ..LinkConfig::default()
            };
            assert!(config.check().unwrap_err().contains(part));
        }
        assert!(delayed().check().is_ok());
    }
}

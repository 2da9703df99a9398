//! Expiry of writers: the limit of a table's streams, and the choice of writers that expire for a new one.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{KnownWriter, Writers};
use crate::error::{Error, Result};

impl KnownWriter {
    /// Time of the last push; `None` while one waits, or a frame of the connection, which may be one.
    fn idle_since(&self) -> Option<Instant> {
        #[cfg(test)]
        tests::LOOKS.set(tests::LOOKS.get() + 1);
        let own = self.activity.idle_since()?;
        match &self.connection {
            Some(connection) => Some(own.max(connection.idle_since()?)),
            None => Some(own),
        }
    }

    /// Whether it has never pushed, so that no push can be repeated. A push that is being applied counts.
    fn is_unused(&self) -> bool {
        self.writer.try_lock().is_ok_and(|writer| writer.last_sequence == 0)
    }

    /// Idle time after which it may expire.
    fn patience(&self) -> Duration {
        match (self.has_left(), self.is_unused()) {
            (true, true) => Duration::ZERO,
            (true, false) => Writers::GRACE,
            (false, true) => Writers::UNUSED,
            (false, false) => Writers::IDLE,
        }
    }

    /// Whether its connection has ended, and no other has taken it over.
    pub(super) fn has_left(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.has_ended())
    }
}

impl Writers {
    /// Most streams of a writer.
    pub const MAX_STREAMS: u32 = 65_536;
    /// Most streams of all writers of a table. A new writer may take half of the free ones, so that a few wide writers do not
    /// keep out the next one. For it, idle writers expire, the widest first, then writers disconnected within [`Writers::GRACE`]
    /// that are wider than it and [`Writers::NARROW`]; if these are too few it is refused. A writer with a waiting push is not
    /// idle, nor is one whose connection the server does not read meanwhile.
    pub const MOST_STREAMS: u32 = 2 * Self::MAX_STREAMS;
    /// Time without a push after which a writer may expire.
    pub const IDLE: Duration = Duration::from_secs(300);
    /// [`Writers::IDLE`] of a writer that has never pushed. Once its connection has ended it may expire at once.
    pub const UNUSED: Duration = Duration::from_secs(10);
    /// [`Writers::IDLE`] of a writer that has pushed, from the end of its connection on: the default `reconnect_for` of a client.
    pub const GRACE: Duration = Duration::from_secs(60);
    /// Most streams of a disconnected writer that certainly keeps its [`Writers::GRACE`]. A wider one loses it to a narrower one
    /// that needs its streams; otherwise a few disconnected ones could keep out all others.
    pub const NARROW: u32 = 256;

    /// Expires idle writers, then wide disconnected ones, until a new one may have `streams`.
    pub(super) fn expire_for(&self, entries: &mut HashMap<u64, KnownWriter>, streams: u32, now: Instant) -> Result<()> {
        let limit = u64::from(Self::MOST_STREAMS);
        let total: u64 = entries.values().map(|e| u64::from(e.streams)).sum();
        let mut excess = (total + 2 * u64::from(streams)).saturating_sub(limit);
        if excess == 0 {
            return Ok(());
        }
        let kept = streams.max(Self::NARROW);
        let mut victims: Vec<(bool, Reverse<u32>, Instant, u64)> = entries
            .iter()
            .filter_map(|(&writer, entry)| {
                let since = entry.idle_since()?;
                let in_grace = now.saturating_duration_since(since) < entry.patience();
                let expires = !in_grace || entry.streams > kept && entry.has_left();
                expires.then_some((in_grace, Reverse(entry.streams), since, writer))
            })
            .collect();
        victims.sort_unstable();
        let mut needed = 0;
        while excess > 0 {
            let Some(&(_, Reverse(freed), ..)) = victims.get(needed) else {
                return Err(Error::Streams {
                    table: self.table.clone(),
                    streams,
                    limit: limit.saturating_sub(total) / 2,
                    taken: total,
                    of: limit,
                });
            };
            excess = excess.saturating_sub(freed.into());
            needed += 1;
        }
        for (_, Reverse(streams), since, writer) in victims.drain(..needed) {
            if let Some(expired) = entries.remove(&writer) {
                self.note_gone(expired.identity, since);
            }
            tracing::warn!(table = self.table, streams, "an idle writer has expired: a new one needs its streams");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::open;
    use super::*;
    use crate::sync::lock;
    use crate::table::activity::Activity;

    thread_local! {
        /// Looks at whether a writer is idle.
        pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    /// Opens a writer that has pushed.
    fn open_used(writers: &Writers, writer: u64, streams: u32, now: Instant) {
        writers.open(&open(writer, streams), now).unwrap();
        lock(&lock(&writers.entries)[&writer].writer).applied(1);
    }

    fn known(writers: &Writers) -> Vec<u64> {
        let mut known: Vec<u64> = lock(&writers.entries).keys().copied().collect();
        known.sort_unstable();
        known
    }

    #[test]
    fn idle_writers_make_room_the_widest_first_and_busy_ones_do_not() {
        const WIDE: u32 = Writers::MAX_STREAMS / 2;
        let (writers, start) = (Writers::new("t"), Instant::now());
        for (writer, streams) in [(1, WIDE / 2), (2, WIDE), (3, WIDE / 2)] {
            let opened = start + Duration::from_secs(writer);
            open_used(&writers, writer, streams, opened);
        }
        let newcomer = open(4, WIDE + 2);
        let error = writers.open(&newcomer, start + Writers::IDLE).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("32770 streams is over the limit of 32768") && message.contains("65536 of its 131072"),
            "{message}"
        );
        assert_eq!((writers.counts().connected, writers.counts().streams), (3, u64::from(2 * WIDE)));

        // The first two are idle long enough, and the wider one is enough.
        let later = start + Duration::from_secs(2) + Writers::IDLE + Duration::from_millis(1);
        writers.open(&newcomer, later).unwrap();
        assert_eq!(known(&writers), [1, 3, 4]);
        assert!(writers.open(&open(5, 0), Instant::now()).is_err());
        assert!(writers.open(&open(5, Writers::MAX_STREAMS + 1), Instant::now()).is_err());
    }

    #[test]
    fn a_few_wide_writers_do_not_keep_out_the_next_one() {
        let (writers, now) = (Writers::new("t"), Instant::now());
        for writer in 1..=8 {
            let widest = (Writers::MOST_STREAMS >> writer) + u32::from(writer > 1);
            assert_eq!(writers.open(&open(writer, widest), now).is_ok(), writer == 1);
            if writer > 1 {
                open_used(&writers, writer, widest - 1, now);
            }
        }
        open_used(&writers, 9, 128, now);
    }

    #[test]
    fn a_writer_that_never_pushed_makes_room_after_seconds_or_with_the_end_of_its_connection() {
        let (writers, start) = (Writers::new("t"), Instant::now());
        let widest = |writer| open(writer, Writers::MAX_STREAMS);
        writers.open(&widest(1), start).unwrap();
        let soon = start + Writers::UNUSED - Duration::from_millis(1);
        assert!(writers.open(&widest(2), soon).is_err());
        writers.open(&widest(2), start + Writers::UNUSED).unwrap();
        assert_eq!(known(&writers), [2]);

        let connection = Activity::new(start);
        writers.attach(2, &connection);
        assert!(writers.open(&widest(3), start).is_err());
        connection.end(start);
        // Another connection takes it over in time.
        assert_eq!(writers.resume(&widest(2)).unwrap().epoch, 2);
        assert!(writers.open(&widest(3), start).is_err());
        writers.attach(2, &connection);
        writers.open(&widest(3), start + Writers::UNUSED).unwrap();
        assert_eq!(known(&writers), [3]);

        // One that has pushed keeps its sequence number.
        lock(&writers.get(3).unwrap()).applied(1);
        writers.attach(3, &connection);
        let later = Instant::now() + Writers::GRACE;
        assert!(writers.open(&widest(4), later - Writers::UNUSED).is_err());
        assert_eq!(writers.resume(&widest(3)).unwrap().last_sequence, 1);
    }

    /// Opens a writer that has pushed, on a connection.
    fn open_connected(writers: &Writers, writer: u64, streams: u32, now: Instant) -> Arc<Activity> {
        open_used(writers, writer, streams, now);
        let connection = Activity::new(now);
        writers.attach(writer, &connection);
        connection
    }

    #[test]
    fn wide_writers_that_have_pushed_and_left_keep_no_narrower_one_out() {
        let (writers, now) = (Writers::new("t"), Instant::now());
        let connections: Vec<_> =
            (0..17).map(|n| open_connected(&writers, n, Writers::MAX_STREAMS >> n, now)).collect();
        assert!(writers.open(&open(17, 1), now).is_err(), "all are there");
        connections.iter().for_each(|connection| connection.end(now));
        let widest = writers.open(&open(17, Writers::MAX_STREAMS), now);
        assert!(widest.is_err(), "none is wider");
        // One is enough, the widest.
        writers.open(&open(17, 1), now).unwrap();
        assert_eq!(known(&writers), (1..=17).collect::<Vec<_>>());
        assert!(matches!(writers.resume(&open(0, Writers::MAX_STREAMS)), Err(Error::Expired { .. })));
        assert_eq!(writers.resume(&open(1, 32_768)).unwrap().last_sequence, 1);
    }

    #[test]
    fn narrow_writers_that_have_pushed_and_left_keep_their_grace() {
        let (writers, start) = (Writers::new("t"), Instant::now());
        let all = u64::from(Writers::MOST_STREAMS / Writers::NARROW);
        for writer in 1..all {
            open_connected(&writers, writer, Writers::NARROW, start).end(start);
        }
        let newcomer = open(all, Writers::NARROW);
        let soon = start + Writers::GRACE - Duration::from_millis(1);
        assert!(writers.open(&newcomer, soon).is_err());
        assert_eq!(writers.counts().resumable, all - 1);
        writers.open(&newcomer, start + Writers::GRACE).unwrap();
        assert_eq!((writers.counts().connected, writers.counts().resumable), (1, all - 2), "one has expired");
    }

    #[test]
    fn idle_writers_make_room_before_wider_ones_in_their_grace() {
        let (writers, start) = (Writers::new("t"), Instant::now());
        let later = start + Writers::IDLE;
        open_used(&writers, 1, Writers::MAX_STREAMS / 2, start);
        open_connected(&writers, 2, Writers::MAX_STREAMS * 3 / 4 - 1, later).end(later);
        open_used(&writers, 3, Writers::MAX_STREAMS / 4, later);
        writers.open(&open(4, Writers::MAX_STREAMS / 2), later).unwrap();
        assert_eq!(known(&writers), [2, 3, 4]);
    }

    #[test]
    fn a_newcomer_looks_at_each_writer_once() {
        const WRITERS: u64 = 1_024;
        let streams = Writers::MAX_STREAMS / WRITERS as u32;
        let (writers, start) = (Writers::new("t"), Instant::now());
        for writer in 0..WRITERS {
            open_used(&writers, writer, streams, start);
        }
        assert_eq!(LOOKS.get(), 0, "there was room");
        let newcomer = open(WRITERS, Writers::MAX_STREAMS);
        writers.open(&newcomer, start + Writers::IDLE).unwrap();
        assert_eq!(LOOKS.take(), WRITERS);
        assert_eq!((writers.counts().connected, writers.counts().streams), (1, Writers::MAX_STREAMS.into()));
    }

    #[test]
    fn a_push_keeps_a_writer_from_expiring() {
        let writers = Writers::new("t");
        writers.open(&open(1, Writers::MAX_STREAMS), Instant::now()).unwrap();
        writers.get(1).unwrap();
        let wide = writers.open(&open(2, Writers::MAX_STREAMS), Instant::now());
        assert!(matches!(wide, Err(Error::Streams { .. })));
        writers.get(1).unwrap();
    }

    #[test]
    fn a_writer_is_not_idle_while_its_connection_is_not_read() {
        let writers = Writers::new("t");
        let start = Instant::now();
        writers.open(&open(1, Writers::MAX_STREAMS), start).unwrap();
        let connection = Activity::new(start);
        writers.attach(1, &connection);
        writers.attach(2, &connection);
        let frame = connection.wait();
        let open_after = |idle: u32| writers.open(&open(2, Writers::MAX_STREAMS), start + idle * Writers::IDLE);
        assert!(matches!(open_after(1_000), Err(Error::Streams { .. })));
        drop(frame);
        assert!(open_after(0).is_err(), "idle from here on");
        open_after(1_000).unwrap();
        assert!(matches!(writers.get(1), Err(Error::Expired { .. })));
    }
}

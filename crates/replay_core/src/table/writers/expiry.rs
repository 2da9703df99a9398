//! Expiry of writers: the limit of a table's streams, and the choice of writers that expire for a new one.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::Instant;

use super::{KnownWriter, Writers};
use crate::error::{Error, Result};

/// The connection of writers, or the channel of a writer of this process. Its end disconnects them.
#[derive(Debug, Default)]
pub struct WriterConnection(OnceLock<Instant>);

impl WriterConnection {
    pub fn end(&self, now: Instant) {
        let _ = self.0.set(now);
    }

    pub(super) fn end_time(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}

impl Writers {
    pub const MAX_STREAMS: u32 = 65_536;
    /// Most streams of all writers of a table. A new writer may take half of those that the connected ones leave, so that a few wide
    /// writers do not keep out the next one. Disconnected writers keep theirs until a new one needs them: the one that has been
    /// disconnected longest expires first.
    pub const MOST_STREAMS: u32 = 2 * Self::MAX_STREAMS;

    /// Expires disconnected writers until a new one may have `streams`; none if there are too few.
    pub(super) fn expire_for(&self, entries: &mut HashMap<u64, KnownWriter>, streams: u32) -> Result<()> {
        let of = u64::from(Self::MOST_STREAMS);
        let needed = 2 * u64::from(streams);
        let (mut taken, mut disconnected) = (0, Vec::new());
        for (&writer, entry) in &*entries {
            match entry.disconnected_since() {
                Some(since) => disconnected.push((since, writer, u64::from(entry.streams))),
                None => taken += u64::from(entry.streams),
            }
        }
        if taken + needed > of {
            let (table, limit) = (self.table.clone(), of.saturating_sub(taken) / 2);
            return Err(Error::Streams { table, streams, limit, taken, of });
        }
        let kept: u64 = disconnected.iter().map(|(_, _, streams)| streams).sum();
        let mut excess = (taken + kept + needed).saturating_sub(of);
        if excess == 0 {
            return Ok(());
        }
        // The longest disconnected last.
        disconnected.sort_unstable_by(|one, other| other.cmp(one));
        while excess > 0
            && let Some((since, writer, freed)) = disconnected.pop()
        {
            excess = excess.saturating_sub(freed);
            if let Some(expired) = entries.remove(&writer) {
                let name = &expired.identity.name;
                tracing::warn!(
                    table = self.table,
                    name,
                    freed,
                    "a disconnected writer has expired: a new one needs its streams"
                );
                self.note_gone(expired.identity, since);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::tests::open;
    use super::*;
    use crate::sync::lock;

    fn known(writers: &Writers) -> Vec<u64> {
        let mut known: Vec<u64> = lock(&writers.entries).keys().copied().collect();
        known.sort_unstable();
        known
    }

    /// Opens a writer that has pushed, on a connection.
    fn open_connected(writers: &Writers, writer: u64, streams: u32) -> Arc<WriterConnection> {
        writers.open(&open(writer, streams)).unwrap();
        lock(&writers.get(writer).unwrap()).applied(1);
        let connection = Arc::<WriterConnection>::default();
        writers.attach(writer, &connection);
        connection
    }

    #[test]
    fn connected_writers_keep_their_streams_and_the_refusal_has_the_numbers() {
        const WIDE: u32 = Writers::MAX_STREAMS / 2;
        let writers = Writers::new("t");
        let connections =
            [(1, WIDE), (2, WIDE), (3, 1)].map(|(writer, streams)| open_connected(&writers, writer, streams));
        // One that is not attached yet is connected, too.
        writers.open(&open(4, 1)).unwrap();
        let newcomer = open(5, WIDE + 1);
        let message = writers.open(&newcomer).unwrap_err().to_string();
        assert!(
            message.contains("32769 streams is over the limit of 32767") && message.contains("65538 of its 131072"),
            "{message}"
        );
        // Nobody expires where that is not enough.
        connections[2].end(Instant::now());
        assert!(matches!(writers.open(&newcomer), Err(Error::Streams { .. })));
        assert_eq!(known(&writers), [1, 2, 3, 4]);
        assert_eq!((writers.counts().connected, writers.counts().streams), (3, u64::from(2 * WIDE) + 2));
        connections[0].end(Instant::now());
        writers.open(&newcomer).unwrap();
        for streams in [0, Writers::MAX_STREAMS + 1] {
            assert!(writers.open(&open(6, streams)).is_err());
        }
    }

    #[test]
    fn a_few_wide_writers_do_not_keep_out_the_next_one() {
        let writers = Writers::new("t");
        for writer in 1..=8 {
            let widest = (Writers::MOST_STREAMS >> writer) + u32::from(writer > 1);
            assert_eq!(writers.open(&open(writer, widest)).is_ok(), writer == 1);
            if writer > 1 {
                writers.open(&open(writer, widest - 1)).unwrap();
            }
        }
        writers.open(&open(9, 128)).unwrap();
    }

    #[test]
    fn the_writer_that_has_been_disconnected_longest_expires_first_however_wide_it_is() {
        let (writers, start) = (Writers::new("t"), Instant::now());
        let streams = [1, Writers::MAX_STREAMS / 2, 1, Writers::MAX_STREAMS / 2 - 3, 1];
        let connections: Vec<_> = (0..).zip(streams).map(|(writer, n)| open_connected(&writers, writer, n)).collect();
        // By their ends, the second and the others in the order of their numbers.
        for (place, writer) in [1, 0, 2, 3].into_iter().enumerate() {
            connections[writer].end(start + Duration::from_secs(place as u64));
        }
        writers.open(&open(5, Writers::MAX_STREAMS / 2 + 1)).unwrap();
        assert_eq!(known(&writers), [0, 2, 3, 4, 5], "one was enough");
        writers.open(&open(6, Writers::MAX_STREAMS / 2 + 2)).unwrap();
        assert_eq!(known(&writers), [4, 5, 6], "narrow ones do not spare a wide one that left after them");
        let expired = writers.resume(&open(1, Writers::MAX_STREAMS / 2));
        assert!(matches!(expired, Err(Error::Expired { .. })));
    }

    #[test]
    fn a_disconnected_writer_stays_until_its_streams_are_needed() {
        let (writers, start) = (Writers::new("t"), Instant::now());
        let connection = open_connected(&writers, 1, Writers::MAX_STREAMS / 2);
        connection.end(start);
        writers.open(&open(2, Writers::MAX_STREAMS / 2)).unwrap();
        assert_eq!(writers.counts().resumable, 1);
        // Taken over, it is connected again, also before the new connection is attached.
        let back = writers.resume(&open(1, Writers::MAX_STREAMS / 2)).unwrap();
        assert_eq!((back.epoch, back.last_sequence, back.connected), (2, 1, 2));
        assert!(writers.open(&open(3, Writers::MAX_STREAMS / 2 + 1)).is_err());
        let again = Arc::<WriterConnection>::default();
        writers.attach(1, &again);
        connection.end(start);
        assert!(writers.open(&open(3, Writers::MAX_STREAMS / 2 + 1)).is_err(), "the older connection ended");
        again.end(start);
        writers.open(&open(3, Writers::MAX_STREAMS / 2 + 1)).unwrap();
        assert_eq!(known(&writers), [2, 3]);
    }
}

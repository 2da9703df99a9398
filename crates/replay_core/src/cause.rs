//! Reasons of waits. A blocked attempt records numbers, which are also what the wire carries; they are formatted as a sentence only
//! when a call logs its wait or fails.

use std::fmt;
use std::time::{Duration, Instant};

use base::wait::Wait;
use serde::{Deserialize, Serialize};

/// Cause of a blocked attempt at a table: the numbers of that moment, and the settings that they do not meet. Its text follows the table's
/// name.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "fields with the names of settings have none")]
pub enum Cause {
    /// A sample: fewer live items than `min_size`.
    #[error("holds {live} items of the {min_size} that min_size asks for; waiting for writers")]
    MinSize {
        /// Live items.
        live: u64,
        min_size: u64,
    },
    /// A sample: the table is being emptied.
    #[error("is being emptied")]
    Emptied,
    /// A sample: the rate limiter waits for inserts.
    #[error(
        "has {sampled} items sampled for {inserted} inserted, at samples_per_insert {samples_per_insert} and slack {slack}; a sample of \
         {wanted} waits for writers to insert {} more",
        (.missing / .samples_per_insert).ceil().max(1.0)
    )]
    Inserts {
        /// Items sampled.
        sampled: u64,
        /// Items inserted.
        inserted: u64,
        /// Items of the sample.
        wanted: u32,
        /// Items by which it is too large.
        missing: f64,
        samples_per_insert: f64,
        slack: f64,
    },
    /// A sample: too few samples left, at `max_times_sampled`.
    #[error(
        "has {left} samples left of the {wanted} asked for, at max_times_sampled {max_times_sampled}; waiting for writers"
    )]
    SamplesLeft {
        /// Samples left.
        left: u64,
        /// Items of the sample.
        wanted: u32,
        max_times_sampled: u32,
    },
    /// A sample: items were removed while it chose them.
    #[error("has {found} items to sample at the moment of the {wanted} asked for; waiting for writers")]
    Items {
        /// Items found.
        found: u64,
        /// Items of the sample.
        wanted: u32,
    },
    /// A push: the rate limiter waits for samples.
    #[error(
        "has {sampled} items sampled for {inserted} inserted, at samples_per_insert {samples_per_insert} and slack {slack}; the next insert \
         waits for its readers to sample {} more",
        .missing.ceil()
    )]
    Samples {
        /// Items sampled.
        sampled: u64,
        /// Items inserted.
        inserted: u64,
        /// Items to be sampled before the next insert.
        missing: f64,
        samples_per_insert: f64,
        slack: f64,
    },
    /// A push: readers hold blobs of evicted chunks, whose bytes it needs.
    #[error(
        "has {pinned} of its {capacity_bytes} bytes in evicted chunks that readers still hold; waiting for them to let go of {missing}"
    )]
    PinnedBytes {
        /// Bytes of evicted chunks that are held.
        pinned: u64,
        /// Bytes by which the push is too large.
        missing: u64,
        capacity_bytes: u64,
    },
    /// A push: readers pin so many evicted chunks that no chunk slot is free.
    #[error("has no slot for another chunk beside the evicted ones that samples still pin; waiting for them")]
    PinnedChunks,
    /// A push: samples are ending the last items, whose slots it needs.
    #[error("waits for readers that are taking its last items")]
    LastItems,
}

/// The wait for a table that does not admit a call yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableWait {
    /// The table.
    pub table: String,
    /// Cause of the wait of the first call in the queue.
    pub cause: Cause,
    /// Calls queued ahead of this one.
    pub ahead: u64,
    /// Steps in a table that has never had an item; 0 otherwise.
    pub steps_without_items: u64,
}

/// The wait of a writer for newer parameters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error(
    "writer {writer:?} of table {table:?} {}: with max_version_lag {max_version_lag} its steps wait until it gets newer ones \
     (get_parameters with this writer)",
    self.difference()
)]
pub struct OutdatedWriter {
    /// The table.
    pub table: String,
    /// Name of the writer.
    pub writer: String,
    /// Name of the parameters.
    pub parameters: String,
    /// Version of the writer's parameters; 0 if it has none.
    pub version: u64,
    /// The newest version.
    pub newest: u64,
    /// The table's setting.
    pub max_version_lag: u32,
}

/// The reason of a wait. Its `Display` is the sentence for logs and errors; it crosses the wire in JSON.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// A table does not admit the call yet.
    #[error("{0}")]
    Table(TableWait),
    /// A writer's parameters are too old for its table.
    #[error("{0}")]
    Outdated(OutdatedWriter),
    /// Number of calls queued ahead, before the first one has been tried.
    #[error("{0} earlier calls wait")]
    Ahead(u64),
    /// Bytes of the connection's replies that its client has not read.
    #[error(
        "{0} bytes of replies wait for this client to read them, and a connection has a quarter of its role's part of --reply-bytes"
    )]
    OwnReplies(u64),
    /// Bytes of unread replies on all connections of the client's role.
    #[error(
        "{0} bytes of replies wait for clients of this role to read them, which is their part of the server's limit (--reply-bytes)"
    )]
    RoleReplies(u64),
    /// Number of the connection's unanswered requests, at which reading it is paused.
    #[error("the server reads no further request of this connection: {0} wait for their answers")]
    Answers(u32),
    /// Reading the connection is paused: no receive memory for its next frame.
    #[error(
        "the server's receive memory is full of pushes that wait: 1 MiB of this writer, or its table's part of --max-frame-bytes"
    )]
    ReceiveMemory,
    /// Any other cause, as a sentence.
    #[error("{0}")]
    Other(String),
    /// The same of a table, where steps of a writer may end the wait; to others it is [`Self::Other`].
    #[error("{1}")]
    ForWriters(String, String),
    /// Reason at one of several servers, with the server's name.
    #[error("{0}: {1}")]
    AtServer(String, Box<WaitReason>),
}

impl From<String> for WaitReason {
    fn from(sentence: String) -> Self {
        WaitReason::Other(sentence)
    }
}

impl From<&str> for WaitReason {
    fn from(sentence: &str) -> Self {
        WaitReason::Other(sentence.to_owned())
    }
}

impl WaitReason {
    /// The wait of a call of `table` for this cause.
    pub fn at(table: &str, cause: Cause) -> Self {
        WaitReason::Table(TableWait { table: table.to_owned(), cause, ahead: 0, steps_without_items: 0 })
    }

    /// The wait of a call behind `calls` others, the first of which waits for this reason.
    pub(crate) fn behind(&self, calls: u64) -> Self {
        let mut reason = self.clone();
        if let WaitReason::Table(wait) = &mut reason {
            wait.ahead = calls;
        }
        reason
    }

    /// The table of a wait that steps of a writer may end.
    pub fn awaited_table(&self) -> Option<&str> {
        use Cause::{Inserts, Items, MinSize, SamplesLeft};
        match self {
            WaitReason::Table(wait) => {
                matches!(wait.cause, MinSize { .. } | Inserts { .. } | SamplesLeft { .. } | Items { .. })
                    .then_some(wait.table.as_str())
            }
            WaitReason::AtServer(_, reason) => reason.awaited_table(),
            WaitReason::ForWriters(table, _) => Some(table),
            _ => None,
        }
    }

    /// Whether steps of a writer may end the wait.
    pub fn is_for_writers(&self) -> bool {
        self.awaited_table().is_some()
    }

    /// Logs the wait, see [`Wait::report`], with the caller's advice if it is for writers.
    pub fn report(&self, wait: &Wait<'_>, now: Instant, after: Duration) {
        let table = self.awaited_table();
        wait.awaits(table);
        wait.report(now, after, || {
            let advice = wait.advice().zip(table).and_then(|(advice, table)| advice(table));
            self.to_string() + &advice.unwrap_or_default()
        });
    }
}

impl fmt::Display for TableWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ahead > 0 {
            write!(f, "{} earlier calls wait: ", self.ahead)?;
        }
        write!(f, "table {:?} {}", self.table, self.cause)?;
        if self.steps_without_items > 0 {
            write!(
                f,
                "; {} steps have arrived and made no item: is each the first of an episode (first=True, see \
                 Writer.dropped_windows), or no episode longer than the burn_in of its view?",
                self.steps_without_items
            )?;
        }
        Ok(())
    }
}

impl OutdatedWriter {
    fn difference(&self) -> String {
        let OutdatedWriter { parameters, version, newest, .. } = self;
        match version {
            0 => format!("has got no parameters, and {parameters:?} has version {newest}"),
            _ => {
                format!("makes its steps with version {version} of {parameters:?}, and version {newest} is the newest")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_for_writers_by_its_cause_whatever_the_names_say() {
        let samples = Cause::Items { found: 1, wanted: 2 };
        let pushes = Cause::PinnedChunks;
        for (cause, for_writers) in [(samples, true), (pushes, false), (Cause::Emptied, false)] {
            let first = WaitReason::at("for writers", cause);
            let behind = first.behind(3);
            let of_several = WaitReason::AtServer("innet://a".into(), Box::new(behind.clone()));
            assert!(of_several.to_string().starts_with("innet://a: 3 earlier calls wait: table"));
            for reason in [first, behind, of_several] {
                assert_eq!(reason.is_for_writers(), for_writers, "{reason}");
            }
        }
        assert!(!WaitReason::from("waiting for writers").is_for_writers());
    }
}

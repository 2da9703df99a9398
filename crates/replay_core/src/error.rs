//! Errors of the memory, and of the steps and batches that go in and out of it; the reason of a wait, which the caller logs, and
//! returns as an error at the deadline.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use base::allocation::{OutOfMemory, TooLarge};
use base::notation::Number;
use base::system::OsError;
use base::wait::{Interrupted, Wait};

/// An error of the memory. Messages name the fault and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A fault of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
    /// A priority that is NaN, infinite or negative, or too large for a new item.
    #[error("priority {position} of {count} is {}: {}", Number(*.value), priority_advice(*.value))]
    Priority {
        /// From 0.
        position: usize,
        count: usize,
        value: f64,
    },
    /// A sample from a table in which no item has a priority above zero.
    #[error(
        "table {table:?} has nothing to sample: of its {items} items none has a priority above zero; raise some with `update_priorities`"
    )]
    NoMass { table: String, items: u64 },
    /// A sample from a sum tree without any priority above zero.
    #[error(
        "the sum tree has nothing to sample: none of its {capacity} indexes has a priority above zero; set some with `update`"
    )]
    NothingSet { capacity: u32 },
    #[error("there is no table {table:?}; {known}")]
    UnknownTable {
        table: String,
        /// The existing names, as a sentence.
        known: String,
    },
    #[error("table {table:?} exists with another definition: {difference}")]
    TableDiffers {
        table: String,
        /// Each field that differs, with the existing and the requested value.
        difference: String,
    },
    #[error("table {table:?} cannot be made: {reason}")]
    Table {
        table: String,
        /// The field, and valid values for it.
        reason: String,
    },
    /// Data that does not fit the table's columns.
    #[error("data for table {table:?} was refused: {reason}")]
    Schema {
        table: String,
        /// The column and the difference.
        reason: String,
    },
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A size for which the process has no memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A new writer with more streams than its table has left for it.
    #[error(
        "a new writer of {streams} streams is over the limit of {limit} for table {table:?}: its connected writers have {taken} of its {of} streams, and a new one may take half of the rest; close writers, or open this one with fewer streams"
    )]
    Streams {
        table: String,
        streams: u32,
        /// Most that it may have.
        limit: u64,
        /// Streams of the table's connected writers.
        taken: u64,
        /// Most streams of the table's writers.
        of: u64,
    },
    #[error("the deadline passed: {waited_for}")]
    Deadline {
        /// Unmet condition, and how far it is from being met.
        waited_for: Box<WaitReason>,
    },
    /// A view that needs more rows than the items' windows have.
    #[error(
        "the view needs {before} steps before and {after} after the anchor, but the items of table {table:?} were written with {window_before} and {window_after}; write with a view at least as wide"
    )]
    View { table: String, before: u16, after: u16, window_before: u16, window_after: u16 },
    /// A writer that a newer connection has taken over.
    #[error("writer {writer:?} was fenced off: a newer connection of the same writer took over")]
    Fenced { writer: String },
    /// A writer that the memory no longer knows.
    #[error(
        "writer {writer:?} has expired: it was closed, or disconnected when a new writer needed its streams, its table was dropped, or its server restarted; open a new writer"
    )]
    Expired {
        /// The writer's name, or its number if the name is not known.
        writer: String,
    },
    /// A batch whose lease is over.
    #[error(
        "this batch of table {table:?} has no lease: it was acknowledged before, or its time (lease) or its reader's connection has ended, and its items can be sampled again"
    )]
    Lease { table: String },
    /// A writer's call that breaks the rules of its interface.
    #[error("protocol error: {0}")]
    Misuse(String),
    #[error("stored data does not decode: {0}")]
    Corrupt(String),
    /// Bytes that are damaged, or not a snapshot of this format.
    #[error("the snapshot cannot be used: {reason}; nothing was restored")]
    Snapshot {
        reason: String,
        /// Whether a later release has saved them.
        newer: bool,
    },
    /// A restore into a table that is not empty.
    #[error(
        "table {table:?} is not empty: it has {steps} steps and holds {bytes} bytes; restore before the first write, or empty the table and drop its batches first"
    )]
    NotEmpty {
        table: String,
        steps: u64,
        /// Bytes of its steps, including evicted ones that sampled batches hold.
        bytes: u64,
    },
    #[error("{0}")]
    Config(String),
    /// Parameters that are too large or not a safetensors file.
    #[error("parameters {name:?} were refused: {reason}")]
    Parameters { name: String, reason: String },
    #[error("{0} is closed")]
    Closed(&'static str),
    #[error(transparent)]
    Io(#[from] OsError),
    #[error("interrupted")]
    Interrupted,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Interrupted> for Error {
    fn from(Interrupted: Interrupted) -> Self {
        Error::Interrupted
    }
}

/// Valid priorities, and the usual mistake behind a negative one.
fn priority_advice(value: f64) -> &'static str {
    match value {
        0.0..f64::INFINITY => "a new item's priority is a float32, at most 3.4e38",
        _ if !value.is_finite() => "a priority has to be finite and not negative",
        _ => "a priority has to be finite and not negative; take the absolute value of TD errors",
    }
}

impl Error {
    /// Data that does not fit the columns of `table`.
    pub fn schema(table: &str, reason: String) -> Self {
        Error::Schema { table: table.to_owned(), reason }
    }

    /// A deadline that passed while the call waited for this.
    pub fn deadline(waited_for: impl Into<WaitReason>) -> Self {
        Error::Deadline { waited_for: Box::new(waited_for.into()) }
    }
}

/// The reason of a wait: a sentence for logs and errors. It crosses the wire in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReason {
    sentence: Cow<'static, str>,
    /// The table of a wait that steps of a writer may end.
    awaited_table: Option<String>,
}

impl WaitReason {
    /// A reason that no writer's steps remove.
    pub const fn new(sentence: &'static str) -> Self {
        WaitReason { sentence: Cow::Borrowed(sentence), awaited_table: None }
    }

    /// The reason of a wait that steps for `table` may end.
    pub fn for_writers(table: &str, sentence: String) -> Self {
        WaitReason { sentence: sentence.into(), awaited_table: Some(table.to_owned()) }
    }

    /// The reason of a wait behind `calls` others, the first of which waits for this reason.
    pub(crate) fn behind(&self, calls: usize) -> Self {
        self.map(|sentence| format!("{calls} earlier calls wait: {sentence}"), str::to_owned)
    }

    /// The reason with another sentence, and another name of the table.
    pub fn map(&self, sentence: impl FnOnce(&str) -> String, table: impl FnOnce(&str) -> String) -> Self {
        WaitReason {
            sentence: sentence(&self.sentence).into(),
            awaited_table: self.awaited_table.as_deref().map(table),
        }
    }

    /// The table of a wait that steps of a writer may end.
    pub fn awaited_table(&self) -> Option<&str> {
        self.awaited_table.as_deref()
    }

    /// Whether steps of a writer may end the wait.
    pub fn is_for_writers(&self) -> bool {
        self.awaited_table.is_some()
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

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl From<String> for WaitReason {
    fn from(sentence: String) -> Self {
        WaitReason { sentence: sentence.into(), awaited_table: None }
    }
}

impl From<&'static str> for WaitReason {
    fn from(sentence: &'static str) -> Self {
        WaitReason::new(sentence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_writers_stays_one_behind_others_and_at_a_server() {
        let of = |reason: WaitReason| reason.behind(3).map(|sentence| format!("innet://a: {sentence}"), str::to_owned);
        let waits = of(WaitReason::for_writers("t", "table \"t\" is empty".into()));
        assert_eq!(waits.to_string(), "innet://a: 3 earlier calls wait: table \"t\" is empty");
        assert_eq!((waits.awaited_table(), waits.is_for_writers()), (Some("t"), true));
        assert!(!of("waiting for writers".into()).is_for_writers());
    }
}

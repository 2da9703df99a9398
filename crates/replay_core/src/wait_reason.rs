//! The reason of a wait, which the caller logs, and returns as an error at the deadline.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use base::wait::Wait;
use serde::{Deserialize, Serialize};

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

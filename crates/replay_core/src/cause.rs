//! Causes of blocked calls. An attempt notes numbers; they become a sentence only where a call reports its wait.

use std::fmt;
use std::sync::Arc;

use crate::schema::TableConfig;

/// Part of the sentence of every wait that a push of steps may end. Sentences cross the wire, and clients find it in them.
pub const FOR_WRITERS: &str = "for writers";

/// The cause of a blocked attempt at a table, with the numbers of that moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    /// A sample: fewer live items than `min_size`.
    MinSize {
        /// Live items.
        live: u64,
    },
    /// A sample: the table is being emptied.
    Emptied,
    /// A sample: the rate limiter waits for inserts.
    Inserts {
        /// Items sampled.
        sampled: u64,
        /// Items inserted.
        inserted: u64,
        /// Items of the sample.
        wanted: u32,
        /// Items by which it is too large.
        missing: f64,
    },
    /// A sample: too few samples left, at `max_times_sampled`.
    SamplesLeft {
        /// Samples left.
        left: u64,
        /// Items of the sample.
        wanted: u32,
    },
    /// A sample: items went while they were chosen.
    Items {
        /// Items found.
        found: usize,
        /// Items of the sample.
        wanted: u32,
    },
    /// A push: the rate limiter waits for samples.
    Samples {
        /// Items sampled.
        sampled: u64,
        /// Items inserted.
        inserted: u64,
        /// Items to be sampled before the next insert.
        missing: f64,
    },
    /// A push: readers hold evicted chunks, whose bytes are missing.
    PinnedBytes {
        /// Bytes of evicted chunks that are held.
        pinned: u64,
        /// Bytes by which the push is too large.
        missing: u64,
    },
    /// A push: readers hold so many evicted chunks that there is no slot for another.
    PinnedChunks,
    /// A push: readers are taking the last items.
    LastItems,
}

/// The reason of a wait. Its `Display` is the sentence for logs and errors.
#[derive(Debug, Clone)]
pub enum WaitReason {
    /// A table does not admit the call yet.
    Table {
        /// Definition of the table.
        config: Arc<TableConfig>,
        /// Cause of the wait of the first call in the line.
        cause: Cause,
        /// Calls that wait ahead of this one.
        ahead: usize,
        /// Steps in a table that has never had an item; 0 otherwise.
        steps_without_items: u64,
    },
    /// Any other cause, as a sentence.
    Other(String),
}

impl From<String> for WaitReason {
    fn from(sentence: String) -> Self {
        WaitReason::Other(sentence)
    }
}

impl WaitReason {
    /// The wait of a call of `table` for this cause.
    pub fn at(config: &Arc<TableConfig>, cause: Cause) -> Self {
        WaitReason::Table {
            config: config.clone(),
            cause,
            ahead: 0,
            steps_without_items: 0,
        }
    }

    /// The wait of a call behind `calls` others, the first of which waits for this reason.
    pub(crate) fn behind(&self, calls: usize) -> Self {
        let mut reason = self.clone();
        if let WaitReason::Table { ahead, .. } = &mut reason {
            *ahead = calls;
        }
        reason
    }
}

impl Cause {
    fn write(self, config: &TableConfig, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TableConfig {
            name,
            min_size,
            samples_per_insert,
            max_times_sampled,
            ..
        } = config;
        let slack = config.effective_slack();
        match self {
            Cause::MinSize { live } => write!(
                f,
                "table {name:?} holds {live} items of the {min_size} that min_size asks for; waiting {FOR_WRITERS}"
            ),
            Cause::Emptied => write!(f, "table {name:?} is being emptied"),
            Cause::Inserts {
                sampled,
                inserted,
                wanted,
                missing,
            } => write!(
                f,
                "table {name:?} has {sampled} items sampled for {inserted} inserted, at samples_per_insert \
                 {samples_per_insert} and slack {slack}; a sample of {wanted} waits {FOR_WRITERS} to insert {} more",
                (missing / samples_per_insert).ceil().max(1.0)
            ),
            Cause::SamplesLeft { left, wanted } => write!(
                f,
                "table {name:?} has {left} samples left of the {wanted} asked for, at max_times_sampled \
                 {max_times_sampled}; waiting {FOR_WRITERS}"
            ),
            Cause::Items { found, wanted } => write!(
                f,
                "table {name:?} has {found} items to sample at the moment of the {wanted} asked for; waiting {FOR_WRITERS}"
            ),
            Cause::Samples {
                sampled,
                inserted,
                missing,
            } => write!(
                f,
                "table {name:?} has {sampled} items sampled for {inserted} inserted, at samples_per_insert \
                 {samples_per_insert} and slack {slack}; the next insert waits for its readers to sample {} more",
                missing.ceil()
            ),
            Cause::PinnedBytes { pinned, missing } => write!(
                f,
                "table {name:?} has {pinned} of its {} bytes in evicted chunks that readers still hold; waiting for them \
                 to let go of {missing}",
                config.effective_capacity_bytes()
            ),
            Cause::PinnedChunks => write!(
                f,
                "table {name:?} has no slot for another chunk beside the evicted ones that samples still pin; waiting \
                 for them"
            ),
            Cause::LastItems => {
                write!(
                    f,
                    "table {name:?} waits for readers that are taking its last items"
                )
            }
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (config, cause, ahead, steps) = match self {
            WaitReason::Other(sentence) => return f.write_str(sentence),
            WaitReason::Table {
                config,
                cause,
                ahead,
                steps_without_items,
            } => (config, cause, *ahead, *steps_without_items),
        };
        if ahead > 0 {
            write!(f, "{ahead} earlier calls wait: ")?;
        }
        cause.write(config, f)?;
        if steps > 0 {
            write!(
                f,
                "; {steps} steps have arrived and made no item: are they all the first of an episode (first=True)? \
                 Writer.dropped_windows counts the windows that end so"
            )?;
        }
        Ok(())
    }
}

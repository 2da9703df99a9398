//! Definition of a table: columns (in `column.rs`), capacity, sampler and limits. The one configuration of a table,
//! with the same names in TOML, on the wire and in Python.

use std::fmt;
use std::str::FromStr;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

pub use crate::codec::{Codec, Dtype};
pub use crate::column::Column;
use crate::column::is_zero;
use crate::error::{Error, Result};
use crate::view_spec::ViewSpec;
use crate::view_spec::has_column;
use base::notation::{Number, truth};

/// Choice of items; details in `table/samplers`. Ordered samplers repeat the first item until it has been sampled
/// `max_times_sampled` times or, without that limit, until another one ranks first; its probability is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampler {
    /// With a probability in proportion to priority^exponent (Schaul et al., 2016).
    #[default]
    Prioritized,
    Uniform,
    /// The oldest one first; needs `max_times_sampled`.
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    /// With a probability in proportion to 1 / rank^exponent (Schaul et al., 2016). Ranks are sorted at intervals.
    RankBased,
}

impl Sampler {
    /// Whether priorities decide which item it samples.
    pub const fn uses_priorities(self) -> bool {
        match self {
            Sampler::Uniform | Sampler::Fifo | Sampler::Lifo => false,
            Sampler::Prioritized | Sampler::RankBased | Sampler::MaxHeap | Sampler::MinHeap => true,
        }
    }

    /// Whether it samples the first item of an order, with probability 1, and not at random.
    pub const fn is_ordered(self) -> bool {
        match self {
            Sampler::Fifo | Sampler::Lifo | Sampler::MaxHeap | Sampler::MinHeap => true,
            Sampler::Prioritized | Sampler::Uniform | Sampler::RankBased => false,
        }
    }

    /// Whether it has `priority_exponent`.
    pub const fn uses_exponent(self) -> bool {
        match self {
            Sampler::Prioritized | Sampler::RankBased => true,
            Sampler::Uniform | Sampler::Fifo | Sampler::Lifo | Sampler::MaxHeap | Sampler::MinHeap => false,
        }
    }
}

/// Name in files and in Python.
impl fmt::Display for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The sampler of that name; the error lists all names.
impl FromStr for Sampler {
    type Err = serde::de::value::Error;

    fn from_str(name: &str) -> std::result::Result<Self, Self::Err> {
        Sampler::deserialize(name.into_deserializer())
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableConfig {
    pub name: String,
    /// The columns of a step, in row order.
    pub columns: Vec<Column>,
    /// Steps it holds before the oldest chunk is evicted; at most 2^24.
    pub capacity: u64,
    /// Bytes of steps it holds before the oldest chunk is evicted: as stored, and [`Self::CHUNK_BYTES`] for each chunk. 0 derives
    /// it from `capacity` unpacked steps, each a chunk, with 64 KiB for a ragged value without `max_length`. Excludes the index, see `Table::index_bytes`.
    #[serde(default)]
    pub capacity_bytes: u64,
    #[serde(default)]
    pub sampler: Sampler,
    /// Exponent on priorities (alpha in Schaul et al., 2016). 0 samples every live item with the same probability.
    #[serde(default = "default_priority_exponent")]
    pub priority_exponent: f64,
    /// Base-2 logarithm of the smallest difference of two stored priorities, after the exponent.
    #[serde(default = "default_priority_unit_log2")]
    pub priority_unit_log2: i32,
    /// Whether an item without a priority takes the largest one of the live items, not the largest since the table was created or
    /// emptied, so that an outlier stops counting with the end of its item. Costs pushes and updates another lock, and the index 28
    /// bytes more for each step of `capacity`.
    #[serde(default)]
    pub live_max_priority: bool,
    /// An item is removed after it was sampled this often; 0 is never. At least `samples_per_insert`.
    #[serde(default)]
    pub max_times_sampled: u32,
    /// Items needed before the first sample.
    #[serde(default = "default_min_size")]
    pub min_size: u64,
    /// Items sampled for each item inserted, held to within `slack`; 0 sets no limit.
    #[serde(default)]
    pub samples_per_insert: f64,
    /// How far the items sampled may run from `samples_per_insert` times the items inserted,
    /// in sampled items, either way. 0 derives it, see [`Self::effective_slack`].
    #[serde(default)]
    pub slack: f64,
    /// Items for which a queue has room: a push waits while as many are unread, or read and not acknowledged where readers do that, and
    /// none of them is evicted. 0 is no queue.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub queue_size: u32,
    /// Most versions by which the parameters of a pushing writer may lag behind the newest ones; 0 sets no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_version_lag: u32,
    /// Name of the parameters that its steps come from: chunks have the version of their writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<String>,
    /// Most versions by which a sampled item may lag behind the newest of `parameters`: an older one is removed. 0 sets no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_sample_lag: u32,
    /// View of writers and samples that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view: Option<ViewSpec>,
}

/// Priority exponent of a table that sets none.
pub const DEFAULT_PRIORITY_EXPONENT: f64 = 0.6;

fn default_priority_exponent() -> f64 {
    DEFAULT_PRIORITY_EXPONENT
}
fn default_priority_unit_log2() -> i32 {
    -19
}
fn default_min_size() -> u64 {
    1
}

/// Bits of the flag byte that starts every row.
pub mod flags {
    /// The observation starts a new observation stack.
    pub const FIRST: u8 = 1;
    /// Learning ends after this step: no bootstrap.
    pub const TERMINATED: u8 = 2;
    /// The episode was cut after this step: the final row bootstraps.
    pub const TRUNCATED: u8 = 4;
    /// The last observation of an episode, without action and reward.
    pub const FINAL: u8 = 8;
    /// Blobs of the row are differences to its key row.
    pub const DIFFERENCE: u8 = 16;
    /// In a reply: a key row outside its window.
    pub const REFERENCE: u8 = 32;
}

impl TableConfig {
    /// Largest ratio of samples to inserts.
    const MAX_SAMPLES_PER_INSERT: f64 = 1e9;
    /// Largest slack: a float64 counts every item up to it.
    const MAX_SLACK: f64 = 1e15;
    /// Most steps, and so items, of one table: sums of 39-bit priorities stay under 2^63.
    pub const MAX_CAPACITY: u64 = 1 << 24;
    pub const MAX_STEP_BYTES: u64 = 1 << 28;
    pub const MAX_COLUMNS: usize = 256;
    /// Bytes that a chunk counts for beside its stored steps: its bookkeeping.
    pub const CHUNK_BYTES: u64 = 512;

    /// Names of arguments of a writer's append and of arrays of a batch.
    pub const RESERVED_COLUMNS: [&str; 12] = [
        "terminated",
        "truncated",
        "first",
        "final",
        "q",
        "final_q",
        "priority",
        "timeout",
        "weights",
        "probabilities",
        "ids",
        "ages",
    ];
    /// Such names in a table that names parameters.
    const RESERVED_WITH_PARAMETERS: [&str; 2] = ["version", "versions"];

    /// A table with the defaults of every other field.
    pub fn new(name: impl Into<String>, columns: Vec<Column>, capacity: u64) -> Self {
        TableConfig {
            name: name.into(),
            columns,
            capacity,
            capacity_bytes: 0,
            sampler: Sampler::default(),
            priority_exponent: default_priority_exponent(),
            priority_unit_log2: default_priority_unit_log2(),
            live_max_priority: false,
            max_times_sampled: 0,
            min_size: default_min_size(),
            samples_per_insert: 0.0,
            slack: 0.0,
            queue_size: 0,
            max_version_lag: 0,
            parameters: None,
            max_sample_lag: 0,
            view: None,
        }
    }

    /// Checks exponent and unit of priorities. The error names the fault and the valid range.
    pub(crate) fn check_priorities(exponent: f64, unit_log2: i32) -> std::result::Result<(), String> {
        if !(0.0..=4.0).contains(&exponent) {
            return Err(format!("priority_exponent is 0 to 4, got {}", Number(exponent)));
        }
        if !(-30..=0).contains(&unit_log2) {
            return Err(format!("priority_unit_log2 is -30 to 0, got {unit_log2}"));
        }
        Ok(())
    }

    /// Checks every field. The error names the first invalid one and its valid values.
    pub fn validate(&self) -> Result<()> {
        let check = |holds: bool, reason: &dyn Fn() -> String| match holds {
            true => Ok(()),
            false => Err(Error::Table { table: self.name.clone(), reason: reason() }),
        };
        let is_name = |name: &str| (1..=128).contains(&name.len());
        check(is_name(&self.name), &|| "a name has 1 to 128 bytes, with its namespace".into())?;
        let (columns, most) = (self.columns.len(), Self::MAX_COLUMNS);
        check((1..=most).contains(&columns), &|| format!("a table has 1 to {most} columns, got {columns}"))?;
        let mut step_bytes = 0u64;
        for (i, column) in self.columns.iter().enumerate() {
            let name = &column.name;
            check(is_name(name) && column.shape.len() <= 8, &|| {
                format!("column {i} needs a name of 1 to 128 bytes and at most 8 dimensions")
            })?;
            check(!name.split('/').any(str::is_empty), &|| {
                format!("column {name:?} is a part of a structure, and a part has a name between slashes")
            })?;
            let with_parameters = self.parameters.is_some() && Self::RESERVED_WITH_PARAMETERS.contains(&column.root());
            check(!(Self::RESERVED_COLUMNS.contains(&column.root()) || with_parameters), &|| {
                format!("column {name:?} has the name of an argument of append or of an array of a batch: rename it")
            })?;
            check(self.columns[..i].iter().all(|c| c.name != *name), &|| format!("column {name:?} appears twice"))?;
            let is_within = |part: &&Column| part.name != *name && has_column(name, &part.name);
            if let Some(Column { name: part, .. }) = self.columns.iter().find(is_within) {
                check(false, &|| {
                    format!("column {name:?} has the part {part:?}, and a column with parts is no array: rename one")
                })?;
            }
            check(column.element_bytes() > 0, &|| {
                format!(
                    "column {name:?} has an empty shape: only the first dimension may be free, for values of any length"
                )
            })?;
            check(column.is_ragged() || column.max_length == 0, &|| {
                format!("column {name:?} has a max_length and no free dimension: give it the shape (None, ...)")
            })?;
            step_bytes = step_bytes.saturating_add(column.element_bytes() as u64);
        }
        check(step_bytes <= Self::MAX_STEP_BYTES, &|| {
            format!("one step has {step_bytes} bytes; the limit is {}", Self::MAX_STEP_BYTES)
        })?;
        let (capacity, most) = (self.capacity, Self::MAX_CAPACITY);
        check((1..=most).contains(&capacity), &|| format!("capacity is 1 to {most} steps, got {capacity}"))?;
        Self::check_priorities(self.priority_exponent, self.priority_unit_log2)
            .or_else(|reason| check(false, &|| reason.clone()))?;
        check(self.sampler != Sampler::Fifo || self.max_times_sampled > 0, &|| {
            "the fifo sampler needs max_times_sampled of at least 1: else every sample is the oldest item".into()
        })?;
        let size = u64::from(self.queue_size);
        let is_fifo = self.sampler == Sampler::Fifo && self.samples_per_insert == 0.0;
        check(size == 0 || is_fifo, &|| {
            "queue_size is for tables with sampler \"fifo\" and without samples_per_insert: a queue gives each item max_times_sampled times".into()
        })?;
        check(size == 0 || (self.min_size..=capacity).contains(&size), &|| {
            format!("queue_size is min_size to the capacity, {} to {capacity}, got {size}", self.min_size)
        })?;
        check((1..=capacity).contains(&self.min_size), &|| {
            format!("min_size is 1 to the capacity, got {}", self.min_size)
        })?;
        let (ratio, slack) = (self.samples_per_insert, self.slack);
        check((0.0..=Self::MAX_SAMPLES_PER_INSERT).contains(&ratio), &|| {
            format!("samples_per_insert is 0 (no limit) to 1e9, got {}", Number(ratio))
        })?;
        let most = self.max_times_sampled;
        check(most == 0 || ratio <= f64::from(most), &|| {
            format!(
                "samples_per_insert {ratio} is more than max_times_sampled {most}: no item is sampled that often, and writers would \
                 wait for ever; lower the one or raise the other"
            )
        })?;
        check((0.0..=Self::MAX_SLACK).contains(&slack), &|| {
            format!("slack is 0 (derived) to 1e15, got {}", Number(slack))
        })?;
        let least = ratio.max(1.0);
        check(slack == 0.0 || ratio == 0.0 || slack >= least, &|| {
            format!(
                "slack {slack} is too small for samples_per_insert {ratio}: at least {least} so that one insert and one sample fit"
            )
        })?;
        let (parameters, lag) = (self.parameters.as_deref(), self.max_sample_lag);
        check(parameters.is_none_or(is_name), &|| "the name of its parameters has 1 to 128 bytes".into())?;
        check(lag == 0 || parameters.is_some(), &|| {
            format!("max_sample_lag {lag} counts versions of parameters: name them, parameters=\"policy\"")
        })?;
        self.view.iter().try_for_each(|view| view.validate(self))
    }

    /// The names of the columns, for errors.
    pub fn column_names(&self) -> String {
        let names: Vec<_> = self.columns.iter().map(|c| c.name.as_str()).collect();
        names.join(", ")
    }

    pub fn column_index(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name == name)
    }

    /// Checks that a whole window of `before` steps, the anchor and `after` steps can be held, where `streams` streams get
    /// their steps together: between two steps of a window, one step of every other stream arrives.
    pub(crate) fn check_window(&self, streams: u32, before: u16, after: u16) -> Result<()> {
        let window = u64::from(before) + 1 + u64::from(after);
        let needed = (window - 1) * u64::from(streams) + 1;
        if needed <= self.capacity {
            return Ok(());
        }
        let among = match streams {
            1 => String::new(),
            _ => format!(", and {needed} steps of {streams} streams arrive until it is whole"),
        };
        Err(Error::Config(format!(
            "a window has {window} steps ({before} before the anchor, {after} after it){among}, and table {:?} holds {}: \
             its first step would be gone before its last one arrives; take a shorter window (of a Trajectory: \
             max_steps), or a table with a larger capacity",
            self.name, self.capacity
        )))
    }

    /// Bytes of one row without its blobs: flags, raw columns, blob lengths and counts.
    pub fn row_bytes(&self) -> usize {
        1 + self.columns.iter().map(Column::bytes_in_row).sum::<usize>()
    }

    /// Effective byte limit: `capacity_bytes`, or the bytes of `capacity` unpacked steps, each a chunk.
    pub fn effective_capacity_bytes(&self) -> u64 {
        if self.capacity_bytes > 0 {
            return self.capacity_bytes;
        }
        let raw: u64 = self.columns.iter().map(Column::capacity_bytes).sum();
        self.capacity.saturating_mul(raw + self.row_bytes() as u64 + Self::CHUNK_BYTES)
    }

    /// Effective slack: `slack`, or by default the samples of `min_size` / 10 inserts, at least of 1,024 inserts and at least 4,096
    /// samples, so that chunks in flight and prefetched batches block neither side. It lets writers run ahead by no more items than
    /// fit beside `min_size`.
    pub fn effective_slack(&self) -> f64 {
        if self.slack > 0.0 || self.samples_per_insert == 0.0 {
            return self.slack;
        }
        let inserts = (self.min_size as f64 / 10.0).max(1024.0);
        let free = self.capacity.saturating_sub(self.min_size) as f64;
        let most = (self.samples_per_insert * free).max(self.samples_per_insert).max(1.0);
        (self.samples_per_insert * inserts).max(4096.0).min(most)
    }

    /// The view of a writer or a sample: the one that it names, else that of the table. The error says that there is neither.
    pub fn view_or_own(&self, named: Option<ViewSpec>) -> Result<ViewSpec> {
        named.or_else(|| self.view.clone()).ok_or_else(|| {
            Error::Config(format!(
                "table {:?} has no view of its own: name one here, or make the table with `view`",
                self.name
            ))
        })
    }

    /// Checksum of what a batch is decoded with: the columns and, where it uses the table's own, the view. Never 0.
    pub fn checksum(&self, with_view: bool) -> u32 {
        let view = self.view.as_ref().filter(|_| with_view);
        // Neither a map nor a float without a number is in them, so they are JSON.
        let text = serde_json::to_vec(&(&self.columns, view)).unwrap_or_default();
        crc32fast::hash(&text).max(1)
    }

    /// The fields that differ from a definition that is asked for; `None` when they agree. `asked` without a view matches any.
    pub fn difference(&self, asked: &TableConfig) -> Option<String> {
        self.difference_from(asked, "asked for")
    }

    /// # Errors
    /// [`Error::TableDiffers`] unless the definitions agree.
    pub fn check_same(&self, asked: &TableConfig) -> Result<()> {
        let differs = |difference| Err(Error::TableDiffers { table: self.name.clone(), difference });
        self.difference(asked).map_or(Ok(()), differs)
    }

    /// [`Self::difference`] from a definition that the text introduces by `introduced`.
    pub(crate) fn difference_from(&self, other: &TableConfig, introduced: &str) -> Option<String> {
        let named = self.named(other).into_iter().zip(other.named(self));
        let differ =
            named.filter(|((name, own), (_, others))| own != others && (*name != "view" || other.view.is_some()));
        let texts = differ.map(|((name, own), (_, others))| format!("{name} is {own}, {introduced} {others}"));
        let texts: Vec<_> = texts.collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// The fields after `name`, with their values in the words of Python. Of the columns those that `other` lacks.
    fn named(&self, other: &TableConfig) -> [(&'static str, String); 16] {
        let float = |value: f64| format!("{value:?}");
        let view = self.view.as_ref();
        [
            ("columns", self.columns_text(&other.columns)),
            ("capacity", self.capacity.to_string()),
            ("capacity_bytes", self.capacity_bytes.to_string()),
            ("sampler", self.sampler.to_string()),
            ("priority_exponent", float(self.priority_exponent)),
            ("priority_unit_log2", self.priority_unit_log2.to_string()),
            ("live_max_priority", truth(self.live_max_priority).to_owned()),
            ("max_times_sampled", self.max_times_sampled.to_string()),
            ("min_size", self.min_size.to_string()),
            ("samples_per_insert", float(self.samples_per_insert)),
            ("slack", float(self.slack)),
            ("queue_size", self.queue_size.to_string()),
            ("max_version_lag", self.max_version_lag.to_string()),
            ("parameters", self.parameters.as_ref().map_or("None".to_owned(), |name| format!("{name:?}"))),
            ("max_sample_lag", self.max_sample_lag.to_string()),
            ("view", view.map_or("None".to_owned(), |view| view.to_string())),
        ]
    }

    /// The columns that are not in `known`; all where only their order differs.
    pub fn columns_text(&self, known: &[Column]) -> String {
        let text = |column: &Column| {
            let Column { name, dtype, codec, max_length, .. } = column;
            let finite = if column.finite { "" } else { " finite=False" };
            let most = if *max_length == 0 { String::new() } else { format!(" max_length={max_length}") };
            format!("{name}: {} {} {}{finite}{most}", dtype.name(), column.shape_text(), codec.name())
        };
        let reordered = self.columns != known
            && self.columns.len() == known.len()
            && self.columns.iter().all(|column| known.contains(column));
        let shown = |column: &&Column| reordered || !known.contains(column);
        let texts: Vec<_> = self.columns.iter().filter(shown).map(text).collect();
        format!("[{}]", texts.join(", "))
    }
}

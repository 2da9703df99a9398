//! A column of a table: the type, shape and packing of its values.

use serde::{Deserialize, Serialize};

use crate::codec::{Codec, Dtype};
use crate::schema::TableConfig;
use base::notation::tuple;

/// A named array with one value per step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ReadColumn")]
pub struct Column {
    pub name: String,
    pub dtype: Dtype,
    /// Its shape; empty for a scalar. A 0 in the first place is a free dimension: the column is ragged, and its values have any length.
    pub shape: Vec<u32>,
    pub codec: Codec,
    /// Whether writers refuse NaN and infinities where the column is [`REWARD`](crate::view_spec::REWARD), or the
    /// observation of the writer's or the table's view.
    pub finite: bool,
    /// Most elements along the free dimension of a ragged column; 0 sets no limit but the bytes of a step.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_length: u32,
}

/// Deserialised column; omitted fields take defaults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadColumn {
    name: String,
    dtype: Dtype,
    #[serde(default)]
    shape: Vec<u32>,
    codec: Option<Codec>,
    finite: Option<bool>,
    #[serde(default)]
    max_length: u32,
}

impl From<ReadColumn> for Column {
    fn from(read: ReadColumn) -> Self {
        let mut column = Column::new(read.name, read.dtype, read.shape);
        column.codec = read.codec.unwrap_or(column.codec);
        column.finite = read.finite.unwrap_or(column.finite);
        column.max_length = read.max_length;
        column
    }
}

impl Column {
    /// Least bytes of a value that is packed by default: an LZ4 block of fewer is rarely shorter than its input.
    const PACKED_FROM_BYTES: usize = 64;
    /// For vectors of floats, most of which change in every step: packed they are longer, and a sample of 256 takes 1.4 times as long.
    const PACKED_VECTOR_FROM_BYTES: usize = 1024;

    /// Bytes that a ragged value without `max_length` counts for in a table that sets no `capacity_bytes`.
    const RAGGED_BYTES: u64 = 64 << 10;

    /// A column with the default codec: LZ4 for values of 64 bytes and more, vectors of floats of 1,024 and more, else none, as for
    /// ragged values.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: Vec<u32>) -> Self {
        let mut column = Column { name: name.into(), dtype, shape, codec: Codec::None, finite: true, max_length: 0 };
        let least = match column.shape.len() {
            1 if dtype.is_float() => Self::PACKED_VECTOR_FROM_BYTES,
            _ => Self::PACKED_FROM_BYTES,
        };
        if !column.is_ragged() && column.bytes() >= least {
            column.codec = Codec::Lz4;
        }
        column
    }

    /// Bytes of a blob's length in a row.
    pub const BLOB_LENGTH_BYTES: usize = 4;
    /// Bytes of the number of a ragged value's elements in a row.
    pub const COUNT_BYTES: usize = 4;

    /// First part of the name: `observation` of `observation/camera`. A batch has a structure of this name.
    pub fn root(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }

    /// Whether the first dimension is free.
    pub fn is_ragged(&self) -> bool {
        self.shape.first() == Some(&0)
    }

    /// The dimensions after the free one; all of a column that is not ragged.
    pub fn inner_shape(&self) -> &[u32] {
        &self.shape[usize::from(self.is_ragged())..]
    }

    /// Bytes of one element along the free dimension; of a whole value where the column is not ragged. Saturates;
    /// [`TableConfig::validate`] bounds it.
    pub fn element_bytes(&self) -> usize {
        self.inner_shape().iter().fold(self.dtype.bytes(), |n, &d| n.saturating_mul(d as usize))
    }

    /// Most elements along the free dimension; 1 where the column is not ragged.
    pub fn most_elements(&self) -> usize {
        let fitting = TableConfig::MAX_STEP_BYTES as usize / self.element_bytes().max(1);
        match (self.is_ragged(), self.max_length) {
            (false, _) => 1,
            (true, 0) => fitting,
            (true, most) => fitting.min(most as usize),
        }
    }

    /// Bytes of the largest value, unpacked. Saturates as [`Self::element_bytes`].
    pub fn bytes(&self) -> usize {
        self.element_bytes().saturating_mul(self.most_elements())
    }

    /// Bytes of a value of fixed size; 0 where the column is ragged.
    pub fn fixed_bytes(&self) -> usize {
        if self.is_ragged() { 0 } else { self.bytes() }
    }

    /// Whether values are blobs beside the rows; otherwise they are raw inside them.
    pub fn makes_blobs(&self) -> bool {
        self.codec.makes_blobs() || self.is_ragged()
    }

    /// Bytes of the column's part of a row: a value, or the length of its blob, with the elements of a ragged one.
    pub fn bytes_in_row(&self) -> usize {
        match (self.makes_blobs(), self.is_ragged()) {
            (false, _) => self.bytes(),
            (true, ragged) => Self::BLOB_LENGTH_BYTES + Self::COUNT_BYTES * usize::from(ragged),
        }
    }

    /// Bytes that a value counts for in the capacity of a table that sets no `capacity_bytes`.
    pub fn capacity_bytes(&self) -> u64 {
        match self.is_ragged() && self.max_length == 0 {
            true => Self::RAGGED_BYTES,
            false => self.bytes() as u64,
        }
    }

    /// Shape in Python's words: `(None, 3)` of a ragged column.
    pub fn shape_text(&self) -> String {
        let free = self.is_ragged().then(|| "None".to_owned());
        tuple(free.into_iter().chain(self.inner_shape().iter().map(u32::to_string)))
    }
}

/// Omits unused settings, so that older releases can read the definition.
pub fn is_zero(setting: &u32) -> bool {
    *setting == 0
}

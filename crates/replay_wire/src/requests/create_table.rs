//! Makes a table. Its definition is also the answer to [`DescribeTable`].

use super::*;
use base::words::shortened;
use replay_core::schema::{Codec, Column, Dtype, Sampler};
use replay_core::view::ViewSpec;

/// Longest view of a table, in bytes of JSON.
const MAX_VIEW_BYTES: usize = 64 << 10;

/// Most bytes of a name or view in an error: the peer may be unauthenticated, and errors are logged.
const QUOTED: usize = 64;

/// Most bytes of a parser's reason, which also quotes the text.
const REASON: usize = 256;

call!(TableConfig: Learner => (), names: |table, visit| visit(&mut table.name));

same_variants!(Dtype: Bool Uint8 Int8 Uint16 Int16 Uint32 Int32 Uint64 Int64 Float16 Float32 Float64);
same_variants!(Codec: None Lz4 Zstd);
same_variants!(Sampler: Prioritized Uniform Fifo Lifo MaxHeap MinHeap RankBased);

same_fields! {
    table_config: TableConfig {
        name, capacity, capacity_bytes, sampler, priority_exponent, priority_unit_log2, live_max_priority,
        max_times_sampled, min_size, samples_per_insert, slack, max_version_lag, view; columns: "the columns of a table"
    }
}

/// Written out, because the error about an unknown codec names the column.
impl Message for Column {
    type Struct = wire::column::Owned;

    fn read(from: wire::column::Reader<'_>, _rest: &Rest) -> Result<Self> {
        let name = String::read(from.get_name())?;
        let codec = from.get_codec().map_err(|codec| {
            Error::Protocol(format!(
                "column {:?} has codec {}, which this release does not know: update it, or choose another codec",
                shortened(&*name, QUOTED),
                codec.0
            ))
        })?;
        Ok(Column {
            name,
            dtype: Field::read(from.get_dtype())?,
            shape: from.get_shape().map_err(malformed)?.iter().collect(),
            codec: codec.into(),
            finite: from.get_finite(),
        })
    }

    fn write(&self, mut out: wire::column::Builder<'_>) -> Result<()> {
        out.set_name(&self.name);
        out.set_dtype(self.dtype.into());
        out.set_codec(self.codec.into());
        out.set_finite(self.finite);
        list_len("the dimensions of a column", self.shape.len())?;
        out.set_shape(&self.shape[..]).map_err(internal)
    }
}

/// As JSON, which clients of other languages read, too.
impl Field for Option<ViewSpec> {
    type Read<'a> = capnp::Result<capnp::text::Reader<'a>>;
    type Written<'a> = String;

    fn read(text: Self::Read<'_>) -> Result<Self> {
        let text = text.map_err(malformed)?;
        if text.is_empty() {
            return Ok(None);
        }
        // Checked before the copy: a parsed view takes a small multiple of its text.
        if text.len() > MAX_VIEW_BYTES {
            return Err(Error::Protocol(format!(
                "the view of a table has {} bytes, and {MAX_VIEW_BYTES} are the most",
                text.len()
            )));
        }
        let text = String::read(Ok(text))?;
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Error::Protocol(format!(
                "the view {:?} of a table cannot be read: {}",
                shortened(&*text, QUOTED),
                shortened(error.to_string(), REASON)
            ))
        })
    }

    fn write(&self) -> Result<String> {
        let Some(view) = self else {
            return Ok(String::new());
        };
        serde_json::to_string(view)
            .map_err(|error| replay_core::Error::Config(format!("the view of a table cannot be sent: {error}")).into())
    }
}

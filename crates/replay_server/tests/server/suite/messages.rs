//! Tables, and what is said about them.

use bytes::Bytes;
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody, SampleRequest};
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig};
use replay_link::error::Result;
use replay_wire::ErrorCode;
use replay_wire::RequestBody;

pub const TABLE: &str = "steps";

/// A table of one 64-bit column, so that a row's value identifies the row.
pub fn table() -> TableConfig {
    let value = Column {
        name: "value".into(),
        dtype: Dtype::Int64,
        shape: vec![],
        codec: Codec::None,
        finite: true,
        max_length: 0,
    };
    TableConfig::new(TABLE, vec![value], 10_000)
}

/// The table with a rate limiter that blocks the sixth one-item push until something is sampled, and a sample
/// before the first push.
pub fn limited_table() -> TableConfig {
    TableConfig { samples_per_insert: 1.0, slack: 4.0, ..table() }
}

/// A queue: each item is sampled once, the oldest first.
pub fn queue() -> TableConfig {
    TableConfig { sampler: Sampler::Fifo, max_times_sampled: 1, ..table() }
}

/// A writer of one stream whose items have no row but their anchor.
pub fn writer(number: u64) -> OpenWriter {
    OpenWriter {
        writer: number,
        name: format!("writer {number}"),
        server: None,
        streams: 1,
        window_before: 0,
        window_after: 0,
    }
}

/// `values.len()` steps with an item each; the steps before it were pushed.
pub fn push(writer: u64, epoch: u32, sequence: u64, first_step: u64, values: &[i64]) -> Push {
    let mut payload = Vec::new();
    for (step, value) in (first_step..).zip(values) {
        let first = if step == 0 { replay_core::schema::flags::FIRST } else { 0 };
        payload.push(first);
        payload.extend_from_slice(&value.to_le_bytes());
    }
    let items = (first_step..)
        .take(values.len())
        .map(|anchor| NewItem { anchor, stream: 0, before: 0, after: 0, priority: Some(1.0) })
        .collect();
    let chunk = ChunkHead { stream: 0, rows: values.len() as u32, first_step, bytes: payload.len() as u32, version: 0 };
    Push { writer, epoch, sequence, body: PushBody { chunks: vec![chunk], items, payload: Bytes::from(payload) } }
}

pub fn sample(count: u32) -> RequestBody {
    RequestBody::Sample(SampleRequest { count, ..SampleRequest::default() })
}

/// A safetensors file with one tensor of `bytes` bytes.
pub fn parameters(bytes: usize) -> Bytes {
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + bytes, 9);
    Bytes::from(file)
}

/// The code and the message of a refusal.
pub fn refused<T>(result: Result<T>) -> (ErrorCode, String) {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => (error.code(), error.to_string()),
    }
}

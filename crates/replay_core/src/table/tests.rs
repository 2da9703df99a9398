//! Requests of writers, for the tests of this module.

use crate::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody};

/// Opens a writer of table `t`.
pub fn open(writer: u64, streams: u32) -> OpenWriter {
    OpenWriter { writer, name: String::new(), server: None, streams, window_before: 0, window_after: 0 }
}

/// A push of writer 1: one step, of a byte of flags and a value, with an item.
pub fn push(sequence: u64, priority: Option<f32>) -> Push {
    Push {
        writer: 1,
        epoch: 1,
        sequence,
        body: PushBody {
            chunks: vec![ChunkHead { stream: 0, rows: 1, first_step: sequence - 1, bytes: 2, version: 0 }],
            items: vec![NewItem { anchor: sequence - 1, stream: 0, before: 0, after: 0, priority }],
            payload: vec![0; 2].into(),
        },
    }
}

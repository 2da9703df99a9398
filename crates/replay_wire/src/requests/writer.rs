//! Opens and closes a writer.

use crate::error::Result;
use crate::fields::text;
use crate::innet_capnp as wire;
use replay_core::replay::{OpenWriter, WriterOpened};

/// Opens or takes over a writer. Its pushes use the same connection.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenOrResume {
    /// The writer.
    pub open: OpenWriter,
    /// Whether the writer was opened before: a server that does not know it then refuses.
    pub resume: bool,
}

/// Closes a writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseWriter {
    /// The writer.
    pub writer: u64,
    /// Epoch of its connection.
    pub epoch: u32,
}

pub fn read(from: wire::open_writer::Reader<'_>) -> Result<OpenOrResume> {
    let open = OpenWriter {
        writer: from.get_writer(),
        name: text(from.get_name())?,
        server: None,
        streams: from.get_streams(),
        window_before: from.get_window_before(),
        window_after: from.get_window_after(),
    };
    Ok(OpenOrResume { open, resume: from.get_resume() })
}

pub fn write(OpenOrResume { open, resume }: &OpenOrResume, mut out: wire::open_writer::Builder<'_>) {
    out.set_writer(open.writer);
    out.set_name(&open.name);
    out.set_streams(open.streams);
    out.set_window_before(open.window_before);
    out.set_window_after(open.window_after);
    out.set_resume(*resume);
}

pub fn read_opened(from: wire::writer_opened::Reader<'_>) -> WriterOpened {
    WriterOpened {
        epoch: from.get_epoch(),
        last_sequence: from.get_last_sequence(),
        steps: from.get_steps(),
        connected: from.get_connected(),
    }
}

pub fn write_opened(opened: &WriterOpened, mut out: wire::writer_opened::Builder<'_>) {
    out.set_epoch(opened.epoch);
    out.set_last_sequence(opened.last_sequence);
    out.set_steps(opened.steps);
    out.set_connected(opened.connected);
}

pub fn read_close(from: wire::close_writer::Reader<'_>) -> CloseWriter {
    CloseWriter { writer: from.get_writer(), epoch: from.get_epoch() }
}

pub fn write_close(close: &CloseWriter, mut out: wire::close_writer::Builder<'_>) {
    out.set_writer(close.writer);
    out.set_epoch(close.epoch);
}

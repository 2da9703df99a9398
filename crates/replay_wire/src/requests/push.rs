//! A writer: its steps and items, how it is opened and closed.

use replay_core::replay::{ChunkHead, NewItem, OpenWriter, Push, PushBody, WriterOpened};

use crate::error::Result;
use crate::frame::{Rest, text, write_list};
use crate::innet_capnp as wire;

pub fn read(from: wire::push::Reader<'_>, rest: &Rest) -> Result<Push> {
    let body = PushBody {
        chunks: rest.list(from.get_chunks(), |chunk| Ok(read_chunk(chunk)))?,
        items: rest.list(from.get_items(), |item| Ok(read_item(item)))?,
        payload: rest.payload(),
    };
    Ok(Push { writer: from.get_writer(), epoch: from.get_epoch(), sequence: from.get_sequence(), body })
}

/// Refuses priorities that are NaN, infinite or negative.
pub fn write(push: &Push, mut out: wire::push::Builder<'_>) -> Result<()> {
    let PushBody { chunks, items, .. } = &push.body;
    push.body.check_priorities()?;
    out.set_writer(push.writer);
    out.set_epoch(push.epoch);
    out.set_sequence(push.sequence);
    write_list(out.reborrow().init_chunks(chunks.len() as u32), chunks, write_chunk);
    write_list(out.init_items(items.len() as u32), items, write_item);
    Ok(())
}

pub fn read_chunk(from: wire::chunk::Reader<'_>) -> ChunkHead {
    ChunkHead {
        stream: from.get_stream(),
        rows: from.get_rows(),
        first_step: from.get_first_step(),
        bytes: from.get_bytes(),
        version: from.get_version(),
    }
}

pub fn write_chunk(chunk: &ChunkHead, mut out: wire::chunk::Builder<'_>) {
    out.set_stream(chunk.stream);
    out.set_rows(chunk.rows);
    out.set_first_step(chunk.first_step);
    out.set_bytes(chunk.bytes);
    out.set_version(chunk.version);
}

fn read_item(from: wire::item::Reader<'_>) -> NewItem {
    NewItem {
        anchor: from.get_anchor(),
        stream: from.get_stream(),
        before: from.get_before(),
        after: from.get_after(),
        priority: Some(from.get_priority()).filter(|&priority| priority != -1.0),
    }
}

fn write_item(item: &NewItem, mut out: wire::item::Builder<'_>) {
    out.set_anchor(item.anchor);
    out.set_stream(item.stream);
    out.set_before(item.before);
    out.set_after(item.after);
    out.set_priority(item.priority.unwrap_or(-1.0));
}

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

pub fn read_open(from: wire::open_writer::Reader<'_>) -> Result<OpenOrResume> {
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

pub fn write_open(OpenOrResume { open, resume }: &OpenOrResume, mut out: wire::open_writer::Builder<'_>) {
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

//! Steps and items of a writer.

use crate::error::Result;
use crate::fields::{Rest, write_list};
use crate::innet_capnp as wire;
use replay_core::replay::{ChunkHead, NewItem, Push, PushBody};

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
    }
}

pub fn write_chunk(chunk: &ChunkHead, mut out: wire::chunk::Builder<'_>) {
    out.set_stream(chunk.stream);
    out.set_rows(chunk.rows);
    out.set_first_step(chunk.first_step);
    out.set_bytes(chunk.bytes);
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

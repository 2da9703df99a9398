//! The stored steps of a table.

use super::push::{read_chunk, write_chunk};
use crate::error::{Error, Result};
use crate::fields::{COPIED, Rest, write_list};
use crate::innet_capnp as wire;
use replay_core::replay::{ChunkHead, ReadPosition, ReadSteps, StepsRead, StoredSteps};

pub fn read(from: wire::read_steps::Reader<'_>) -> Result<ReadSteps> {
    Ok(ReadSteps { bytes: from.get_bytes(), from: read_position(from.get_from()?) })
}

pub fn write(request: &ReadSteps, mut out: wire::read_steps::Builder<'_>) {
    out.set_bytes(request.bytes);
    write_position(&request.from, out.init_from());
}

pub fn read_read(from: wire::steps_read::Reader<'_>, rest: &Rest) -> Result<StepsRead> {
    let heads = rest.list(from.get_chunks(), |chunk| Ok(read_chunk(chunk)))?;
    let writers = from.get_writers()?;
    let mut payload = rest.payload();
    let bytes: u64 = heads.iter().map(|head| u64::from(head.bytes)).sum();
    if writers.len() as usize != heads.len() || bytes != payload.len() as u64 {
        return Err(Error::Protocol(format!(
            "stored steps in {} chunks of {bytes} bytes come with {} writers and {} bytes",
            heads.len(),
            writers.len(),
            payload.len()
        )));
    }
    let chunks = heads.iter().zip(writers).map(|(head, writer)| StoredSteps {
        writer,
        stream: head.stream,
        rows: head.rows,
        first_step: head.first_step,
        packed: payload.split_to(head.bytes as usize),
    });
    let chunks = chunks.collect();
    let next = from.has_next().then(|| from.get_next().map(read_position)).transpose()?;
    Ok(StepsRead { chunks, next })
}

pub fn write_read(read: &StepsRead, mut out: wire::steps_read::Builder<'_>) {
    let chunks = &read.chunks;
    write_list(out.reborrow().init_chunks(chunks.len() as u32), chunks, |chunk, out| {
        // A chunk came in a frame, whose payload has at most so many bytes.
        let bytes = chunk.packed.len() as u32;
        let &StoredSteps { stream, rows, first_step, .. } = chunk;
        write_chunk(&ChunkHead { stream, rows, first_step, bytes }, out);
    });
    let writers: Vec<_> = chunks.iter().map(|chunk| chunk.writer).collect();
    out.set_writers(&writers[..]).expect(COPIED);
    if let Some(next) = &read.next {
        write_position(next, out.init_next());
    }
}

fn read_position(from: wire::read_position::Reader<'_>) -> ReadPosition {
    ReadPosition { server: 0, number: from.get_number(), next: from.get_next(), end: from.get_end() }
}

fn write_position(position: &ReadPosition, mut out: wire::read_position::Builder<'_>) {
    out.set_number(position.number);
    out.set_next(position.next);
    out.set_end(position.end);
}

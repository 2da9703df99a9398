//! A request for the stored steps of a table.

use super::*;
use replay_core::replay::{ChunkHead, ReadPosition, ReadSteps, StepsRead, StoredSteps};

call!(ReadSteps: Learner => StepsRead, large: true, names: |_, _| {});

same_fields! {
    read_position: ReadPosition { number, next, end | server = |_| 0 }
}

impl Message for ReadSteps {
    type Struct = wire::read_steps::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        Ok(ReadSteps { bytes: from.get_bytes(), from: read(from.get_from(), rest)? })
    }

    fn write(&self, mut out: wire::read_steps::Builder<'_>) -> Result<()> {
        out.set_bytes(self.bytes);
        self.from.write(out.init_from())
    }
}

impl Message for StepsRead {
    type Struct = wire::steps_read::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        let heads: Vec<ChunkHead> = read_list(from.get_chunks(), rest)?;
        let writers = from.get_writers().map_err(malformed)?;
        let next = read_optional(from.has_next(), from.get_next(), rest)?;
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
        Ok(StepsRead { chunks: chunks.collect(), next })
    }

    fn words(&self) -> usize {
        64 + 4 * self.chunks.len()
    }

    fn into_payload(self) -> Payload {
        let packed = self.chunks.into_iter().map(|chunk| chunk.packed);
        (packed.collect(), None)
    }

    fn write(&self, mut out: wire::steps_read::Builder<'_>) -> Result<()> {
        let heads = self.chunks.iter().map(|chunk| ChunkHead {
            stream: chunk.stream,
            rows: chunk.rows,
            first_step: chunk.first_step,
            // A chunk came in a frame, whose payload has at most so many bytes.
            bytes: chunk.packed.len() as u32,
        });
        let heads: Vec<_> = heads.collect();
        let len = list_len("the chunks of stored steps", heads.len())?;
        write_list(out.reborrow().init_chunks(len), &heads)?;
        let writers: Vec<_> = self.chunks.iter().map(|chunk| chunk.writer).collect();
        out.set_writers(&writers[..]).map_err(internal)?;
        match self.next {
            Some(next) => next.write(out.init_next()),
            None => Ok(()),
        }
    }
}

//! Steps and items.

use super::*;
use replay_core::replay::{ChunkHead, NewItem, PushBody};

/// An applied push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Steps of this writer that the table has applied so far.
    pub steps: u64,
}

call!(Push: Actor => Pushed, names: |_, _| {}, payload: |push| push.body.payload.clone());

same_fields! {
    pushed: Pushed { steps }
    chunk: ChunkHead { stream, rows, first_step, bytes }
    item: NewItem { anchor, stream, before, after, priority }
    push: PushBody { | payload = Rest::payload; chunks: "the chunks of a push", items: "the items of a push" }
}

impl Message for Push {
    type Struct = wire::push::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        Ok(Push {
            writer: from.get_writer(),
            epoch: from.get_epoch(),
            sequence: from.get_sequence(),
            body: PushBody::read(from, rest)?,
        })
    }

    fn words(&self) -> usize {
        64 + 3 * (self.body.chunks.len() + self.body.items.len())
    }

    /// Refuses priorities that are NaN, infinite or negative.
    fn write(&self, mut out: wire::push::Builder<'_>) -> Result<()> {
        out.set_writer(self.writer);
        out.set_epoch(self.epoch);
        out.set_sequence(self.sequence);
        self.body.check_priorities()?;
        self.body.write(out)
    }
}

/// A checked priority; -1 for none.
impl Field for Option<f32> {
    type Read<'a> = f32;
    type Written<'a> = f32;

    fn read(priority: f32) -> Result<Self> {
        Ok(Some(priority).filter(|&p| p != -1.0))
    }

    fn write(&self) -> Result<f32> {
        Ok(self.unwrap_or(-1.0))
    }
}

//! Steps and items.

use super::*;
use replay_core::replay::{ChunkHead, NewItem, PushBody};

/// An applied push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Steps of this writer that the table has applied so far.
    pub steps: u64,
}

impl Call for Push {
    const ROLE: Role = Role::Actor;
    type Reply = Pushed;

    fn words(&self) -> usize {
        64 + 3 * (self.body.chunks.len() + self.body.items.len())
    }

    fn payload(&self) -> Bytes {
        self.body.payload.clone()
    }
}

impl Answer for Pushed {}

same_fields! {
    pushed: Pushed { steps }
    chunk: ChunkHead { stream, rows, first_step, bytes }
    item: NewItem { anchor, stream, before, after, priority }
}

impl Message for Push {
    type Struct = wire::push::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        Ok(Push {
            table: Field::read(from.get_table())?,
            writer: from.get_writer(),
            epoch: from.get_epoch(),
            sequence: from.get_sequence(),
            body: PushBody {
                chunks: read_list(from.get_chunks(), rest)?,
                items: read_list(from.get_items(), rest)?,
                payload: rest.payload(),
            },
        })
    }

    /// Refuses priorities that are NaN, infinite or negative.
    fn write(&self, mut out: wire::push::Builder<'_>) -> Result<()> {
        out.set_table(&self.table);
        out.set_writer(self.writer);
        out.set_epoch(self.epoch);
        out.set_sequence(self.sequence);
        self.body.check_priorities()?;
        let chunks = list_len("the chunks of a push", self.body.chunks.len())?;
        write_list(out.reborrow().init_chunks(chunks), &self.body.chunks)?;
        let items = list_len("the items of a push", self.body.items.len())?;
        write_list(out.init_items(items), &self.body.items)
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

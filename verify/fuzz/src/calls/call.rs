//! The calls that a sequence is made of.

use bolero::TypeGenerator;

/// One request.
#[derive(Debug, Clone, TypeGenerator)]
pub enum Call {
    /// Creates a table.
    Create {
        /// Of `TABLES`.
        table: Table,
        /// Its settings.
        kind: u8,
        /// Its capacity.
        capacity: Capacity,
    },
    /// Opens a writer.
    Open {
        /// Its table.
        table: Table,
        /// Its number.
        writer: Writer,
        /// Its streams.
        #[generator(0..4u32)]
        streams: u32,
        /// Rows before its anchors.
        #[generator(0..4u16)]
        before: u16,
        /// Rows after its anchors.
        #[generator(0..4u16)]
        after: u16,
        /// Whether it was opened before.
        resume: bool,
    },
    /// Closes a writer.
    Close(Table, Writer, Chance),
    /// Pushes steps and items.
    Push(PushCall),
    /// Samples.
    Sample {
        /// The table.
        table: Table,
        /// Items.
        #[generator(0..40u32)]
        count: u32,
        /// Rows before the anchor.
        #[generator(0..6u16)]
        before: u16,
        /// Rows after the anchor.
        #[generator(0..6u16)]
        after: u16,
        /// Whether fewer items are enough.
        allow_short: bool,
        /// Whether the smallest probability is wanted.
        min_probability: bool,
        /// For a part of a batch.
        #[generator(0..80u32)]
        part: u32,
        /// Whether the batch is delivered at once.
        delivered: bool,
    },
    /// Delivers the oldest held batch, or drops it.
    Deliver(bool),
    /// Updates priorities.
    Update(Table, Vec<(u64, f64)>),
    /// Reads stored steps.
    Read {
        /// The table.
        table: Table,
        /// Whether to go on where the last answer ended.
        go_on: bool,
        /// The table's number, unless it goes on.
        number: u16,
        /// Number of the next chunk.
        next: u8,
        /// Bytes of the answer.
        bytes: u16,
    },
    /// Reports an item that does not decode.
    Corrupt(Table, u64),
    /// Empties a table.
    Empty(Table, Chance),
    /// Drops a table.
    DropTable(Table, Chance),
    /// Describes a table.
    Describe(Table),
    /// Stores parameters.
    Put {
        /// Idempotency key.
        id: u8,
        /// Their version.
        version: u8,
        /// Whether they are a safetensors file.
        valid: bool,
        /// Their bytes.
        bytes: Vec<u8>,
    },
    /// Gets parameters.
    Get {
        /// The client's version.
        newer_than: u8,
        /// Who uses them.
        writer: Option<(Table, Writer)>,
    },
    /// Removes parameters.
    DropParameters(Chance),
    /// Lists tables and parameters.
    List,
    /// Statistics.
    Stats,
}

/// A table: mostly the first one.
#[derive(Debug, Clone, Copy, TypeGenerator)]
pub struct Table(#[generator(0..12u8)] u8);

impl Table {
    /// The first one.
    pub const FIRST: Table = Table(2);

    /// Its index.
    pub fn index(self) -> usize {
        2_u8.saturating_sub(self.0).into()
    }
}

/// A writer: mostly the first one.
#[derive(Debug, Clone, Copy, TypeGenerator)]
pub struct Writer(#[generator(0..12u8)] u8);

impl Writer {
    /// The first one.
    pub const FIRST: Writer = Writer(2);

    /// Its index.
    pub fn index(self) -> u8 {
        2_u8.saturating_sub(self.0)
    }
}

/// A number that is seldom small: what ends things happens seldom.
#[derive(Debug, Clone, Copy, TypeGenerator)]
pub struct Chance(u8);

impl Chance {
    /// Once in sixteen times.
    pub fn is_seldom(self) -> bool {
        self.0 < 16
    }
}

/// Capacity of a table.
#[derive(Debug, Clone, Copy, TypeGenerator)]
pub enum Capacity {
    /// A few steps.
    Small(#[generator(1..60u8)] u8),
    /// Any.
    Any(u64),
}

/// A push.
#[derive(Debug, Clone, TypeGenerator)]
pub struct PushCall {
    pub(super) table: Table,
    pub(super) writer: Writer,
    /// Small numbers are mistakes.
    pub(super) wrong: u8,
    #[generator(bolero::produce_with::<Vec<ChunkCall>>().len(0..4usize))]
    pub(super) chunks: Vec<ChunkCall>,
    #[generator(bolero::produce_with::<Vec<ItemCall>>().len(0..8usize))]
    pub(super) items: Vec<ItemCall>,
    /// Position and new value of a byte of the payload, where `wrong` says so.
    pub(super) spoil: (u16, u8),
}

/// A chunk of a push.
#[derive(Debug, Clone, TypeGenerator)]
pub struct ChunkCall {
    #[generator(0..4u32)]
    pub(super) stream: u32,
    #[generator(1..7u32)]
    pub(super) rows: u32,
    /// Small numbers are mistakes.
    pub(super) wrong: u8,
}

/// An item of a push.
#[derive(Debug, Clone, TypeGenerator)]
pub struct ItemCall {
    #[generator(0..4u32)]
    pub(super) stream: u32,
    /// Steps from the end of its window to the last step.
    #[generator(0..8u8)]
    pub(super) back: u8,
    /// Small numbers are mistakes.
    pub(super) wrong: u8,
    #[generator(0..4u16)]
    pub(super) before: u16,
    #[generator(0..4u16)]
    pub(super) after: u16,
    pub(super) priority: Option<f32>,
}

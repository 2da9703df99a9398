//! The crate's one error type. `ErrorCode` is what crosses the wire and what Python maps to exceptions.

use std::io;
use std::path::PathBuf;

use crate::wait::Interrupted;

/// What went wrong, in a form that the wire and other languages can carry. The order is the wire's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// A fault of this program.
    Internal,
    /// A priority that is NaN, infinite or negative.
    Priority,
    /// A draw from a table, or a sum tree, in which nothing has mass.
    NoMass,
    /// A table nobody made.
    UnknownTable,
    /// A table that exists with another definition.
    TableDiffers,
    /// A table definition that cannot be made.
    Table,
    /// Data that does not fit the table's columns.
    Schema,
    /// A length beyond a limit.
    TooLarge,
    /// The deadline passed.
    Deadline,
    /// A view that reaches beyond an item's window.
    View,
    /// A newer connection of the same writer took over.
    Fenced,
    /// The server no longer knows the writer.
    Expired,
    /// The peer does not follow the protocol.
    Protocol,
    /// The peer is of another release.
    Version,
    /// A missing or wrong token, or a failed TLS handshake.
    Authentication,
    /// Nobody answers at the address.
    Connect,
    /// The connection broke.
    Disconnected,
    /// Stored data does not decode.
    Corrupt,
    /// A configuration that cannot be used.
    Config,
    /// Parameters that are not a safetensors file, or too large.
    Parameters,
    /// The replay, or the writer, was closed.
    Closed,
    /// The operating system refused something.
    Io,
    /// A signal arrived while waiting.
    Interrupted,
    /// A sum of gradients came to nothing.
    Gradients,
}

/// Every error of the crate. Messages are for the person who reads them: they say what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A fault of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
    /// A priority that is NaN, infinite or negative.
    #[error("a priority has to be finite and not negative, got {value}")]
    Priority {
        /// The refused value.
        value: f64,
    },
    /// A draw from a table in which no item has mass.
    #[error(
        "table {table:?} has nothing to draw: of its {items} items none has a priority above zero"
    )]
    NoMass {
        /// The table.
        table: String,
        /// Its live items.
        items: u64,
    },
    /// A draw from a priority index in which nothing has a priority.
    #[error(
        "the sum tree has nothing to draw: none of its {capacity} indexes has a priority above zero; set some with `update`"
    )]
    NothingSet {
        /// Its indexes.
        capacity: u32,
    },
    /// A table nobody made.
    #[error("there is no table {table:?}; {known}")]
    UnknownTable {
        /// The name asked for.
        table: String,
        /// The names there are, as a sentence.
        known: String,
    },
    /// A table that exists with another definition.
    #[error("table {table:?} exists with another definition: {difference}")]
    TableDiffers {
        /// The table.
        table: String,
        /// Each field that differs: what is there and what was asked for.
        difference: String,
    },
    /// A table definition that cannot be made.
    #[error("table {table:?} cannot be made: {reason}")]
    Table {
        /// The table.
        table: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Data that does not fit the table's columns.
    #[error("data for table {table:?} was refused: {reason}")]
    Schema {
        /// The table.
        table: String,
        /// The column and the difference.
        reason: String,
    },
    /// A length beyond a limit.
    #[error("{what} of {size} is over the limit of {limit}; {advice}")]
    TooLarge {
        /// What is too large, with its unit.
        what: &'static str,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
        /// What to do.
        advice: &'static str,
    },
    /// The deadline passed.
    #[error("the deadline passed: {waited_for}")]
    Deadline {
        /// Who is waited for, and by how much.
        waited_for: String,
    },
    /// A view that reaches beyond an item's window.
    #[error(
        "the view needs {before} steps before and {after} after the anchor, but the items of table {table:?} were written with {window_before} and {window_after}; write with a view at least as wide"
    )]
    View {
        /// The table.
        table: String,
        /// Steps the view needs before the anchor.
        before: u16,
        /// Steps the view needs after the anchor.
        after: u16,
        /// Steps the items have before the anchor.
        window_before: u16,
        /// Steps the items have after the anchor.
        window_after: u16,
    },
    /// A newer connection of the same writer took over.
    #[error("writer {writer:?} was fenced off: a newer connection of the same writer took over")]
    Fenced {
        /// The writer's name.
        writer: String,
    },
    /// The server no longer knows the writer.
    #[error("writer {writer:?} has expired: the server no longer knows it; open a new writer")]
    Expired {
        /// The writer's name, or its number where the name is gone.
        writer: String,
    },
    /// The peer does not follow the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The peer is of another release.
    #[error(
        "the server speaks protocol {server} (release {server_release}), this client {client} (release {client_release}); install the same release at both ends"
    )]
    Version {
        /// The server's protocol number.
        server: u32,
        /// The server's release.
        server_release: String,
        /// The client's protocol number.
        client: u32,
        /// The client's release.
        client_release: String,
    },
    /// A missing or wrong token, or a failed TLS handshake.
    #[error("authentication failed: {0}")]
    Authentication(String),
    /// Nobody answers at the address.
    #[error("cannot connect to {address}: {source}; is `innet-replay serve` running there?")]
    Connect {
        /// The address.
        address: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to {address} broke: {reason}")]
    Disconnected {
        /// The address.
        address: String,
        /// What was seen.
        reason: String,
    },
    /// Stored data does not decode.
    #[error("stored data does not decode: {0}")]
    Corrupt(String),
    /// A snapshot that is no snapshot, of another release, or damaged.
    #[error("the snapshot {} cannot be used: {reason}; nothing was restored", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A table with steps, where a snapshot was to be restored.
    #[error(
        "table {table:?} is not empty: it has {steps} steps and holds {bytes} bytes; restore before anything is written, or empty it and let go of its batches first"
    )]
    NotEmpty {
        /// The table.
        table: String,
        /// Its steps.
        steps: u64,
        /// Bytes of its steps, and of evicted ones that readers still hold.
        bytes: u64,
    },
    /// A configuration that cannot be used.
    #[error("configuration: {0}")]
    Config(String),
    /// Parameters that are not a safetensors file, or too large.
    #[error("parameters {name:?} were refused: {reason}")]
    Parameters {
        /// The name they were put under.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The replay, or the writer, was closed.
    #[error("{0} is closed")]
    Closed(&'static str),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A signal arrived while waiting.
    #[error("interrupted")]
    Interrupted,
    /// A sum of gradients, or a control of its job, came to nothing.
    #[error("gradients: {0}")]
    Gradients(Box<dyn std::error::Error + Send + Sync>),
    /// An error that a server answered with.
    #[error("{message}")]
    Remote {
        /// Its code.
        code: ErrorCode,
        /// The server's message.
        message: String,
    },
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Interrupted> for Error {
    fn from(Interrupted: Interrupted) -> Self {
        Error::Interrupted
    }
}

impl Error {
    /// The code that crosses the wire.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Internal(_) => ErrorCode::Internal,
            Error::Priority { .. } => ErrorCode::Priority,
            Error::NoMass { .. } | Error::NothingSet { .. } => ErrorCode::NoMass,
            Error::UnknownTable { .. } => ErrorCode::UnknownTable,
            Error::TableDiffers { .. } => ErrorCode::TableDiffers,
            Error::Table { .. } => ErrorCode::Table,
            Error::Schema { .. } => ErrorCode::Schema,
            Error::TooLarge { .. } => ErrorCode::TooLarge,
            Error::Deadline { .. } => ErrorCode::Deadline,
            Error::View { .. } => ErrorCode::View,
            Error::Fenced { .. } => ErrorCode::Fenced,
            Error::Expired { .. } => ErrorCode::Expired,
            Error::Protocol(_) => ErrorCode::Protocol,
            Error::Version { .. } => ErrorCode::Version,
            Error::Authentication(_) => ErrorCode::Authentication,
            Error::Connect { .. } => ErrorCode::Connect,
            Error::Disconnected { .. } => ErrorCode::Disconnected,
            Error::Corrupt(_) => ErrorCode::Corrupt,
            Error::Snapshot { .. } => ErrorCode::Corrupt,
            Error::NotEmpty { .. } | Error::Config(_) => ErrorCode::Config,
            Error::Parameters { .. } => ErrorCode::Parameters,
            Error::Closed(_) => ErrorCode::Closed,
            Error::Io { .. } => ErrorCode::Io,
            Error::Interrupted => ErrorCode::Interrupted,
            Error::Gradients(_) => ErrorCode::Gradients,
            Error::Remote { code, .. } => *code,
        }
    }
}

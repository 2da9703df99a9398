use super::*;

/// Closes a writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseWriter {
    /// The table.
    pub table: String,
    /// The writer.
    pub writer: u64,
    /// Epoch of its connection.
    pub epoch: u32,
}

call!(CloseWriter: Actor => (), names: |close, visit| visit(&mut close.table));

same_fields! { close_writer: CloseWriter { table, writer, epoch } }

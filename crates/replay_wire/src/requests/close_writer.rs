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

impl Call for CloseWriter {
    const ROLE: Role = Role::Actor;
    type Reply = ();
}

same_fields! { close_writer: CloseWriter { table, writer, epoch } }

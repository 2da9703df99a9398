use super::*;

/// Closes a writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseWriter {
    /// The writer.
    pub writer: u64,
    /// Epoch of its connection.
    pub epoch: u32,
}

call!(CloseWriter: Actor => (), names: |_, _| {});

same_fields! { close_writer: CloseWriter { writer, epoch } }

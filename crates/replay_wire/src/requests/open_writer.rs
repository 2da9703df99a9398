use super::*;
use replay_core::replay::OpenWriter;

/// Opens or takes over a writer. Its pushes use the same connection.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenOrResume {
    /// The writer.
    pub open: OpenWriter,
    /// Whether the writer was opened before: a server that does not know it then refuses.
    pub resume: bool,
}

call!(OpenOrResume: Actor => WriterOpened, names: |writer, visit| visit(&mut writer.open.name));

impl Message for OpenOrResume {
    type Struct = wire::open_writer::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        Ok(OpenOrResume { open: OpenWriter::read(from, rest)?, resume: from.get_resume() })
    }

    fn write(&self, mut out: wire::open_writer::Builder<'_>) -> Result<()> {
        out.set_resume(self.resume);
        self.open.write(out)
    }
}

same_fields! {
    open_writer: OpenWriter { writer, name, streams, window_before, window_after | server = |_| None }
    writer_opened: WriterOpened { epoch, last_sequence, steps, connected }
}

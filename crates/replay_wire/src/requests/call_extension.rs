use super::*;

/// A message to an extension of the server, or its answer, in the extension's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Name of the extension.
    pub name: String,
    /// The frame's payload.
    pub message: Bytes,
}

call!(Extension: Learner => Extension, names: |_, _| {}, payload: |request| request.message.clone());

impl Message for Extension {
    type Struct = wire::extension::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        Ok(Extension { name: Field::read(from.get_name())?, message: rest.payload() })
    }

    fn into_payload(self) -> Payload {
        (vec![self.message], None)
    }

    fn write(&self, mut out: wire::extension::Builder<'_>) -> Result<()> {
        out.set_name(&self.name);
        Ok(())
    }
}

use super::*;

/// Newest parameters. The answer is `None` when there are none newer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GetParameters {
    /// Their name.
    pub name: String,
    /// The client's version; 0 for none.
    pub newer_than: u64,
    /// The writer of the request's table whose later steps use these parameters; ignored without a table.
    pub writer: u64,
}

call!(GetParameters: Actor => Option<Parameters>, large: true, names: |get, visit| visit(&mut get.name));

same_fields! {
    get_parameters: GetParameters { name, newer_than, writer }
}

impl Message for Option<Parameters> {
    type Struct = wire::parameters::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        let version = from.get_version();
        Ok((version > 0).then(|| Parameters { version, bytes: rest.payload() }))
    }

    fn into_payload(self) -> Payload {
        (self.into_iter().map(|stored| stored.bytes).collect(), None)
    }

    fn write(&self, mut out: wire::parameters::Builder<'_>) -> Result<()> {
        out.set_version(self.as_ref().map_or(0, |stored| stored.version));
        Ok(())
    }
}

use super::*;

/// Ends the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authenticate {
    /// The client's proof; `None` without a token.
    pub proof: Option<[u8; 32]>,
}

/// The answer to [`Authenticate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The server's proof; `None` without a token.
    pub proof: Option<[u8; 32]>,
}

call!(Authenticate: Actor => Welcome, names: |_, _| {});

same_fields! {
    authenticate: Authenticate { proof }
    welcome: Welcome { proof }
}

/// A proof; empty for none.
impl Field for Option<[u8; 32]> {
    type Read<'a> = capnp::Result<capnp::data::Reader<'a>>;
    type Written<'a> = capnp::data::Reader<'a>;

    fn read(data: Self::Read<'_>) -> Result<Self> {
        match data {
            Ok([]) => Ok(None),
            data => Field::read(data).map(Some),
        }
    }

    fn write(&self) -> Result<&[u8]> {
        Ok(self.as_ref().map_or(&[], |proof| proof))
    }
}

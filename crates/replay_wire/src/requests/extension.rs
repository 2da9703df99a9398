use crate::error::Result;
use crate::fields::{Rest, text};
use crate::innet_capnp as wire;
use bytes::Bytes;

/// A message to an extension of the server, or its answer, in the extension's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Name of the extension.
    pub name: String,
    /// The frame's payload.
    pub message: Bytes,
}

pub fn read(from: wire::extension::Reader<'_>, rest: &Rest) -> Result<Extension> {
    Ok(Extension { name: text(from.get_name())?, message: rest.payload() })
}

pub fn write(extension: &Extension, mut out: wire::extension::Builder<'_>) {
    out.set_name(&extension.name);
}

//! Named parameters.

use crate::error::Result;
use crate::fields::{Rest, text};
use crate::innet_capnp as wire;
use bytes::Bytes;
use replay_core::replay::Parameters;

/// Stores parameters. The answer is their version, without bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutParameters {
    /// Their name.
    pub name: String,
    /// Idempotency key: a resent put has the same one; 0 for none.
    pub id: u64,
    /// The version to store; if it is 0 or not newer than the stored one, the next version.
    pub version: u64,
    /// A safetensors file.
    pub bytes: Bytes,
}

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

pub fn read_put(from: wire::put_parameters::Reader<'_>, rest: &Rest) -> Result<PutParameters> {
    let (id, version) = (from.get_id(), from.get_version());
    Ok(PutParameters { name: text(from.get_name())?, id, version, bytes: rest.payload() })
}

pub fn write_put(put: &PutParameters, mut out: wire::put_parameters::Builder<'_>) {
    out.set_name(&put.name);
    out.set_id(put.id);
    out.set_version(put.version);
}

pub fn read_get(from: wire::get_parameters::Reader<'_>) -> Result<GetParameters> {
    let (newer_than, writer) = (from.get_newer_than(), from.get_writer());
    Ok(GetParameters { name: text(from.get_name())?, newer_than, writer })
}

pub fn write_get(get: &GetParameters, mut out: wire::get_parameters::Builder<'_>) {
    out.set_name(&get.name);
    out.set_newer_than(get.newer_than);
    out.set_writer(get.writer);
}

pub fn read(from: wire::parameters::Reader<'_>, rest: &Rest) -> Option<Parameters> {
    let version = from.get_version();
    (version > 0).then(|| Parameters { version, bytes: rest.payload() })
}

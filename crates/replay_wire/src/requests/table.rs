//! Definitions of tables, named parameters, and the list of both.

use bytes::Bytes;
use capnp::text;

use replay_core::replay::{ListedParameters, Listing, Parameters};
use replay_core::schema::TableConfig;

use crate::error::{Error, Result};
use crate::frame::{Rest, json, text, to_json, write_list};
use crate::innet_capnp as wire;

/// Longest definition of a table, in bytes of JSON.
const MAX_DEFINITION_BYTES: usize = 128 << 10;

pub fn read(definition: capnp::Result<text::Reader<'_>>) -> Result<TableConfig> {
    // Checked first: a parsed definition takes a small multiple of its text.
    match definition.as_ref().map_or(0, |definition| definition.len()) {
        ..=MAX_DEFINITION_BYTES => json("the definition of a table", definition),
        bytes => Err(Error::Protocol(format!(
            "the definition of a table has {bytes} bytes, and {MAX_DEFINITION_BYTES} are the most"
        ))),
    }
}

pub fn read_listing(from: wire::listing::Reader<'_>, rest: &Rest) -> Result<Listing> {
    let definitions = from.get_tables()?;
    rest.reserve::<TableConfig>(definitions.len())?;
    Ok(Listing {
        tables: definitions.iter().map(read).collect::<Result<_>>()?,
        parameters: rest.list(from.get_parameters(), |listed| {
            let (version, bytes) = (listed.get_version(), listed.get_bytes());
            Ok(ListedParameters { name: text(listed.get_name())?, version, bytes })
        })?,
    })
}

pub fn write_listing(Listing { tables, parameters }: &Listing, mut out: wire::listing::Builder<'_>) {
    let mut definitions = out.reborrow().init_tables(tables.len() as u32);
    for (i, table) in tables.iter().enumerate() {
        definitions.set(i as u32, &*to_json(table));
    }
    write_list(out.init_parameters(parameters.len() as u32), parameters, |listed, mut out| {
        out.set_name(&listed.name);
        out.set_version(listed.version);
        out.set_bytes(listed.bytes);
    });
}

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

pub fn read_parameters(from: wire::parameters::Reader<'_>, rest: &Rest) -> Option<Parameters> {
    let version = from.get_version();
    (version > 0).then(|| Parameters { version, bytes: rest.payload() })
}

//! Definitions of tables, and the list of tables and parameters.

use crate::error::{Error, Result};
use crate::fields::{Rest, json, text, to_json, write_list};
use crate::innet_capnp as wire;
use capnp::text;
use replay_core::replay::{ListedParameters, Listing};
use replay_core::schema::TableConfig;

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

//! Definitions of tables, and the list of tables and parameters.

use crate::error::{Error, Result};
use crate::fields::{COPIED, QUOTED, Rest, json, named, text, to_json, write_list};
use crate::innet_capnp as wire;
use base::words::shortened;
use capnp::text;
use replay_core::replay::{ListedParameters, Listing};
use replay_core::schema::{Column, TableConfig};
use replay_core::view::ViewSpec;

/// Longest view of a table, in bytes of JSON.
const MAX_VIEW_BYTES: usize = 64 << 10;

pub fn read(from: wire::table_config::Reader<'_>, rest: &Rest) -> Result<TableConfig> {
    Ok(TableConfig {
        name: text(from.get_name())?,
        columns: rest.list(from.get_columns(), read_column)?,
        capacity: from.get_capacity(),
        capacity_bytes: from.get_capacity_bytes(),
        sampler: named("a table has a sampler", from.get_sampler())?,
        priority_exponent: from.get_priority_exponent(),
        priority_unit_log2: from.get_priority_unit_log2(),
        live_max_priority: from.get_live_max_priority(),
        max_times_sampled: from.get_max_times_sampled(),
        min_size: from.get_min_size(),
        samples_per_insert: from.get_samples_per_insert(),
        slack: from.get_slack(),
        max_version_lag: from.get_max_version_lag(),
        view: read_view(from.get_view()?)?,
    })
}

pub fn write(table: &TableConfig, mut out: wire::table_config::Builder<'_>) {
    out.set_name(&table.name);
    let columns = out.reborrow().init_columns(table.columns.len() as u32);
    write_list(columns, &table.columns, write_column);
    out.set_capacity(table.capacity);
    out.set_capacity_bytes(table.capacity_bytes);
    out.set_sampler(&*table.sampler.to_string());
    out.set_priority_exponent(table.priority_exponent);
    out.set_priority_unit_log2(table.priority_unit_log2);
    out.set_live_max_priority(table.live_max_priority);
    out.set_max_times_sampled(table.max_times_sampled);
    out.set_min_size(table.min_size);
    out.set_samples_per_insert(table.samples_per_insert);
    out.set_slack(table.slack);
    out.set_max_version_lag(table.max_version_lag);
    if let Some(view) = &table.view {
        out.set_view(&*to_json(view));
    }
}

fn read_column(from: wire::column::Reader<'_>) -> Result<Column> {
    let name = text(from.get_name())?;
    let column = format!("column {:?} has", shortened(&*name, QUOTED));
    Ok(Column {
        dtype: named(&format!("{column} a dtype"), from.get_dtype())?,
        shape: from.get_shape()?.iter().collect(),
        codec: named(&format!("{column} a codec"), from.get_codec())?,
        finite: from.get_finite(),
        name,
    })
}

fn write_column(column: &Column, mut out: wire::column::Builder<'_>) {
    out.set_name(&column.name);
    out.set_dtype(column.dtype.name());
    out.set_codec(column.codec.name());
    out.set_finite(column.finite);
    out.set_shape(&column.shape[..]).expect(COPIED);
}

/// A view from JSON; empty for none.
fn read_view(view: text::Reader<'_>) -> Result<Option<ViewSpec>> {
    match view.len() {
        0 => Ok(None),
        // Checked before the copy: a parsed view takes a small multiple of its text.
        1..=MAX_VIEW_BYTES => json("the view of a table", Ok(view)).map(Some),
        bytes => {
            Err(Error::Protocol(format!("the view of a table has {bytes} bytes, and {MAX_VIEW_BYTES} are the most")))
        }
    }
}

pub fn read_listing(from: wire::listing::Reader<'_>, rest: &Rest) -> Result<Listing> {
    Ok(Listing {
        tables: rest.list(from.get_tables(), |table| read(table, rest))?,
        parameters: rest.list(from.get_parameters(), |listed| {
            let (version, bytes) = (listed.get_version(), listed.get_bytes());
            Ok(ListedParameters { name: text(listed.get_name())?, version, bytes })
        })?,
    })
}

pub fn write_listing(Listing { tables, parameters }: &Listing, mut out: wire::listing::Builder<'_>) {
    write_list(out.reborrow().init_tables(tables.len() as u32), tables, write);
    write_list(out.init_parameters(parameters.len() as u32), parameters, |listed, mut out| {
        out.set_name(&listed.name);
        out.set_version(listed.version);
        out.set_bytes(listed.bytes);
    });
}

//! Snapshots of a memory, written while it is in use and restored into empty tables. The format is in `snapshot_records.rs`. [`save`]
//! writes the tables; their writers have to be opened anew. [`save_server`] also writes the parameters, the writers' progress and the
//! ids of the items, so that clients of the server continue.
//!
//! A save first records the state of each table between two of its pushes, one table right after the other, and the parameters. The
//! snapshot excludes later pushes, and chunks evicted before it is complete, with their items. Priorities and sample counts are those
//! at the time when the item is written. No lock is held over I/O: chunks are listed a few at a time under the table's insert lock,
//! and each is pinned while it is written.
//!
//! [`restore`] reads and checks everything before it stores anything, and never takes more memory than the tables may. A
//! snapshot is trusted no more than a connection.

use std::io::{Read, Write};

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::parameters::ParameterStore;
use crate::schema::TableConfig;
use crate::snapshot_records::{ParametersRecord, RecordKind, RecordReader, RecordWriter, from_json, to_json};
use crate::table::Table;
use crate::table::restore::Staged;
use crate::table::restore::store::StoredTable;
use crate::table::save::SavePoint;

/// Writes all tables.
///
/// # Errors
/// [`Error::Io`] when `out` fails.
pub fn save(memory: &Memory, out: impl Write) -> Result<()> {
    write(memory, out, false)
}

/// [`save`] for a server: also the memory's identity, parameters, the progress of writers, and ids of items.
pub fn save_server(memory: &Memory, out: impl Write) -> Result<()> {
    write(memory, out, true)
}

/// Restores the tables of a snapshot of `bytes` bytes, into empty tables of these names or into new ones. An existing table keeps its
/// capacity, limits and rate limiter; if it is smaller, only the newest steps are kept. Priorities, samples of each item, the
/// limiter's counts and the statistics continue. Earlier ids are invalid, unless a server saved them. A server's identity and writers
/// are restored too, and its parameters, except under names that have some already.
///
/// # Errors
/// Nothing is stored with [`Error::Io`] (it cannot be read), [`Error::Snapshot`] (it is damaged, cut off, or of
/// another format), [`Error::TableDiffers`] (a table has other columns, another sampler, exponent or unit, or another view that the
/// items have too few steps for),
/// [`Error::NotEmpty`] (a table has steps), [`Error::Table`] (too many bytes for a new table) or [`Error::TooLarge`] (of
/// parameters).
pub fn restore(memory: &Memory, from: impl Read, bytes: u64) -> Result<()> {
    let mut made = Vec::new();
    let done = RecordReader::new(from, bytes)
        .and_then(|records| read(memory, records, &mut made))
        .and_then(|read| store(memory, read));
    if done.is_err() {
        for name in made {
            // Another thread may have dropped it already.
            let _ = memory.drop_table(&name);
        }
    }
    done
}

fn write(memory: &Memory, out: impl Write, server: bool) -> Result<()> {
    let _saving = memory.saving();
    let mut out = RecordWriter::new(out)?;
    let tables = memory.tables().into_iter();
    let points: Vec<SavePoint> = tables.map(|table| table.save_point(server)).collect::<Result<_>>()?;
    let mut parameters = memory.parameters().records();
    if !server {
        // Without the files: the next puts go on counting, so that the versions of chunks keep their meaning.
        parameters.retain(|record| points.iter().any(|point| point.parameters() == Some(&record.name)));
        for record in &mut parameters {
            (record.puts, record.file) = (Vec::new(), Bytes::new());
        }
    }
    if server {
        out.json(RecordKind::Memory, &memory.identity())?;
    }
    for parameters in parameters {
        let head = to_json(&parameters)?;
        let length = (head.len() as u32).to_le_bytes();
        out.record(RecordKind::Parameters, &[&length, &head, &parameters.file])?;
    }
    for point in points {
        Table::save(&point, &mut out)?;
    }
    out.record(RecordKind::End, &[])
}

/// What a snapshot has, checked.
#[derive(Default)]
struct Contents {
    identity: Option<u64>,
    tables: Vec<Staged>,
    parameters: Vec<ParametersRecord>,
}

/// Reads and checks a whole snapshot. Adds newly created tables to `made`.
fn read(memory: &Memory, mut records: RecordReader<impl Read>, made: &mut Vec<String>) -> Result<Contents> {
    let Contents { mut identity, mut tables, mut parameters } = Contents::default();
    loop {
        let (kind, body) = records.next()?;
        let open = tables.last_mut().filter(|table| !table.is_complete());
        match (kind, open) {
            (RecordKind::Table, None) => {
                let config: TableConfig = from_json(&body).map_err(|reason| records.damaged(reason))?;
                config.validate().map_err(|error| records.damaged(error))?;
                let table = match memory.table(&config.name) {
                    Ok(table) => table,
                    Err(_) => {
                        let table = memory.create_table(&config)?;
                        made.push(config.name.clone());
                        table
                    }
                };
                if tables.iter().any(|known| known.name() == config.name) {
                    return Err(records.damaged(format!("table {:?} appears twice", config.name)));
                }
                tables.push(Staged::new(table, config)?);
            }
            (RecordKind::Parameters, None) => {
                let record = ParametersRecord::from_bytes(body).map_err(|reason| records.damaged(reason))?;
                let alike = parameters.iter().filter(|other| other.is_dropped() == record.is_dropped());
                if alike.count() == ParameterStore::MAX_NAMES || parameters.iter().any(|p| p.name == record.name) {
                    return Err(records.damaged(format!("parameters {:?} appear twice, or are too many", record.name)));
                }
                let staged = memory.parameters().stage(record);
                parameters.push(staged.map_err(|error| match error {
                    Error::Parameters { .. } => records.damaged(error),
                    error => error,
                })?);
            }
            (RecordKind::Memory, None) => {
                identity = Some(from_json(&body).map_err(|reason| records.damaged(reason))?);
            }
            (RecordKind::End, None) => {
                records.finish()?;
                return Ok(Contents { identity, tables, parameters });
            }
            (RecordKind::Table | RecordKind::End, Some(table)) => {
                let reason = format!("the table {:?} is not complete", table.name());
                return Err(records.damaged(reason));
            }
            (_, Some(table)) => table.take(kind, body).map_err(|reason| records.damaged(reason))?,
            (_, None) => return Err(records.damaged("it has data that is of no table")),
        }
    }
}

fn store(memory: &Memory, Contents { identity, mut tables, parameters }: Contents) -> Result<()> {
    // A save locks a table's writers before its arrivals, and a restore after them.
    let _saving = memory.saving();
    tables.iter_mut().try_for_each(Staged::check_view)?;
    tables.iter().try_for_each(Staged::check_unused)?;
    let mut stored: Vec<StoredTable> = Vec::with_capacity(tables.len());
    for staged in tables {
        match staged.store() {
            Ok(table) => stored.push(table),
            Err(error) => {
                stored.iter().try_for_each(|stored| stored.table.empty())?;
                return Err(error);
            }
        }
    }
    if let Some(identity) = identity {
        memory.set_identity(identity);
    }
    memory.parameters().restore(parameters);
    for restored in stored {
        if restored.left_out > 0 {
            tracing::warn!(
                table = restored.table.config().name,
                steps = restored.left_out,
                "the oldest steps of the snapshot are left out: the table is smaller than it was"
            );
        }
        restored.keep_ids(memory);
    }
    Ok(())
}

//! Snapshots: a memory in one file, written while it is in use, and put back into empty tables. The format is in
//! `snapshot_records.rs`. [`save`] writes the tables; their writers have to be opened anew. [`save_server`] also writes the
//! parameters, the writers' progress and the ids of the items, so that clients of the server continue.
//!
//! A save begins with a moment: each table is noted between two of its pushes, one table right after the other, and the
//! parameters with them. Later pushes are not in the file, nor are chunks that are evicted before the file is complete, with
//! their items; a priority and a sample count are as of the instant in which the item is written. The save holds no lock over
//! I/O: chunks are named a few at a time under the table's insert lock, and each is pinned while it is written.
//!
//! [`restore`] reads and checks everything before it stores anything, and holds no more than the tables may. A
//! file is trusted no more than a connection.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::parameters::ParameterStore;
use crate::schema::TableConfig;
use crate::snapshot_records::content::ParametersRecord;
use crate::snapshot_records::{
    CAPNP_VERSION, RecordKind, RecordReader, RecordWriter, cannot_read, cannot_write,
};
use crate::table::Table;
use crate::table::restore::Staged;
use crate::table::restore::place::Placed;
use crate::table::save::Moment;
use base::sync::lock;

/// Buffer of the file, for records smaller than it.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes all tables to a file, replacing the file there as a whole once everything is on the disk. A symbolic link stays, and
/// its target is the file.
///
/// # Errors
/// [`Error::Io`] when it cannot be written, another process saves to it now, or something other than a regular file is there;
/// what was there stays.
pub fn save(memory: &Memory, path: &Path) -> Result<()> {
    let target = replaceable(path).map_err(cannot_write(path))?;
    save_as(memory, &target, None).map(|_| ())
}

/// The path whose file a new one replaces: `path`, or the target of a symbolic link.
fn replaceable(path: &Path) -> io::Result<PathBuf> {
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there.file_type(),
        // A new name; the file's creation names a folder that is missing.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(path.to_owned()),
        Err(error) => return Err(error),
    };
    // Of a link the target, which has to exist.
    let target = match there.is_symlink() {
        true => path.canonicalize()?,
        false => path.to_owned(),
    };
    let kind = fs::symlink_metadata(&target)?.file_type();
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    match kind.is_file() {
        true => Ok(target),
        false => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "it is a device, a pipe or a socket, and only a regular file is replaced",
        )),
    }
}

/// [`save`] for a server: also parameters, the progress of writers, and ids of items. Returns the file's bytes. It ends with an
/// error soon after `stop` was set.
///
/// # Errors
/// Errors of [`save`].
pub fn save_server(memory: &Memory, path: &Path, stop: &AtomicBool) -> Result<u64> {
    save_as(memory, path, Some(stop))
}

/// `server`: the whole state of a server, until it is set.
fn save_as(memory: &Memory, path: &Path, server: Option<&AtomicBool>) -> Result<u64> {
    // One at a time: two would write the same temporary file, and a table has one moment.
    static SAVING: Mutex<()> = Mutex::new(());
    let _saving = lock(&SAVING);
    let partial = partial_path(path);
    let file = lock_partial(&partial)?;
    let written = write(memory, &file, &partial, server);
    let done = written.and_then(|bytes| put_in_place(&partial, path).map(|()| bytes));
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    done
}

/// A file whose writes fail once `stop` is set.
struct Stoppable<'a> {
    file: &'a File,
    stop: Option<&'a AtomicBool>,
}

impl Write for Stoppable<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Relaxed: nothing is published with it.
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(io::Error::other("it was stopped"));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Puts the tables of a snapshot back: into tables of these names that are empty, or into new ones. Capacity, limits
/// and rate limiter stay as the table has them; if it is smaller, only the newest steps are kept. Priorities, samples of
/// each item, the limiter's counts and the statistics continue. Ids from before name nothing, unless a server saved them.
/// So do parameters, under names that have none, and writers of a server's snapshot.
///
/// # Errors
/// Nothing is stored with [`Error::Io`] (it cannot be read), [`Error::Snapshot`] (it is damaged, cut off, or of
/// another release), [`Error::TableDiffers`] (a table has other columns, another sampler, exponent or unit),
/// [`Error::NotEmpty`] (a table has steps), [`Error::Table`] (too many bytes for a new table) or [`Error::TooLarge`] (of
/// parameters).
pub fn restore(memory: &Memory, path: &Path) -> Result<()> {
    restore_any(memory, path, |_| {
        Err(Error::Config(
            "it has format 2, whose table definitions only the Python module reads".to_owned(),
        ))
    })
}

/// As [`restore`], also of format 2, whose definitions of tables `read_capnp` decodes: this crate does not know
/// Cap'n Proto.
///
/// # Errors
/// Errors of [`restore`].
pub fn restore_any(
    memory: &Memory,
    path: &Path,
    read_capnp: fn(&[u8]) -> Result<TableConfig>,
) -> Result<()> {
    let mut made = Vec::new();
    let done = read(memory, path, read_capnp, &mut made).and_then(|read| place(memory, read));
    if done.is_err() {
        for name in made {
            // Another thread may have dropped it already.
            let _ = memory.drop_table(&name);
        }
    }
    done
}

/// Beside the file, so that it can be renamed to it.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Opens and empties the temporary file, which no other process writes until it is closed. A symbolic link in its place is
/// not followed: it might name any file of this user.
fn lock_partial(partial: &Path) -> Result<File> {
    let open = || -> io::Result<File> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            // A pipe without a reader is an error, and not waited for.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(partial)?;
        // SAFETY: the descriptor is open for the call, which touches no memory.
        let locked = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
        let (mine, there) = (file.metadata()?, fs::symlink_metadata(partial)?);
        // The file of another process, or one that it has just renamed.
        if locked != 0 || (mine.dev(), mine.ino()) != (there.dev(), there.ino()) {
            let text = "another process saves to this file now";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        // Bytes of an earlier writer. Nothing else is cut: a device has no length to set.
        if file.metadata()?.len() > 0 {
            file.set_len(0)?;
        }
        Ok(file)
    };
    open().map_err(cannot_write(partial))
}

fn write(memory: &Memory, file: &File, partial: &Path, server: Option<&AtomicBool>) -> Result<u64> {
    let error = cannot_write(partial);
    let stoppable = Stoppable { file, stop: server };
    let mut out = RecordWriter::new(BufWriter::with_capacity(BUFFER_BYTES, stoppable), partial)?;
    let tables = memory.tables().into_iter();
    let moments: Vec<Moment> = tables
        .map(|table| table.moment(server.is_some()))
        .collect::<Result<_>>()?;
    let parameters = match server {
        Some(_) => memory.parameters().records(),
        None => Vec::new(),
    };
    for parameters in parameters {
        out.record(
            RecordKind::Parameters,
            &[&parameters.head(), &parameters.file],
        )?;
    }
    for moment in moments {
        Table::save(&moment, &mut out)?;
    }
    out.record(RecordKind::End, &[])?;
    out.into_inner().flush().map_err(&error)?;
    file.sync_all().map_err(&error)?;
    file.metadata().map(|file| file.len()).map_err(&error)
}

fn put_in_place(partial: &Path, path: &Path) -> Result<()> {
    let error = cannot_write(path);
    fs::rename(partial, path).map_err(&error)?;
    // The new name has to be on the disk too.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))
        .and_then(|folder| folder.sync_all())
        .map_err(&error)
}

/// Reads and checks a whole file. Tables that were not there are in `made`.
fn read(
    memory: &Memory,
    path: &Path,
    read_capnp: fn(&[u8]) -> Result<TableConfig>,
    made: &mut Vec<String>,
) -> Result<(Vec<Staged>, Vec<ParametersRecord>)> {
    let error = cannot_read(path);
    // The opening of a pipe would wait for its writer.
    if !fs::metadata(path).map_err(&error)?.is_file() {
        return Err(error(io::Error::other("it is not a regular file")));
    }
    let file = File::open(path).map_err(&error)?;
    let bytes = file.metadata().map_err(&error)?.len();
    let mut records = RecordReader::new(BufReader::with_capacity(BUFFER_BYTES, file), bytes, path)?;
    let mut tables: Vec<Staged> = Vec::new();
    let mut parameters: Vec<ParametersRecord> = Vec::new();
    loop {
        let (kind, body) = records.next()?;
        let open = tables.last_mut().filter(|table| !table.is_complete());
        match (kind, open) {
            (RecordKind::Table, None) => {
                let config = match records.version() {
                    CAPNP_VERSION => read_capnp(&body),
                    _ => serde_json::from_slice(&body)
                        .map_err(|error| Error::Corrupt(error.to_string())),
                };
                let config = config
                    .and_then(|config| config.validate().map(|()| config))
                    .map_err(|error| records.damaged(error))?;
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
                let record =
                    ParametersRecord::from_bytes(body).map_err(|reason| records.damaged(reason))?;
                if parameters.len() == ParameterStore::MAX_NAMES
                    || parameters.iter().any(|p| p.name == record.name)
                {
                    return Err(records.damaged(format!(
                        "parameters {:?} appear twice, or are too many",
                        record.name
                    )));
                }
                let staged = memory.parameters().stage(record);
                parameters.push(staged.map_err(|error| match error {
                    Error::Parameters { .. } => records.damaged(error),
                    error => error,
                })?);
            }
            (RecordKind::End, None) => {
                records.finish()?;
                return Ok((tables, parameters));
            }
            (RecordKind::Table | RecordKind::End, Some(table)) => {
                let reason = format!("the table {:?} is not complete", table.name());
                return Err(records.damaged(reason));
            }
            (_, Some(table)) => table
                .take(kind, body)
                .map_err(|reason| records.damaged(reason))?,
            (_, None) => return Err(records.damaged("it has data that is of no table")),
        }
    }
}

fn place(
    memory: &Memory,
    (tables, parameters): (Vec<Staged>, Vec<ParametersRecord>),
) -> Result<()> {
    let mut placed: Vec<Placed> = Vec::with_capacity(tables.len());
    for staged in tables {
        match staged.place() {
            Ok(table) => placed.push(table),
            Err(error) => {
                placed.iter().try_for_each(|placed| placed.table.empty())?;
                return Err(error);
            }
        }
    }
    memory.parameters().restore(parameters);
    for placed in placed {
        if placed.left_out > 0 {
            tracing::warn!(
                table = placed.table.config().name,
                steps = placed.left_out,
                "the oldest steps of the snapshot are left out: the table is smaller than it was"
            );
        }
        placed.keep_ids(memory);
    }
    Ok(())
}

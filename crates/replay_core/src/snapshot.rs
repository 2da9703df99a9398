//! Snapshots: all tables of a memory in one file, written while they are in use, and put back into empty tables. The
//! format is in `snapshot_records.rs`. Parameters and writers are not in it: writers have to be opened anew.
//!
//! [`save`] holds no lock over I/O: chunks are named a few at a time under the table's insert lock, and
//! each is pinned while it is written. Chunks evicted meanwhile are left out, with their items, and so is every
//! push after the beginning.
//!
//! [`restore`] reads and checks everything before it stores anything, and holds no more than the tables may. A
//! file is trusted no more than a connection.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::schema::TableConfig;
use crate::snapshot_records::{
    CAPNP_VERSION, RecordKind, RecordReader, RecordWriter, cannot_read, cannot_write,
};
use crate::sync::lock;
use crate::table::restore::Staged;

/// Buffer of the file, for records smaller than it.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes all tables to a file, replacing the file there as a whole once everything is on the disk.
///
/// # Errors
/// [`Error::Io`] when it cannot be written, or another process saves to it now; the file that was there stays.
pub fn save(memory: &Memory, path: &Path) -> Result<()> {
    // One at a time: two would write the same temporary file.
    static SAVING: Mutex<()> = Mutex::new(());
    let _saving = lock(&SAVING);
    let partial = partial_path(path);
    let file = lock_partial(&partial)?;
    let done = write(memory, &file, &partial).and_then(|()| put_in_place(&partial, path));
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    done
}

/// Puts the tables of a snapshot back: into tables of these names that are empty, or into new ones. Capacity, limits
/// and rate limiter stay as the table has them; if it is smaller, only the newest steps are kept. Priorities, samples of
/// each item, the limiter's counts and the statistics continue. Ids from before name nothing.
///
/// # Errors
/// Nothing is stored with [`Error::Io`] (it cannot be read), [`Error::Snapshot`] (it is damaged, cut off, or of
/// another release), [`Error::TableDiffers`] (a table has other columns, another sampler, exponent or unit),
/// [`Error::NotEmpty`] (a table has steps) or [`Error::Table`] (too many bytes for a new table).
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
    let done = read(memory, path, read_capnp, &mut made).and_then(place);
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
            .custom_flags(libc::O_NOFOLLOW)
            .open(partial)?;
        // SAFETY: the descriptor is open for the call, which touches no memory.
        let locked = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
        let (mine, there) = (file.metadata()?, fs::symlink_metadata(partial)?);
        // The file of another process, or one that it has just renamed.
        if locked != 0 || (mine.dev(), mine.ino()) != (there.dev(), there.ino()) {
            let text = "another process saves to this file now";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        // What an earlier writer left. Nothing else is cut: a device has no length to set.
        if file.metadata()?.len() > 0 {
            file.set_len(0)?;
        }
        Ok(file)
    };
    open().map_err(cannot_write(partial))
}

fn write(memory: &Memory, file: &File, partial: &Path) -> Result<()> {
    let error = cannot_write(partial);
    let mut out = RecordWriter::new(BufWriter::with_capacity(BUFFER_BYTES, file), partial)?;
    for table in memory.tables() {
        table.save(&mut out)?;
    }
    out.record(RecordKind::End, &[])?;
    let mut file = out.into_inner();
    file.flush().map_err(&error)?;
    file.get_ref().sync_all().map_err(&error)
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
) -> Result<Vec<Staged>> {
    let error = cannot_read(path);
    let file = File::open(path).map_err(&error)?;
    let bytes = file.metadata().map_err(&error)?.len();
    let mut records = RecordReader::new(BufReader::with_capacity(BUFFER_BYTES, file), bytes, path)?;
    let mut tables: Vec<Staged> = Vec::new();
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
            (RecordKind::End, None) => {
                records.finish()?;
                return Ok(tables);
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

fn place(tables: Vec<Staged>) -> Result<()> {
    let mut placed = Vec::with_capacity(tables.len());
    for staged in tables {
        match staged.place() {
            Ok(table) => placed.push(table),
            Err(error) => {
                placed.iter().try_for_each(|table| table.empty())?;
                return Err(error);
            }
        }
    }
    Ok(())
}

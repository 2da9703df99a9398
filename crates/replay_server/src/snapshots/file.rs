//! A snapshot file, written under a temporary name and renamed, so that the previous file stays until the new one is complete.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use base::error::OsError;
use base::sync::lock;
use replay_core::memory::Memory;
use replay_core::snapshot;

use super::disk::{Disk, DiskFile, Machine, PRIVATE};
use replay_link::error::{Error, Result, io_error};

/// Writes all tables to a file. Replaces an existing file as a whole, once everything is on the disk. Follows a symbolic link and replaces
/// its target.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written, another process saves to it now, or it is not a regular file; an existing file stays.
pub fn save(memory: &Memory, path: &Path) -> Result<()> {
    // One save at a time: two would write to one temporary file. A server has a folder of its own.
    static SAVING: Mutex<()> = Mutex::new(());
    let _saving = lock(&SAVING);
    let target = replaceable(path).map_err(cannot_write(path))?;
    save_as(&Machine, &target, 0o666, None, |out| snapshot::save(memory, out)).map(drop)
}

/// [`save`] for a server on `disk`: see [`snapshot::save_server`]. Only this user can read the file. Returns its size in bytes. Fails soon
/// after `stop` is set.
///
/// # Errors
/// Errors of [`save`].
pub fn save_server(disk: &dyn Disk, memory: &Memory, path: &Path, stop: &AtomicBool) -> Result<u64> {
    save_as(disk, path, PRIVATE, Some(stop), |out| snapshot::save_server(memory, out))
}

/// Restores the snapshot in a file: see [`snapshot::restore`].
///
/// # Errors
/// Its errors; [`Error::Io`] when the file cannot be read, [`Error::Snapshot`] for a damaged one.
pub fn restore(memory: &Memory, path: &Path) -> Result<()> {
    restore_from(&Machine, memory, path)
}

/// [`restore`] from `disk`.
///
/// # Errors
/// Errors of [`restore`].
pub fn restore_from(disk: &dyn Disk, memory: &Memory, path: &Path) -> Result<()> {
    let what = format!("the snapshot {} cannot be read", path.display());
    let (file, bytes) = disk.open(path).map_err(io_error(what))?;
    snapshot::restore(memory, file, bytes).map_err(named(path))
}

fn save_as(
    disk: &dyn Disk,
    path: &Path,
    mode: u32,
    stop: Option<&AtomicBool>,
    write: impl FnOnce(&mut BufWriter<Stoppable<'_>>) -> replay_core::Result<()>,
) -> Result<u64> {
    let partial = partial_path(path);
    let file = disk.create(&partial, mode).map_err(cannot_write(&partial))?;
    let mut out = BufWriter::with_capacity(disk.buffer_bytes(), Stoppable { file, stop });
    let written = || {
        write(&mut out).map_err(named(&partial))?;
        let flushed = out.flush();
        base::planted!(UnsyncedFile => return Ok(0));
        let bytes = flushed.and_then(|()| out.get_ref().file.sync());
        bytes.map_err(cannot_write(&partial))
    };
    let done = written().and_then(|bytes| {
        put_in_place(disk, &partial, path)?;
        Ok(bytes)
    });
    if done.is_err() {
        // The first error is the one to report.
        let _ = disk.remove(&partial);
    }
    done
}

/// Error of a failed write to the file.
pub(super) fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> Error {
    io_error(format!("the snapshot {} cannot be written", path.display()))
}

/// Adds the path to the memory's error about a snapshot.
fn named(path: &Path) -> impl FnOnce(replay_core::Error) -> Error {
    |error| match error {
        replay_core::Error::Snapshot { reason, newer } => Error::Snapshot { path: path.to_owned(), reason, newer },
        replay_core::Error::Io(OsError { what, source }) => Error::Io(OsError {
            what: what.replacen("the snapshot", &format!("the snapshot {}", path.display()), 1),
            source,
        }),
        error => error.into(),
    }
}

/// Path of the file to replace: `path`, or the target of a symbolic link.
fn replaceable(path: &Path) -> io::Result<PathBuf> {
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there.file_type(),
        // A new file. If its folder is missing, the file's creation fails and names it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(path.to_owned()),
        Err(error) => return Err(error),
    };
    // A link's target has to exist.
    let target = if there.is_symlink() { path.canonicalize()? } else { path.to_owned() };
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

/// A file whose writes fail once `stop` is set.
struct Stoppable<'a> {
    file: Box<dyn DiskFile>,
    stop: Option<&'a AtomicBool>,
}

impl Write for Stoppable<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Relaxed: the flag publishes no other data.
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(io::Error::other("it was stopped"));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Temporary file in the target's folder, because a rename cannot cross file systems.
fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

fn put_in_place(disk: &dyn Disk, partial: &Path, path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let sync = || if base::planted!(UnsyncedFolder) { Ok(()) } else { disk.sync_folder(folder) };
    // A disk that fails here keeps the previous file.
    sync().and_then(|()| disk.rename(partial, path)).map_err(cannot_write(path))?;
    // Again, so that the rename survives a crash.
    sync().map_err(io_error(format!(
        "the snapshot {} is complete and in place, but a crash of the machine may lose it",
        path.display()
    )))
}

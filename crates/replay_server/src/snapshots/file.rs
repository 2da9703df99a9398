//! Where snapshot files are, on the machine's disks or on the simulated ones of tests, and one snapshot file, written under a temporary name and renamed, so that the previous file stays until the new one is complete.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use base::fork::close_in_children;
use base::system::OsError;
use base::wait::lock;
use replay_core::memory::Memory;
use replay_core::snapshot;
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
    save_as(&LocalDisk, &target, 0o666, None, |out| snapshot::save(memory, out)).map(drop)
}

/// [`save`] for a server on `disk`: see [`snapshot::save_server`]. Only this user can read the file. Returns its size in bytes. Fails soon
/// after `stop` is set.
///
/// # Errors
/// Errors of [`save`].
pub fn save_server(disk: &dyn Disk, memory: &Memory, path: &Path, stop: &AtomicBool) -> Result<u64> {
    save_as(disk, path, PRIVATE, Some(stop), |out| snapshot::save_server(memory, out))
}

/// Restores the snapshot in a file on `disk`: see [`snapshot::restore`].
///
/// # Errors
/// Its errors; [`Error::Io`] when the file cannot be read, [`Error::Snapshot`] for a damaged one.
pub fn restore(disk: &dyn Disk, memory: &Memory, path: &Path) -> Result<()> {
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

/// Buffer of a file that is read or written, for records smaller than it.
const BUFFER_BYTES: usize = 1 << 20;

/// Files and folders.
pub trait Disk: Send + Sync {
    /// Creates a folder if it is missing, and locks it until the result is dropped, with the process at the latest. `None` if another
    /// server has locked it.
    ///
    /// # Errors
    /// Errors of the operating system, as in every method.
    fn lock_folder(&self, folder: &Path) -> io::Result<Option<FolderLock>>;
    /// Names in a folder.
    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// Opens a file, and tells its size in bytes.
    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)>;
    /// Creates a file of the permissions `mode` less the umask, or empties one, and locks it until the result is dropped.
    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn DiskFile>>;
    /// Replaces `to` with `from`. After [`Self::sync_folder`] that survives a crash.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Writes a folder's names to the disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Buffer of a file that is written.
    fn buffer_bytes(&self) -> usize {
        BUFFER_BYTES
    }
}

/// A locked folder: tells whether it is still the one at its path, which may have been removed and made again.
pub type FolderLock = Box<dyn Fn() -> bool + Send + Sync>;

/// Permissions of a server's files: only its user can read them.
pub const PRIVATE: u32 = 0o600;

/// A file that is written.
pub trait DiskFile: Write {
    /// Writes everything to the disk; returns the size of the file in bytes.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn sync(&self) -> io::Result<u64>;
}

/// File in a folder whose lock marks the folder's server.
const LOCK: &str = "lock";

/// The disks of this machine.
pub struct LocalDisk;

impl Disk for LocalDisk {
    fn lock_folder(&self, folder: &Path) -> io::Result<Option<FolderLock>> {
        make_folder(folder)?;
        let path = folder.join(LOCK);
        let file = File::options().write(true).create(true).truncate(false).mode(PRIVATE).open(&path)?;
        close_in_children(&file);
        let locked = lock_file(&file, folder);
        Ok(locked.then(|| Box::new(move || is_at(&file, &path).unwrap_or(false)) as FolderLock))
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)> {
        // Opening a named pipe would block until it has a writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        Ok((Box::new(BufReader::with_capacity(BUFFER_BYTES, file)), bytes))
    }

    /// Does not follow a symbolic link, which could point to any file of this user.
    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn DiskFile>> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(mode)
            // O_NONBLOCK: opening a pipe without a reader fails instead of blocking.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        let locked = lock_file(&file, path);
        // Another process has locked the file, or has renamed it since the open.
        if !locked || !is_at(&file, path)? {
            let text = "another process saves to this file now";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        // Left by a killed writer. A device is never truncated: it has no length to set.
        if file.metadata()?.len() > 0 {
            file.set_len(0)?;
        }
        Ok(Box::new(file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Does nothing on a file system that refuses it for folders, such as FUSE's.
    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let synced = File::open(folder)?.sync_all();
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP));
        synced.or_else(|error| if refused(&error) { Ok(()) } else { Err(error) })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

impl DiskFile for File {
    fn sync(&self) -> io::Result<u64> {
        self.sync_all()?;
        Ok(self.metadata()?.len())
    }
}

/// Makes a folder of snapshots, if it is missing, which only this user can read.
///
/// # Errors
/// Errors of the operating system.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Whether the file is the one at `path`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (mine, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    Ok((mine.dev(), mine.ino()) == (there.dev(), there.ino()))
}

/// Locks a file; `false` if another process has locked it. On a file system without locks it warns, once in a process, and goes on.
fn lock_file(file: &File, path: &Path) -> bool {
    static WARNED: AtomicBool = AtomicBool::new(false);
    // SAFETY: the descriptor is open for the call, which touches no memory.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return true;
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock {
        return false;
    }
    // Relaxed: the flag publishes no other data.
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("{} cannot be locked ({error}): do not save there from two processes", path.display());
    }
    true
}

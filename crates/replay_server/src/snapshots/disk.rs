//! Where snapshot files are: on the machine's disks, or on the simulated ones of tests.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use base::fork::close_in_children;

/// Buffer of a file that is read or written, for records smaller than it.
const BUFFER_BYTES: usize = 1 << 20;

/// Files and folders.
pub trait Disk: Send + Sync {
    /// Creates a folder if it is missing, and locks it until the result is dropped, with the process at the latest. `None` if another
    /// server has locked it.
    ///
    /// # Errors
    /// The operating system's, as of every method.
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
    /// The operating system's.
    fn sync(&self) -> io::Result<u64>;
}

/// File in a folder whose lock marks the folder's server.
const LOCK: &str = "lock";

/// The disks of this machine.
pub struct Machine;

impl Disk for Machine {
    fn lock_folder(&self, folder: &Path) -> io::Result<Option<FolderLock>> {
        make_folder(folder)?;
        let path = folder.join(LOCK);
        let file = File::options().write(true).create(true).truncate(false).mode(PRIVATE).open(&path)?;
        close_in_children(&file);
        let locked = lock(&file, folder);
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
        let locked = lock(&file, path);
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
/// The system's.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Whether the file is the one at `path`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (mine, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    Ok((mine.dev(), mine.ino()) == (there.dev(), there.ino()))
}

/// Locks a file; `false` if another process has locked it. On a file system without locks it warns, once in a process, and goes on.
fn lock(file: &File, path: &Path) -> bool {
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

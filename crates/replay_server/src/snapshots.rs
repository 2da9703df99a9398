//! Snapshots of a server's memory in a folder: restored at the start, saved at intervals, on request and at the end. The two
//! newest are kept, and those that cannot be read, under another name. Format and time of a snapshot are in [`replay_core::snapshot`].

pub mod file;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use serde_json::{Map, Value, json};

use base::system::{self, OsError};
use base::wait::lock;
use file::{Disk, FolderLock, LocalDisk, PRIVATE, make_folder};
use replay_core::memory::Memory;
use replay_link::error::{Error, Result, io_error};

/// Number of snapshots kept.
const KEPT: usize = 2;
/// Limit of the pause after a failed save.
const RETRY: Duration = Duration::from_secs(10);
/// Bytes written at the start, to check for free space.
const TRIAL_BYTES: usize = 1 << 20;
/// Niceness that reduces a thread's scheduling weight to a tenth (`sched_prio_to_weight` of Linux).
const NICENESS: i32 = 10;

const SUFFIX: &str = ".snapshot";
const PARTIAL_SUFFIX: &str = ".snapshot.partial";
/// Suffix of a damaged snapshot that an older one has replaced. It is never removed.
const UNREADABLE_SUFFIX: &str = ".snapshot.unreadable";

/// The snapshots of one server.
pub struct Snapshots {
    memory: Arc<Memory>,
    disk: Box<dyn Disk>,
    folder: PathBuf,
    /// For the life of the server, so that no other server uses the folder.
    lock: FolderLock,
    /// Number of the next snapshot; locked during a save.
    next: Mutex<u64>,
    report: Mutex<Report>,
    /// What was restored at the start, for [`Self::stats`].
    restored: Value,
    stopped: AtomicBool,
}

/// Numbers of the snapshots in a folder.
struct Numbers {
    /// The newest first.
    saved: Vec<u64>,
    unreadable: Vec<u64>,
}

#[derive(Default)]
struct Report {
    saved: u64,
    failed: u64,
    last: Option<Saved>,
}

/// A complete snapshot.
struct Saved {
    path: PathBuf,
    bytes: u64,
    duration: Duration,
    at: Instant,
}

impl Snapshots {
    /// Locks the folder on the `disk`, creates it if it is missing, and restores its newest undamaged snapshot.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read or written, or another server uses it; [`Error::Config`] when all of its snapshots are
    /// damaged, or the newest is of a later release or does not fit the memory: the message says what to do.
    pub fn open(memory: Arc<Memory>, disk: Box<dyn Disk>, folder: &Path) -> Result<Arc<Self>> {
        let lock = take(&*disk, folder)?;
        let Numbers { saved, mut unreadable } = numbers(&*disk, folder).map_err(unusable(folder))?;
        let (restored, damaged) = restore(&memory, &*disk, folder, &saved)?;
        try_space(&*disk, folder).map_err(unusable(folder))?;
        // Only now, so that a folder of damaged snapshots alone never looks like an empty one.
        for number in damaged {
            let path = folder.join(file_name(number, SUFFIX));
            disk.rename(&path, &folder.join(file_name(number, UNREADABLE_SUFFIX))).map_err(unusable(folder))?;
            unreadable.push(number);
        }
        for &number in &unreadable {
            let path = folder.join(file_name(number, UNREADABLE_SUFFIX));
            tracing::warn!(path = %path.display(), "this snapshot could not be read; it is kept until you remove it");
        }
        let newest = saved.iter().chain(&unreadable).max();
        Ok(Arc::new(Snapshots {
            memory,
            disk,
            folder: folder.to_owned(),
            lock,
            next: Mutex::new(newest.map_or(1, |newest| newest + 1)),
            report: Mutex::default(),
            restored,
            stopped: AtomicBool::new(false),
        }))
    }

    /// Starts a thread that saves at intervals of `every`. The result ends it after a save in progress, and tells whether it ended without a
    /// panic.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot start a thread.
    pub fn save_every(self: &Arc<Self>, every: Duration) -> Result<impl FnOnce() -> bool + Send + use<>> {
        let (end, ended) = mpsc::channel::<()>();
        let snapshots = self.clone();
        let save_until_the_end = move || {
            yield_to_clients();
            let mut pause = every;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
                pause = match snapshots.save() {
                    Ok(()) => every,
                    Err(_) => every.min(RETRY),
                };
            }
        };
        let thread = thread::Builder::new()
            .name("innet-snapshots".to_owned())
            .spawn(save_until_the_end)
            .map_err(io_error("cannot start a thread"))?;
        Ok(move || {
            drop(end);
            thread.join().is_ok()
        })
    }

    /// [`Self::save`] at low priority. Call it on a dedicated thread: the thread keeps the priority.
    ///
    /// # Errors
    /// Errors of [`Self::save`].
    pub fn save_on_request(&self) -> Result<()> {
        yield_to_clients();
        self.save()
    }

    /// Saves the memory, and removes all but the two newest snapshots. One save at a time.
    ///
    /// # Errors
    /// [`Error::Io`]; existing snapshots are kept.
    pub fn save(&self) -> Result<()> {
        let mut next = lock(&self.next);
        let path = self.folder.join(file_name(*next, SUFFIX));
        if base::planted!(EarlyRemoval) {
            for number in numbers(&*self.disk, &self.folder).map_or(Vec::new(), |numbers| numbers.saved) {
                let _ = self.disk.remove(&self.folder.join(file_name(number, SUFFIX)));
            }
        }
        let begun = system::now();
        let saved = self.check_lock(&path);
        let saved = saved.and_then(|()| file::save_server(&*self.disk, &self.memory, &path, &self.stopped));
        let bytes = match saved {
            Ok(bytes) => bytes,
            Err(error) => {
                lock(&self.report).failed += 1;
                tracing::warn!(
                    %error,
                    "no new snapshot; the ones before are kept, and the next attempt follows"
                );
                return Err(error);
            }
        };
        let duration = system::elapsed(begun);
        tracing::info!(path = %path.display(), bytes, seconds = duration.as_secs_f64(), "snapshot saved");
        let mut report = lock(&self.report);
        report.saved += 1;
        report.last = Some(Saved { path, bytes, duration, at: system::now() });
        drop(report);
        *next += 1;
        if let Err(error) = self.remove_old() {
            tracing::warn!(folder = %self.folder.display(), %error, "old snapshots cannot be removed");
        }
        Ok(())
    }

    /// Checks that the folder is still the one that this server has locked.
    fn check_lock(&self, path: &Path) -> Result<()> {
        match (self.lock)() {
            true => Ok(()),
            false => Err(file::cannot_write(path)(io::Error::other(
                "its folder was removed or replaced since this server started, and another server may save there now; start \
                 this one again, with a folder of its own",
            ))),
        }
    }

    fn remove_old(&self) -> io::Result<()> {
        for number in numbers(&*self.disk, &self.folder)?.saved.into_iter().skip(KEPT) {
            self.disk.remove(&self.folder.join(file_name(number, SUFFIX)))?;
        }
        Ok(())
    }

    /// Aborts a save in progress and all later saves with an error.
    pub fn stop(&self) {
        // Relaxed: the flag publishes no other data.
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Counts of saves and, of the last one, `path`, `bytes`, `duration_s` and `age_s` (null before the first). `restored` describes the
    /// snapshot restored at the start: its `path` and the steps of its `tables`; null without one.
    pub fn stats(&self) -> Value {
        let report = lock(&self.report);
        let last = report.last.as_ref();
        json!({
            "saved": report.saved,
            "failed": report.failed,
            "path": last.map(|saved| saved.path.display().to_string()),
            "bytes": last.map(|saved| saved.bytes),
            "duration_s": last.map(|saved| saved.duration.as_secs_f64()),
            "age_s": last.map(|saved| system::elapsed(saved.at).as_secs_f64()),
            "restored": self.restored,
        })
    }
}

fn file_name(number: u64, suffix: &str) -> String {
    format!("{number:010}{suffix}")
}

/// The error of a folder that cannot be used: of the system, as it may pass.
fn unusable(folder: &Path) -> impl Fn(io::Error) -> Error {
    move |error| {
        let advice = "name another folder (--snapshot), or make it writable and free space there";
        io_error(format!("snapshots cannot be saved in {} ({advice})", folder.display()))(error)
    }
}

/// Creates the folder and locks it.
fn take(disk: &dyn Disk, folder: &Path) -> Result<FolderLock> {
    let locked = disk.lock_folder(folder).map_err(unusable(folder))?;
    locked.ok_or_else(|| {
        let reason =
            "another server has locked it: wait for its end, or give each server a folder of its own (--snapshot)";
        let what = format!("snapshots cannot be saved in {}", folder.display());
        io_error(what)(io::Error::new(io::ErrorKind::ResourceBusy, reason))
    })
}

/// Numbers of the snapshots in the folder. Temporary files of a killed server are removed.
fn numbers(disk: &dyn Disk, folder: &Path) -> io::Result<Numbers> {
    let mut numbers = Numbers { saved: Vec::new(), unreadable: Vec::new() };
    for name in disk.names(folder)? {
        let number = |suffix| name.to_str()?.strip_suffix(suffix)?.parse::<u64>().ok();
        numbers.saved.extend(number(SUFFIX));
        numbers.unreadable.extend(number(UNREADABLE_SUFFIX));
        if number(PARTIAL_SUFFIX).is_some() {
            disk.remove(&folder.join(&name))?;
        }
    }
    numbers.saved.sort_unstable_by(|one, other| other.cmp(one));
    Ok(numbers)
}

/// Checks that snapshots can be saved in a folder. Does not lock it: its server may run. A missing one is left to the server, whose user
/// may be another.
///
/// # Errors
/// [`Error::Io`] with advice.
pub fn check_folder(folder: &Path) -> Result<()> {
    let missing = !folder.exists();
    let tried = make_folder(folder).and_then(|()| try_space(&LocalDisk, folder));
    if missing {
        // Not where a server has begun to save there meanwhile.
        let _ = fs::remove_dir(folder);
    }
    tried.map_err(unusable(folder))
}

/// Writes and removes a file, which fails on a full disk.
fn try_space(disk: &dyn Disk, folder: &Path) -> io::Result<()> {
    let path = folder.join(file_name(0, PARTIAL_SUFFIX));
    let mut file = disk.create(&path, PRIVATE)?;
    let written = file.write_all(&vec![0; TRIAL_BYTES]).and_then(|()| file.sync());
    match disk.remove(&path) {
        // Removed by the server of the folder, beside a check.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    written.map(drop)
}

/// Restores the newest undamaged snapshot. Returns its entry in [`Snapshots::stats`], and the numbers of damaged later ones.
fn restore(memory: &Memory, disk: &dyn Disk, folder: &Path, numbers: &[u64]) -> Result<(Value, Vec<u64>)> {
    let mut damaged = Vec::new();
    for &number in numbers {
        let path = folder.join(file_name(number, SUFFIX));
        let begun = system::now();
        match file::restore(disk, memory, &path) {
            Ok(()) => {
                let seconds = system::elapsed(begun).as_secs_f64();
                return Ok((report_restored(memory, &path, seconds), damaged));
            }
            Err(error @ Error::Snapshot { newer: true, .. }) => {
                return Err(Error::Config(format!(
                    "{error}: start the release that has saved it, or move that file out of {} to restore the one before it",
                    folder.display()
                )));
            }
            Err(error @ Error::Snapshot { .. }) => {
                tracing::error!(%error, "the snapshot before it is used");
                damaged.push(number);
            }
            Err(Error::Io(OsError { what, source })) => {
                let advice = "make it readable, or move that file out of";
                let what = format!("{what} ({advice} {} to restore the one before it)", folder.display());
                return Err(Error::Io(OsError { what, source }));
            }
            Err(error) => {
                return Err(Error::Config(format!(
                    "the snapshot {} does not fit this server: {error}; restore the setting, or move the snapshots out \
                     of {} to begin with an empty memory",
                    path.display(),
                    folder.display()
                )));
            }
        }
    }
    match numbers.first() {
        None => Ok((Value::Null, damaged)),
        Some(_) => Err(Error::Config(format!(
            "every snapshot in {} is damaged, or of another format: move them away to begin with an empty memory",
            folder.display()
        ))),
    }
}

/// Logs the restored snapshot and returns its entry in the statistics.
fn report_restored(memory: &Memory, path: &Path, seconds: f64) -> Value {
    let (mut steps, mut writers) = (0, 0);
    let mut tables = Map::new();
    for table in memory.tables() {
        let stats = table.stats();
        steps += stats["steps"].as_u64().unwrap_or(0);
        writers += stats["resumable_writers"].as_u64().unwrap_or(0);
        tables.insert(table.config().name.clone(), stats["steps"].clone());
    }
    let parameters = memory.list().parameters.len();
    let (path, count) = (path.display().to_string(), tables.len());
    tracing::info!(path, tables = count, steps, writers, parameters, seconds, "snapshot restored");
    json!({"path": path, "tables": tables})
}

/// Lowers this thread's scheduling priority below that of client threads.
fn yield_to_clients() {
    // SAFETY: the call changes this thread's priority alone (0 is the calling thread), and touches no memory. Its failure would
    // leave the priority as it is.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS);
    }
}

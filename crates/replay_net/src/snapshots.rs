//! Snapshots of a server's memory in a folder: restored at the start, saved at intervals, on request and at the end. The two
//! newest are kept. Format and moment of a snapshot are in [`replay_core::snapshot`].

pub mod disk;
pub mod file;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::io_error;
use base::host;
use base::mistake::{Mistake, planted};
use base::sync::lock;
use disk::{Disk, FolderLock};
use replay_core::memory::Memory;

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

/// The snapshots of one server.
pub struct Snapshots {
    memory: Arc<Memory>,
    disk: Box<dyn Disk>,
    folder: PathBuf,
    /// For the life of the server, so that no other server uses the folder.
    _lock: FolderLock,
    /// Locked during a save.
    files: Mutex<Files>,
    report: Mutex<Report>,
    /// What was restored at the start, for [`Self::stats`].
    restored: Value,
    stopped: AtomicBool,
}

/// The files of the folder.
struct Files {
    /// Number of the next snapshot.
    next: u64,
    /// Numbers of damaged snapshots, which the next successful save removes.
    damaged: Vec<u64>,
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

/// The thread that saves at intervals.
pub struct SnapshotThread {
    /// Dropping it ends the thread.
    end: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl SnapshotThread {
    /// Ends the thread, after a save in progress.
    pub fn join(self) {
        drop(self.end);
        if self.thread.join().is_err() {
            tracing::error!("the thread that saves snapshots panicked");
        }
    }
}

impl Snapshots {
    /// Locks the folder on the `disk`, creates it if it is missing, and restores its newest undamaged snapshot.
    ///
    /// # Errors
    /// [`Error::Config`] when the folder cannot be written, another server uses it, all of its snapshots are damaged, or the newest does
    /// not fit the memory: the message says what to do.
    pub fn open(memory: Arc<Memory>, disk: Box<dyn Disk>, folder: &Path) -> Result<Arc<Self>> {
        let lock = take(&*disk, folder)?;
        let numbers = numbers(&*disk, folder).map_err(unusable(folder))?;
        let (restored, damaged) = restore(&memory, &*disk, folder, &numbers)?;
        try_space(&*disk, folder).map_err(unusable(folder))?;
        Ok(Arc::new(Snapshots {
            memory,
            disk,
            folder: folder.to_owned(),
            _lock: lock,
            files: Mutex::new(Files { next: numbers.first().map_or(1, |newest| newest + 1), damaged }),
            report: Mutex::default(),
            restored,
            stopped: AtomicBool::new(false),
        }))
    }

    /// Starts a thread that saves at intervals of `every`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot start a thread.
    pub fn save_every(self: &Arc<Self>, every: Duration) -> Result<SnapshotThread> {
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
        Ok(SnapshotThread { end, thread })
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
        let mut files = lock(&self.files);
        let path = self.folder.join(file_name(files.next));
        if planted(Mistake::EarlyRemoval) {
            for number in numbers(&*self.disk, &self.folder).unwrap_or_default() {
                let _ = self.disk.remove(&self.folder.join(file_name(number)));
            }
        }
        let begun = host::now();
        let bytes = match file::save_server(&*self.disk, &self.memory, &path, &self.stopped) {
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
        let duration = host::elapsed(begun);
        tracing::info!(path = %path.display(), bytes, seconds = duration.as_secs_f64(), "snapshot saved");
        let mut report = lock(&self.report);
        report.saved += 1;
        report.last = Some(Saved { path, bytes, duration, at: host::now() });
        drop(report);
        files.next += 1;
        if let Err(error) = self.remove_old(&mut files) {
            tracing::warn!(folder = %self.folder.display(), %error, "old snapshots cannot be removed");
        }
        Ok(())
    }

    fn remove_old(&self, files: &mut Files) -> io::Result<()> {
        let mut numbers = numbers(&*self.disk, &self.folder)?;
        let (damaged, whole): (Vec<_>, Vec<_>) = numbers.drain(..).partition(|number| files.damaged.contains(number));
        for number in whole.into_iter().skip(KEPT).chain(damaged) {
            self.disk.remove(&self.folder.join(file_name(number)))?;
        }
        files.damaged.clear();
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
            "age_s": last.map(|saved| host::elapsed(saved.at).as_secs_f64()),
            "restored": self.restored,
        })
    }
}

fn file_name(number: u64) -> String {
    format!("{number:010}{SUFFIX}")
}

/// The error of a folder that cannot be used.
fn unusable(folder: &Path) -> impl Fn(io::Error) -> Error {
    move |error| {
        Error::Config(format!(
            "snapshots cannot be saved in {}: {error}; name another folder (--snapshot), or make it writable and free \
             space there",
            folder.display()
        ))
    }
}

/// Creates the folder and locks it.
fn take(disk: &dyn Disk, folder: &Path) -> Result<FolderLock> {
    let locked = disk.lock_folder(folder).map_err(unusable(folder))?;
    locked.ok_or_else(|| {
        Error::Config(format!(
            "another server saves its snapshots in {}: give each server a folder of its own (--snapshot)",
            folder.display()
        ))
    })
}

/// Numbers of the snapshots in the folder, the newest first. Temporary files of a killed server are removed.
fn numbers(disk: &dyn Disk, folder: &Path) -> io::Result<Vec<u64>> {
    let mut numbers: Vec<u64> = Vec::new();
    for name in disk.names(folder)? {
        let Some(name) = name.to_str() else { continue };
        if let Some(number) = name.strip_suffix(SUFFIX).and_then(|n| n.parse().ok()) {
            numbers.push(number);
        }
        let partial = name.strip_suffix(PARTIAL_SUFFIX);
        if partial.is_some_and(|number| number.parse::<u64>().is_ok()) {
            disk.remove(&folder.join(name))?;
        }
    }
    numbers.sort_unstable_by(|one, other| other.cmp(one));
    Ok(numbers)
}

/// Writes and removes a file, which fails on a full disk.
fn try_space(disk: &dyn Disk, folder: &Path) -> io::Result<()> {
    let path = folder.join(format!("{:010}{PARTIAL_SUFFIX}", 0));
    let mut file = disk.create(&path)?;
    let written = file.write_all(&vec![0; TRIAL_BYTES]).and_then(|()| file.sync());
    disk.remove(&path)?;
    written.map(drop)
}

/// Restores the newest undamaged snapshot. Returns its entry in [`Snapshots::stats`], and the numbers of damaged newer ones.
fn restore(memory: &Memory, disk: &dyn Disk, folder: &Path, numbers: &[u64]) -> Result<(Value, Vec<u64>)> {
    let mut damaged = Vec::new();
    for &number in numbers {
        let path = folder.join(file_name(number));
        let begun = host::now();
        match file::restore_from(disk, memory, &path) {
            Ok(()) => {
                let seconds = host::elapsed(begun).as_secs_f64();
                return Ok((report_restored(memory, &path, seconds), damaged));
            }
            Err(error @ Error::Snapshot { .. }) => {
                tracing::error!(%error, "the snapshot before it is used");
                damaged.push(number);
            }
            Err(error @ Error::Io { .. }) => {
                return Err(Error::Config(format!(
                    "{error}: make it readable, or move that file out of {} to restore the one before it",
                    folder.display()
                )));
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

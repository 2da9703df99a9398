//! A simulated disk: what is not synced is lost, torn or reordered by a crash; writes and syncs fail; it fills up.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::wait::lock;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_server::snapshots::file::{Disk, DiskFile, FolderLock};

use crate::process;

/// Share of the writes that pause, on a disk with pauses.
const PAUSES: f64 = 0.2;

/// Faults of a disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiskFaults {
    /// Operations fail with this probability.
    pub failing: f64,
    /// Bytes of all files; 0 is no limit.
    pub capacity: u64,
    /// After this many operations the power fails; `None` is never.
    pub power_fails_after: Option<u32>,
}

/// A disk, shared by a server and the world.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<State>>);

struct State {
    random: StdRng,
    /// Longest pause of a write.
    pause: Duration,
    faults: DiskFaults,
    /// Names on the disk, and as programs see them.
    durable: BTreeMap<PathBuf, Node>,
    visible: BTreeMap<PathBuf, Node>,
    /// Changes of names since the last sync of the folder, in order.
    unsynced: Vec<Change>,
    locked: bool,
    /// The power has failed: everything fails until [`SimDisk::restart`].
    dead: bool,
}

/// Content of a file: the bytes that programs see, and the number of them that are synced.
type Node = Arc<Mutex<Content>>;

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    synced: Vec<u8>,
}

#[derive(Clone)]
enum Change {
    Create(PathBuf, Node),
    /// The new name is that of the file which had the old one, whatever else of the names is lost.
    Rename(PathBuf, PathBuf, Node),
    Remove(PathBuf),
}

impl Change {
    fn apply(self, names: &mut BTreeMap<PathBuf, Node>) {
        match self {
            Change::Create(path, node) => drop(names.insert(path, node)),
            Change::Rename(from, to, node) => {
                names.remove(&from);
                names.insert(to, node);
            }
            Change::Remove(path) => drop(names.remove(&path)),
        }
    }
}

impl State {
    /// Begins an operation, which may fail.
    fn operate(&mut self) -> io::Result<()> {
        if let Some(left) = &mut self.faults.power_fails_after {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => self.dead = true,
            }
        }
        if self.dead {
            return Err(io::Error::other("the power has failed"));
        }
        match self.random.random_bool(self.faults.failing) {
            true => Err(io::Error::other("an input/output error")),
            false => Ok(()),
        }
    }

    fn bytes(&self) -> u64 {
        let nodes = self.visible.values();
        nodes.map(|node| lock(node).bytes.len() as u64).sum()
    }
}

impl SimDisk {
    /// An empty disk. Its writes pause for up to `pause` now and then, while other programs go on; without a pause a file is written in
    /// one step.
    pub fn new(seed: u64, pause: Duration) -> Self {
        SimDisk(Arc::new(Mutex::new(State {
            random: StdRng::seed_from_u64(seed),
            pause,
            faults: DiskFaults::default(),
            durable: BTreeMap::new(),
            visible: BTreeMap::new(),
            unsynced: Vec::new(),
            locked: false,
            dead: false,
        })))
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: DiskFaults) {
        lock(&self.0).faults = faults;
    }

    /// Whether the power has failed.
    pub fn is_dead(&self) -> bool {
        lock(&self.0).dead
    }

    /// The server has ended; its machine goes on.
    pub fn release(&self) {
        lock(&self.0).locked = false;
    }

    /// Flips a bit of the file with the last name that ends in `suffix`.
    ///
    /// # Panics
    /// When there is none.
    pub fn flip(&self, suffix: &str) {
        let mut state = lock(&self.0);
        let State { random, visible, .. } = &mut *state;
        let last = visible.iter().rfind(|(path, _)| path.to_string_lossy().ends_with(suffix));
        let mut content = lock(last.expect("such a file").1);
        let bit = random.random_range(0..8 * content.bytes.len());
        let Content { bytes, synced } = &mut *content;
        for byte in [bytes, synced].into_iter().filter_map(|side| side.get_mut(bit / 8)) {
            *byte ^= 1 << (bit % 8);
        }
    }

    /// The machine starts again. Of the changes of names since the last sync of the folder any prefix is there, or, as file systems
    /// reorder, any subset; of the unsynced bytes of a file any part, the rest old bytes or zeros.
    pub fn restart(&self) {
        let mut state = lock(&self.0);
        let State { random, durable, unsynced, .. } = &mut *state;
        let reordered = random.random_bool(0.5);
        let kept = random.random_range(0..=unsynced.len());
        for (at, change) in std::mem::take(unsynced).into_iter().enumerate() {
            let survives = match reordered {
                true => random.random_bool(0.5),
                false => at < kept,
            };
            if survives {
                change.apply(durable);
            }
        }
        for node in durable.values() {
            tear(&mut lock(node), random);
        }
        state.visible = state.durable.clone();
        state.faults = DiskFaults::default();
        state.locked = false;
        state.dead = false;
    }

    /// Lets other programs go on, now and then.
    fn pause(&self) {
        let mut state = lock(&self.0);
        // At a server's start no process runs.
        if state.pause == Duration::ZERO || !process::runs() || !state.random.random_bool(PAUSES) {
            return;
        }
        let longest = state.pause;
        let time = state.random.random_range(Duration::ZERO..longest);
        drop(state);
        process::sleep(time);
    }

    fn operate<T>(&self, operation: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = lock(&self.0);
        state.operate()?;
        operation(&mut state)
    }
}

/// Loses a part of the bytes that were not synced.
fn tear(content: &mut Content, random: &mut StdRng) {
    if content.bytes == content.synced {
        return;
    }
    let length = random.random_range(content.synced.len().min(content.bytes.len())..=content.bytes.len());
    const PAGE: usize = 512;
    let mut torn = vec![0; length];
    for start in (0..length).step_by(PAGE) {
        let page = start..length.min(start + PAGE);
        let from = match random.random_bool(0.5) {
            true => &content.bytes,
            false => &content.synced,
        };
        if let Some(bytes) = from.get(page.clone()) {
            torn[page].copy_from_slice(bytes);
        }
    }
    content.synced.clone_from(&torn);
    content.bytes = torn;
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Disk for SimDisk {
    fn lock_folder(&self, _folder: &Path) -> io::Result<Option<FolderLock>> {
        self.operate(|state| {
            if std::mem::replace(&mut state.locked, true) {
                return Ok(None);
            }
            Ok(Some(Box::new(|| true) as FolderLock))
        })
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        self.operate(|state| {
            let inside = state.visible.keys().filter(|path| path.parent() == Some(folder));
            Ok(inside.filter_map(|path| path.file_name()).map(OsString::from).collect())
        })
    }

    fn open(&self, path: &Path) -> io::Result<(Box<dyn Read>, u64)> {
        self.operate(|state| {
            let node = state.visible.get(path).ok_or_else(missing)?;
            let bytes = lock(node).bytes.clone();
            let length = bytes.len() as u64;
            Ok((Box::new(Cursor::new(bytes)) as Box<dyn Read>, length))
        })
    }

    fn create(&self, path: &Path, _mode: u32) -> io::Result<Box<dyn DiskFile>> {
        self.operate(|state| {
            let node = match state.visible.get(path) {
                Some(node) => node.clone(),
                None => {
                    let node = Node::default();
                    let create = Change::Create(path.to_owned(), node.clone());
                    state.unsynced.push(create.clone());
                    create.apply(&mut state.visible);
                    node
                }
            };
            lock(&node).bytes.clear();
            let disk = self.clone();
            Ok(Box::new(File { disk, node }) as Box<dyn DiskFile>)
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate(|state| {
            let node = state.visible.get(from).ok_or_else(missing)?.clone();
            let rename = Change::Rename(from.to_owned(), to.to_owned(), node);
            state.unsynced.push(rename.clone());
            rename.apply(&mut state.visible);
            Ok(())
        })
    }

    fn sync_folder(&self, _folder: &Path) -> io::Result<()> {
        self.operate(|state| {
            for change in std::mem::take(&mut state.unsynced) {
                change.apply(&mut state.durable);
            }
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operate(|state| {
            let remove = Change::Remove(path.to_owned());
            state.unsynced.push(remove.clone());
            state.visible.remove(path).map(drop).ok_or_else(missing)
        })
    }

    fn buffer_bytes(&self) -> usize {
        match lock(&self.0).pause {
            Duration::ZERO => 1 << 20,
            // A few records.
            _ => 1 << 10,
        }
    }
}

struct File {
    disk: SimDisk,
    node: Node,
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.disk.pause();
        let node = &self.node;
        self.disk.operate(|state| {
            let capacity = state.faults.capacity;
            if capacity > 0 && state.bytes() + bytes.len() as u64 > capacity {
                return Err(io::ErrorKind::StorageFull.into());
            }
            lock(node).bytes.extend(bytes);
            Ok(bytes.len())
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DiskFile for File {
    fn sync(&self) -> io::Result<u64> {
        let node = &self.node;
        self.disk.operate(|_| {
            let mut content = lock(node);
            let bytes = content.bytes.clone();
            content.synced = bytes;
            Ok(content.bytes.len() as u64)
        })
    }
}

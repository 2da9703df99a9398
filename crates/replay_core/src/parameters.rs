//! Named, versioned parameters. A put stores one whole safetensors file; a get returns one whole version or
//! "nothing newer". The bytes are never unpacked or copied, only the header is checked. A put that is sent again after a
//! broken connection is stored once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::budget::{Budget, Reservation};
use crate::error::{Error, Result};
use crate::replay::{ListedParameters, Parameters};
use crate::snapshot_records::content::ParametersRecord;
use crate::sync::{Mutex, RwLock, RwLockReadGuard, lock};
use base::error::TooLarge;
use base::error::check_size;
use base::histogram::Histogram;

/// The newest version of each name.
pub struct ParameterStore {
    budget: Arc<Budget>,
    newest: RwLock<BTreeMap<String, Stored>>,
    /// The last versions of dropped names, at most [`Self::MAX_NAMES`]. Locked before `newest`.
    dropped: Mutex<BTreeMap<String, u64>>,
}

/// The newest version of one name.
struct Stored {
    parameters: Parameters,
    /// Numbers and versions of the last puts, the newest last: at most [`ParameterStore::REMEMBERED_PUTS`].
    puts: VecDeque<(u64, u64)>,
    /// Version lag of readers.
    lag: Histogram,
}

impl Stored {
    fn new(parameters: Parameters, puts: VecDeque<(u64, u64)>) -> Self {
        Stored { parameters, puts, lag: Histogram::new(0, 10) }
    }

    /// The version of the put with the number `id`, if it is one of the last puts.
    fn put(&self, id: u64) -> Option<u64> {
        let mut puts = self.puts.iter();
        puts.find(|&&(put, _)| id != 0 && put == id && !base::planted!(RepeatedPut)).map(|&(_, version)| version)
    }
}

/// A file and its reservation of the memory's byte limit: a replaced version counts until its last reader drops it.
struct CountedFile {
    bytes: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for CountedFile {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Versions of a snapshot are below it. A put may ask for half of it, so that later puts stay below it, too.
const MOST_VERSIONS: u64 = 1 << 47;

impl ParameterStore {
    /// Most bytes of one file.
    pub const MAX_BYTES: u64 = 2 << 30;
    /// Most names.
    pub const MAX_NAMES: usize = 1024;
    /// Most bytes of a name.
    pub const MAX_NAME_BYTES: usize = 128;

    /// Latest puts of a name that are deduplicated when they are sent again.
    pub const REMEMBERED_PUTS: usize = 64;

    /// An empty store that reserves its bytes from `budget`.
    pub fn new(budget: Arc<Budget>) -> Self {
        ParameterStore { budget, newest: RwLock::new(BTreeMap::new()), dropped: Mutex::default() }
    }

    /// Stores one safetensors file as the newest version of `name` and returns the version, 1 for the first. A put with the
    /// `id` of one of the last puts is a repetition: it stores nothing and returns that put's version. An `id` of 0 means none.
    ///
    /// # Errors
    /// [`Error::Parameters`] when the name is empty or too long, the bytes are not one safetensors file, or there
    /// are too many names; [`Error::TooLarge`] when the file is over [`Self::MAX_BYTES`] or over the rest of the
    /// memory's byte limit.
    pub fn put(&self, name: &str, id: u64, bytes: Bytes) -> Result<u64> {
        self.put_version(name, id, 0, bytes)
    }

    /// [`ParameterStore::put`] as version `version` if that exceeds the newest, so that several memories agree. A copy from
    /// another memory has no `id`, and is dropped if its version is not newer.
    ///
    /// # Errors
    /// Errors of [`ParameterStore::put`].
    pub fn put_version(&self, name: &str, id: u64, version: u64, bytes: Bytes) -> Result<u64> {
        Self::check_name(name)?;
        Self::check_version(name, version, 0..MOST_VERSIONS / 2)?;
        // Before the file is checked and counted: a repetition needs no memory for a second copy.
        let repeated = self.read().get(name).and_then(|stored| stored.put(id));
        if let Some(version) = repeated {
            return Ok(version);
        }
        let file = self.count(name, bytes)?;
        let mut dropped = lock(&self.dropped);
        let mut newest = self.newest.write().unwrap_or_else(PoisonError::into_inner);
        let stored = newest.get(name);
        // Checked again: the first attempt may have been stored meanwhile.
        if let Some(version) = stored.and_then(|stored| stored.put(id)) {
            return Ok(version);
        }
        let known = stored.is_some();
        let last = stored.map(|stored| stored.parameters.version);
        let last = last.or_else(|| dropped.get(name).copied()).unwrap_or(0);
        let next = last.saturating_add(1);
        if id == 0 && (1..next).contains(&version) {
            return Ok(next - 1);
        }
        let version = match base::planted!(FirstVersion) {
            true => 1,
            false => next.max(version),
        };
        if !known && newest.len() >= Self::MAX_NAMES {
            return Err(Self::refusal(name, format!("there are {} names already", Self::MAX_NAMES)));
        }
        let parameters = Parameters { version, bytes: file };
        let replaced = match newest.get_mut(name) {
            Some(stored) => {
                if stored.puts.len() == Self::REMEMBERED_PUTS {
                    stored.puts.pop_front();
                }
                stored.puts.push_back((id, version));
                Some(std::mem::replace(&mut stored.parameters, parameters))
            }
            None => {
                let puts = [(id, version)].into();
                newest.insert(name.to_owned(), Stored::new(parameters, puts));
                dropped.remove(name);
                None
            }
        };
        drop(newest);
        drop(dropped);
        // Frees the old file, unless it has readers, without the lock.
        drop(replaced);
        Ok(version)
    }

    /// Removes the parameters of this name, if there are any. Their file is freed once its last reader drops it. The next put continues
    /// the version numbers, so that readers notice it.
    pub fn remove(&self, name: &str) {
        let mut dropped = lock(&self.dropped);
        let mut newest = self.newest.write().unwrap_or_else(PoisonError::into_inner);
        let Some(stored) = newest.remove(name) else {
            return;
        };
        if dropped.len() >= Self::MAX_NAMES {
            dropped.pop_first();
        }
        dropped.insert(name.to_owned(), stored.parameters.version);
    }

    fn refusal(name: &str, reason: String) -> Error {
        Error::Parameters { name: name.chars().take(Self::MAX_NAME_BYTES).collect(), reason }
    }

    fn check_version(name: &str, version: u64, allowed: Range<u64>) -> Result<()> {
        match allowed.contains(&version) {
            true => Ok(()),
            false => {
                let reason = format!("version {version} is none that puts reach");
                Err(Self::refusal(name, reason))
            }
        }
    }

    fn check_name(name: &str) -> Result<()> {
        if name.is_empty() || name.len() > Self::MAX_NAME_BYTES {
            return Err(Self::refusal(name, format!("a name has 1 to {} bytes", Self::MAX_NAME_BYTES)));
        }
        Ok(())
    }

    /// Checks a file, and counts it in the memory's byte limit until its last reader drops it.
    fn count(&self, name: &str, bytes: Bytes) -> Result<Bytes> {
        let what = "parameters, in bytes,";
        let size = bytes.len() as u64;
        check_size(what, size, Self::MAX_BYTES, "put them under several names, or as bfloat16")?;
        SafeTensors::deserialize(&bytes)
            .map_err(|e| Self::refusal(name, format!("they are not a safetensors file: {e}")))?;
        let reservation = self.budget.reserve(size).ok_or_else(|| TooLarge {
            what,
            size,
            limit: self.budget.left(),
            advice: "tables at their capacity and other parameters take the rest of max_bytes: raise it (by default it is a share of the memory that the process may have), or make tables smaller",
        })?;
        Ok(Bytes::from_owner(CountedFile { bytes, _reservation: reservation }))
    }

    /// The newest version of each name with its last puts, for a snapshot. Those of dropped names have no file.
    pub(crate) fn records(&self) -> Vec<ParametersRecord> {
        let dropped = lock(&self.dropped);
        let newest = self.read();
        let last = |(name, &version): (&String, &u64)| ParametersRecord {
            version,
            name: name.clone(),
            puts: Vec::new(),
            file: Bytes::new(),
        };
        let record = |(name, stored): (&String, &Stored)| ParametersRecord {
            version: stored.parameters.version,
            name: name.clone(),
            puts: stored.puts.iter().copied().collect(),
            file: stored.parameters.bytes.clone(),
        };
        newest.iter().map(record).chain(dropped.iter().map(last)).collect()
    }

    /// Checks and counts the parameters of a snapshot.
    ///
    /// # Errors
    /// Errors of [`Self::put`].
    pub(crate) fn stage(&self, record: ParametersRecord) -> Result<ParametersRecord> {
        Self::check_name(&record.name)?;
        Self::check_version(&record.name, record.version, 1..MOST_VERSIONS)?;
        if record.is_dropped() {
            return Ok(record);
        }
        let file = self.count(&record.name, record.file)?;
        Ok(ParametersRecord { file, ..record })
    }

    /// Stores staged parameters, at most [`Self::MAX_NAMES`], and the versions of as many dropped names; existing names keep theirs.
    pub(crate) fn restore(&self, staged: Vec<ParametersRecord>) {
        let mut dropped = lock(&self.dropped);
        let mut newest = self.newest.write().unwrap_or_else(PoisonError::into_inner);
        for record in staged {
            if record.is_dropped() {
                if !newest.contains_key(&record.name) {
                    dropped.insert(record.name, record.version);
                }
                continue;
            }
            let skipped = record.puts.len().saturating_sub(Self::REMEMBERED_PUTS);
            let parameters = Parameters { version: record.version, bytes: record.file };
            let puts = record.puts.into_iter().skip(skipped).collect();
            newest.entry(record.name).or_insert_with(|| Stored::new(parameters, puts));
        }
    }

    /// The newest version of `name`; `None` when it is not newer than `newer_than`, or there is none.
    pub fn get(&self, name: &str, newer_than: u64) -> Option<Parameters> {
        let newest = self.read();
        let Stored { parameters, lag, .. } = newest.get(name)?;
        // A reader without a version is not behind.
        if newer_than > 0 {
            lag.record(parameters.version.saturating_sub(newer_than));
        }
        (parameters.version > newer_than).then(|| parameters.clone())
    }

    /// The newest version of `name`; 0 when there is none.
    pub fn version(&self, name: &str) -> u64 {
        let newest = self.read();
        newest.get(name).map_or(0, |stored| stored.parameters.version)
    }

    /// The name with the highest version, and this version.
    pub fn highest_version(&self) -> Option<(String, u64)> {
        let newest = self.read();
        let versions = newest.iter().map(|(name, s)| (name, s.parameters.version));
        let highest = versions.max_by_key(|(_, version)| *version);
        highest.map(|(name, version)| (name.clone(), version))
    }

    /// The bytes that [`Self::get`] would return: a shared slice, not a copy.
    pub fn newest(&self, name: &str, newer_than: u64) -> Option<Bytes> {
        let newest = self.read();
        let parameters = &newest.get(name)?.parameters;
        (parameters.version > newer_than).then(|| parameters.bytes.clone())
    }

    /// Names, versions and sizes, in the order of the names.
    pub fn list(&self) -> Vec<ListedParameters> {
        let newest = self.read();
        let listed = newest.iter().map(|(name, stored)| ListedParameters {
            name: name.clone(),
            version: stored.parameters.version,
            bytes: stored.parameters.bytes.len() as u64,
        });
        listed.collect()
    }

    /// Version, bytes and the lag of readers of each name.
    pub fn stats(&self) -> Value {
        let newest = self.read();
        let entry = |(name, stored): (&String, &Stored)| {
            let Parameters { version, bytes } = &stored.parameters;
            let (bytes, lag) = (bytes.len(), stored.lag.stats(1.0));
            let stats = json!({"version": version, "bytes": bytes, "lag": lag});
            (name.clone(), stats)
        };
        Value::Object(newest.iter().map(entry).collect())
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Stored>> {
        self.newest.read().unwrap_or_else(PoisonError::into_inner)
    }
}

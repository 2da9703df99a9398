//! Named, versioned parameters. A put stores one whole safetensors file; a get returns one whole version or
//! "nothing newer". The bytes are never unpacked or copied, only the header is checked. A put that is sent again after a
//! broken connection is stored once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::budget::{Budget, Counted};
use crate::error::{Error, Result};
use crate::replay::{ListedParameters, Parameters};
use crate::snapshot_records::ParametersRecord;
use crate::sync::{Mutex, lock};
use base::allocation::{TooLarge, check_size};
use base::histogram::Histogram;

/// The newest version of each name.
pub struct ParameterStore {
    budget: Arc<Budget>,
    /// At most [`Self::MAX_NAMES`] that are kept, and as many that were dropped.
    names: Mutex<BTreeMap<String, Stored>>,
}

/// The newest version of one name. A dropped name has its last version without a file.
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

    fn is_dropped(&self) -> bool {
        self.parameters.bytes.is_empty()
    }

    /// The version of the put with the number `id`, if it is one of the last puts.
    fn put(&self, id: u64) -> Option<u64> {
        let mut puts = self.puts.iter();
        puts.find(|&&(put, _)| id != 0 && put == id && !base::planted!(RepeatedPut)).map(|&(_, version)| version)
    }
}

/// Versions of a snapshot are below it. A put may ask for half of it, so that later puts stay below it, too.
const MOST_VERSIONS: u64 = 1 << 47;

impl ParameterStore {
    pub const MAX_BYTES: u64 = 2 << 30;
    pub const MAX_NAMES: usize = 1024;
    pub const MAX_NAME_BYTES: usize = 128;

    /// Latest puts of a name that are deduplicated when they are sent again.
    pub const REMEMBERED_PUTS: usize = 64;

    /// An empty store that reserves its bytes from `budget`.
    pub fn new(budget: Arc<Budget>) -> Self {
        ParameterStore { budget, names: Mutex::new(BTreeMap::new()) }
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

    /// [`ParameterStore::put`] as version `version` if that exceeds the newest, so that several memories agree. A copy from another memory has
    /// no `id`, and is dropped if its version is not newer.
    pub fn put_version(&self, name: &str, id: u64, version: u64, bytes: Bytes) -> Result<u64> {
        Self::check_name(name)?;
        Self::check_version(name, version, 0..MOST_VERSIONS / 2)?;
        // Before the file is checked and counted: a repetition needs no memory for a second copy.
        let repeated = lock(&self.names).get(name).and_then(|stored| stored.put(id));
        if let Some(version) = repeated {
            return Ok(version);
        }
        let file = self.count(name, bytes)?;
        let mut names = lock(&self.names);
        let stored = names.get(name);
        // Checked again: the first attempt may have been stored meanwhile.
        if let Some(version) = stored.and_then(|stored| stored.put(id)) {
            return Ok(version);
        }
        let last = stored.map_or(0, |stored| stored.parameters.version);
        let next = last.saturating_add(1);
        if id == 0 && (1..next).contains(&version) {
            return Ok(last);
        }
        let version = match base::planted!(FirstVersion) {
            true => 1,
            false => next.max(version),
        };
        let is_new = stored.is_none_or(Stored::is_dropped);
        if is_new && kept(&names).count() >= Self::MAX_NAMES {
            return Err(Self::refusal(name, format!("there are {} names already", Self::MAX_NAMES)));
        }
        if stored.is_none() {
            names.insert(name.to_owned(), Stored::new(Parameters::default(), VecDeque::new()));
        }
        let stored = names.get_mut(name).expect("it is there, or was just inserted");
        if stored.puts.len() == Self::REMEMBERED_PUTS {
            stored.puts.pop_front();
        }
        stored.puts.push_back((id, version));
        let replaced = std::mem::replace(&mut stored.parameters, Parameters { version, bytes: file });
        drop(names);
        // Frees the old file, unless it has readers, without the lock.
        drop(replaced);
        Ok(version)
    }

    /// Removes parameters; the last holder of the file frees it. The next put continues the version numbers, so that clients notice it.
    pub fn remove(&self, name: &str) {
        let mut names = lock(&self.names);
        let earlier = names.iter().filter(|(_, stored)| stored.is_dropped());
        let first = (earlier.clone().count() >= Self::MAX_NAMES).then(|| earlier.map(|(name, _)| name.clone()).next());
        let Some(stored) = names.get_mut(name).filter(|stored| !stored.is_dropped()) else {
            return;
        };
        let version = stored.parameters.version;
        *stored = Stored::new(Parameters { version, bytes: Bytes::new() }, VecDeque::new());
        if let Some(first) = first.flatten() {
            names.remove(&first);
        }
    }

    fn refusal(name: &str, reason: String) -> Error {
        Error::Parameters { name: name.chars().take(Self::MAX_NAME_BYTES).collect(), reason }
    }

    fn check_version(name: &str, version: u64, allowed: Range<u64>) -> Result<()> {
        match allowed.contains(&version) {
            true => Ok(()),
            false => {
                let reason = format!("version {version} is out of range");
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
        Ok(Counted::bytes(bytes, reservation))
    }

    /// The newest version of each name with its last puts, for a snapshot. Those of dropped names have no file.
    pub(crate) fn records(&self) -> Vec<ParametersRecord> {
        let record = |(name, stored): (&String, &Stored)| ParametersRecord {
            version: stored.parameters.version,
            name: name.clone(),
            puts: stored.puts.iter().copied().collect(),
            file: stored.parameters.bytes.clone(),
        };
        lock(&self.names).iter().map(record).collect()
    }

    /// Checks and counts the parameters of a snapshot.
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
        let mut names = lock(&self.names);
        for record in staged {
            let skipped = record.puts.len().saturating_sub(Self::REMEMBERED_PUTS);
            let parameters = Parameters { version: record.version, bytes: record.file };
            let puts = record.puts.into_iter().skip(skipped).collect();
            names.entry(record.name).or_insert_with(|| Stored::new(parameters, puts));
        }
    }

    /// The newest version of `name`; `None` when it is not newer than `newer_than`, or there is none.
    pub fn get(&self, name: &str, newer_than: u64) -> Option<Parameters> {
        let names = lock(&self.names);
        let Stored { parameters, lag, .. } = names.get(name).filter(|stored| !stored.is_dropped())?;
        // A reader without a version is not behind.
        if newer_than > 0 {
            lag.record(parameters.version.saturating_sub(newer_than));
        }
        (parameters.version > newer_than).then(|| parameters.clone())
    }

    /// The newest version of `name`; 0 when there is none.
    pub fn version(&self, name: &str) -> u64 {
        let names = lock(&self.names);
        names.get(name).filter(|stored| !stored.is_dropped()).map_or(0, |stored| stored.parameters.version)
    }

    /// The name with the highest version, and this version.
    pub fn highest_version(&self) -> Option<(String, u64)> {
        let names = lock(&self.names);
        let versions = kept(&names).map(|(name, s)| (name, s.parameters.version));
        let highest = versions.max_by_key(|(_, version)| *version);
        highest.map(|(name, version)| (name.clone(), version))
    }

    /// The bytes that [`Self::get`] would return: a shared slice, not a copy.
    pub fn newest(&self, name: &str, newer_than: u64) -> Option<Bytes> {
        let names = lock(&self.names);
        let stored = names.get(name).filter(|stored| !stored.is_dropped())?;
        (stored.parameters.version > newer_than).then(|| stored.parameters.bytes.clone())
    }

    /// Names, versions and sizes, in the order of the names.
    pub fn list(&self) -> Vec<ListedParameters> {
        let names = lock(&self.names);
        let listed = kept(&names).map(|(name, stored)| ListedParameters {
            name: name.clone(),
            version: stored.parameters.version,
            bytes: stored.parameters.bytes.len() as u64,
        });
        listed.collect()
    }

    /// Version, bytes and the lag of readers of each name.
    pub fn stats(&self) -> Value {
        let names = lock(&self.names);
        let entry = |(name, stored): (&String, &Stored)| {
            let Parameters { version, bytes } = &stored.parameters;
            let (bytes, lag) = (bytes.len(), stored.lag.stats(1.0));
            let stats = json!({"version": version, "bytes": bytes, "lag": lag});
            (name.clone(), stats)
        };
        Value::Object(kept(&names).map(entry).collect())
    }
}

fn kept(names: &BTreeMap<String, Stored>) -> impl Iterator<Item = (&String, &Stored)> {
    names.iter().filter(|(_, stored)| !stored.is_dropped())
}

//! Versions of parameters, in a table that names some: the lag of sampled items, and which are too old.
//!
//! A chunk has one version, which never changes. An item has the oldest one of the rows that a sample reads.

use crate::parameters::ParameterStore;
use crate::schema::TableConfig;

/// The versions of one sample, from its beginning to its end: a put during the sample counts for the next one.
#[derive(Debug, Clone, Copy)]
pub struct Versions {
    newest: u64,
    /// The oldest version that is not too old.
    oldest: u64,
}

impl Versions {
    /// By the newest version of the table's parameters now; `None` for a table that names none.
    pub fn now(config: &TableConfig, parameters: &ParameterStore) -> Option<Self> {
        let newest = parameters.version(config.parameters.as_deref()?);
        let lag = u64::from(config.max_sample_lag);
        let oldest = if lag == 0 { 0 } else { newest.saturating_sub(lag) };
        Some(Versions { newest, oldest })
    }

    /// Whether an item of this version is too old. One of an unknown version, 0, never is.
    pub fn has_expired(&self, version: u64) -> bool {
        let oldest = self.oldest + u64::from(base::planted!(EarlyExpiry));
        (1..oldest).contains(&version) && !base::planted!(KeptExpired)
    }

    /// Versions by which an item is behind the newest; `None` for an unknown version.
    pub fn lag(&self, version: u64) -> Option<u64> {
        (version > 0).then(|| self.newest.saturating_sub(version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_expires_beyond_the_lag_and_never_without_a_version() {
        let versions = Versions { newest: 9, oldest: 9 - 4 };
        let expired: Vec<_> = (0..12).filter(|&version| versions.has_expired(version)).collect();
        assert_eq!(expired, [1, 2, 3, 4]);
        assert_eq!([0, 5, 9, 11].map(|version| versions.lag(version)), [None, Some(4), Some(0), Some(0)]);
    }
}

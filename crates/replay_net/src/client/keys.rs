//! Keys of a server that was started again name nothing. The upper bits of a key, which servers leave 0, say
//! which of the incarnations that this client has seen the key is of.

use std::sync::{Mutex, PoisonError};

use replay_core::error::{Error, Result};

const STAMP_SHIFT: u32 = 49;
const MAX_INCARNATIONS: usize = 1 << (64 - STAMP_SHIFT);
const KEY_MASK: u64 = (1 << STAMP_SHIFT) - 1;

/// The incarnations that a client has seen; a stamp is a position in this list.
#[derive(Debug, Default)]
pub struct Incarnations(Mutex<Vec<u64>>);

/// The position of an incarnation in the list of those seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp(u16);

impl Incarnations {
    /// The stamp of an incarnation, a new one if it has not been seen.
    ///
    /// # Errors
    /// [`Error::Config`] after 32,768 of them.
    pub fn stamp(&self, incarnation: u64) -> Result<Stamp> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match seen.iter().position(|&i| i == incarnation) {
            Some(at) => at,
            None if seen.len() == MAX_INCARNATIONS => {
                return Err(Error::Config(format!(
                    "this client has seen {MAX_INCARNATIONS} starts of its server, and keys have no room for more: connect again"
                )));
            }
            None => {
                seen.push(incarnation);
                seen.len() - 1
            }
        };
        Ok(Stamp(at as u16))
    }
}

impl Stamp {
    /// The client's key for a server's key.
    pub fn mark(self, key: u64) -> u64 {
        key & KEY_MASK | u64::from(self.0) << STAMP_SHIFT
    }

    /// The server's key for a client's key, `None` when it is of another incarnation.
    pub fn open(self, key: u64) -> Option<u64> {
        (key >> STAMP_SHIFT == u64::from(self.0)).then_some(key & KEY_MASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_open_under_their_own_incarnation_alone() {
        let seen = Incarnations::default();
        let (first, second) = (seen.stamp(77).unwrap(), seen.stamp(5).unwrap());
        assert_eq!(seen.stamp(77).unwrap(), first);
        assert_eq!(first.mark(KEY_MASK), KEY_MASK);
        assert_eq!(first.open(first.mark(42)), Some(42));
        assert_eq!(second.open(second.mark(42)), Some(42));
        assert_eq!(second.open(first.mark(42)), None);
        assert_eq!(first.open(second.mark(42)), None);
    }

    #[test]
    fn incarnations_are_never_taken_for_one_another() {
        let seen = Incarnations::default();
        for incarnation in 0..MAX_INCARNATIONS as u64 {
            let stamp = seen.stamp(incarnation).unwrap();
            assert_eq!(stamp.mark(0) >> STAMP_SHIFT, incarnation);
        }
        assert!(seen.stamp(u64::MAX).is_err());
        assert!(seen.stamp(3).is_ok());
    }
}

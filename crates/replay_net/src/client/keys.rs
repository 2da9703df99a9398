//! Keys across restarts of a server: a key from before a restart is stale. Servers leave the upper bits of keys 0; the
//! client stores there which incarnation of the server a key belongs to.

use std::sync::{Mutex, PoisonError};

use replay_core::error::{Error, Result};

const TAG_SHIFT: u32 = 49;
const MAX_INCARNATIONS: usize = 1 << (64 - TAG_SHIFT);
const KEY_MASK: u64 = (1 << TAG_SHIFT) - 1;

/// Incarnations of the server that this client has seen. A tag is a position in this list.
#[derive(Debug, Default)]
pub struct Incarnations(Mutex<Vec<u64>>);

/// Position of an incarnation in [`Incarnations`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncarnationTag(u16);

impl Incarnations {
    /// Tag of an incarnation; a new one gets the next tag.
    ///
    /// # Errors
    /// [`Error::Config`] after 32,768 incarnations.
    pub fn tag(&self, incarnation: u64) -> Result<IncarnationTag> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match seen.iter().position(|&i| i == incarnation) {
            Some(at) => at,
            None if seen.len() == MAX_INCARNATIONS => {
                return Err(Error::Config(format!(
                    "the server was started {MAX_INCARNATIONS} times since this client connected, and its keys have no bits for more: connect again"
                )));
            }
            None => {
                seen.push(incarnation);
                seen.len() - 1
            }
        };
        Ok(IncarnationTag(at as u16))
    }
}

impl IncarnationTag {
    /// The client's key for a server's key.
    pub fn tag_key(self, key: u64) -> u64 {
        key & KEY_MASK | u64::from(self.0) << TAG_SHIFT
    }

    /// The server's key for a client's key; `None` for a key of another incarnation.
    pub fn untag_key(self, key: u64) -> Option<u64> {
        (key >> TAG_SHIFT == u64::from(self.0)).then_some(key & KEY_MASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_open_under_their_own_incarnation_alone() {
        let seen = Incarnations::default();
        let (first, second) = (seen.tag(77).unwrap(), seen.tag(5).unwrap());
        assert_eq!(seen.tag(77).unwrap(), first);
        assert_eq!(first.tag_key(KEY_MASK), KEY_MASK);
        assert_eq!(first.untag_key(first.tag_key(42)), Some(42));
        assert_eq!(second.untag_key(second.tag_key(42)), Some(42));
        assert_eq!(second.untag_key(first.tag_key(42)), None);
        assert_eq!(first.untag_key(second.tag_key(42)), None);
    }

    #[test]
    fn incarnations_are_never_taken_for_one_another() {
        let seen = Incarnations::default();
        for incarnation in 0..MAX_INCARNATIONS as u64 {
            let tag = seen.tag(incarnation).unwrap();
            assert_eq!(tag.tag_key(0) >> TAG_SHIFT, incarnation);
        }
        assert!(seen.tag(u64::MAX).is_err());
        assert!(seen.tag(3).is_ok());
    }
}

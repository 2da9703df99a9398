//! Session table of an aggregator: the lower bits of a session number are its index.

/// Member that has a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOwner {
    pub job: u32,
    /// Its number in the job.
    pub worker: u16,
}

/// Random session numbers with their owners. The table has no collisions: a number whose entry is in use is never assigned.
pub struct SessionTable {
    /// A power of two.
    entries: Vec<Option<(u32, SessionOwner)>>,
}

impl SessionTable {
    /// A table for up to `sessions`. At most a quarter of the entries are in use, so a random number is free three times out of four.
    pub fn new(sessions: usize) -> Self {
        SessionTable { entries: vec![None; (4 * sessions).next_power_of_two()] }
    }

    #[inline]
    fn index(&self, session: u32) -> usize {
        session as usize & (self.entries.len() - 1)
    }

    #[inline]
    pub fn owner(&self, session: u32) -> Option<SessionOwner> {
        let (found, owner) = self.entries[self.index(session)]?;
        (found == session).then_some(owner)
    }

    pub fn is_free(&self, session: u32) -> bool {
        self.entries[self.index(session)].is_none()
    }

    /// Gives a free session number to `owner`.
    pub fn insert(&mut self, session: u32, owner: SessionOwner) {
        let index = self.index(session);
        self.entries[index] = Some((session, owner));
    }

    pub fn remove(&mut self, session: u32) -> Option<SessionOwner> {
        let owner = self.owner(session)?;
        let index = self.index(session);
        self.entries[index] = None;
        Some(owner)
    }

    pub fn remove_job(&mut self, job: usize) {
        for entry in &mut self.entries {
            entry.take_if(|(_, owner)| owner.job as usize == job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sessions_are_found_and_no_others() {
        let mut sessions = SessionTable::new(4096);
        let owner = |n: u32| SessionOwner { job: n % 3, worker: n as u16 };
        // Two numbers with the same lower bits: the second one is not given out.
        sessions.insert(7, owner(0));
        assert!(!sessions.is_free(7 + (1 << 20)));
        assert_eq!(sessions.owner(7 + (1 << 20)), None);
        assert_eq!(sessions.remove(7 + (1 << 20)), None);
        let mut given = vec![7];
        for number in 0..10_000u32 {
            let session = number.wrapping_mul(0x9E37_79B9).rotate_right(7);
            if sessions.is_free(session) {
                sessions.insert(session, owner(given.len() as u32));
                given.push(session);
            }
        }
        assert!(given.len() > 1000);
        for (number, session) in (0..).zip(&given) {
            assert_eq!(sessions.owner(*session), Some(owner(number)));
        }
        sessions.remove_job(1);
        for (number, session) in (0..).zip(&given) {
            let left = (number % 3 != 1).then(|| owner(number));
            assert_eq!(sessions.owner(*session), left);
            assert_eq!(sessions.remove(*session), left);
        }
        assert!(sessions.entries.iter().all(Option::is_none));
    }
}

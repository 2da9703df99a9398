//! The sessions of an aggregator's workers, in a table where the lower bits of a session are its place.

/// Places there are at first.
const FIRST: usize = 64;

/// Who has a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Number of the job.
    pub job: u32,
    /// Number of the worker in it.
    pub worker: u16,
}

/// Random numbers, each with its owner. One whose place is taken is not given to anybody, so that a session is found at the first look.
pub struct Sessions {
    /// As many as a power of two.
    places: Vec<Option<(u32, Owner)>>,
    taken: usize,
}

impl Sessions {
    /// Without sessions.
    pub fn new() -> Self {
        Sessions {
            places: vec![None; FIRST],
            taken: 0,
        }
    }

    #[inline]
    fn place(&self, session: u32) -> usize {
        session as usize & (self.places.len() - 1)
    }

    /// Who has `session`.
    #[inline]
    pub fn owner(&self, session: u32) -> Option<Owner> {
        let (taken, owner) = self.places[self.place(session)]?;
        (taken == session).then_some(owner)
    }

    /// Whether `session` can be given to somebody.
    pub fn is_free(&self, session: u32) -> bool {
        self.places[self.place(session)].is_none()
    }

    /// Gives a session that is free to `owner`.
    pub fn insert(&mut self, session: u32, owner: Owner) {
        debug_assert!(self.is_free(session), "it would take another one's place");
        // Three of four numbers that are drawn stay free.
        if 4 * (self.taken + 1) > self.places.len() {
            self.grow();
        }
        let place = self.place(session);
        self.taken += usize::from(self.places[place].is_none());
        self.places[place] = Some((session, owner));
    }

    /// Sessions that differ in their lower bits differ in more of them, too.
    fn grow(&mut self) {
        let empty = vec![None; 2 * self.places.len()];
        for (session, owner) in std::mem::replace(&mut self.places, empty)
            .into_iter()
            .flatten()
        {
            let place = self.place(session);
            self.places[place] = Some((session, owner));
        }
    }

    /// Takes a session from its owner.
    pub fn remove(&mut self, session: u32) -> Option<Owner> {
        let owner = self.owner(session)?;
        let place = self.place(session);
        self.places[place] = None;
        self.taken -= 1;
        Some(owner)
    }

    /// Takes all sessions of a job away.
    pub fn remove_job(&mut self, job: usize) {
        for place in &mut self.places {
            if place.is_some_and(|(_, owner)| owner.job as usize == job) {
                *place = None;
                self.taken -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sessions_are_found_and_no_others() {
        let mut sessions = Sessions::new();
        let owner = |n: u32| Owner {
            job: n % 3,
            worker: n as u16,
        };
        // Two that differ late, which is why the second one is not given away.
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
        assert_eq!(sessions.taken, 0);
    }
}

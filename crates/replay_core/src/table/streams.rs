//! What a stream holds: which steps lie in which chunk, and whether a window of steps is there as a whole.

use std::collections::VecDeque;

/// Chunks at a stream's end that a window is looked for in first.
const RECENT: usize = 8;

/// A chunk of a stream that was alive when it was last looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The chunk's number in the table's order of arrival.
    pub arrival: u64,
    /// The step of its first row.
    pub first_step: u64,
    /// Its rows.
    pub rows: u32,
}

impl Link {
    fn end(&self) -> u64 {
        self.first_step + u64::from(self.rows)
    }
}

/// One environment's steps, by number.
#[derive(Debug, Default)]
pub struct Stream {
    /// The number the next step has unless there is a gap.
    next_step: u64,
    links: VecDeque<Link>,
}

/// Where a window begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In a chunk that the table holds.
    Held {
        /// The chunk's number in the order of arrival.
        arrival: u64,
        /// The row of that chunk.
        row: u32,
    },
    /// In the chunk that is being pushed.
    Pushed {
        /// The row of that chunk.
        row: u32,
    },
    /// Before everything that is still held.
    Evicted,
}

impl Stream {
    /// The number of the next step.
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// Forgets chunks that were evicted: those before `first_arrival`.
    pub fn forget_before(&mut self, first_arrival: u64) {
        while self
            .links
            .front()
            .is_some_and(|l| l.arrival < first_arrival)
        {
            self.links.pop_front();
        }
    }

    /// The last chunk that a chunk starting at `first_step` continues without a gap.
    pub fn continues(&self, first_step: u64) -> Option<u64> {
        self.links
            .back()
            .filter(|l| l.end() == first_step)
            .map(|l| l.arrival)
    }

    /// Adds a chunk that has arrived.
    pub fn push(&mut self, link: Link) {
        self.next_step = link.end();
        self.links.push_back(link);
    }

    /// Finds the first row of the window of steps `first..=last`, given the chunk (first step, rows) that is being
    /// pushed to this stream, if any.
    ///
    /// # Errors
    /// Says which steps are missing: those not written yet, or in a gap.
    pub fn locate(
        &self,
        first: u64,
        last: u64,
        pushed: Option<(u64, u32)>,
    ) -> Result<Place, String> {
        let pushed = pushed.map(|(first_step, rows)| Link {
            arrival: u64::MAX,
            first_step,
            rows,
        });
        let end = pushed.map_or(self.next_step, |l| l.end());
        if last >= end {
            return Err(format!(
                "steps up to {last}, and the stream has been written up to step {end}, exclusive"
            ));
        }
        let before = |link: &Link| link.end() <= first;
        // Nearly always in one of the last chunks: the others are not looked at.
        let recent = self.links.len().saturating_sub(RECENT);
        let begin = match self.links.get(recent) {
            Some(link) if before(link) => {
                recent + self.links.range(recent..).take_while(|l| before(l)).count()
            }
            _ => self.links.partition_point(before),
        };
        let mut rest = self.links.range(begin..).copied().chain(pushed);
        let Some(holder) = rest.next() else {
            return Ok(Place::Evicted);
        };
        if first < holder.first_step {
            // Nothing held comes before: evicted, or a gap that nobody remembers. Else it is a known gap.
            return if begin == 0 {
                Ok(Place::Evicted)
            } else {
                Err(format!(
                    "step {first}, which the stream's gap before step {} leaves out",
                    holder.first_step
                ))
            };
        }
        let mut covered = holder.end();
        for link in rest {
            if covered > last {
                break;
            }
            if link.first_step != covered {
                return Err(format!(
                    "steps {first} to {last}, across the stream's gap before step {}",
                    link.first_step
                ));
            }
            covered = link.end();
        }
        let row = (first - holder.first_step) as u32;
        Ok(match holder.arrival {
            u64::MAX => Place::Pushed { row },
            arrival => Place::Held { arrival, row },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> Stream {
        let mut stream = Stream::default();
        for (arrival, first_step, rows) in [(3, 0, 4), (5, 4, 4), (9, 10, 4)] {
            stream.push(Link {
                arrival,
                first_step,
                rows,
            });
        }
        stream
    }

    #[test]
    fn finds_windows_within_and_across_chunks() {
        let s = stream();
        let held = |arrival, row| Ok(Place::Held { arrival, row });
        assert_eq!(s.locate(1, 3, None), held(3, 1));
        assert_eq!(s.locate(3, 7, None), held(3, 3));
        assert_eq!(s.locate(12, 15, Some((14, 2))), held(9, 2));
        assert_eq!(
            s.locate(14, 15, Some((14, 2))),
            Ok(Place::Pushed { row: 0 })
        );
        assert_eq!(s.continues(14), Some(9));
        assert_eq!(s.continues(15), None);
    }

    #[test]
    fn refuses_steps_that_are_not_there() {
        let s = stream();
        assert!(
            s.locate(13, 14, None)
                .unwrap_err()
                .contains("up to step 14")
        );
        assert!(
            s.locate(6, 10, None)
                .unwrap_err()
                .contains("gap before step 10")
        );
        assert!(
            s.locate(8, 10, None)
                .unwrap_err()
                .contains("gap before step 10")
        );
        assert!(
            s.locate(13, 17, Some((16, 4)))
                .unwrap_err()
                .contains("gap before step 16")
        );
    }

    #[test]
    fn tells_evicted_from_missing() {
        let mut s = stream();
        s.forget_before(5);
        assert_eq!(s.locate(3, 5, None), Ok(Place::Evicted));
        s.forget_before(10);
        assert_eq!(s.locate(10, 12, None), Ok(Place::Evicted));
        assert_eq!(s.next_step(), 14);
        assert_eq!(s.locate(13, 14, Some((14, 1))), Ok(Place::Evicted));
    }
}
